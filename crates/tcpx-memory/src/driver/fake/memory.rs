//! Memory of the fake driver.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::world::{context, world};
use super::{INVALID_VALUE, OK, World, answer, pointer};

/// What freed memory is filled with.
const FREED: u8 = 0xDD;
/// Longer memory takes no pages before it is used: each GPU of a test has some.
const UNTOUCHED: usize = 64 << 20;
/// Most bytes of freed memory that are kept.
const KEPT: usize = 64 << 20;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Host,
    Device(u64),
}

pub(super) struct Memory {
    pub(super) layout: Layout,
    place: Place,
    context: usize,
}

pub(super) fn allocate(world: &mut World, len: usize, place: Place) -> Option<usize> {
    if len > 1 << 40 {
        return None;
    }
    let align = if len < 2 << 20 { 256 } else { 4096 };
    let layout = Layout::from_size_align(len, align).unwrap();
    let memory = if len < UNTOUCHED {
        // SAFETY: the crate never asks the driver for no bytes.
        unsafe {
            let memory = alloc(layout);
            memory.write_bytes(0x77, len);
            memory
        }
    } else {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags) };
        mapped.ok()?.cast()
    };
    let address = memory.expose_provenance();
    let context = context();
    let memory = Memory {
        layout,
        place,
        context,
    };
    world.memory.insert(address, memory);
    Some(address)
}

/// Memory of the caller's that becomes pinned. Its pages, which are zero as yet, are given back
/// until they are used: each GPU of a test has many.
pub(super) fn register(world: &mut World, address: usize, len: usize) -> i32 {
    // SAFETY: the crate pins only what it has just mapped, and nothing of it is lost.
    unsafe { libc::madvise(pointer(address).cast(), len, libc::MADV_DONTNEED) };
    let memory = Memory {
        layout: Layout::from_size_align(len, 1).unwrap(),
        place: Place::Host,
        context: context(),
    };
    world.memory.insert(address, memory);
    OK
}

/// Pinned memory of the driver's own, for code that is not of this crate.
#[cfg(feature = "fake-driver")]
pub(super) const HOST_ALLOC: unsafe extern "C" fn(*mut *mut c_void, usize, u32) -> i32 = {
    unsafe extern "C" fn call(address: *mut *mut c_void, len: usize, _flags: u32) -> i32 {
        super::outside_captures(|world| match allocate(world, len, Place::Host) {
            Some(memory) => super::handle(address, memory),
            None => super::OUT_OF_MEMORY,
        })
    }
    call
};

pub(super) fn release(world: &mut World, address: usize) -> i32 {
    let Some(Memory { layout, .. }) = world.memory.remove(&address) else {
        return INVALID_VALUE;
    };
    // What is allocated there later is other memory.
    let own = address..address + layout.size();
    world.untraceable.retain(|at, _| !own.contains(at));
    // SAFETY: allocated with that layout.
    unsafe { pointer(address).write_bytes(FREED, layout.size()) };
    // Kept for a while, so that late users read the poison.
    world.freed.push_back((address, layout));
    while world
        .freed
        .iter()
        .map(|(_, layout)| layout.size())
        .sum::<usize>()
        > KEPT
    {
        if let Some((address, layout)) = world.freed.pop_front() {
            // SAFETY: allocated or mapped with that layout and forgotten here.
            unsafe {
                if layout.size() < UNTOUCHED {
                    dealloc(pointer(address), layout);
                } else {
                    munmap(pointer(address).cast(), layout.size()).unwrap();
                }
            }
        }
    }
    OK
}

/// Memory that others allocated as memory of the primary context.
#[cfg(feature = "fake-driver")]
pub(crate) fn adopt(address: usize, len: usize) {
    let memory = Memory {
        layout: Layout::from_size_align(len, 1).unwrap(),
        place: Place::Device(0),
        context: super::CONTEXT,
    };
    let end = address + len;
    world(|world| {
        let is_apart =
            |at: &usize, other: &mut Memory| *at >= end || at + other.layout.size() <= address;
        world.memory.retain(is_apart);
        world.memory.insert(address, memory);
    });
}

/// A range of addresses of a device, of which some parts are mapped; each part is as long as its
/// number says. Nothing may be read there.
pub(crate) fn mapped(gpu: &crate::Gpu, device: u64, parts: &[(usize, bool)]) -> u64 {
    let len = parts.iter().map(|(len, _)| len).sum();
    let _current = gpu.enter().unwrap();
    world(|world| {
        let start = allocate(world, len, Place::Device(device)).unwrap();
        let mut at = start;
        let parts = parts.iter().map(|&(len, is_mapped)| {
            at += len;
            (at - len..at, is_mapped)
        });
        world.mapped.insert(start, parts.collect());
        start as u64
    })
}

/// Memory that is mapped by its parts, which the fake does not allocate.
pub(super) fn insert_mapped(
    world: &mut World,
    start: usize,
    len: usize,
    place: Place,
    parts: Vec<(std::ops::Range<usize>, bool)>,
) {
    let memory = Memory {
        layout: Layout::from_size_align(len, 1).unwrap(),
        place,
        context: 0,
    };
    world.memory.insert(start, memory);
    world.mapped.insert(start, parts);
}

/// What the driver says about memory that it knows; of all else it knows nothing.
pub(super) fn describe(world: &World, value: *mut c_void, attribute: i32, address: usize) -> i32 {
    use crate::driver::sys::CUpointer_attribute as Attribute;
    let around = world
        .memory
        .iter()
        .find(|(start, memory)| (**start..**start + memory.layout.size()).contains(&address));
    let Some((&start, memory)) = around else {
        return INVALID_VALUE;
    };
    let parts = world.mapped.get(&start);
    let whole = (start..start + memory.layout.size(), true);
    let part = match parts {
        Some(parts) => parts.iter().find(|(part, _)| part.contains(&address)),
        None => Some(&whole),
    };
    let (part, is_mapped) = part.unwrap_or(&whole);
    let number = |value| Some(u64::from(value));
    let known = match (attribute, memory.place) {
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as i32 => {
            Some(start as u64)
        }
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as i32 => {
            Some(memory.layout.size() as u64)
        }
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as i32 => {
            Some(part.start as u64)
        }
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE as i32 => {
            Some(part.len() as u64)
        }
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_MAPPED as i32 => number(*is_mapped),
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as i32 => number(false),
        (is, place) if is == Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as i32 => {
            Some(if place == Place::Host { 1 } else { 2 })
        }
        (is, Place::Host) if is == Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER as i32 => {
            Some(address as u64)
        }
        (is, Place::Device(device))
            if is == Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as i32 =>
        {
            Some(device)
        }
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_CONTEXT as i32 => {
            // Memory that is mapped belongs to no context.
            Some(if parts.is_some() {
                0
            } else {
                memory.context as u64
            })
        }
        (is, _) if is == Attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS as i32 => Some(3),
        _ => None,
    };
    // What the driver writes is as long as the attribute; the caller's place is 8 bytes.
    known.map_or(INVALID_VALUE, |known| answer(value.cast::<u64>(), known))
}
