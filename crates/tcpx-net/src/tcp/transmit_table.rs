//! Sends in flight: a slot for each. Their group of lanes has the queue of those that any writable
//! lane may take.
//!
//! A chunk keeps its slot and its bytes until the peer has placed it:
//! [`forget`](TransmitTable::forget) ends it then. Its lane keeps it meanwhile; of a lane that dies
//! it goes back into the queue.

mod send;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tcpx_lanes::idle::LaneSet;
use tcpx_lanes::lane_group::{Fate, LaneGroup, Released};

use super::shared::lock;
pub(super) use send::{Outgoing, SendState, Settled, Unstaged, describe};

/// Bytes of a chunk that does not fit in the socket buffers of a lane.
pub(super) const LONG: usize = 1 << 20;

/// Bytes in the queue for which one more lane is woken, at each end with a thread that looks for
/// more a while: both ends of one host run out of cores before they run out of lanes.
const LANE_BYTES: u64 = 256 << 10;

#[derive(Debug)]
pub(super) struct TransmitTable {
    slots: Box<[Mutex<SendState>]>,
    /// Slots that are `Queued` or `Withdrawn`, each once, with the bytes of their chunks.
    pub(super) chunks: LaneGroup<Outgoing, (u16, u64)>,
    /// The bytes of those in the queue, or about to be.
    queued_bytes: AtomicU64,
    /// Lanes that may be writing chunks which nobody waits for.
    letting_go: LaneSet,
    /// For each lane that lends memory to another host: whether that host's system has acknowledged
    /// the lane's stream up to a place.
    acknowledged: Box<[Mutex<Option<Acknowledged>>]>,
}

/// Whether a stream is acknowledged up to a place.
pub(super) struct Acknowledged(pub(super) Box<dyn Fn(u64) -> bool + Send>);

impl fmt::Debug for Acknowledged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Acknowledged")
    }
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
    /// A copy reads it, or has just ended to; an event says when it is free.
    NotYet,
    /// This lane is writing it, and may have to wait for its peer: [have it let
    /// go](TransmitTable::let_go).
    InHand(u16),
}

impl TransmitTable {
    /// Of so many lanes, and chunks at a time.
    pub(super) fn new(lanes: u16, window: u16) -> Self {
        Self {
            slots: (0..window).map(|_| Mutex::new(SendState::Free)).collect(),
            chunks: LaneGroup::new(lanes.into(), window.into()),
            queued_bytes: AtomicU64::new(0),
            acknowledged: (0..lanes).map(|_| Mutex::default()).collect(),
            letting_go: LaneSet::new(),
        }
    }

    /// The lane lends memory from now on, until its end.
    pub(super) fn lends(&self, lane: u16, acknowledged: Option<Acknowledged>) {
        *lock(&self.acknowledged[usize::from(lane)]) = acknowledged;
    }

    fn is_acknowledged(&self, lane: u16, end: u64) -> bool {
        let acknowledged = lock(&self.acknowledged[usize::from(lane)]);
        acknowledged.as_ref().is_none_or(|it_is| it_is.0(end))
    }

    pub(super) fn with_slot<R>(&self, slot: u16, act: impl FnOnce(&mut SendState) -> R) -> R {
        act(&mut lock(&self.slots[usize::from(slot)]))
    }

    /// Puts a chunk in the queue. Wake a lane afterwards.
    pub(super) fn enqueue(&self, outgoing: Outgoing) {
        let (slot, bytes) = (outgoing.slot, outgoing.payload.len() as u64);
        self.with_slot(slot, |state| *state = SendState::Queued(outgoing));
        self.push(slot, bytes);
    }

    fn push(&self, slot: u16, bytes: u64) {
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let pushed = self.chunks.push((slot, bytes));
        debug_assert!(pushed.is_ok(), "a slot is in the queue at most once");
    }

