//! Staging through pinned slots, for memory that sockets cannot reach.
//!
//! A send is copied from its source to a slot and then queued; a receive is read into a slot and
//! then copied to its destination. The copy worker does both, so lanes never call CUDA, and copies
//! overlap with the wire.

mod sending;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tcpx_memory::{
    CompletionSink, CopyWorker, FreeWatch, Job, MemoryError, MemoryKind, PinnedPool, PinnedSlot,
    PoolHalf, RegionSlice, Work,
};
use tcpx_wire::frame::Settings;

use super::local::Mark;
use super::receive_table::{Claim, OpenWindow};
use super::roster::Roster;
use super::shared::{ChannelShared, lock};
use super::transmit_table::LONG;
use crate::error::{ChannelError, NetworkError};

#[derive(Debug)]
struct Worker {
    worker: Arc<CopyWorker>,
    /// This connection's slots: for sends, and for receives.
    send: PinnedPool,
    receive: PinnedPool,
    /// Slots for sends that lanes may keep.
    lent: Arc<AtomicUsize>,
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
    /// Copies of short chunks to slots that are under way and wait for nothing else.
    short_copies: AtomicUsize,
    /// Chunks that the copy worker moves from slots to their destinations.
    receiving: Mutex<Receiving>,
}

/// Copies of received chunks under way, by number.
#[derive(Debug, Default)]
struct Receiving {
    copies: Vec<Option<Copying>>,
    free: Vec<u32>,
}

/// A chunk of a window that is copied, and the mark of its source where that lies in the peer's
/// memory.
type Copying = (Arc<OpenWindow>, u32, Option<Mark>);

impl Receiving {
    fn add(&mut self, copying: Copying) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.copies.push(None);
            // No more than slots.
            (self.copies.len() - 1) as u32
        });
        self.copies[number as usize] = Some(copying);
        number
    }

    fn take(&mut self, number: u32) -> Option<Copying> {
        let taken = self.copies.get_mut(number as usize)?.take();
        if taken.is_some() {
            self.free.push(number);
        }
        taken
    }
}

impl Staging {
    pub(super) fn new(
        workers: &[Arc<CopyWorker>],
        stage_host: bool,
        window: u16,
    ) -> Result<Self, NetworkError> {
        let failed = |error: MemoryError| NetworkError::Memory {
            network: super::NAME.to_owned(),
            cause: error.to_string(),
        };
        let with_slots = |worker: Arc<CopyWorker>| Worker {
            send: worker.slots_to_send(window.into()),
            receive: worker.slots_to_receive(window.into()),
            worker,
            lent: Arc::default(),
        };
        let host = match stage_host {
            true => Some(with_slots(CopyWorker::host().map_err(failed)?)),
            false => None,
        };
        Ok(Self {
            host,
            gpus: workers.iter().cloned().map(with_slots).collect(),
            has_waiting: AtomicBool::new(false),
            waiting: Mutex::new(VecDeque::with_capacity(usize::from(window))),
            short_copies: AtomicUsize::new(0),
            receiving: Mutex::default(),
        })
    }

    /// Has the channel woken when slots come back. Keep what it returns outside of anything that a
    /// slot's return could drop.
    pub(super) fn watch(&self, roster: &Arc<Roster>) -> Vec<FreeWatch> {
        let watch = |pool: &PinnedPool| {
            let roster = Arc::clone(roster);
            pool.on_free(Arc::new(move || roster.slot_free()))
        };
        let workers = self.host.iter().chain(&self.gpus);
        let pools = workers.flat_map(|worker| [&worker.send, &worker.receive]);
        pools.map(watch).collect()
    }

    /// Whether some memory goes through slots.
    pub(super) fn has_slots(&self) -> bool {
        self.host.is_some() || !self.gpus.is_empty()
    }

