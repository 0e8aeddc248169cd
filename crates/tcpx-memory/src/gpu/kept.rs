//! What a GPU's work needs of the driver: made once, before the first transfer, and never given
//! back.
//!
//! `cuMemHostUnregister`, `cuMemFree` and `cuModuleUnload` wait for the kernels that run, and until
//! they return no thread of the process can copy. To pin memory or to load a module holds copies up
//! for milliseconds. So the first connection on a GPU does all of that, and later ones share it.

use std::sync::{Arc, Mutex};
use std::thread;

use super::{Gpu, MappedHost};
use crate::error::MemoryError;
use crate::lock;
use crate::pinned::{PinnedPool, Slots};
use crate::region::Region;
use crate::small_copies::SmallCopies;
use crate::worker::WORKER_BYTES;

/// The pinned memory of a GPU. All of it is pinned at once.
pub(crate) struct PinnedOfGpu {
    slots: Arc<Slots>,
    /// For the copy worker, until it takes it.
    worker: Mutex<Option<MappedHost>>,
}

impl PinnedOfGpu {
    /// Pins all of it, and makes what lies there.
    fn make(gpu: &Gpu) -> Result<Self, MemoryError> {
        let slot_bytes = slot_bytes();
        let bytes = [WORKER_BYTES, SmallCopies::ALL_BYTES, size_of::<u32>()];
        thread::scope(|scope| {
            // Most of that takes the kernel, which clears the pages, and not the driver.
            let pin = move || MappedHost::pin(gpu, slot_bytes);
            let slots = thread::Builder::new().spawn_scoped(scope, pin);
            if let Err(error) = gpu.module() {
                tracing::debug!(%error, "there are no kernels on this GPU");
            }
            let worker = MappedHost::pin(gpu, bytes.iter().sum())?;
            let small = worker.at(bytes[0]);
            gpu.try_legacy_stream(small.at(bytes[1]));
            if let Err(error) = SmallCopies::make_all(gpu, small) {
                tracing::warn!(%error, "small messages of GPU memory travel as large ones");
            }
            let slots = match slots.map(|slots| slots.join()) {
                Ok(Ok(slots)) => slots,
                // No thread, or one that panicked.
                Ok(Err(_)) | Err(_) => pin(),
            }?;
            // SAFETY: pinned just now, as long, never freed, and known to nobody else.
            let region = unsafe { Region::pinned_for_good(slots, slot_bytes) };
            Ok(Self {
                slots: Slots::new(region)?,
                worker: Mutex::new(Some(worker)),
            })
        })
    }

    /// The slots that all connections on the GPU share.
    pub(crate) fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }
}

/// Bytes of the slots that connections share: [`PinnedPool::GPU_BYTES`], or what `TCPX_PINNED_MIB`
/// says.
fn slot_bytes() -> usize {
    let Ok(text) = std::env::var("TCPX_PINNED_MIB") else {
        return PinnedPool::GPU_BYTES;
    };
    match text.parse::<usize>() {
        Ok(mebibytes @ 8..=65_536) => mebibytes * PinnedPool::SLOT_BYTES,
        _ => {
            tracing::warn!(TCPX_PINNED_MIB = %text, "expected 8 to 65536, so it stays at 64");
            PinnedPool::GPU_BYTES
        }
    }
}

impl Gpu {
    /// The GPU's pinned memory. The first call pins it and prepares all else that would later hold
    /// copies up: it takes tens of milliseconds, in which copies wait.
    ///
    /// # Errors
    /// The driver's refusal; a later call tries again.
    pub(crate) fn kept(&self) -> Result<&PinnedOfGpu, MemoryError> {
        if let Some(kept) = self.0.kept.get() {
            return Ok(kept);
        }
        let _preparing = lock(&self.0.preparing);
        if let Some(kept) = self.0.kept.get() {
            return Ok(kept);
        }
        let kept = PinnedOfGpu::make(self)?;
        // Set under the lock, once.
        Ok(self.0.kept.get_or_init(|| kept))
    }

    /// [`WORKER_BYTES`] of zeroed pinned memory, for good: those that were pinned at set-up, or
    /// others for a second user.
    pub(crate) fn worker_memory(&self) -> Result<MappedHost, MemoryError> {
        let first = lock(&self.kept()?.worker).take();
        first.map_or_else(|| MappedHost::pin(self, WORKER_BYTES), Ok)
    }
}
