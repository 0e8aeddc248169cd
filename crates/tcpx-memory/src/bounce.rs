//! Bounce pools, which received fragments lie in, and the ways to unpack them.

use std::fmt;
use std::str::FromStr;

use tcpx_wire::Descriptors;

use crate::error::MemoryError;
use crate::kind::MemoryKind;
use crate::region::Region;
use crate::slice::RegionSlice;

/// Memory that a network fills and that fragments point into. Descriptors' source offsets count
/// from its start. Cheap to clone.
///
/// Host memory stands in where the network has no device memory. A pool whose owner goes on filling
/// it while parts are unpacked must be made of a slice that rides on the owner's
/// [`crate::Lease`]; a plain slice is leased for reading by each unpack job.
#[derive(Clone, Debug)]
pub struct BouncePool {
    slice: RegionSlice,
    written_by_card: bool,
}

impl BouncePool {
    /// A pool of these bytes.
    pub fn new(slice: RegionSlice) -> Self {
        Self {
            slice,
            written_by_card: false,
        }
    }

    /// A pool that a network card writes to by itself. In GPU memory, each unpack first makes sure
    /// that the GPU sees those writes.
    pub fn written_by_card(slice: RegionSlice) -> Self {
        Self {
            slice,
            written_by_card: true,
        }
    }

    /// Whether a network card writes to the pool by itself.
    pub fn is_written_by_card(&self) -> bool {
        self.written_by_card
    }

    /// The pool's bytes.
    pub fn slice(&self) -> &RegionSlice {
        &self.slice
    }

    /// Where the pool lives.
    pub fn kind(&self) -> MemoryKind {
        self.slice.kind()
    }

    /// Bytes in the pool.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether the pool has no bytes.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }
}

impl From<Region> for BouncePool {
    fn from(region: Region) -> Self {
        Self::new(region.all())
    }
}

/// Mean bytes of a descriptor from which copies beat the kernel: between GPU memories, and where
/// one end is pinned host memory.
const SMALLEST_DEVICE_COPY: u64 = 8 << 20;
const SMALLEST_HOST_COPY: u64 = 2 << 20;

/// How fragments are moved from a bounce pool to their destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnpackMethod {
    /// The CPU gathers: pool to host, gather, host to destination. Works for every pair of
    /// memories.
    Host,
    /// One device copy per descriptor.
    D2d,
    /// One kernel for all descriptors; on host memory the same code runs on the CPU.
    Kernel,
}

impl UnpackMethod {
    /// All methods.
    pub const ALL: [Self; 3] = [Self::Host, Self::D2d, Self::Kernel];

    /// The fastest method for a pair of memories.
    pub const fn automatic(pool: MemoryKind, destination: MemoryKind) -> Self {
        let on_cpu = pool.is_cpu_accessible() && destination.is_cpu_accessible();
        if !on_cpu && pool.is_device_accessible() && destination.is_device_accessible() {
            Self::Kernel
        } else {
            Self::Host
        }
    }

    /// The fastest method for a list between a pair of memories, as the example `unpack` of
    /// `tcpx-bench` measures.
    pub const fn automatic_for(
        pool: MemoryKind,
        destination: MemoryKind,
        descriptors: usize,
        bytes: u64,
    ) -> Self {
        let smallest = if pool.is_cpu_accessible() || destination.is_cpu_accessible() {
            SMALLEST_HOST_COPY
        } else {
            SMALLEST_DEVICE_COPY
        };
        match Self::automatic(pool, destination) {
            // One copy is never slower, and needs no multiprocessor.
            Self::Kernel if descriptors == 1 => Self::D2d,
            Self::Kernel if descriptors > 1 && bytes / descriptors as u64 >= smallest => Self::D2d,
            method => method,
        }
    }

    /// Whether the method can move bytes between a pair of memories.
    pub const fn is_possible(self, pool: MemoryKind, destination: MemoryKind) -> bool {
        let on_cpu = pool.is_cpu_accessible() && destination.is_cpu_accessible();
        let on_device = pool.is_device_accessible() && destination.is_device_accessible();
        matches!(self, Self::Host) || on_cpu || on_device
    }
}

