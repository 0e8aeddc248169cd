//! Sends in flight: a slot for each. Their group of lanes has the queue of those that any writable lane may take.
//!
//! A chunk keeps its slot and its bytes until the peer has placed it: [`forget`](TransmitTable::forget) ends it
//! then. A lane that dies puts what it had written back into the queue.

mod send;
#[cfg(test)]
mod tests;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tcpx_lanes::lane_group::LaneGroup;

use super::lingering::Lingering;
use super::shared::lock;
pub(super) use send::{Outgoing, SendState, Settled, Unstaged, describe};

/// Bytes of a chunk that does not fit in the socket buffers of a lane.
pub(super) const LONG: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct TransmitTable {
    slots: Box<[Mutex<SendState>]>,
    /// Slots that are `Queued` or `Withdrawn`, each once, with the bytes of their chunks.
    pub(super) chunks: LaneGroup<(u16, u64)>,
    /// The bytes of those in the queue, or about to be.
    queued_bytes: AtomicU64,
    /// Chunks that were written to the last byte.
    writes: AtomicU64,
    /// Of chunks that ended before their sockets were done with them.
    pub(super) lingering: Lingering,
}

/// What a lane found in the queue.
#[derive(Debug)]
pub(super) enum Taken {
    Chunk(Outgoing),
    /// This slot was taken back; report it free.
    Withdrawn(u16),
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
    /// Of so many lanes, and chunks at a time.
    pub(super) fn new(lanes: u16, window: u16) -> Self {
        Self {
            slots: (0..window).map(|_| Mutex::new(SendState::Free)).collect(),
            chunks: LaneGroup::new(lanes.into(), window.into()),
            queued_bytes: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            lingering: Lingering::default(),
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
        let pushed = self.chunks.push((slot, bytes));
        debug_assert!(pushed.is_ok(), "a slot is in the queue at most once");
    }

    fn push_again(&self, chunks: impl IntoIterator<Item = (u16, u64)>) {
        self.chunks
            .push_again(chunks.into_iter().inspect(|(_, bytes)| {
                self.queued_bytes.fetch_add(*bytes, Ordering::Relaxed);
            }));
    }

    /// Bytes of the chunks in the queue; those that were taken back count until a lane comes upon them.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Acquire)
    }

    /// Takes a lane that rests, for a chunk of so many bytes. Short ones take the lanes in turn: the system
    /// takes all of a short chunk at once, so that its lane rests long before the peer has read it. Of long
    /// ones as few lanes as keep up are awake.
    pub(super) fn take_idle(&self, bytes: usize) -> Option<u16> {
        self.chunks.take_idle(bytes < LONG)
    }

    /// The next chunk, or `None` after noting that the lane rests.
    pub(super) fn take(&self, lane: u16) -> Option<Taken> {
        loop {
            let (slot, bytes) = self.chunks.take(lane)?;
            let taken = self.with(slot, |state| {
                match std::mem::replace(state, SendState::Free) {
                    SendState::Queued(outgoing) => {
                        self.chunks.took(lane);
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
            // Behind its count as the lane's: the monitor never misses it.
            self.queued_bytes.fetch_sub(bytes, Ordering::Release);
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
        let ended = self.with(chunk.slot, |state| {
            if let SendState::Taken { lane, settled, .. } = *state {
                if settled.is_none() {
                    *state = SendState::Written { lane, order, chunk };
                    return None;
                }
                self.chunks.acknowledged(lane);
                read = (settled == Some(Settled::Placed) && chunk.attempt == 0).then_some(lane);
            }
            if read.is_none() {
                self.linger(order, &mut chunk);
            }
            Some(chunk)
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
            SendState::Taken { settled: None, .. } => {
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
            self.push_again([(slot, bytes)]);
        }
        ended
    }

    /// What a lane that died had written goes back into the queue, oldest first; returns how many
    /// chunks that were. Wake lanes afterwards.
    pub(super) fn requeue(&self, dead: u16) -> usize {
        let mut found = Vec::new();
        for slot in 0..self.window() {
            self.with(slot, |state| {
                match std::mem::replace(state, SendState::Free) {
                    SendState::Written {
                        lane, mut chunk, ..
                    } if lane == dead => {
                        chunk.mark_again();
                        let bytes = chunk.payload.len() as u64;
                        found.push((chunk.position.sequence, (slot, bytes)));
                        *state = SendState::Queued(chunk);
                    }
                    other => *state = other,
                }
            });
        }
        found.sort_unstable();
        let count = found.len();
        self.push_again(found.into_iter().map(|(_, chunk)| chunk));
        self.chunks.gave_back(dead);
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
                self.chunks.acknowledged(*lane);
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
            SendState::Written { lane, .. } => {
                self.chunks.acknowledged(*lane);
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

    /// Frees a slot whose end is about to be reported.
    pub(super) fn free(&self, slot: u16) {
        self.with(slot, |state| *state = SendState::Free);
    }

    fn window(&self) -> u16 {
        u16::try_from(self.slots.len()).unwrap_or(u16::MAX)
    }
}
