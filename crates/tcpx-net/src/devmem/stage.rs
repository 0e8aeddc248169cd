//! Copies of chunks to where they can be sent from: pinned slots for memory that the CPU cannot reach,
//! slots of bound memory where the card sends by itself.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use tcpx_memory::{
    CompletionSink, CopyWorker, Fence, FreeWatch, Job, MemoryError, MemoryKind, PinnedPool,
    RegionSlice, Work,
};

use super::outflow::{Outflow, Source};
use super::slots::{SLOT_BYTES, SendSlot, SendSlots};
use crate::tcp::signal::Signal;

/// Chunks of one channel on their way to a slot.
#[derive(Debug)]
pub(super) struct Stage {
    /// Of the GPUs whose memory is sent; the host's last.
    workers: Vec<Arc<CopyWorker>>,
    /// Where the card sends from; `None` once it no longer does.
    slots: Option<Arc<SendSlots>>,
    /// Chunks without a slot, by their place in the stream.
    waiting: VecDeque<Waiting>,
    copying: HashMap<u64, Copying>,
    finished: Arc<Finished>,
    _watches: Vec<FreeWatch>,
}

#[derive(Debug)]
struct Waiting {
    start: u64,
    slice: RegionSlice,
    fence: Option<Fence>,
}

#[derive(Debug)]
struct Copying {
    /// The chunk's own memory.
    slice: RegionSlice,
    to: To,
}

#[derive(Debug)]
enum To {
    Pinned(RegionSlice),
    Device(Arc<SendSlot>),
}

/// What the workers have finished, and who is to look.
#[derive(Debug)]
struct Finished {
    signal: Arc<Signal>,
    results: Mutex<Vec<(u64, Result<u64, MemoryError>)>>,
}

impl CompletionSink for Finished {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        results.push((token, result));
        drop(results);
        self.signal.raise();
    }
}

impl Stage {
    pub(super) fn new(
        gpus: &[Arc<CopyWorker>],
        slots: Option<Arc<SendSlots>>,
        signal: Arc<Signal>,
    ) -> Result<Self, MemoryError> {
        let mut workers = gpus.to_vec();
        if slots.is_some() {
            workers.push(CopyWorker::host()?);
        }
        let watch = |worker: &Arc<CopyWorker>| {
            let signal = Arc::clone(&signal);
            worker.pinned().on_free(Arc::new(move || signal.raise()))
        };
        let watches = gpus.iter().map(watch).collect();
        Ok(Self {
            workers,
            slots,
            waiting: VecDeque::new(),
            copying: HashMap::new(),
            finished: Arc::new(Finished {
                signal,
                results: Mutex::default(),
            }),
            _watches: watches,
        })
    }

    /// Whether chunks of GPU memory can be sent.
    pub(super) fn takes_gpu_memory(&self) -> bool {
        self.workers.iter().any(|worker| worker.gpu().is_some())
    }

    /// Longest chunk that can be sent.
    pub(super) fn largest(&self) -> u64 {
        if self.workers.is_empty() {
            u64::from(u32::MAX)
        } else {
            SLOT_BYTES.min(PinnedPool::SLOT_BYTES) as u64
        }
    }

    /// Whether a chunk of this memory must be copied before it can be sent.
    pub(super) fn is_needed(&self, slice: &RegionSlice) -> bool {
        self.slots.is_some() || !slice.kind().is_cpu_accessible()
    }

    /// Copies the chunk that begins at `start` of the stream, as soon as there is a slot.
    pub(super) fn begin(&mut self, start: u64, slice: RegionSlice, fence: Option<Fence>) {
        self.waiting.push_back(Waiting {
            start,
            slice,
            fence,
        });
    }

