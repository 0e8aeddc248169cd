//! Receives in flight: a slot for each, found by sequence number.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tcpx_lanes::idle::LaneSet;
use tcpx_lanes::range_set::RangeSet;
use tcpx_lanes::receive_lane::Violation;
use tcpx_wire::chunk_header::ChunkHeader;

use super::shared::lock;
use crate::channel::ReceiveChunk;
use crate::error::ChunkPosition;

/// How far ahead of the last posted receive a chunk may be. Senders keep within the receiver's
/// window, and windows are 16 bits wide.
const FARTHEST_AHEAD: u64 = 1 << 16;

/// Most separate ranges of sequences that are remembered. A transfer's cancelled chunks are one range, so this
/// is about the number of cancelled transfers whose chunks may still be under way. The oldest range
/// is forgotten first; a chunk of it would then be a protocol error, never a wrong write.
const MOST_RANGES: usize = 256;

#[derive(Debug)]
pub(super) enum ReceiveState {
    Empty,
    Posted(ReceiveChunk),
    /// In a lane's hands.
    Claimed {
        lane: u16,
        sequence: u64,
        attempt: u8,
    },
    /// The copy worker moves it from a pinned slot to its destination.
    Copying {
        bytes: u64,
    },
    /// Its end is being reported.
    Finished,
}

#[derive(Debug)]
struct ReceiveSlot {
    state: Mutex<ReceiveState>,
    /// Asks the lane that claimed the slot to let go of the memory.
    cancelled: AtomicBool,
}

/// A receive in a lane's hands.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) slot: u16,
    pub(super) chunk: ReceiveChunk,
}

/// What a chunk's header leads to.
#[derive(Debug)]
pub(super) enum Arrival {
    Claimed(Claim),
    /// The chunk was cancelled here; drop its bytes.
    Unwanted,
    /// Not posted yet; the lane is on the list of those to wake.
    Early,
    /// It was sent again because this lane died, which this side did not know: end it. The lane that
    /// asks is on the list of those to wake.
    HeldBy(u16),
}

#[derive(Debug)]
pub(super) struct ReceiveTable {
    slots: Box<[ReceiveSlot]>,
    discards: Mutex<RangeSet>,
    /// Sequences that were taken from a lane which sent them again: should the lane that had them
    /// first come back to life, its copies are dropped.
    again: Mutex<RangeSet>,
    /// One behind the highest sequence posted.
    next: AtomicU64,
    /// Lanes paused in front of a chunk that is not posted yet.
    pub(super) early: LaneSet,
}

impl ReceiveTable {
    pub(super) fn new(window: u16) -> Self {
        let slot = || ReceiveSlot {
            state: Mutex::new(ReceiveState::Empty),
            cancelled: AtomicBool::new(false),
        };
        Self {
            slots: (0..window).map(|_| slot()).collect(),
            discards: Mutex::default(),
            again: Mutex::default(),
            next: AtomicU64::new(0),
            early: LaneSet::new(),
        }
    }

    /// The slot of a sequence number.
    pub(super) fn slot_of(&self, sequence: u64) -> u16 {
        // The remainder is below the number of slots, which is a u16.
        (sequence % self.slots.len() as u64) as u16
    }

    pub(super) fn next(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }

    pub(super) fn with<R>(&self, slot: u16, act: impl FnOnce(&mut ReceiveState) -> R) -> R {
        act(&mut lock(&self.slots[usize::from(slot)].state))
    }

    /// Posts a receive; its slot must be empty. Wake the early lanes afterwards.
    pub(super) fn post(&self, chunk: ReceiveChunk) {
        let sequence = chunk.sequence;
        let skipped = self.next()..sequence;
        self.insert_discards(skipped);
        let slot = &self.slots[usize::from(self.slot_of(sequence))];
        let mut state = lock(&slot.state);
        slot.cancelled.store(false, Ordering::Relaxed);
        *state = ReceiveState::Posted(chunk);
        self.next
            .fetch_max(sequence.saturating_add(1), Ordering::AcqRel);
    }

    /// Sequences that will not be posted. Wake the early lanes afterwards.
    pub(super) fn insert_discards(&self, range: Range<u64>) {
        if !range.is_empty() {
            remember(&self.discards, range);
        }
    }

    /// Finds the receive for a header that has arrived.
    pub(super) fn claim(&self, lane: u16, header: &ChunkHeader) -> Result<Arrival, Violation> {
        match self.try_claim(lane, header)? {
            Arrival::Early | Arrival::HeldBy(_) => {
                // Onto the list first and then a second look: whoever posts or lets go in between
                // either is seen here or sees the list.
                self.early.insert(lane);
                let arrival = self.try_claim(lane, header)?;
                if !matches!(arrival, Arrival::Early | Arrival::HeldBy(_)) {
                    self.early.remove(lane);
                }
                Ok(arrival)
            }
            arrival => Ok(arrival),
        }
    }

