//! Parts of messages on their way out of GPU memory: the copy worker puts each into a pinned slot,
//! and when it is there, on the lanes.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use tcpx_lanes::lock;
use tcpx_lanes::socket_calls::Span;
use tcpx_memory::{CompletionSink, Job, MemoryError, PinnedPool, Work};
use tcpx_wire::ChunkHeader;

use super::lane_set::LaneSet;
use super::send_stream::{Chunk, SendStream};
use crate::memory::DeviceSlice;

/// Parts of one comm that are copied at a time.
pub(super) const PARTS: usize = 64;

/// One comm's parts; the copy worker tells it of each that is copied.
pub(crate) struct FromGpu {
    set: Arc<LaneSet>,
    /// The comm's own: one of a send comes back when the peer has read it, which may be never.
    pool: PinnedPool,
    /// Those whose slots the copy worker writes.
    parts: [Mutex<Option<Chunk>>; PARTS],
    started: AtomicUsize,
    failure: OnceLock<MemoryError>,
}

impl FromGpu {
    pub(super) fn new(set: Arc<LaneSet>, pool: PinnedPool) -> Self {
        Self {
            set,
            pool,
            parts: std::array::from_fn(|_| Mutex::new(None)),
            started: AtomicUsize::new(0),
            failure: OnceLock::new(),
        }
    }

    fn part(&self, number: usize) -> MutexGuard<'_, Option<Chunk>> {
        lock(&self.parts[number % PARTS])
    }

    /// Starts the copy of a part, which must fit a slot; `false` when there is no room now.
    pub(super) fn start(
        self: &Arc<Self>,
        send_stream: &Arc<SendStream>,
        header: ChunkHeader,
        from: DeviceSlice,
    ) -> Result<bool, MemoryError> {
        let number = self.started.load(Ordering::Relaxed);
        if self.part(number).is_some() {
            return Ok(false);
        }
        let Some(slot) = self.pool.try_take() else {
            return Ok(false);
        };
        let to = slot.slice().slice(..from.slice.len())?;
        let start = to.host_ptr().unwrap_or(std::ptr::null_mut());
        let payload = Span::new(start, to.len());
        *self.part(number) = Some(send_stream.staged_chunk(header, payload, to.clone()));
        let job = Job {
            work: Work::Copy {
                from: from.slice,
                to,
            },
            // NCCL posts a send when its kernel has written the bytes; that kernel may still run,
            // so waiting for a stream would be waiting for ourselves.
            fence: None,
            sink: Arc::<Self>::clone(self),
            // Below 64.
            token: (number % PARTS) as u64,
        };
        if let Err(refused) = from.device.worker().submit(job) {
            *self.part(number) = None;
            return Err(refused.error);
        }
        self.started
            .store(number.wrapping_add(1), Ordering::Relaxed);
        Ok(true)
    }

    /// Why a part was lost, if one was.
    pub(super) fn failure(&self) -> Option<&MemoryError> {
        self.failure.get()
    }
}

impl CompletionSink for FromGpu {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        // Below 64.
        let Some(mut chunk) = self.part(token as usize).take() else {
            return;
        };
        match result {
            Ok(_) => {
                chunk.put_back();
                self.set.push_in_any_case(chunk);
            }
            Err(error) => {
                if error.may_go_on() {
                    // The slot may still be written; nobody else may have it.
                    std::mem::forget(chunk);
                }
                // The first error explains the others.
                let _ = self.failure.set(error);
            }
        }
    }
}

impl fmt::Debug for FromGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let started = self.started.load(Ordering::Relaxed);
        write!(f, "FromGpu({started} parts started)")
    }
}

#[cfg(test)]
mod tests {
    use tcpx_memory::CopyWorker;

    use super::*;
    use crate::lanes::send_path::header;

    /// A comm's parts of which the first is being copied, and the lanes for it, which nobody
    /// drives.
    fn copying() -> (Arc<SendStream>, Arc<LaneSet>, FromGpu) {
        let set = LaneSet::without_lanes(true);
        let pool = CopyWorker::host().unwrap().slots_to_send(1);
        let (send_stream, from_gpu) = (
            Arc::new(SendStream::new(set.load())),
            FromGpu::new(Arc::clone(&set), pool),
        );
        *from_gpu.part(0) = Some(chunk(&send_stream));
        (send_stream, set, from_gpu)
    }

    fn chunk(send_stream: &Arc<SendStream>) -> Chunk {
        send_stream.chunk(header(1, 0, 0, 10, 10), Span::EMPTY)
    }

    #[test]
    fn a_copied_part_is_queued_though_lanes_have_no_room() {
        let (send_stream, set, from_gpu) = copying();
        let mut queued = 0;
        while set.push(chunk(&send_stream)).is_ok() {
            queued += 1;
        }
        from_gpu.complete(0, Ok(10));
        assert_eq!(set.chunks.queued(), queued + 1);
        while set.chunks.pop().is_some() {}
        assert!(!send_stream.is_busy() && from_gpu.failure().is_none());
    }

    #[test]
    fn a_failed_copy_that_may_go_on_keeps_its_slot() {
        let error = MemoryError::WorkerStopped;
        let (send_stream, set, from_gpu) = copying();
        from_gpu.complete(0, Err(error.clone()));
        assert_eq!(from_gpu.failure(), Some(&error));
        assert!(!send_stream.is_busy() && set.chunks.pop().is_none());

        let (send_stream, set, from_gpu) = copying();
        from_gpu.complete(0, Err(MemoryError::WorkerFailed));
        assert!(send_stream.is_busy() && set.chunks.pop().is_none());
        assert!(from_gpu.failure().is_some());
    }
}
