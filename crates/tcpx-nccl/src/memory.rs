//! Registered memory.

use std::sync::atomic::{AtomicU64, Ordering};

use nccl_net::export::{Buffer, Log, MemoryRegion, NetError};
use tcpx_memory::{Access, Lease, MemoryError, RegionSlice};

use crate::device::Device;

/// One registration: a range of the host program's memory.
#[derive(Debug)]
pub struct Memory {
    /// Tells registrations apart, also those of the same bytes.
    id: u64,
    start: usize,
    len: usize,
    device: Option<(Device, Lease)>,
}

/// Bytes in device memory, and who copies them.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSlice {
    pub(crate) device: Device,
    pub(crate) slice: RegionSlice,
}

impl DeviceSlice {
    /// `len` of its bytes from `offset` on.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Result<Self, MemoryError> {
        Ok(Self {
            device: self.device.clone(),
            slice: self.slice.slice(offset..offset.saturating_add(len))?,
        })
    }
}

/// Where a buffer of a send or receive lies.
#[derive(Debug)]
pub(crate) enum BufferPlace {
    /// Memory that the CPU reads and writes directly.
    Host,
    /// Device memory, or host memory that stands in for it.
    Device(DeviceSlice),
}

/// Jobs on one registration for which there is room from the start: on the way nothing is
/// allocated.
const JOBS_AT_ONCE: usize = 128;

impl Memory {
    /// Registers `region`; with `device`, as memory of that device.
    pub(crate) fn new(region: MemoryRegion, device: Option<&Device>) -> Result<Self, NetError> {
        static REGISTRATIONS: AtomicU64 = AtomicU64::new(0);
        let start = region.data.addr();
        if start.checked_add(region.len).is_none() {
            return Err(NetError::invalid_argument(format!(
                "memory of {} bytes at {start:#x} ends behind the last address",
                region.len
            )));
        }
        let invalid = |error: MemoryError| NetError::invalid_argument(error.to_string());
        let leased = |device: &Device| {
            // For as long as it is registered: then jobs take no lease of their own.
            let memory = device.region(region).map_err(invalid)?;
            let lease = memory.lease(.., Access::Write).map_err(invalid)?;
            lease.reserve_users(JOBS_AT_ONCE);
            Ok((device.clone(), lease))
        };
        Ok(Self {
            id: REGISTRATIONS.fetch_add(1, Ordering::Relaxed),
            start,
            len: region.len,
            device: device.map(leased).transpose()?,
        })
    }

    /// The host takes it back, which its comm has `given_up`, with the failure of what ran there.
    pub(crate) fn deregister(
        self,
        given_up: Result<Option<NetError>, NetError>,
        log: &Log,
    ) -> Result<(), NetError> {
        match given_up {
            Ok(failure) => {
                if let Some(failure) = failure {
                    log.warn(&failure.to_string());
                }
                Ok(())
            }
            Err(error) => {
                // It stays registered for good: what may still use it must find it in its place.
                std::mem::forget(self);
                Err(error)
            }
        }
    }

    /// The registration's number in this process.
    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    /// Finds `buffer` in the registration.
    pub(crate) fn place(&self, buffer: Buffer) -> Result<BufferPlace, NetError> {
        let start = buffer.data.addr();
        let offset = start.wrapping_sub(self.start);
        let inside = buffer.len == 0
            || (start >= self.start && offset <= self.len && buffer.len <= self.len - offset);
        if !inside {
            return Err(NetError::invalid_argument(format!(
                "{} bytes at {start:#x} are outside the registered {} bytes at {:#x}; register the \
                 whole buffer",
                buffer.len, self.len, self.start
            )));
        }
        let Some((device, lease)) = &self.device else {
            return Ok(BufferPlace::Host);
        };
        // An empty buffer may point anywhere.
        let offset = if buffer.len == 0 { 0 } else { offset };
        lease
            .slice(offset..offset + buffer.len)
            .map(|slice| {
                BufferPlace::Device(DeviceSlice {
                    device: device.clone(),
                    slice,
                })
            })
            .map_err(|error| NetError::invalid_argument(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(bytes: &mut [u8]) -> Memory {
        let region = MemoryRegion {
            data: bytes.as_mut_ptr(),
            len: bytes.len(),
            cuda: false,
        };
        Memory::new(region, None).unwrap()
    }

    #[test]
    fn a_buffer_must_lie_inside_its_registration() {
        let mut bytes = [0u8; 100];
        let memory = memory(&mut bytes);
        let start = bytes.as_mut_ptr();
        let place = |offset: isize, len| {
            memory.place(Buffer {
                data: start.wrapping_offset(offset),
                len,
            })
        };
        assert!(matches!(place(0, 100), Ok(BufferPlace::Host)));
        assert!(matches!(place(99, 1), Ok(BufferPlace::Host)));
        assert!(matches!(place(5000, 0), Ok(BufferPlace::Host)));
        for (offset, len) in [(0, 101), (99, 2), (-1, 1), (100, 1), (50, usize::MAX)] {
            let error = place(offset, len).unwrap_err();
            assert!(error.to_string().contains("outside"), "{error}");
        }
    }
}
