//! Sends in flight: a slot for each, and the queue from which any writable lane takes the next.
//!
//! Where a lane's death can be survived, a chunk keeps its slot and its bytes until the peer has
//! placed it: [`forget`](TransmitTable::forget) ends it then. A lane that dies puts what it had
//! written back into the queue.

mod send;
#[cfg(test)]
mod tests;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;

use tcpx_lanes::idle::LaneSet;

use super::lingering::Lingering;
use super::shared::lock;
pub(super) use send::{Outgoing, SendState, Settled, Unstaged, describe};

/// Bytes of a chunk that does not fit in the socket buffers of a lane.
pub(super) const LONG: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct TransmitTable {
    slots: Box<[Mutex<SendState>]>,
    /// Slots that are `Queued` or `Withdrawn`, each once, with the bytes of their chunks.
    queue: ArrayQueue<(u16, u64)>,
    /// The bytes of those in the queue, or about to be.
    queued_bytes: AtomicU64,
    /// Chunks are kept until they are forgotten.
    keep: bool,
    /// One behind the highest sequence that was forgotten.
    forgotten: AtomicU64,
    /// Chunks that were written to the last byte.
    writes: AtomicU64,
    /// Of chunks that ended before their sockets were done with them.
    pub(super) lingering: Lingering,
    /// Lanes at rest because the queue was empty.
    pub(super) idle: LaneSet,
    /// The lane behind the one that was woken last.
    turn: AtomicU16,
}

/// What a lane found in the queue.
#[derive(Debug)]
pub(super) enum Taken {
    Chunk(Outgoing),
    /// This slot was taken back; report it free.
    Withdrawn(u16),
}

/// What follows a short chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// The lane is at rest.
    Rest,
    /// The lane is at rest, and this one is to be woken in its place.
    Wake(u16),
    /// It is the lane's turn again.
    Go,
}

/// What [`TransmitTable::forget`] came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Forgotten {
    /// The slot is free now.
    Free,
    /// Nobody reads the chunk's source any more; an event will say when the slot is free.
    Settled,
    /// A lane still reads the source; its end brings an event.
    Later,
    /// The slot holds no such chunk.
    Unknown,
}

/// What became of a send that was taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Withdrawn {
    /// It and its slot are free.
    Now,
    /// It is free; an event says when its slot is.
    Later,
    /// Something still reads it, or has just ended to; an event says so.
    NotYet,
}

impl TransmitTable {
    /// `keep`: a chunk may have to be sent again.
    pub(super) fn new(window: u16, keep: bool) -> Self {
        Self {
            slots: (0..window).map(|_| Mutex::new(SendState::Free)).collect(),
            queue: ArrayQueue::new(usize::from(window)),
            queued_bytes: AtomicU64::new(0),
            keep,
            forgotten: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            lingering: Lingering::default(),
            idle: LaneSet::new(),
            turn: AtomicU16::new(0),
        }
    }

    pub(super) fn with<R>(&self, slot: u16, act: impl FnOnce(&mut SendState) -> R) -> R {
        act(&mut lock(&self.slots[usize::from(slot)]))
    }

    /// Puts a chunk in the queue. Wake a lane afterwards.
    pub(super) fn enqueue(&self, outgoing: Outgoing) {
        let (slot, bytes) = (outgoing.slot, outgoing.payload.len() as u64);
        self.with(slot, |state| *state = SendState::Queued(outgoing));
        self.push(slot, bytes);
    }

    fn push(&self, slot: u16, bytes: u64) {
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let pushed = self.queue.push((slot, bytes));
        debug_assert!(pushed.is_ok(), "a slot is in the queue at most once");
    }

    fn pop(&self) -> Option<u16> {
        let (slot, bytes) = self.queue.pop()?;
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Some(slot)
    }

