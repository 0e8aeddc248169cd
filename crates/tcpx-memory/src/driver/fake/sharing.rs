//! Memory that processes share: legacy handles, and physical segments by descriptors.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{c_uint, c_void};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::memory::{Place, insert_mapped};
use super::world::world;
use super::{INVALID_VALUE, OK, answer, inside, pointer};
use crate::driver::sys::{CUdeviceptr, CUipcMemHandle, CUmemAccessDesc};

/// What processes share of the fake's memory.
#[derive(Default)]
pub(crate) struct Sharing {
    /// Physical segments by handle; a mapping keeps its own reference.
    handles: HashMap<u64, OwnedFd>,
    /// Mapped segments by address, with their length.
    mapped: HashMap<usize, (usize, OwnedFd)>,
    /// How often a legacy handle's memory is open.
    open: HashMap<u64, usize>,
    /// Reserved ranges by address.
    reserved: HashMap<usize, usize>,
    /// Threads that closed a handle, and that unmapped segments, by name.
    closers: [BTreeSet<String>; 2],
}

/// Names of the threads that have closed legacy handles, and of those that have unmapped segments.
#[cfg(feature = "fake-driver")]
pub(crate) fn closers() -> [BTreeSet<String>; 2] {
    world(|world| world.sharing.closers.clone())
}

fn this_thread() -> String {
    let thread = std::thread::current();
    thread.name().unwrap_or_default().to_owned()
}

/// Whether a legacy handle's memory is open.
#[cfg(test)]
pub(crate) fn is_open(at: u64) -> bool {
    world(|world| world.sharing.open.contains_key(&at))
}

/// How many legacy handles are open, and ranges reserved.
#[cfg(feature = "fake-driver")]
pub(crate) fn opened() -> [usize; 2] {
    world(|world| [world.sharing.open.len(), world.sharing.reserved.len()])
}

/// Whether a range that begins there is reserved.
#[cfg(test)]
pub(crate) fn is_reserved(at: u64) -> bool {
    world(|world| world.sharing.reserved.contains_key(&(at as usize)))
}

const READ_AND_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Memory of the GPU that is mapped by segments of these lengths.
pub(crate) fn segments(gpu: &crate::Gpu, lengths: &[usize]) -> u64 {
    let _current = gpu.enter().unwrap();
    let len = lengths.iter().sum();
    let start = reserve_range(len);
    let mut at = start;
    let mut parts = Vec::new();
    for &len in lengths {
        let segment = memfd_create("segment", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&segment, len as u64).unwrap();
        map_there(at, len, segment.as_fd());
        world(|world| world.sharing.mapped.insert(at, (len, segment)));
        parts.push((at..at + len, true));
        at += len;
    }
    world(|world| insert_mapped(world, start, len, Place::Device(0), parts));
    start as u64
}

fn reserve_range(len: usize) -> usize {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), flags) };
    at.unwrap().expose_provenance()
}

fn map_there(at: usize, len: usize, segment: BorrowedFd<'_>) {
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the caller reserved the range.
    unsafe { mmap(pointer(at).cast(), len, READ_AND_WRITE, flags, segment, 0) }.unwrap();
}

pub(super) unsafe extern "C" fn handle_of(handle: *mut CUipcMemHandle, at: CUdeviceptr) -> i32 {
    inside(|world| {
        let at = at as usize;
        if !world.memory.contains_key(&at) || world.mapped.contains_key(&at) {
            return INVALID_VALUE;
        }
        let mut bytes = [0; 64];
        for (place, byte) in bytes.iter_mut().zip(at.to_ne_bytes()) {
            *place = byte as std::ffi::c_char;
        }
        answer(handle, CUipcMemHandle { reserved: bytes })
    })
}

pub(super) unsafe extern "C" fn open(
    place: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    _flags: c_uint,
) -> i32 {
    inside(|world| {
        let bytes = std::array::from_fn(|index| handle.reserved[index] as u8);
        let at = u64::from_ne_bytes(bytes);
        *world.sharing.open.entry(at).or_default() += 1;
        match world.sharing.open[&at] {
            1 => answer(place, at),
            // As some drivers do.
            _ => INVALID_VALUE,
        }
    })
}

pub(super) unsafe extern "C" fn close(at: CUdeviceptr) -> i32 {
    inside(|world| {
        world.sharing.closers[0].insert(this_thread());
        world.sharing.open.remove(&at).map_or(INVALID_VALUE, |_| OK)
    })
}

