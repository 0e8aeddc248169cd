//! Sends in flight: a slot for each, and the queue from which any writable lane takes the next.

use std::sync::Mutex;

use crossbeam_queue::ArrayQueue;
use tcpx_memory::{Fence, RegionSlice};
use tcpx_wire::chunk_header::ChunkHeader;

use super::idle::LaneSet;
use super::permits::Permit;
use super::shared::lock;
use crate::error::ChunkPosition;

/// A chunk that a lane can send as it is.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) slot: u16,
    pub(super) header: [u8; ChunkHeader::BYTES],
    pub(super) position: ChunkPosition,
    /// The source itself, or a pinned slot with a copy of it.
    pub(super) payload: RegionSlice,
    /// Held along with a pinned slot.
    pub(super) permit: Option<Permit>,
}

/// A chunk whose bytes must be copied to a pinned slot first.
#[derive(Debug)]
pub(super) struct Unstaged {
    pub(super) header: [u8; ChunkHeader::BYTES],
    pub(super) position: ChunkPosition,
    pub(super) source: RegionSlice,
    pub(super) fence: Option<Fence>,
}

#[derive(Debug)]
pub(super) enum SendState {
    Free,
    /// Waits in order for a pinned slot.
    Waiting(Unstaged),
    /// The copy worker fills the pinned slot in `Outgoing::payload`.
    Copying {
        outgoing: Outgoing,
        cancelled: bool,
    },
    /// In the queue.
    Queued(Outgoing),
    /// In a lane's hands, or its end is being reported.
    Taken,
    /// Taken back while it was in the queue; whoever finds the queue's entry frees the slot.
    Withdrawn,
}

#[derive(Debug)]
pub(super) struct TransmitTable {
    slots: Box<[Mutex<SendState>]>,
    /// Slots that are `Queued` or `Withdrawn`, each once.
    queue: ArrayQueue<u16>,
    /// Lanes at rest because the queue was empty.
    pub(super) idle: LaneSet,
}

/// What a lane found in the queue.
#[derive(Debug)]
pub(super) enum Taken {
    Chunk(Outgoing),
    /// This slot was taken back; report it free.
    Withdrawn(u16),
}

impl TransmitTable {
    pub(super) fn new(window: u16) -> Self {
        Self {
            slots: (0..window).map(|_| Mutex::new(SendState::Free)).collect(),
            queue: ArrayQueue::new(usize::from(window)),
            idle: LaneSet::new(),
        }
    }

    pub(super) fn with<R>(&self, slot: u16, act: impl FnOnce(&mut SendState) -> R) -> R {
        act(&mut lock(&self.slots[usize::from(slot)]))
    }

    /// Puts a chunk in the queue. Wake a lane afterwards.
    pub(super) fn enqueue(&self, outgoing: Outgoing) {
        let slot = outgoing.slot;
        self.with(slot, |state| *state = SendState::Queued(outgoing));
        let pushed = self.queue.push(slot);
        debug_assert!(pushed.is_ok(), "a slot is in the queue at most once");
    }

    /// The next chunk, or `None` after noting that the lane rests.
    pub(super) fn take(&self, lane: u16) -> Option<Taken> {
        loop {
            let slot = match self.queue.pop() {
                Some(slot) => slot,
                None => {
                    self.idle.insert(lane);
                    let slot = self.queue.pop()?;
                    self.idle.remove(lane);
                    slot
                }
            };
            let taken = self.with(slot, |state| {
                match std::mem::replace(state, SendState::Taken) {
                    SendState::Queued(outgoing) => Some(Taken::Chunk(outgoing)),
                    SendState::Withdrawn => {
                        *state = SendState::Free;
                        Some(Taken::Withdrawn(slot))
                    }
                    other => {
                        *state = other;
                        None
                    }
                }
            });
            if taken.is_some() {
                return taken;
            }
        }
    }

    /// Frees a slot whose end is about to be reported.
    pub(super) fn free(&self, slot: u16) {
        self.with(slot, |state| *state = SendState::Free);
    }
}
