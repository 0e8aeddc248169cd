//! Copies of chunks to where they can be sent from: pinned slots for memory that the CPU cannot
//! reach, slots of bound memory where the card sends by itself.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use tcpx_lanes::lock;
use tcpx_lanes::waker::Waker;
use tcpx_memory::{
    CompletionSink, CopyWorker, Fence, FreeWatch, Job, MemoryError, MemoryKind, PinnedPool,
    RegionSlice, Work,
};

use super::outflow::{Outflow, Source};
use super::slots::{SLOT_BYTES, SendSlot, SendSlots};

/// Chunks of one channel on their way to a slot.
#[derive(Debug)]
pub(super) struct Stage {
    /// Of the GPUs whose memory is sent; the host's last. With slots for what it sends.
    workers: Vec<(Arc<CopyWorker>, PinnedPool)>,
    /// Where the card sends from; `None` once it no longer does.
    slots: Option<Arc<SendSlots>>,
    /// Chunks without a slot, by their sequence: the first one is served first, so that no later
    /// one has the slot that the peer waits for.
    waiting: BTreeMap<u64, Waiting>,
    copying: HashMap<u64, Copying>,
    finished: Arc<Finished>,
    closed: bool,
    _watches: Vec<FreeWatch>,
}

#[derive(Debug)]
struct Waiting {
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
    signal: Arc<Waker>,
    results: Mutex<Vec<(u64, Result<u64, MemoryError>)>>,
}

impl CompletionSink for Finished {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        let mut results = lock(&self.results);
        results.push((token, result));
        drop(results);
        self.signal.wake();
    }
}

/// Most pinned slots of a channel.
const PINNED_SLOTS: usize = 64;

impl Stage {
    pub(super) fn new(
        gpus: &[Arc<CopyWorker>],
        slots: Option<Arc<SendSlots>>,
        signal: Arc<Waker>,
    ) -> Result<Self, MemoryError> {
        let mut workers = gpus.to_vec();
        if slots.is_some() {
            workers.push(CopyWorker::host()?);
        }
        let with_slots = |worker: Arc<CopyWorker>| {
            let pool = worker.slots_to_send(PINNED_SLOTS);
            (worker, pool)
        };
        let workers: Vec<_> = workers.into_iter().map(with_slots).collect();
        let watch = |(_, pool): &(_, PinnedPool)| {
            let signal = Arc::clone(&signal);
            pool.on_free(Arc::new(move || signal.wake()))
        };
        let watches = workers.iter().map(watch).collect();
        Ok(Self {
            workers,
            slots,
            waiting: BTreeMap::new(),
            copying: HashMap::new(),
            finished: Arc::new(Finished {
                signal,
                results: Mutex::default(),
            }),
            closed: false,
            _watches: watches,
        })
    }

