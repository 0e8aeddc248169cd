//! The worker's own pinned memory, for bytes on their way to or from pageable memory.

use super::device::Device;
use crate::error::CudaError;
use crate::gpu::{MappedHost, host_free};

/// Bytes of staging memory.
pub(super) const STAGING: usize = 16 << 20;

/// Pinned once, when the worker starts.
pub(super) struct Staging {
    memory: MappedHost,
}

impl Staging {
    pub(super) fn create(device: &Device) -> Result<Self, CudaError> {
        let memory = MappedHost::alloc(&device.gpu, STAGING)?;
        Ok(Self { memory })
    }

    /// Frees the memory; nothing may use it any more.
    pub(super) fn destroy(self, device: &Device) {
        // SAFETY: the caller has waited for all work, or the context is broken and nothing runs.
        unsafe { host_free(&device.gpu, self.memory) };
    }

    /// Where byte `at` of the staging memory is for the CPU.
    pub(super) fn host(&self, at: usize) -> *mut u8 {
        debug_assert!(at <= STAGING);
        self.memory.host.as_ptr().wrapping_add(at)
    }

    /// Where byte `at` of the staging memory is for the device.
    pub(super) fn device_address(&self, at: usize) -> u64 {
        debug_assert!(at <= STAGING);
        self.memory.device + at as u64
    }
}
