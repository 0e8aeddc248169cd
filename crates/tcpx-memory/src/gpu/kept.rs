//! What a GPU's work needs of the driver: made once, before the first transfer, and never given back.
//!
//! `cuMemFreeHost`, `cuMemFree` and `cuModuleUnload` wait for the kernels that run, and until they return no
//! thread of the process can copy. To pin memory or to load a module holds copies up for milliseconds. So the
//! first connection on a GPU does all of that, and later ones share it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::sync::PIECE as BLOCKING_BYTES;
use super::{Gpu, MappedHost};
use crate::error::MemoryError;
use crate::lock;
use crate::pinned::{PinnedPool, Slots};
use crate::region::Region;
use crate::small_copies::SmallCopies;
use crate::worker::WORKER_BYTES;

/// The pinned memory of a GPU. All of it is pinned at once.
pub(crate) struct Kept {
    slots: Arc<Slots>,
    /// For the copy worker, and for blocking access, until they take it.
    worker: Mutex<Option<MappedHost>>,
    blocking: Mutex<Option<MappedHost>>,
    /// For small copies: cut into parts from its beginning, for good.
    small: MappedHost,
    cut: AtomicUsize,
}

// SAFETY: the memory stays for ever, and each part of it belongs to the one that took it.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

impl Kept {
    /// Also tries the legacy stream, which takes a word of pinned memory.
    fn pin(gpu: &Gpu) -> Result<Self, MemoryError> {
        let slot_bytes = slot_bytes();
        let bytes = [
            slot_bytes,
            WORKER_BYTES,
            BLOCKING_BYTES,
            SmallCopies::ALL_BYTES,
            size_of::<u32>(),
        ];
        let mut memory = MappedHost::alloc(gpu, bytes.iter().sum())?;
        let [slots, worker, blocking, small, word] = bytes.map(|bytes| {
            let part = memory;
            memory = MappedHost {
                // SAFETY: inside the allocation, or its end.
                host: unsafe { part.host.add(bytes) },
                device: part.device + bytes as u64,
            };
            part
        });
        // SAFETY: aligned, ours, and never freed.
        unsafe { word.host.cast::<u32>().write(0) };
        gpu.try_legacy_stream(word);
        // SAFETY: pinned just now, as long, never freed, and known to nobody else.
        let region = unsafe { Region::pinned_for_good(slots, slot_bytes) };
        Ok(Self {
            slots: Slots::new(region)?,
            worker: Mutex::new(Some(worker)),
            blocking: Mutex::new(Some(blocking)),
            small,
            cut: AtomicUsize::new(0),
        })
    }

    /// The slots that all connections on the GPU share.
    pub(crate) fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// Zeroed memory for small copies, for the caller alone and for good; `None` if less than that is left.
    pub(crate) fn cut(&self, bytes: usize) -> Option<MappedHost> {
        let fits = |cut: usize| cut + bytes <= SmallCopies::ALL_BYTES;
        let further = |cut: usize| fits(cut).then_some(cut + bytes);
        let order = Ordering::Relaxed;
        let at = self.cut.fetch_update(order, order, further).ok()?;
        // SAFETY: inside the memory for small copies, and no other part covers it.
        let host = unsafe {
            let host = self.small.host.add(at);
            host.write_bytes(0, bytes);
            host
        };
        let device = self.small.device + at as u64;
        Some(MappedHost { host, device })
    }
}

/// Bytes of the slots that connections share: [`PinnedPool::GPU_BYTES`], or what `TCPX_PINNED_MIB` says.
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

/// Pinned memory of connections that have ended, with its length.
#[derive(Default)]
pub(super) struct Left(Mutex<Vec<(usize, MappedHost)>>);

// SAFETY: nobody else uses the memory.
unsafe impl Send for Left {}
// SAFETY: as above; the list has a lock.
unsafe impl Sync for Left {}

impl Gpu {
    /// Zeroed pinned memory that an ended connection has left, or new.
    pub(crate) fn recycled_pinned(&self, len: usize) -> Result<MappedHost, MemoryError> {
        let mut left = lock(&self.0.left.0);
        let found = left.iter().position(|(bytes, _)| *bytes == len);
        let found = found.map(|at| left.swap_remove(at).1);
        drop(left);
        let memory = match found {
            Some(memory) => memory,
            None => MappedHost::alloc(self, len)?,
        };
        // SAFETY: as long, and nobody else uses it.
        unsafe { memory.host.write_bytes(0, len) };
        Ok(memory)
    }

    /// Leaves memory that nobody uses any more to the next connection.
    pub(crate) fn recycle(&self, len: usize, memory: MappedHost) {
        lock(&self.0.left.0).push((len, memory));
    }

    /// The GPU's pinned memory. The first call pins it and prepares all else that would later hold copies up: it
    /// takes tens of milliseconds, in which copies wait.
    ///
    /// # Errors
    /// The driver's refusal; a later call tries again.
    pub(crate) fn kept(&self) -> Result<&Kept, MemoryError> {
        if let Some(kept) = self.0.kept.get() {
            return Ok(kept);
        }
        let _preparing = lock(&self.0.preparing);
        if let Some(kept) = self.0.kept.get() {
            return Ok(kept);
        }
        let kept = Kept::pin(self)?;
        if let Err(error) = self.persistent_kernel() {
            tracing::debug!(%error, "small copies go on without the persistent kernel");
        }
        if let Err(error) = SmallCopies::make_all(self, &kept) {
            tracing::warn!(%error, "small messages of GPU memory travel as large ones");
        }
        // Set under the lock, once.
        Ok(self.0.kept.get_or_init(|| kept))
    }

    /// [`WORKER_BYTES`] of zeroed pinned memory, for good: those that were pinned at set-up, or others for a second user.
    pub(crate) fn worker_memory(&self) -> Result<MappedHost, MemoryError> {
        let first = lock(&self.kept()?.worker).take();
        let memory = first.map_or_else(|| MappedHost::alloc(self, WORKER_BYTES), Ok)?;
        // SAFETY: as long, and nobody else uses it.
        unsafe { memory.host.write_bytes(0, WORKER_BYTES) };
        Ok(memory)
    }

    /// As above, of [`BLOCKING_BYTES`], and not zeroed.
    pub(super) fn blocking_memory(&self) -> Result<MappedHost, MemoryError> {
        let first = lock(&self.kept()?.blocking).take();
        Ok(first.map_or_else(|| MappedHost::alloc(self, BLOCKING_BYTES), Ok)?)
    }
}
