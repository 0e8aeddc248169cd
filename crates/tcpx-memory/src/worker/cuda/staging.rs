//! The worker's own pinned memory: for bytes on their way to or from pageable memory, and for
//! descriptors that do not fit in a launch.

use super::device::Device;
use crate::error::CudaError;
use crate::gpu::{MappedHost, host_free};

/// Bytes of staging memory.
pub(super) const STAGING: usize = 16 << 20;

/// Descriptors in one mapped block: so few that the GPU begins soon, so many that launches cost little.
pub(super) const BLOCK_ENTRIES: usize = 4096;
pub(super) const BLOCK_BYTES: usize = BLOCK_ENTRIES * 16;
const BLOCKS: usize = 32;

/// Pinned once, when the worker starts.
pub(super) struct Staging {
    memory: MappedHost,
    free_blocks: Vec<usize>,
}

impl Staging {
    pub(super) fn create(device: &Device) -> Result<Self, CudaError> {
        let memory = MappedHost::alloc(&device.gpu, STAGING + BLOCKS * BLOCK_BYTES)?;
        Ok(Self {
            memory,
            free_blocks: (0..BLOCKS).collect(),
        })
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

    /// A block for descriptors: its number, its CPU and its device address.
    pub(super) fn take_block(&mut self) -> Option<(usize, *mut u8, u64)> {
        let block = self.free_blocks.pop()?;
        let at = STAGING + block * BLOCK_BYTES;
        let host = self.memory.host.as_ptr().wrapping_add(at);
        Some((block, host, self.memory.device + at as u64))
    }

    /// The sums that a checksum's launch, which has ended, left in a block.
    pub(super) fn sums(&self, block: usize, count: usize) -> &[u32] {
        debug_assert!(block < BLOCKS && count * 4 <= BLOCK_BYTES);
        let at = STAGING + block * BLOCK_BYTES;
        let host = self.memory.host.as_ptr().wrapping_add(at);
        // SAFETY: inside the block, which is initialised and which nothing writes any more.
        unsafe { std::slice::from_raw_parts(host.cast(), count) }
    }

    pub(super) fn give_back_block(&mut self, block: usize) {
        self.free_blocks.push(block);
    }
}
