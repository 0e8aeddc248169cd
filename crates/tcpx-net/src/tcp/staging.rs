//! Staging through pinned slots, for memory that sockets cannot reach.
//!
//! A send is copied from its source to a slot and then queued; a receive is read into a slot and
//! then copied to its destination. The copy worker does both, so lanes never call CUDA, and copies
//! overlap with the wire.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tcpx_memory::{
    CompletionSink, CopyWorker, FreeWatch, Job, MemoryError, MemoryKind, PinnedPool, RegionSlice,
    Work,
};
use tcpx_wire::frame::Settings;

use super::permits::Permits;
use super::receive_table::{Claim, ReceiveState};
use super::shared::{Event, Shared, lock};
use super::transmit_table::{Outgoing, SendState, Unstaged};
use super::wakers::Wakers;
use crate::channel::MemoryKinds;
use crate::error::{ChannelError, NetworkError};

#[derive(Debug)]
struct Worker {
    worker: Arc<CopyWorker>,
    permits: Arc<Permits>,
}

/// Which memory is staged, by whom, and the sends that wait for a slot.
#[derive(Debug)]
pub(super) struct Staging {
    /// Stages host memory too, when set.
    host: Option<Worker>,
    gpus: Vec<Worker>,
    has_waiting: AtomicBool,
    /// Slots of the transmit table, in sequence order.
    waiting: Mutex<VecDeque<u16>>,
}

/// Where a receive's payload is read to.
#[derive(Debug)]
pub(super) enum Landing {
    At(RegionSlice),
    /// No slot is free; the lane is woken when one may be.
    Later,
}

impl Staging {
    pub(super) fn new(
        workers: &[Arc<CopyWorker>],
        stage_host: bool,
        window: u16,
    ) -> Result<Self, NetworkError> {
        let with_permits = |worker: Arc<CopyWorker>| {
            let permits = Permits::of(&worker);
            Worker { worker, permits }
        };
        let host = if stage_host {
            let worker = CopyWorker::host().map_err(|error| NetworkError::Memory {
                network: super::NAME.to_owned(),
                cause: error.to_string(),
            })?;
            Some(with_permits(worker))
        } else {
            None
        };
        let gpus = workers.iter().cloned().map(with_permits).collect();
        Ok(Self {
            host,
            gpus,
            has_waiting: AtomicBool::new(false),
            waiting: Mutex::new(VecDeque::with_capacity(usize::from(window))),
        })
    }

    /// Has the channel woken when slots come back. Keep what it returns outside of anything that a
    /// slot's return could drop.
    pub(super) fn watch(&self, wakers: &Arc<Wakers>) -> Vec<FreeWatch> {
        let watch = |worker: &Worker| {
            let wakers = Arc::clone(wakers);
            worker
                .worker
                .pinned()
                .on_free(Arc::new(move || wakers.slot_free()))
        };
        self.host.iter().chain(&self.gpus).map(watch).collect()
    }

    pub(super) fn largest_request(&self) -> u64 {
        if self.host.is_none() && self.gpus.is_empty() {
            Settings::MAX_CHUNK_BYTES.into()
        } else {
            PinnedPool::SLOT_BYTES as u64
        }
    }

    pub(super) fn kinds(&self) -> MemoryKinds {
        MemoryKinds {
            host: true,
            pinned: true,
            cuda: !self.gpus.is_empty(),
        }
    }

    /// Refuses memory that neither a lane nor a worker of ours can reach.
    pub(super) fn admit(&self, memory: &RegionSlice) -> Result<(), String> {
        let kind = memory.kind();
        match kind {
            MemoryKind::Cuda { .. } if self.worker(kind).is_none() => Err(format!(
                "it names memory of {kind}, expected that of a GPU the network was made for; \
                 name that GPU in the endpoint's options"
            )),
            _ => Ok(()),
        }
    }

    /// Whether these bytes go through slots.
    pub(super) fn is_needed(&self, memory: &RegionSlice) -> bool {
        self.worker(memory.kind()).is_some()
    }