    /// Moves on what can be: finished copies to the outflow, waiting chunks to free slots.
    ///
    /// # Errors
    /// A copy failed or was refused. The chunk's request is in the outflow, its memory free.
    pub(super) fn progress(&mut self, outflow: &mut Outflow) -> Result<(), MemoryError> {
        self.finished.signal.clear();
        let mut results = self
            .finished
            .results
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let finished = std::mem::take(&mut *results);
        drop(results);
        let mut outcome = Ok(());
        for (start, result) in finished {
            let Some(copied) = self.copying.remove(&start) else {
                continue;
            };
            match result {
                Ok(_) => outflow.staged(start, copied.ready()),
                Err(error) => {
                    outflow.staged(start, Source::Failed);
                    outcome = Err(error);
                }
            }
        }
        while let Some(first) = self.waiting.pop_front() {
            match self.slot_for(&first.slice) {
                Ok(Some((worker, to))) => {
                    let start = first.start;
                    if let Err(error) = self.submit(first, &worker, to) {
                        outflow.staged(start, Source::Failed);
                        outcome = Err(error);
                    }
                }
                Ok(None) => {
                    self.waiting.push_front(first);
                    break;
                }
                Err(error) => {
                    outflow.staged(first.start, Source::Failed);
                    outcome = Err(error);
                }
            }
        }
        outcome
    }

    /// The card no longer sends by itself.
    pub(super) fn forget_slots(&mut self) {
        self.slots = None;
    }

    /// Chunks without a slot will not be sent.
    pub(super) fn close(&mut self, outflow: &mut Outflow) {
        for waiting in self.waiting.drain(..) {
            outflow.staged(waiting.start, Source::Failed);
        }
    }

    fn slot_for(&self, slice: &RegionSlice) -> Result<Option<(Arc<CopyWorker>, To)>, MemoryError> {
        let worker = self.worker_of(slice)?;
        let bytes = slice.len();
        if let Some(slots) = &self.slots {
            let slot = slots.take(&self.finished.signal);
            return Ok(slot.map(|slot| (worker, To::Device(slot))));
        }
        match worker.pinned().try_take() {
            Some(slot) => {
                let to = slot.slice().slice(..bytes)?;
                Ok(Some((worker, To::Pinned(to))))
            }
            None => Ok(None),
        }
    }

    /// Whose memory it is; host memory goes to a GPU's slots by that GPU's worker.
    fn worker_of(&self, slice: &RegionSlice) -> Result<Arc<CopyWorker>, MemoryError> {
        let to_gpu = self
            .slots
            .as_ref()
            .and_then(|slots| slots.path().memory().region().gpu());
        let gpu = slice.region().gpu().or(to_gpu);
        let is_its = |worker: &&Arc<CopyWorker>| match (worker.gpu(), gpu) {
            (Some(own), Some(gpu)) => own.is_same(gpu),
            (None, None) => true,
            _ => false,
        };
        let found = self.workers.iter().find(is_its);
        found.cloned().ok_or_else(|| MemoryError::WrongWorker {
            worker: MemoryKind::Host,
            kind: slice.kind(),
        })
    }

    fn submit(
        &mut self,
        waiting: Waiting,
        worker: &Arc<CopyWorker>,
        to: To,
    ) -> Result<(), MemoryError> {
        let Waiting {
            start,
            slice,
            fence,
        } = waiting;
        let target = match &to {
            To::Pinned(to) => to.clone(),
            To::Device(slot) => slot.slice(slice.len())?,
        };
        let sink: Arc<dyn CompletionSink> = Arc::<Finished>::clone(&self.finished);
        let job = Job {
            work: Work::Copy {
                from: slice.clone(),
                to: target,
            },
            fence,
            sink,
            token: start,
        };
        worker.submit(job)?;
        self.copying.insert(start, Copying { slice, to });
        Ok(())
    }
}

impl Copying {
    fn ready(self) -> Source {
        match self.to {
            To::Pinned(slice) => Source::Host(slice),
            To::Device(slot) => Source::Device {
                slot,
                slice: self.slice,
            },
        }
    }
}