    /// Whether chunks of GPU memory can be sent.
    pub(super) fn takes_gpu_memory(&self) -> bool {
        self.workers
            .iter()
            .any(|(worker, _)| worker.gpu().is_some())
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

    /// Copies the chunk of this sequence as soon as there is a slot.
    pub(super) fn begin(&mut self, sequence: u64, slice: RegionSlice, fence: Option<Fence>) {
        self.waiting.insert(sequence, Waiting { slice, fence });
    }

    /// Moves on what can be: finished copies to the outflow, waiting chunks to free slots.
    ///
    /// # Errors
    /// A copy failed or was refused. The chunk's request is in the outflow, its memory free.
    pub(super) fn progress(&mut self, outflow: &mut Outflow) -> Result<(), MemoryError> {
        self.finished.signal.clear();
        let mut results = lock(&self.finished.results);
        let finished = std::mem::take(&mut *results);
        drop(results);
        let mut outcome = Ok(());
        for (sequence, result) in finished {
            let Some(copied) = self.copying.remove(&sequence) else {
                continue;
            };
            match result {
                Ok(_) if self.slots.is_none() && copied.is_in_device() => {
                    self.out_of_slot(outflow, sequence, copied.slice);
                }
                Ok(_) => outflow.staged(sequence, copied.ready()),
                Err(error) => {
                    outflow.staged(sequence, Source::Failed);
                    outcome = Err(error);
                }
            }
        }
        if self.slots.as_ref().is_some_and(|slots| slots.are_lost()) {
            self.slots = None;
        }
        // Chunks on their way to a slot that is of no use any more are in front of those that wait.
        let is_turned = self.slots.is_none() && self.copying.values().any(Copying::is_in_device);
        while !is_turned && let Some((sequence, first)) = self.waiting.pop_first() {
            if !self.is_needed(&first.slice) {
                outflow.staged(sequence, Source::Host(first.slice));
                continue;
            }
            match self.slot_for(&first.slice) {
                Ok(Some((worker, to))) => {
                    if let Err(error) = self.submit(sequence, first, &worker, to) {
                        outflow.staged(sequence, Source::Failed);
                        outcome = Err(error);
                    }
                }
                Ok(None) => {
                    self.waiting.insert(sequence, first);
                    break;
                }
                Err(error) => {
                    outflow.staged(sequence, Source::Failed);
                    outcome = Err(error);
                }
            }
        }
        outcome
    }

    /// The card no longer sends by itself: chunks in slots go from their own memory, by way of a
    /// pinned slot where the CPU does not reach that.
    pub(super) fn leave_slots(&mut self, outflow: &mut Outflow) {
        if self.slots.take().is_none() {
            return;
        }
        for (sequence, slice) in outflow.take_from_slots() {
            self.out_of_slot(outflow, sequence, slice);
        }
        self.finished.signal.wake();
    }

    fn out_of_slot(&mut self, outflow: &mut Outflow, sequence: u64, slice: RegionSlice) {
        if self.closed {
            outflow.staged(sequence, Source::Failed);
        } else if slice.kind().is_cpu_accessible() {
            outflow.staged(sequence, Source::Host(slice));
        } else {
            // What it had to wait for has ended, as it was copied before.
            self.begin(sequence, slice, None);
        }
    }

    /// Chunks without a slot will not be sent.
    pub(super) fn close(&mut self, outflow: &mut Outflow) {
        self.closed = true;
        for sequence in std::mem::take(&mut self.waiting).into_keys() {
            outflow.staged(sequence, Source::Failed);
        }
    }

    fn slot_for(&self, slice: &RegionSlice) -> Result<Option<(Arc<CopyWorker>, To)>, MemoryError> {
        let (worker, pool) = self.worker_of(slice)?;
        let bytes = slice.len();
        if let Some(slots) = &self.slots {
            let slot = slots.take(&self.finished.signal);
            return Ok(slot.map(|slot| (Arc::clone(worker), To::Device(slot))));
        }
        match pool.try_take() {
            Some(slot) => {
                let to = slot.slice().slice(..bytes)?;
                Ok(Some((Arc::clone(worker), To::Pinned(to))))
            }
            None => Ok(None),
        }
    }

    /// Whose memory it is; host memory goes to a GPU's slots by that GPU's worker.
    fn worker_of(
        &self,
        slice: &RegionSlice,
    ) -> Result<&(Arc<CopyWorker>, PinnedPool), MemoryError> {
        let to_gpu = self
            .slots
            .as_ref()
            .and_then(|slots| slots.path().memory().region().gpu());
        let gpu = slice.region().gpu().or(to_gpu);
        let is_its = |(worker, _): &&(Arc<CopyWorker>, PinnedPool)| match (worker.gpu(), gpu) {
            (Some(own), Some(gpu)) => own.is_same(gpu),
            (None, None) => true,
            _ => false,
        };
        let found = self.workers.iter().find(is_its);
        found.ok_or_else(|| MemoryError::WrongWorker {
            worker: MemoryKind::Host,
            kind: slice.kind(),
        })
    }

    fn submit(
        &mut self,
        sequence: u64,
        waiting: Waiting,
        worker: &Arc<CopyWorker>,
        to: To,
    ) -> Result<(), MemoryError> {
        let Waiting { slice, fence } = waiting;
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
            token: sequence,
        };
        worker.submit(job)?;
        self.copying.insert(sequence, Copying { slice, to });
        Ok(())
    }
}