    fn try_claim(&self, lane: u16, header: &ChunkHeader) -> Result<Arrival, Violation> {
        let sequence = header.sequence;
        let index = self.slot_of(sequence);
        let mut state = lock(&self.slots[usize::from(index)].state);
        if let ReceiveState::Posted(posted) = &*state
            && posted.sequence == sequence
        {
            check(posted, header)?;
            if header.attempt > 0 {
                remember(&self.again, sequence..sequence.saturating_add(1));
            }
            let attempt = header.attempt;
            let claimed = ReceiveState::Claimed {
                lane,
                sequence,
                attempt,
            };
            let ReceiveState::Posted(chunk) = std::mem::replace(&mut *state, claimed) else {
                return Ok(Arrival::Early);
            };
            return Ok(Arrival::Claimed(Claim { slot: index, chunk }));
        }
        // Before the lists below, for what a dead lane still holds is not at its destination.
        if let ReceiveState::Claimed {
            lane: holder,
            sequence: held,
            attempt,
        } = *state
            && held == sequence
            && holder != lane
            // An older attempt that comes late supersedes nobody.
            && (header.attempt > attempt || header.attempt == u8::MAX)
        {
            return Ok(Arrival::HeldBy(holder));
        }
        if lock(&self.discards).contains(sequence) {
            return Ok(Arrival::Unwanted);
        }
        let next = self.next();
        if sequence < next && (header.attempt > 0 || lock(&self.again).contains(sequence)) {
            return Ok(Arrival::Unwanted);
        }
        if sequence < next {
            return Err(Violation {
                expected: format!("each chunk once, the next new one being {next}"),
                arrived: format!("a second chunk {sequence}"),
                chunk: Some(*header),
            });
        }
        if sequence - next > FARTHEST_AHEAD {
            return Err(Violation {
                expected: format!(
                    "chunks from {next} to {}",
                    next.saturating_add(FARTHEST_AHEAD)
                ),
                arrived: format!("chunk {sequence}"),
                chunk: Some(*header),
            });
        }
        Ok(Arrival::Early)
    }

    /// A lane lets go of its receive so that another one may take it; gives it back when it
    /// was cancelled meanwhile, which is then to be reported. Wake the early lanes afterwards.
    pub(super) fn put_back(&self, claim: Claim) -> Result<(), Claim> {
        let slot = &self.slots[usize::from(claim.slot)];
        let mut state = lock(&slot.state);
        if slot.cancelled.load(Ordering::Acquire) {
            return Err(claim);
        }
        *state = ReceiveState::Posted(claim.chunk);
        Ok(())
    }

    /// Takes back a receive that no lane has claimed, or asks its lane to let go.
    pub(super) fn cancel(&self, slot: u16) -> Withdrawal {
        let slot = &self.slots[usize::from(slot)];
        let mut state = lock(&slot.state);
        match &*state {
            ReceiveState::Posted(chunk) => {
                let sequence = chunk.sequence;
                // Before the slot is empty, so that no lane finds the sequence unknown.
                self.insert_discards(sequence..sequence.saturating_add(1));
                *state = ReceiveState::Empty;
                Withdrawal::Done
            }
            ReceiveState::Claimed { lane, .. } => {
                slot.cancelled.store(true, Ordering::Release);
                Withdrawal::AskLane(*lane)
            }
            ReceiveState::Copying { .. } | ReceiveState::Finished => Withdrawal::Ending,
            ReceiveState::Empty => Withdrawal::Done,
        }
    }

    /// Whether the lane that claimed this slot should let go of it.
    pub(super) fn is_cancelled(&self, slot: u16) -> bool {
        self.slots[usize::from(slot)]
            .cancelled
            .load(Ordering::Acquire)
    }

    pub(super) fn set(&self, slot: u16, state: ReceiveState) {
        self.with(slot, |held| *held = state);
    }
}

fn remember(sequences: &Mutex<RangeSet>, range: Range<u64>) {
    let mut sequences = lock(sequences);
    sequences.insert(range);
    if sequences.ranges() > MOST_RANGES {
        sequences.remove_first();
    }
}

/// What [`ReceiveTable::cancel`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Withdrawal {
    Done,
    AskLane(u16),
    Ending,
}

/// The chunk that a header names, nothing of it done.
pub(super) fn position(header: &ChunkHeader) -> ChunkPosition {
    ChunkPosition {
        sequence: header.sequence,
        transfer: header.transfer.0,
        offset: header.offset,
        length: header.length.into(),
        done: 0,
    }
}

/// The header must name exactly what was posted.
fn check(posted: &ReceiveChunk, header: &ChunkHeader) -> Result<(), Violation> {
    let length = posted.destination.len() as u64;
    if (posted.transfer, posted.offset, length)
        == (header.transfer.0, header.offset, u64::from(header.length))
    {
        return Ok(());
    }
    Err(Violation {
        expected: format!(
            "chunk {} as {length} bytes at offset {} of transfer {}",
            posted.sequence, posted.offset, posted.transfer
        ),
        arrived: format!(
            "{} bytes at offset {} of transfer {}",
            header.length, header.offset, header.transfer.0
        ),
        chunk: Some(*header),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded_and_the_oldest_is_forgotten() {
        let sequences = Mutex::default();
        for index in 0..2 * MOST_RANGES as u64 {
            remember(&sequences, index * 10..index * 10 + 1);
        }
        let sequences = lock(&sequences);
        assert_eq!(sequences.ranges(), MOST_RANGES);
        assert!(!sequences.contains(0));
        assert!(sequences.contains((2 * MOST_RANGES as u64 - 1) * 10));
    }
}