impl fmt::Display for UnpackMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::D2d => "d2d",
            Self::Kernel => "kernel",
        })
    }
}

/// A name that is no unpack method.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no unpack method; use \"host\", \"d2d\" or \"kernel\"")]
pub struct ParseMethodError(pub String);

impl FromStr for UnpackMethod {
    type Err = ParseMethodError;

    fn from_str(name: &str) -> Result<Self, ParseMethodError> {
        Self::ALL
            .into_iter()
            .find(|method| method.to_string() == name)
            .ok_or_else(|| ParseMethodError(name.to_owned()))
    }
}

/// Checks that every descriptor lies inside this pool and this destination; the list was built
/// against limits that the caller named, which need not be these.
pub(crate) fn check_bounds(
    descriptors: &Descriptors,
    pool: usize,
    destination: usize,
) -> Result<(), MemoryError> {
    // The list knows its ends; only one that does not fit is walked to find the culprit.
    if descriptors.source_end() <= pool as u64
        && descriptors.destination_end() <= destination as u64
    {
        return Ok(());
    }
    for (index, descriptor) in descriptors.as_slice().iter().enumerate() {
        let start = u64::from(descriptor.source_offset);
        let end = start + u64::from(descriptor.length);
        if end > pool as u64 {
            return Err(MemoryError::SourceOutOfBounds {
                index,
                start,
                end,
                len: pool,
            });
        }
        let start = descriptor.destination_offset;
        let end = start.checked_add(u64::from(descriptor.length));
        if end.is_none_or(|end| end > destination as u64) {
            return Err(MemoryError::DestinationOutOfBounds {
                index,
                start,
                length: descriptor.length,
                len: destination,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUDA: MemoryKind = MemoryKind::Cuda { device: 0 };

    #[test]
    fn few_long_copies_are_the_copy_engines() {
        let choose = |pool, count, bytes| UnpackMethod::automatic_for(pool, CUDA, count, bytes);
        for (count, bytes, expected) in [
            (0, 0, UnpackMethod::Kernel),
            (1, 1, UnpackMethod::D2d),
            (4, 64 << 20, UnpackMethod::D2d),
            (16, 64 << 20, UnpackMethod::Kernel),
            (128, 512 << 10, UnpackMethod::Kernel),
        ] {
            assert_eq!(
                choose(CUDA, count, bytes),
                expected,
                "{count} of {bytes} bytes"
            );
        }
        assert_eq!(choose(MemoryKind::Pinned, 16, 64 << 20), UnpackMethod::D2d);
        assert_eq!(
            choose(MemoryKind::Pinned, 64, 64 << 20),
            UnpackMethod::Kernel
        );
        assert_eq!(choose(MemoryKind::Host, 1, 64 << 20), UnpackMethod::Host);
    }

    #[test]
    fn methods_have_names_that_read_back() {
        for method in UnpackMethod::ALL {
            assert_eq!(method.to_string().parse(), Ok(method));
        }
        let refused = "D2D".parse::<UnpackMethod>().unwrap_err();
        assert!(refused.to_string().contains("\"d2d\""));
    }

    #[test]
    fn the_automatic_method_is_always_possible() {
        let kinds = [MemoryKind::Host, MemoryKind::Pinned, CUDA];
        for pool in kinds {
            for destination in kinds {
                let method = UnpackMethod::automatic(pool, destination);
                assert!(
                    method.is_possible(pool, destination),
                    "{pool} to {destination}"
                );
            }
        }
        assert_eq!(
            UnpackMethod::automatic(MemoryKind::Pinned, CUDA),
            UnpackMethod::Kernel
        );
        assert_eq!(
            UnpackMethod::automatic(MemoryKind::Host, CUDA),
            UnpackMethod::Host
        );
        assert!(!UnpackMethod::Kernel.is_possible(MemoryKind::Host, CUDA));
    }
}