    pub(super) fn largest_request(&self) -> u64 {
        match self.has_slots() {
            false => Settings::MAX_CHUNK_BYTES.into(),
            true => PinnedPool::SLOT_BYTES as u64,
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

    /// Whether a chunk for this memory goes to its slot past the caches: from the cache of the core
    /// that wrote them a GPU reads bytes at half the speed, and to read them aside and stream them
    /// takes that core no longer than to read them where they are cold. Long ones, which keep all
    /// cores busy, come out slower, and other processors than x86-64 have no such stores here.
    pub(super) fn takes_past_caches(&self, destination: &RegionSlice, bytes: usize) -> bool {
        cfg!(target_arch = "x86_64") && bytes < LONG && self.is_needed(destination)
    }

    /// Whether sends wait for a slot.
    pub(super) fn has_waiting(&self) -> bool {
        self.has_waiting.load(Ordering::SeqCst)
    }
}

/// A slot for a copy of so many bytes: long chunks that follow each other lie one behind the other,
/// as far as that goes, so that one copy moves several.
fn take_slot(pool: &PinnedPool, bytes: usize, half: PoolHalf, sequence: u64) -> Option<PinnedSlot> {
    if bytes < LONG {
        pool.try_take_rested()
    } else {
        pool.try_take_at(half, sequence)
    }
}

/// Marks a job's token as that of a receive; the low bits are the copy's number.
const RECEIVE: u64 = 1 << 32;
/// Marks it as that of short sends that are counted; the low bits are the slot of the first.
const COUNTED: u64 = 1 << 33;

impl ChannelShared {
    /// The memory that a lane reads a receive's payload into; `None`: no slot is free, and the lane
    /// is woken when one may be.
    pub(super) fn landing(&self, claim: &Claim, lane: u16) -> Option<RegionSlice> {
        let destination = &claim.destination;
        let Some(Worker { receive, .. }) = self.parts.staging.worker(destination.kind()) else {
            return Some(destination.clone());
        };
        let take = || {
            let slot = take_slot(receive, destination.len(), PoolHalf::Upper, claim.number())?;
            slot.slice().slice(..destination.len()).ok()
        };
        if let Some(slot) = take() {
            return Some(slot);
        }
        // Onto the list first and then a second look: a slot that comes back in between either is
        // seen here or sees the list.
        self.roster.unplaced.insert(lane);
        let slot = take()?;
        self.roster.unplaced.remove(lane);
        Some(slot)
    }

    /// All of a receive's payload is in `into`: the destination itself, or a slot to be copied, or
    /// GPU memory of the peer's by this mark.
    pub(super) fn deliver(shared: &Arc<Self>, claim: Claim, into: RegionSlice, mark: Option<Mark>) {
        let staging = &shared.parts.staging;
        let worker = match (mark, claim.destination.kind()) {
            (Some(_), MemoryKind::Host | MemoryKind::Pinned) => staging.worker(into.kind()),
            (_, kind) => staging.worker(kind),
        };
        let Some(Worker { worker, .. }) = worker else {
            drop(into);
            return shared.report_placed(claim);
        };
        let (index, fence) = (claim.index(), claim.fence());
        let Claim {
            window,
            destination,
            ..
        } = claim;
        shared.receive.copies(&window, index);
        let number = lock(&shared.parts.staging.receiving).add((window, index, mark));
        let job = Job {
            work: Work::Copy {
                from: into,
                to: destination,
            },
            fence,
            sink: Arc::<Self>::clone(shared),
            token: RECEIVE | u64::from(number),
        };
        if let Err(refused) = worker.submit(job) {
            shared.receive_copied(number, Err(MemoryError::from(refused)));
        }
    }

    fn receive_copied(&self, number: u32, result: Result<u64, MemoryError>) {
        let copied = lock(&self.parts.staging.receiving).take(number);
        let Some((window, index, mark)) = copied else {
            return;
        };
        let peer = self.parts.local.peer.as_ref();
        // What is read after its sender has let go of it is not the chunk, and nothing of it can be
        // wrong.
        let is_live = mark.is_none_or(|mark| peer.is_some_and(|peer| peer.is_live(mark)));
        let error = result
            .err()
            .filter(|_| is_live)
            .map(|error| self.copy_failed("copying a chunk to the GPU", &error));
        self.receive.copied(&window, index, error, is_live);
        self.roster.signal.wake();
    }

    fn copy_failed(&self, operation: &'static str, error: &MemoryError) -> ChannelError {
        ChannelError::Memory {
            channel: self.parts.name.clone(),
            operation,
            cause: error.to_string(),
        }
    }
}

impl CompletionSink for ChannelShared {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        if let Err(error) = &result
            && error.may_go_on()
        {
            // Such a copy keeps its slot for good, and those after it fare no better: what waits
            // for slots, here or at the peer, would wait for ever.
            self.end(self.copy_failed("copying between a slot and a GPU", error));
        }
        let number = (token & u64::from(u32::MAX)) as u32;
        if token & RECEIVE != 0 && token & COUNTED == 0 {
            self.receive_copied(number, result);
        } else if let Ok(slot) = u16::try_from(number) {
            self.sends_copied(slot, &result, token & COUNTED != 0);
        }
    }
}

/// For tests that count the slots of the process's host worker: one at a time.
#[cfg(test)]
pub(super) fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    lock(&ALONE)
}

/// For tests without lanes: a channel whose host memory is copied to slots first.
#[cfg(test)]
fn staged_channel() -> Arc<ChannelShared> {
    let parts = super::shared::Parts::of_two_lanes(true, 64);
    ChannelShared::new(parts).unwrap()
}

#[cfg(test)]
mod tests {
    use tcpx_memory::Region;
    use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};
    use tcpx_wire::{ChunkPlan, TransferId};

    use super::super::receive_table::Arrival;
    use super::super::tcp_channel::TcpChannel;
    use super::*;
    use crate::channel::{Cancel, Channel, Completion, ReceiveWindow};

    #[test]
    fn a_chunk_that_could_not_be_copied_leaves_its_window_open() {
        let _alone = alone();
        let shared = staged_channel();
        let mut channel = TcpChannel::new(Arc::clone(&shared), 64);
        channel
            .open_window(ReceiveWindow {
                token: 7,
                window: 0,
                cut: ChunkPlan::even(64, 32),
                destination: Region::host(64).unwrap().all(),
                fence: None,
            })
            .unwrap();
        let header = ChunkHeader {
            sequence: 1,
            transfer: TransferId(0),
            offset: 32,
            total: 64,
            length: 32,
            attempt: 0,
            payload: ChunkPayload::Follows,
        };
        let Ok(Arrival::Claimed(claim)) = shared.receive.claim(0, &header) else {
            panic!("its window is open");
        };
        let window = claim.window;
        shared.receive.copies(&window, 1);
        let number = lock(&shared.parts.staging.receiving).add((window, 1, None));
        shared.receive_copied(number, Err(MemoryError::WorkerStopped));
        let mut out = Vec::new();
        channel.poll(&mut out).unwrap();
        assert!(
            matches!(
                out[1..],
                [Completion::NotPlaced {
                    token: 7,
                    index: 1,
                    error: ChannelError::Memory { .. },
                }]
            ),
            "{out:?}"
        );
        assert_eq!(channel.in_flight(), 1, "a chunk of it was reported");
        assert_eq!(channel.cancel(7), Cancel::Pending, "a chunk came to it");
        channel.poll(&mut out).unwrap();
        assert!(
            matches!(
                out.last(),
                Some(Completion::Closed {
                    token: 7,
                    touched: true
                })
            ),
            "{out:?}"
        );
        assert_eq!(channel.in_flight(), 0);
    }
}
