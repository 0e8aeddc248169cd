//! Parts of messages on their way out of GPU memory: the copy worker puts each into a pinned slot, and
//! when it is there, on the lanes.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tcpx_lanes::socket_calls::Span;
use tcpx_memory::{CompletionSink, Job, MemoryError, Work};
use tcpx_wire::ChunkHeader;

use super::lane_set::LaneSet;
use super::outlet::{Chunk, Outlet};
use crate::memory::DeviceSlice;

/// Parts of one comm that are copied at a time.
const PARTS: usize = 64;

enum Part {
    Free,
    /// The copy worker writes its slot.
    Copying(Chunk),
    /// Copied, when the lanes' queue had no room.
    Late(Chunk),
}

/// One comm's parts; the copy worker tells it of each that is copied.
pub(crate) struct FromGpu {
    set: Arc<LaneSet>,
    parts: [Mutex<Part>; PARTS],
    started: AtomicUsize,
    late: AtomicUsize,
    failure: OnceLock<MemoryError>,
}

impl FromGpu {
    pub(super) fn new(set: Arc<LaneSet>) -> Self {
        Self {
            set,
            parts: std::array::from_fn(|_| Mutex::new(Part::Free)),
            started: AtomicUsize::new(0),
            late: AtomicUsize::new(0),
            failure: OnceLock::new(),
        }
    }

    fn part(&self, number: usize) -> MutexGuard<'_, Part> {
        self.parts[number % PARTS]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the copy of a part, which must fit a slot; `false` when there is no room now.
    ///
    /// The pool's last half is for receives. Theirs come back when the GPU has copied them; one of a send
    /// comes back when the peer has read it, for which the peer may need slots that its own sends hold.
    pub(super) fn start(
        self: &Arc<Self>,
        outlet: &Arc<Outlet>,
        header: ChunkHeader,
        from: DeviceSlice,
    ) -> Result<bool, MemoryError> {
        let number = self.started.load(Ordering::Relaxed);
        let pool = from.device.worker().pinned();
        let is_busy = !matches!(*self.part(number), Part::Free);
        if is_busy || pool.free_slots() * 2 <= pool.slots() {
            return Ok(false);
        }
        let Some(slot) = pool.try_take() else {
            return Ok(false);
        };
        let to = slot.slice().slice(..from.slice.len())?;
        let start = to.host_ptr().unwrap_or(std::ptr::null_mut());
        let payload = Span::new(start, to.len());
        *self.part(number) = Part::Copying(outlet.staged_chunk(header, payload, to.clone()));
        let job = Job {
            work: Work::Copy {
                from: from.slice,
                to,
            },
            // NCCL posts a send when its kernel has written the bytes; that kernel may still run, so
            // waiting for a stream would be waiting for ourselves.
            fence: None,
            sink: Arc::<Self>::clone(self),
            // Below 64.
            token: (number % PARTS) as u64,
        };
        if let Err(refused) = from.device.worker().submit(job) {
            *self.part(number) = Part::Free;
            return match refused.error {
                MemoryError::QueueFull { .. } => Ok(false),
                error => Err(error),
            };
        }
        self.started
            .store(number.wrapping_add(1), Ordering::Relaxed);
        Ok(true)
    }

    /// Queues what found no room when it was copied.
    pub(super) fn push_late(&self) {
        if self.late.load(Ordering::Acquire) == 0 {
            return;
        }
        for number in 0..PARTS {
            let mut part = self.part(number);
            match std::mem::replace(&mut *part, Part::Free) {
                Part::Late(chunk) => {
                    self.late.fetch_sub(1, Ordering::AcqRel);
                    self.queue(&mut part, chunk);
                }
                other => *part = other,
            }
        }
    }

    fn queue(&self, part: &mut Part, chunk: Chunk) {
        if let Err(chunk) = self.set.push(chunk) {
            *part = Part::Late(chunk);
            self.late.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Why a part was lost, if one was.
    pub(super) fn failure(&self) -> Option<&MemoryError> {
        self.failure.get()
    }

    /// Drops what waits for room: its comm closes.
    pub(super) fn close(&self) {
        for number in 0..PARTS {
            let mut part = self.part(number);
            if matches!(*part, Part::Late(_)) {
                *part = Part::Free;
                self.late.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

impl CompletionSink for FromGpu {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        // Below 64.
        let mut part = self.part(token as usize);
        let Part::Copying(chunk) = std::mem::replace(&mut *part, Part::Free) else {
            return;
        };
        match result {
            Ok(_) => self.queue(&mut part, chunk),
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
    use super::*;
    use crate::lanes::carriage::header;

    /// A comm's parts of which the first is being copied, and the lanes for it, which nobody drives.
    fn copying() -> (Arc<Outlet>, Arc<LaneSet>, FromGpu) {
        let set = LaneSet::without_lanes(true);
        let (outlet, from_gpu) = (
            Arc::new(Outlet::new(set.load())),
            FromGpu::new(Arc::clone(&set)),
        );
        *from_gpu.part(0) = Part::Copying(chunk(&outlet));
        (outlet, set, from_gpu)
    }

    fn chunk(outlet: &Arc<Outlet>) -> Chunk {
        outlet.chunk(header(1, 0, 0, 10, 10), Span::EMPTY)
    }

    #[test]
    fn a_part_that_is_copied_while_the_lanes_have_no_room_is_queued_later() {
        let (outlet, set, from_gpu) = copying();
        while set.push(chunk(&outlet)).is_ok() {}
        from_gpu.complete(0, Ok(10));
        from_gpu.push_late();
        let queued = std::iter::from_fn(|| set.chunks().pop()).count();
        assert!(outlet.is_busy(), "the part is still there");
        from_gpu.push_late();
        assert!(set.chunks().pop().is_some() && set.chunks().pop().is_none() && queued > 0);
        assert!(!outlet.is_busy() && from_gpu.failure().is_none());
    }

    #[test]
    fn a_closing_comm_drops_what_waits_for_room() {
        let (outlet, set, from_gpu) = copying();
        while set.push(chunk(&outlet)).is_ok() {}
        from_gpu.complete(0, Ok(10));
        from_gpu.close();
        while set.chunks().pop().is_some() {}
        from_gpu.push_late();
        assert!(set.chunks().pop().is_none() && !outlet.is_busy());
    }

    #[test]
    fn a_copy_that_fails_is_told_and_one_that_may_go_on_keeps_its_slot() {
        let error = MemoryError::WorkerStopped;
        let (outlet, set, from_gpu) = copying();
        from_gpu.complete(0, Err(error.clone()));
        assert_eq!(from_gpu.failure(), Some(&error));
        assert!(!outlet.is_busy() && set.chunks().pop().is_none());

        let (outlet, set, from_gpu) = copying();
        from_gpu.complete(0, Err(MemoryError::WorkerFailed));
        assert!(outlet.is_busy() && set.chunks().pop().is_none());
        assert!(from_gpu.failure().is_some());
    }
}