impl Copying {
    fn is_in_device(&self) -> bool {
        matches!(self.to, To::Device(_))
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use tcpx_memory::{DmaBuf, Region};

    use crate::SendPath;
    use crate::outflow::NextWrite;

    /// A stage over two slots, and as many chunks as are wanted, posted and begun.
    fn stage(chunks: usize) -> (Stage, Outflow, Arc<SendSlots>, Vec<Region>) {
        let nothing = std::fs::File::open("/dev/null").unwrap();
        let region = Region::host(2 * SLOT_BYTES).unwrap();
        // SAFETY: no device gets it.
        let memory = unsafe { DmaBuf::from_fd(nothing.into(), region) };
        let path = SendPath::new(memory, 1, "lo".to_owned(), 1, Arc::new(()));
        let slots = SendSlots::new(path).unwrap();
        let signal = Arc::new(Waker::new().unwrap());
        let mut stage = Stage::new(&[], Some(Arc::clone(&slots)), signal).unwrap();
        let mut outflow = Outflow::default();
        let regions: Vec<_> = (0..chunks).map(|_| Region::host(1000).unwrap()).collect();
        for (token, region) in (0u64..).zip(&regions) {
            outflow.post(token, token, 1000, Source::Staging);
            stage.begin(token, region.all(), None);
        }
        (stage, outflow, slots, regions)
    }

    /// Lets the worker finish what it has.
    fn wait(stage: &mut Stage, outflow: &mut Outflow) {
        while !stage.copying.is_empty() {
            let signal = Arc::clone(&stage.finished.signal);
            let limit = Timespec::try_from(Duration::from_secs(60)).unwrap();
            let ready = poll(&mut [PollFd::new(&*signal, PollFlags::IN)], Some(&limit));
            assert_eq!(ready, Ok(1), "the worker copies");
            stage.progress(outflow).unwrap();
        }
    }

    /// Every chunk goes from its own memory.
    fn assert_own(outflow: &mut Outflow, regions: &[Region]) {
        for region in regions {
            let Some(NextWrite::Host(slice)) = outflow.next(1000) else {
                panic!("{outflow:?}");
            };
            assert_eq!(slice.host_ptr(), region.all().host_ptr());
            outflow.wrote(1000);
        }
        assert!(outflow.next(1000).is_none());
    }

    #[test]
    fn every_chunk_goes_from_its_memory_once_slots_are_left() {
        for copied in [false, true] {
            let (mut stage, mut outflow, slots, regions) = stage(4);
            stage.progress(&mut outflow).unwrap();
            assert_eq!(stage.waiting.len(), 2);
            if copied {
                wait(&mut stage, &mut outflow);
                let next = outflow.next(1000).unwrap();
                assert!(matches!(next, NextWrite::Device { .. }), "{next:?}");
            }
            stage.leave_slots(&mut outflow);
            stage.progress(&mut outflow).unwrap();
            wait(&mut stage, &mut outflow);
            assert_own(&mut outflow, &regions);
            let signal = Arc::new(Waker::new().unwrap());
            let free = [slots.take(&signal), slots.take(&signal)];
            assert!(free.iter().all(Option::is_some), "both slots came back");
        }
    }

    #[test]
    fn slots_that_a_card_never_lets_go_of_are_not_waited_for() {
        let (mut stage, mut outflow, slots, regions) = stage(1);
        for _ in 0..2 {
            slots.take(&stage.finished.signal).unwrap().keep_for_good();
        }
        stage.progress(&mut outflow).unwrap();
        assert_own(&mut outflow, &regions);
    }

    #[test]
    fn what_the_peer_waits_for_is_first_in_line_whenever_it_came() {
        let (mut stage, _, _, regions) = stage(2);
        stage.waiting.clear();
        for sequence in [7000, 3000, 5000] {
            stage.begin(sequence, regions[0].all(), None);
        }
        assert_eq!(stage.waiting.pop_first().unwrap().0, 3000);
    }
}