    /// Bytes of the chunks in the queue; those that were taken back count until a lane comes upon them.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Relaxed)
    }

    /// Takes a lane that rests, for a chunk of so many bytes. Short ones take the lanes in turn: the system
    /// takes all of a short chunk at once, so that its lane rests long before the peer has read it. Of long
    /// ones as few lanes as keep up are awake.
    pub(super) fn take_idle(&self, bytes: usize) -> Option<u16> {
        if bytes >= LONG {
            return self.idle.take(0);
        }
        let lane = self.idle.take(self.turn.load(Ordering::Relaxed))?;
        self.turn.store(lane + 1, Ordering::Relaxed);
        Some(lane)
    }

    /// What a lane does that has just sent a short chunk, whose peer is not through with it for long: lanes
    /// that rest go first.
    pub(super) fn next_after_short(&self, lane: u16) -> Next {
        self.idle.insert(lane);
        // Looked at afterwards: who queues a chunk later than this finds the lane at rest.
        if self.queue.is_empty() {
            return Next::Rest;
        }
        match self.take_idle(0) {
            Some(longest) if longest == lane => Next::Go,
            Some(other) => Next::Wake(other),
            // Somebody has taken this lane off the list to wake it.
            None => Next::Rest,
        }
    }

    /// The next chunk, or `None` after noting that the lane rests.
    pub(super) fn take(&self, lane: u16) -> Option<Taken> {
        loop {
            let slot = match self.pop() {
                Some(slot) => slot,
                None => {
                    self.idle.insert(lane);
                    self.pop()?
                }
            };
            // Also where it found one at once: a lane may be woken for other reasons than its place there,
            // and one with a chunk in its hands must not be given another's turn.
            self.idle.remove(lane);
            let taken = self.with(slot, |state| {
                match std::mem::replace(state, SendState::Free) {
                    SendState::Queued(outgoing) => {
                        *state = SendState::Taken {
                            lane,
                            sequence: outgoing.position.sequence,
                            settled: None,
                        };
                        Some(Taken::Chunk(outgoing))
                    }
                    SendState::Withdrawn => Some(Taken::Withdrawn(slot)),
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

    /// A lane wrote the chunk to its last byte. Gives it back if it has ended with that: drop it and
    /// [`free`](Self::free) its slot.
    pub(super) fn written(&self, mut chunk: Outgoing) -> Option<Outgoing> {
        let order = self.next_order();
        let mut read = None;
        let ended = self.with(chunk.slot, |state| match *state {
            SendState::Taken {
                lane,
                settled: None,
                ..
            } if self.keep => {
                *state = SendState::Written { lane, order, chunk };
                None
            }
            SendState::Taken {
                lane,
                settled: Some(Settled::Placed),
                ..
            } if chunk.attempt == 0 => {
                read = Some(lane);
                Some(chunk)
            }
            _ => {
                self.linger(order, &mut chunk);
                Some(chunk)
            }
        });
        if let Some(lane) = read {
            self.lingering.read(lane, order);
        }
        ended
    }

    /// The next place among all chunks that were written.
    pub(super) fn next_order(&self) -> u64 {
        self.writes.fetch_add(1, Ordering::SeqCst)
    }

    /// The chunk ends here. What the kernel may still send of it stays as it is: the peer drops it, but
    /// it must not see another transfer's bytes.
    fn linger(&self, order: u64, chunk: &mut Outgoing) {
        if let Some(lane) = chunk.spliced {
            let permit = chunk.permit.take();
            self.lingering
                .keep(lane, order, chunk.payload.clone(), permit);
        }
    }

    /// Whether the kernel may refer to pages that this lane sent and that the peer has not read.
    pub(super) fn has_unread_pages(&self, lane: u16) -> bool {
        let written = |state: &mut SendState| matches!(state, SendState::Written { chunk, .. } if chunk.spliced == Some(lane));
        self.lingering.has(lane) || (0..self.window()).any(|slot| self.with(slot, written))
    }

    /// The chunk in the hands of a lane that dies goes back into the queue, unless it has ended:
    /// drop it then and [`free`](Self::free) its slot. Wake a lane afterwards.
    pub(super) fn put_back(&self, mut chunk: Outgoing) -> Option<Outgoing> {
        let (slot, bytes) = (chunk.slot, chunk.payload.len() as u64);
        let ended = self.with(slot, |state| match state {
            SendState::Taken { settled: None, .. } if self.keep => {
                chunk.mark_again();
                *state = SendState::Queued(chunk);
                None
            }
            _ => {
                self.linger(self.next_order(), &mut chunk);
                Some(chunk)
            }
        });
        if ended.is_none() {
            self.push(slot, bytes);
        }
        ended
    }

    /// What a lane that died had written goes back into the queue, oldest first; returns how many
    /// chunks that were. Wake lanes afterwards.
    pub(super) fn requeue(&self, dead: u16) -> usize {
        let mut found = Vec::new();
        for slot in 0..self.window() {
            let sequence = self.with(slot, |state| match state {
                SendState::Written { lane, chunk, .. } if *lane == dead => {
                    Some(chunk.position.sequence)
                }
                _ => None,
            });
            found.extend(sequence.map(|sequence| (sequence, slot)));
        }
        found.sort_unstable();
        let mut count = 0;
        for (_, slot) in found {
            let queued = self.with(slot, |state| {
                match std::mem::replace(state, SendState::Free) {
                    SendState::Written {
                        lane, mut chunk, ..
                    } if lane == dead => {
                        chunk.mark_again();
                        let bytes = chunk.payload.len() as u64;
                        *state = SendState::Queued(chunk);
                        Some(bytes)
                    }
                    // Forgotten since.
                    other => {
                        *state = other;
                        None
                    }
                }
            });
            if let Some(bytes) = queued {
                self.push(slot, bytes);
                count += 1;
            }
        }
        count
    }

    /// Whether the slot holds the chunk of this sequence, and no byte of it was sent.
    pub(super) fn is_unsent(&self, slot: u16, sequence: u64) -> bool {
        self.with(slot, |state| match state {
            SendState::Waiting(Unstaged { position, .. })
            | SendState::Copying {
                outgoing: Outgoing { position, .. },
                ..
            } => position.sequence == sequence,
            SendState::Queued(chunk) => chunk.attempt == 0 && chunk.position.sequence == sequence,
            _ => false,
        })
    }

    /// The peer has placed the chunk of this sequence in this slot, or nobody wants it any more.
    pub(super) fn forget(&self, slot: u16, sequence: u64, placed: bool) -> Forgotten {
        let mut read = None;
        let (answer, chunk) = self.with(slot, |state| match state {
            SendState::Written { lane, order, chunk } if chunk.position.sequence == sequence => {
                if !placed {
                    self.linger(*order, chunk);
                } else if chunk.attempt == 0 {
                    // Else it may have been read from another lane.
                    read = Some((*lane, *order));
                }
                (
                    Forgotten::Free,
                    Some(std::mem::replace(state, SendState::Free)),
                )
            }
            SendState::Queued(chunk) if chunk.position.sequence == sequence => {
                if !placed {
                    self.linger(self.next_order(), chunk);
                }
                (
                    Forgotten::Settled,
                    Some(std::mem::replace(state, SendState::Withdrawn)),
                )
            }
            SendState::Taken {
                sequence: held,
                settled,
                ..
            } if *held == sequence => {
                let how = if placed {
                    Settled::Placed
                } else {
                    Settled::Unwanted
                };
                settled.get_or_insert(how);
                (Forgotten::Later, None)
            }
            _ => (Forgotten::Unknown, None),
        });
        // Outside of the slot's lock: a permit that comes back wakes others.
        drop(chunk);
        if let Some((lane, order)) = read {
            self.lingering.read(lane, order);
        }
        if answer != Forgotten::Unknown {
            self.forgotten
                .fetch_max(sequence.saturating_add(1), Ordering::Relaxed);
        }
        answer
    }

    /// Takes a send back, if no lane has it and no copy reads it.
    pub(super) fn withdraw(&self, slot: u16) -> Withdrawn {
        let (answer, before) = self.with(slot, |state| match state {
            SendState::Queued(chunk) => {
                self.linger(self.next_order(), chunk);
                let before = std::mem::replace(state, SendState::Withdrawn);
                (Withdrawn::Later, Some(before))
            }
            SendState::Waiting(_) => {
                let before = std::mem::replace(state, SendState::Withdrawn);
                (Withdrawn::Later, Some(before))
            }
            // News of its copy are still under way: they end the request, and must not be taken for
            // those of the slot's next chunk.
            SendState::Written { chunk, .. } if chunk.permit.is_some() => (Withdrawn::NotYet, None),
            SendState::Written { .. } => {
                let before = std::mem::replace(state, SendState::Free);
                (Withdrawn::Now, Some(before))
            }
            SendState::Copying { cancelled, .. } => {
                *cancelled = true;
                (Withdrawn::NotYet, None)
            }
            SendState::Taken { settled, .. } => {
                settled.get_or_insert(Settled::Unwanted);
                (Withdrawn::NotYet, None)
            }
            SendState::Free | SendState::Withdrawn => (Withdrawn::NotYet, None),
        });
        // Outside of the slot's lock: a permit that comes back wakes others.
        drop(before);
        answer
    }

    /// One behind the highest sequence that was forgotten.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    /// The oldest chunk that each lane took and that was not forgotten, by lane.
    pub(super) fn oldest_by_lane(&self, oldest: &mut [Option<u64>]) {
        oldest.fill(None);
        for slot in 0..self.window() {
            let held = self.with(slot, |state| match state {
                SendState::Taken {
                    lane,
                    sequence,
                    settled: None,
                } => Some((*lane, *sequence)),
                SendState::Written { lane, chunk, .. } => Some((*lane, chunk.position.sequence)),
                _ => None,
            });
            if let Some((lane, sequence)) = held
                && let Some(place) = oldest.get_mut(usize::from(lane))
            {
                *place = Some(place.map_or(sequence, |other| other.min(sequence)));
            }
        }
    }

    /// Whether a chunk waits for a lane.
    pub(super) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Chunks in the queue, about, and those that other lanes took and that were not forgotten.
    pub(super) fn left(&self, lane: u16) -> (u64, u64) {
        let by_other = |state: &mut SendState| match state {
            SendState::Taken {
                lane: by, settled, ..
            } => settled.is_none() && *by != lane,
            SendState::Written { lane: by, .. } => *by != lane,
            _ => false,
        };
        let others = (0..self.window()).filter(|slot| self.with(*slot, by_other));
        (self.queue.len() as u64, others.count() as u64)
    }

    /// Frees a slot whose end is about to be reported.
    pub(super) fn free(&self, slot: u16) {
        self.with(slot, |state| *state = SendState::Free);
    }

    fn window(&self) -> u16 {
        u16::try_from(self.slots.len()).unwrap_or(u16::MAX)
    }
}
