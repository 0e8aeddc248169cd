//! Work on memory that the CPU can address.

use std::ops::Range;

use tcpx_wire::Descriptor;

use crate::bounce::UnpackMethod;
use crate::checksum::Crc32c;
use crate::error::MemoryError;
use crate::job::Work;
use crate::slice::RegionSlice;

/// Does checked and held work whose every end the CPU can address.
pub(crate) fn run(work: &Work) -> Result<u64, MemoryError> {
    match work {
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
            // SAFETY: the job's descriptors were checked against both lengths, and holds keep others
            // away.
            unsafe { unpack(*with, source, destination, descriptors.as_slice()) };
            Ok(descriptors.bytes())
        }
        Work::Checksum { of } => {
            let mut crc = Crc32c::new();
            // SAFETY: the bytes are initialised, and the job's hold keeps writers away.
            crc.update(unsafe { std::slice::from_raw_parts(pointer(of)?, of.len()) });
            Ok(u64::from(crc.finish()))
        }
    }
}

fn pointer(slice: &RegionSlice) -> Result<*mut u8, MemoryError> {
    slice
        .host_ptr()
        .ok_or_else(|| MemoryError::NotCpuAccessible { kind: slice.kind() })
}

/// Moves fragments.
///
/// # Safety
/// Every descriptor's source and destination must lie in memory that is valid and that nobody else
/// writes (source) or touches (destination).
pub(crate) unsafe fn unpack(
    with: UnpackMethod,
    source: *const u8,
    destination: *mut u8,
    descriptors: &[Descriptor],
) {
    match with {
        UnpackMethod::Kernel => {
            // SAFETY: the caller's promise; the C side only reads the descriptors.
            unsafe {
                tcpx_unpack_host(descriptors.as_ptr(), descriptors.len(), source, destination)
            };
        }
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

fn bytes(descriptor: &Descriptor) -> Range<usize> {
    let start = descriptor.source_offset as usize;
    start..start + descriptor.length as usize
}

unsafe extern "C" {
    /// The kernel's lane function, run for every lane of a warp in turn. `kernels/unpack_host.c`.
    fn tcpx_unpack_host(
        descriptors: *const Descriptor,
        count: usize,
        source: *const u8,
        destination: *mut u8,
    );
}