    fn worker(&self, kind: MemoryKind) -> Option<&Worker> {
        match kind {
            MemoryKind::Cuda { .. } => self
                .gpus
                .iter()
                .find(|one| one.worker.gpu().is_some_and(|gpu| gpu.kind() == kind)),
            MemoryKind::Host | MemoryKind::Pinned => self.host.as_ref(),
        }
    }

    /// The memory that a lane reads a receive's payload into.
    pub(super) fn landing(&self, destination: &RegionSlice, lane: u16, wakers: &Wakers) -> Landing {
        let Some(Worker { worker, .. }) = self.worker(destination.kind()) else {
            return Landing::At(destination.clone());
        };
        let take = || {
            let slot = worker.pinned().try_take()?;
            slot.slice().slice(..destination.len()).ok()
        };
        if let Some(slot) = take() {
            return Landing::At(slot);
        }
        // Onto the list first and then a second look: a slot that comes back in between either is
        // seen here or sees the list.
        wakers.unplaced.insert(lane);
        match take() {
            Some(slot) => {
                wakers.unplaced.remove(lane);
                Landing::At(slot)
            }
            None => Landing::Later,
        }
    }

    /// Wakes the copy workers, which have work soon.
    pub(super) fn rouse(&self) {
        for Worker { worker, .. } in self.host.iter().chain(&self.gpus) {
            worker.rouse();
        }
    }

    /// Whether sends wait for a slot.
    pub(super) fn has_waiting(&self) -> bool {
        self.has_waiting.load(Ordering::SeqCst)
    }
}

/// Marks a job's token as that of a receive; the low bits are the slot.
const RECEIVE: u64 = 1 << 32;

impl Shared {
    /// Queues a send that needs a slot, and starts its copy if one is free.
    pub(super) fn stage(shared: &Arc<Self>, slot: u16, unstaged: Unstaged) {
        shared
            .transmit
            .with(slot, |state| *state = SendState::Waiting(unstaged));
        lock(&shared.staging.waiting).push_back(slot);
        Self::stage_waiting(shared);
    }

    /// Starts the copies of waiting sends, in order, while slots are free.
    pub(super) fn stage_waiting(shared: &Arc<Self>) {
        let staging = &shared.staging;
        // Set before looking, so that a slot that comes back meanwhile leads to another look.
        staging.has_waiting.store(true, Ordering::SeqCst);
        loop {
            // Held over taking the slot: two threads must not start copies out of order.
            let mut waiting = lock(&staging.waiting);
            let Some(&slot) = waiting.front() else {
                staging.has_waiting.store(false, Ordering::SeqCst);
                return;
            };
            let source = shared.transmit.with(slot, |state| match state {
                SendState::Waiting(unstaged) => Some(unstaged.source.clone()),
                _ => None,
            });
            let Some(source) = source else {
                // Taken back.
                waiting.pop_front();
                drop(waiting);
                shared.transmit.free(slot);
                shared.report(Event::SendWithdrawn { slot });
                continue;
            };
            let Some(worker) = staging.worker(source.kind()) else {
                return;
            };
            let pool = worker.worker.pinned();
            let Some(permit) = worker.permits.take(pool.slots(), &shared.wakers) else {
                return;
            };
            let Some(pinned) = pool.try_take() else {
                return;
            };
            waiting.pop_front();
            drop(waiting);
            let Ok(payload) = pinned.slice().slice(..source.len()) else {
                return;
            };
            drop(pinned);
            let fence = shared.transmit.with(slot, |state| {
                match std::mem::replace(state, SendState::Free) {
                    SendState::Waiting(Unstaged {
                        header,
                        position,
                        fence,
                        ..
                    }) => {
                        let outgoing = Outgoing {
                            slot,
                            header,
                            position,
                            payload: payload.clone(),
                            attempt: 0,
                            permit: Some(permit),
                            spliced: None,
                        };
                        *state = SendState::Copying {
                            outgoing,
                            cancelled: false,
                        };
                        Some(fence)
                    }
                    other => {
                        *state = other;
                        None
                    }
                }
            });
            // Taken back since: its entry was the one removed above.
            let Some(fence) = fence else {
                shared.transmit.free(slot);
                shared.report(Event::SendWithdrawn { slot });
                continue;
            };
            let job = Job {
                work: Work::Copy {
                    from: source,
                    to: payload,
                },
                fence,
                sink: Arc::<Self>::clone(shared),
                token: slot.into(),
            };
            if let Err(refused) = worker.worker.submit(job) {
                let error = MemoryError::from(refused);
                shared.send_copied(slot, Err(error));
            }
        }
    }

