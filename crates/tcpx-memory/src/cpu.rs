//! Work on memory that the CPU can address.

use std::ops::Range;

use tcpx_wire::Descriptor;

use crate::bounce::UnpackMethod;
use crate::checksum::Checksum;
use crate::error::MemoryError;
use crate::job::Work;
use crate::region::HostParts;
use crate::slice::RegionSlice;

/// Does checked and held work whose every end the CPU can address.
pub(crate) fn run(work: &Work) -> Result<u64, MemoryError> {
    match work {
        Work::Copy { from, to } if from.host_ptr().is_none() || to.host_ptr().is_none() => {
            let mut at = to.offset();
            for (source, len) in parts(from, 0..from.len())? {
                // SAFETY: the bytes are initialised, and holds keep writers away.
                let bytes = unsafe { std::slice::from_raw_parts(source, len) };
                to.region().write_held(at, bytes)?;
                at += len;
            }
            Ok(from.len() as u64)
        }
        Work::Copy { from, to } => {
            let (source, destination) = (pointer(from)?, pointer(to)?);
            // SAFETY: both are valid for the same number of bytes, and holds keep others away. They
            // may overlap when the caller lets two slices ride on one lease.
            unsafe { destination.copy_from(source, from.len()) };
            Ok(from.len() as u64)
        }
        Work::Unpack {
            pool,
            descriptors,
            to,
            with,
        } => {
            let (source, destination) = (pointer(pool.slice())?, pointer(to)?);
            // SAFETY: the job's descriptors were checked against both lengths, and holds keep
            // others away.
            unsafe { unpack(*with, source, destination, descriptors.as_slice()) };
            Ok(descriptors.bytes())
        }
        Work::Checksum { of, tag } => {
            let mut sum = Checksum::new(tag.as_ref());
            for (start, len) in parts(of, 0..of.len())? {
                // SAFETY: the bytes are initialised, and the job's hold keeps writers away.
                sum.update(unsafe { std::slice::from_raw_parts(start, len) });
            }
            Ok(u64::from(sum.finish()))
        }
    }
}

/// Does the next `piece` bytes of such work, or the next descriptors of about as many. `done`
/// counts bytes or descriptors and starts at 0; `Some` is the result at the end.
pub(crate) fn step(
    work: &Work,
    done: &mut usize,
    piece: usize,
    sum: &mut Option<Checksum>,
) -> Result<Option<u64>, MemoryError> {
    match work {
        Work::Copy { from, to } => {
            if from.host_ptr().is_none() || to.host_ptr().is_none() {
                return run(work).map(Some);
            }
            let next = *done..from.len().min(*done + piece);
            let (from_all, to_all) = (pointer(from)?, pointer(to)?);
            if overlap(from_all, to_all, from.len()) {
                return run(work).map(Some);
            }
            // SAFETY: both are valid for the range, and holds keep others away.
            unsafe {
                to_all
                    .add(next.start)
                    .copy_from_nonoverlapping(from_all.add(next.start), next.len())
            };
            *done = next.end;
            Ok((*done == from.len()).then_some(from.len() as u64))
        }
        Work::Checksum { of, tag } => {
            let sum = sum.get_or_insert_with(|| Checksum::new(tag.as_ref()));
            let next = *done..of.len().min(*done + piece);
            for (start, len) in parts(of, next.clone())? {
                // SAFETY: the bytes are initialised, and the job's hold keeps writers away.
                sum.update(unsafe { std::slice::from_raw_parts(start, len) });
            }
            *done = next.end;
            Ok((*done == of.len()).then(|| u64::from(sum.finish())))
        }
        Work::Unpack {
            pool,
            descriptors,
            to,
            with,
        } => {
            let rest = &descriptors.as_slice()[*done..];
            let mut bytes = 0;
            let count = rest.iter().take_while(|next| {
                let more = bytes < piece;
                bytes += next.length as usize;
                more
            });
            let now = &rest[..count.count()];
            // SAFETY: as in `run`.
            unsafe { unpack(*with, pointer(pool.slice())?, pointer(to)?, now) };
            *done += now.len();
            Ok((*done == descriptors.len()).then_some(descriptors.bytes()))
        }
    }
}

fn overlap(one: *const u8, other: *const u8, len: usize) -> bool {
    one.addr().abs_diff(other.addr()) < len
}

fn parts(slice: &RegionSlice, range: Range<usize>) -> Result<HostParts<'_>, MemoryError> {
    let parts = slice.host_parts(range)?;
    parts.ok_or_else(|| MemoryError::NotCpuAccessible { kind: slice.kind() })
}

fn pointer(slice: &RegionSlice) -> Result<*mut u8, MemoryError> {
    slice
        .host_ptr()
        .ok_or_else(|| MemoryError::NotCpuAccessible { kind: slice.kind() })
}

/// Moves fragments.
///
/// # Safety
/// Every descriptor's source and destination must lie in memory that is valid and that nothing else
/// writes (source) or touches (destination).
pub(crate) unsafe fn unpack(
    with: UnpackMethod,
    source: *const u8,
    destination: *mut u8,
    descriptors: &[Descriptor],
) {
    match with {
        // SAFETY: the caller's promise.
        UnpackMethod::Kernel => unsafe { by_lanes(source, destination, descriptors, 0) },
        UnpackMethod::Host | UnpackMethod::D2d => {
            for descriptor in descriptors {
                let Range { start, .. } = bytes(descriptor);
                // SAFETY: the caller's promise. Pool and destination may be one region.
                unsafe {
                    destination
                        .add(descriptor.destination_offset as usize)
                        .copy_from(source.add(start), descriptor.length as usize);
                }
            }
        }
    }
}

/// The kernel's way, each fragment shared by `1 << split` warps.
///
/// # Safety
/// As [`unpack`].
unsafe fn by_lanes(
    source: *const u8,
    destination: *mut u8,
    descriptors: &[Descriptor],
    split: u32,
) {
    let (list, count) = (descriptors.as_ptr(), descriptors.len());
    // SAFETY: the caller's promise; the C side only reads the descriptors.
    unsafe { tcpx_unpack_host(list, count, source, destination, BATCH, split) };
}

fn bytes(descriptor: &Descriptor) -> Range<usize> {
    let start = descriptor.source_offset as usize;
    start..start + descriptor.length as usize
}

/// Words that a lane has in flight; the kernel has launches of 2 and of 4.
const BATCH: u32 = 4;

unsafe extern "C" {
    /// The kernel's lane function, run for every lane of a warp in turn. `kernels/unpack_host.c`.
    fn tcpx_unpack_host(
        descriptors: *const Descriptor,
        count: usize,
        source: *const u8,
        destination: *mut u8,
        batch: u32,
        split: u32,
    );
}

#[cfg(test)]
mod tests;