pub(super) unsafe extern "C" fn retain(handle: *mut u64, at: *mut c_void) -> i32 {
    let at = at.addr();
    inside(|world| {
        let found = world.sharing.mapped.iter();
        let mut found = found.filter(|(start, (len, _))| (**start..**start + len).contains(&at));
        let Some((_, (_, segment))) = found.next() else {
            return INVALID_VALUE;
        };
        let segment = fcntl_dupfd_cloexec(segment, 0).unwrap();
        let new = world.handle() as u64;
        world.sharing.handles.insert(new, segment);
        answer(handle, new)
    })
}

pub(super) unsafe extern "C" fn export(
    place: *mut c_void,
    handle: u64,
    kind: c_uint,
    _flags: u64,
) -> i32 {
    inside(|world| match world.sharing.handles.get(&handle) {
        Some(segment) if kind == 1 => {
            let own = fcntl_dupfd_cloexec(segment, 0).unwrap();
            answer(place.cast::<i32>(), own.into_raw_fd())
        }
        _ => INVALID_VALUE,
    })
}

pub(super) unsafe extern "C" fn import(handle: *mut u64, from: *mut c_void, kind: c_uint) -> i32 {
    inside(|world| {
        if kind != 1 {
            return INVALID_VALUE;
        }
        // SAFETY: the caller's descriptor is open during the call.
        let segment = unsafe { BorrowedFd::borrow_raw(from.addr() as i32) };
        let Ok(own) = fcntl_dupfd_cloexec(segment, 0) else {
            return INVALID_VALUE;
        };
        let new = world.handle() as u64;
        world.sharing.handles.insert(new, own);
        answer(handle, new)
    })
}

pub(super) unsafe extern "C" fn release(handle: u64) -> i32 {
    inside(|world| {
        world
            .sharing
            .handles
            .remove(&handle)
            .map_or(INVALID_VALUE, |_| OK)
    })
}

pub(super) unsafe extern "C" fn reserve(
    place: *mut CUdeviceptr,
    len: usize,
    _alignment: usize,
    _wish: CUdeviceptr,
    _flags: u64,
) -> i32 {
    inside(|world| {
        let at = reserve_range(len);
        world.sharing.reserved.insert(at, len);
        answer(place, at as u64)
    })
}

pub(super) unsafe extern "C" fn unreserve(at: CUdeviceptr, len: usize) -> i32 {
    inside(|world| {
        if world.sharing.reserved.remove(&(at as usize)) != Some(len) {
            return INVALID_VALUE;
        }
        // SAFETY: reserved above, and nobody uses it.
        unsafe { munmap(pointer(at as usize).cast(), len) }.unwrap();
        OK
    })
}

pub(super) unsafe extern "C" fn map(
    at: CUdeviceptr,
    len: usize,
    _offset: usize,
    handle: u64,
    _flags: u64,
) -> i32 {
    inside(|world| {
        let Some(segment) = world.sharing.handles.get(&handle) else {
            return INVALID_VALUE;
        };
        let segment = fcntl_dupfd_cloexec(segment, 0).unwrap();
        if rustix::fs::fstat(&segment).map_or(0, |stat| stat.st_size as usize) != len {
            return INVALID_VALUE;
        }
        map_there(at as usize, len, segment.as_fd());
        world.sharing.mapped.insert(at as usize, (len, segment));
        OK
    })
}

pub(super) unsafe extern "C" fn unmap(at: CUdeviceptr, len: usize) -> i32 {
    inside(|world| {
        world.sharing.closers[1].insert(this_thread());
        let range = at as usize..at as usize + len;
        let before = world.sharing.mapped.len();
        let mapped = &mut world.sharing.mapped;
        mapped.retain(|start, _| !range.contains(start));
        if mapped.len() == before {
            return INVALID_VALUE;
        }
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: inside a reserved range.
        let there =
            unsafe { mmap_anonymous(pointer(range.start).cast(), len, ProtFlags::empty(), flags) };
        there.map_or(INVALID_VALUE, |_| OK)
    })
}

pub(super) unsafe extern "C" fn set_access(
    _at: CUdeviceptr,
    _len: usize,
    _access: *const CUmemAccessDesc,
    count: usize,
) -> i32 {
    if count > 0 { OK } else { INVALID_VALUE }
}