    fn send_copied(&self, slot: u16, result: Result<u64, MemoryError>) {
        let copied = self.transmit.with(slot, |state| {
            match std::mem::replace(state, SendState::Free) {
                SendState::Copying {
                    outgoing,
                    cancelled,
                } => Some((outgoing, cancelled)),
                other => {
                    *state = other;
                    None
                }
            }
        });
        let Some((outgoing, cancelled)) = copied else {
            return;
        };
        let error = match result {
            Ok(_) if cancelled => ChannelError::Cancelled,
            Ok(_) => {
                // First: the chunk's end may be reported as soon as a lane can see it.
                self.report(Event::Copied { slot });
                let bytes = outgoing.payload.len();
                self.transmit.enqueue(outgoing);
                self.wake_sender(bytes);
                if self.closing.load(Ordering::Acquire) {
                    self.wakers.signal.raise();
                }
                return;
            }
            Err(error) => self.copy_failed("copying a chunk to a pinned slot", &error),
        };
        drop(outgoing);
        self.transmit.free(slot);
        self.report(Event::SendFailed { slot, error });
    }

    /// All of a receive's payload is in `into`: the destination itself, or a slot to be copied.
    pub(super) fn deliver(shared: &Arc<Self>, claim: Claim, into: RegionSlice) {
        let Claim { slot, chunk } = claim;
        let (destination, fence) = (chunk.destination, chunk.fence);
        let bytes = destination.len() as u64;
        let Some(worker) = shared.staging.worker(destination.kind()) else {
            drop((into, destination));
            shared.receive.set(slot, ReceiveState::Finished);
            shared.report(Event::Received { slot, bytes });
            return;
        };
        shared.receive.set(slot, ReceiveState::Copying { bytes });
        let job = Job {
            work: Work::Copy {
                from: into,
                to: destination,
            },
            fence,
            sink: Arc::<Self>::clone(shared),
            token: RECEIVE | u64::from(slot),
        };
        if let Err(refused) = worker.worker.submit(job) {
            shared.receive_copied(slot, Err(MemoryError::from(refused)));
        }
    }

    fn receive_copied(&self, slot: u16, result: Result<u64, MemoryError>) {
        let bytes = self.receive.with(slot, |state| match *state {
            ReceiveState::Copying { bytes } => {
                *state = ReceiveState::Finished;
                Some(bytes)
            }
            _ => None,
        });
        let Some(bytes) = bytes else { return };
        self.report(match result {
            Ok(_) => Event::Received { slot, bytes },
            Err(error) => {
                let error = self.copy_failed("copying a chunk from a pinned slot", &error);
                Event::ReceiveFailed { slot, error }
            }
        });
    }

    fn copy_failed(&self, operation: &'static str, error: &MemoryError) -> ChannelError {
        ChannelError::Memory {
            channel: self.name.clone(),
            operation,
            cause: error.to_string(),
        }
    }
}

impl CompletionSink for Shared {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        let Ok(slot) = u16::try_from(token & u64::from(u16::MAX)) else {
            return;
        };
        if token & RECEIVE == 0 {
            self.send_copied(slot, result);
        } else {
            self.receive_copied(slot, result);
        }
    }
}
