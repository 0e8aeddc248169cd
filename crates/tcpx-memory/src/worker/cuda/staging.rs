//! The worker's own pinned memory, for bytes on their way to or from pageable memory.

use crate::gpu::MappedHost;

/// Bytes of staging memory.
pub(super) const STAGING: usize = 8 << 20;

/// Pinned for good, before the worker starts.
pub(super) struct Staging {
    memory: MappedHost,
}

impl Staging {
    pub(super) fn new(memory: MappedHost) -> Self {
        Self { memory }
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