    /// Bytes of the chunks in the queue; those that were taken back count until a lane comes upon
    /// them.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Acquire)
    }

    /// Whether what is in the queue is worth another lane, of so many that live.
    pub(super) fn is_worth_another(&self, live: usize) -> bool {
        let at_work = self.chunks.at_work(live) as u64;
        match self.chunks.queued() {
            0 => false,
            _ => at_work == 0 || self.queued_bytes() > at_work * LANE_BYTES,
        }
    }

    /// Whether no more chunks are under way than half of the lanes.
    pub(super) fn leaves_lanes(&self) -> bool {
        let done = self.chunks.done();
        let (lanes, under_way) = done.fold((0, 0), |(lanes, sum), done| {
            (lanes + 1, sum + done.under_way())
        });
        2 * under_way <= lanes
    }

    /// The next chunk, or `None` after noting that the lane rests.
    pub(super) fn take(&self, lane: u16) -> Option<Taken> {
        loop {
            let (slot, bytes) = self.chunks.take(lane)?;
            let taken = self.with_slot(slot, |state| {
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

    /// A lane wrote the chunk to its last byte, which ends there in its stream. Whether the chunk
    /// has ended with that: [`free`](Self::free) its slot.
    pub(super) fn written(&self, lane: u16, chunk: Outgoing, end: u64) -> bool {
        let (slot, first) = (chunk.slot, chunk.attempt == 0);
        let released = self.with_slot(slot, |state| {
            self.chunks.keep(lane, end, chunk);
            match state {
                // Of what is sent again the peer has another copy: nobody has read this one.
                SendState::Taken {
                    settled: Some(how), ..
                } => self.release(lane, slot, *how == Settled::Placed && first),
                _ => None,
            }
        });
        released.is_some()
    }

    /// Ends a chunk that the lane keeps, if it does.
    fn release(&self, lane: u16, slot: u16, placed: bool) -> Option<Released<Outgoing>> {
        let such = |chunk: &Outgoing| chunk.slot == slot;
        let mut released = self.chunks.release(lane, such, |chunk, end| {
            let is_lent = chunk.spliced == Some(lane);
            // Without lent memory on any lane the system's word frees nothing, and is not worth a
            // call.
            let may_free = is_lent || self.chunks.unwanted() > 0;
            match placed {
                true if !may_free => Fate::Free,
                // The peer says so; only its system's word frees what other peers may not see.
                true if chunk.attempt == 0 && self.is_acknowledged(lane, end) => Fate::Read,
                true if chunk.attempt == 0 && is_lent => Fate::Lent,
                // What was sent again may have been read from another lane. Then the peer drops
                // what it reads here, whatever that is by now.
                true => Fate::Free,
                false if is_lent => Fate::Lent,
                false => Fate::Free,
            }
        })?;
        let elsewhere = |chunk: &mut Outgoing| chunk.spliced.is_some_and(|one| one != lane);
        if !placed && let Some(chunk) = released.chunk.take_if(elsewhere) {
            drop(self.give_up(chunk));
        }
        Some(released)
    }

    /// No lane has the chunk, and nobody waits for it. Gives it back unless a socket refers to its
    /// memory.
    fn give_up(&self, chunk: Outgoing) -> Option<Outgoing> {
        match chunk.spliced {
            Some(lane) => self.chunks.keep_lent(lane, chunk),
            None => return Some(chunk),
        }
        None
    }

    /// What a lane that died had written, or has in its hands, goes back into the queue, the oldest
    /// first; says how many chunks that were. The slots of those that have ended are to be `freed`.
    /// Wake lanes afterwards.
    pub(super) fn lane_ended(
        &self,
        lane: u16,
        in_hand: impl IntoIterator<Item = Outgoing>,
        mut freed: impl FnMut(u16),
    ) -> usize {
        let mut again = Vec::new();
        for mut chunk in self.chunks.end(lane).into_iter().chain(in_hand) {
            let (slot, bytes) = (chunk.slot, chunk.payload.len() as u64);
            let ended = self.with_slot(slot, |state| match state {
                SendState::Taken { settled: None, .. } => {
                    chunk.mark_again();
                    *state = SendState::Queued(chunk);
                    None
                }
                _ => Some(self.give_up(chunk)),
            });
            match ended {
                None => again.push((slot, bytes)),
                Some(chunk) => {
                    drop(chunk);
                    freed(slot);
                }
            }
        }
        let bytes = again.iter().map(|(_, bytes)| bytes).sum();
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let count = again.len();
        self.chunks.push_again(again);
        count
    }

    /// Whether the slot holds the chunk of this sequence, and no byte of it was sent.
    pub(super) fn is_unsent(&self, slot: u16, sequence: u64) -> bool {
        self.with_slot(slot, |state| match state {
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
        let (answer, ..) = self.with_slot(slot, |state| match state {
            SendState::Queued(chunk) if chunk.position.sequence == sequence => {
                let chunk = self.take_back(state, placed);
                (Forgotten::Settled, None, chunk)
            }
            SendState::Taken {
                lane,
                sequence: held,
                settled,
            } if *held == sequence => match self.release(*lane, slot, placed) {
                Some(released) => {
                    *state = SendState::Free;
                    (Forgotten::Free, Some(released), None)
                }
                None => {
                    let how = if placed {
                        Settled::Placed
                    } else {
                        Settled::Unwanted
                    };
                    settled.get_or_insert(how);
                    (Forgotten::Later, None, None)
                }
            },
            _ => (Forgotten::Unknown, None, None),
        });
        answer
    }

    /// Empties the slot of a send whose place in the queue a lane is to come upon. Drop the chunk
    /// outside of the slot's lock: a pinned slot that comes back wakes others.
    fn take_back(&self, state: &mut SendState, placed: bool) -> Option<Outgoing> {
        match std::mem::replace(state, SendState::Withdrawn) {
            SendState::Queued(chunk) if placed => Some(chunk),
            SendState::Queued(chunk) => self.give_up(chunk),
            _ => None,
        }
    }

    /// Takes a send back, if no lane has it and no copy reads it.
    pub(super) fn withdraw(&self, slot: u16) -> Withdrawn {
        let (answer, ..) = self.with_slot(slot, |state| match state {
            SendState::Queued(_) | SendState::Waiting(_) => {
                (Withdrawn::Later, None, self.take_back(state, false))
            }
            SendState::Copying { cancelled, .. } => {
                *cancelled = true;
                (Withdrawn::NotYet, None, None)
            }
            SendState::Taken { lane, settled, .. } => {
                // News of a copy are still under way: they end the request, and must not be taken
                // for those of the slot's next chunk.
                let copied = |chunk: &Outgoing| chunk.slot == slot && chunk.permit.is_some();
                if self.chunks.keeps(*lane, copied) {
                    return (Withdrawn::NotYet, None, None);
                }
                let released = self.release(*lane, slot, false);
                if released.is_some() {
                    *state = SendState::Free;
                    return (Withdrawn::Now, released, None);
                }
                settled.get_or_insert(Settled::Unwanted);
                (Withdrawn::InHand(*lane), None, None)
            }
            SendState::Free | SendState::Withdrawn => (Withdrawn::NotYet, None, None),
        });
        answer
    }

    /// Has a lane give the source back of the chunk that it is writing, where that has
    /// [ended](Settled). Wake it afterwards.
    pub(super) fn let_go(&self, lane: u16) {
        self.letting_go.insert(lane);
    }

    /// Whether the lane, which is writing the chunk in this slot, is to give its source back.
    pub(super) fn is_to_let_go(&self, lane: u16, slot: u16) -> bool {
        let has_ended = |state: &mut SendState| {
            matches!(
                state,
                SendState::Taken {
                    settled: Some(_),
                    ..
                }
            )
        };
        self.letting_go.remove(lane) && self.with_slot(slot, has_ended)
    }

    /// Frees a slot whose end is about to be reported.
    pub(super) fn free(&self, slot: u16) {
        self.with_slot(slot, |state| *state = SendState::Free);
    }
}
