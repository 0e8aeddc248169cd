//! One direction's stream of chunks: which chunk is posted next on which channel.

use std::collections::VecDeque;

use super::action::{Chunk, OperationId};
use crate::frame::{Grant, Level};
use crate::plan::ChunkPlan;
use crate::time::Time;

/// How one granted transfer is cut and where it lies in the stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    cut: ChunkPlan,
    pub(super) chunks: u32,
    pub(super) first_sequence: u64,
    /// What its chunks name on an addressed network.
    pub(super) window: u64,
    channels: u16,
}

impl Plan {
    pub(super) fn new(cut: ChunkPlan, first_sequence: u64, channels: u16, window: u64) -> Self {
        Self {
            cut,
            chunks: cut.count(),
            first_sequence,
            window,
            channels,
        }
    }

    /// Of a transfer whose chunks are found by their window's name, and come in any order.
    pub(super) fn named(cut: ChunkPlan, window: u64) -> Self {
        Self::new(cut, 0, 1, window)
    }

    /// The same for a transfer that is cut so.
    pub(super) fn recut(&self, cut: ChunkPlan) -> Self {
        Self::new(cut, self.first_sequence, self.channels, self.window)
    }

    pub(super) fn cut(&self) -> ChunkPlan {
        self.cut
    }

    /// What the peer is told of it.
    pub(super) fn grant(&self, level: Level) -> Grant {
        Grant {
            chunk_bytes: self.cut.chunk_bytes(),
            window: self.window,
            level,
            taper: self.cut.taper(),
        }
    }

    /// Length of the transfer in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.cut.bytes()
    }

    /// `index` is below `chunks`.
    pub(super) fn chunk(&self, index: u32) -> Chunk {
        let (offset, length) = self.cut.range(index);
        let sequence = self.first_sequence + u64::from(index);
        Chunk {
            index,
            offset,
            length,
            sequence,
            channel: channel_of(sequence, self.channels),
        }
    }
}

fn channel_of(sequence: u64, channels: u16) -> u16 {
    // The remainder is below a u16.
    (sequence % u64::from(channels.max(1))) as u16
}

/// The chunk to post next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) owner: OperationId,
    pub(super) index: u32,
}

/// Chunks of transfers that may be sent, or were granted, and which of them is next.
#[derive(Debug)]
pub(super) struct ChunkStream {
    end: u64,
    order: Order,
    /// When a chunk last moved.
    moved: Time,
    /// Chunks that were handed out and have not ended, in the order of that. One that is sent
    /// again keeps its place.
    unfinished: VecDeque<Unfinished>,
}

#[derive(Debug)]
struct Unfinished {
    owner: OperationId,
    index: u32,
    /// When something last moved between the chunk before this one and this one.
    moved_before: Time,
}

#[derive(Debug)]
enum Order {
    /// The peer finds chunks by their numbers.
    Numbered(Numbered),
    /// The peer finds them by their window's name.
    Turns(Turns),
}

impl ChunkStream {
    /// Of no channel yet. Chunks of an addressed network come in any order.
    pub(super) fn new(is_addressed: bool, turn_bytes: u32) -> Self {
        Self {
            end: 0,
            order: match is_addressed {
                true => Order::Turns(Turns {
                    turn_bytes,
                    ..Turns::default()
                }),
                false => Order::Numbered(Numbered::default()),
            },
            moved: Time::default(),
            unfinished: VecDeque::new(),
        }
    }

    /// At most `window` chunks of a channel are in flight at a time.
    pub(super) fn configure(&mut self, channels: u16, window: u16) {
        let window = window.into();
        match &mut self.order {
            Order::Numbered(numbered) => numbered.configure(channels, window),
            Order::Turns(turns) => turns.window = window,
        }
    }

    /// Sequence number of the next chunk to be granted.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// A transfer that is cut so may be sent, or was granted: its chunks have the next numbers.
    pub(super) fn append(&mut self, owner: OperationId, cut: &ChunkPlan) {
        let chunks = cut.count();
        if chunks == 0 {
            return;
        }
        let first = self.end;
        let end = first + u64::from(chunks);
        self.end = end;
        match &mut self.order {
            Order::Numbered(numbered) => numbered.transfers.push_back(Span {
                first,
                end,
                owner: Some(owner),
            }),
            Order::Turns(turns) => {
                let each = (turns.turn_bytes / cut.chunk_bytes().max(1)).max(1);
                turns.transfers.push_back(Turn {
                    owner,
                    first,
                    next: first,
                    end,
                    each,
                    left: each,
                });
            }
        }
    }

    /// Leaves out what was not yet posted of the owner's transfer, whose chunks start at `first`. A
    /// transfer without chunks has none to leave out; the chunk at `first` is then another's.
    pub(super) fn drop_from(&mut self, owner: OperationId, first: u64) {
        match &mut self.order {
            Order::Numbered(numbered) => numbered.drop_from(owner, first),
            Order::Turns(turns) => turns.drop_from(owner, first),
        }
    }

    /// Hands out the next chunk, if there is room for one.
    pub(super) fn next(&mut self) -> Option<Slot> {
        let slot = match &mut self.order {
            Order::Numbered(numbered) => numbered.next(),
            Order::Turns(turns) => turns.next(),
        }?;
        self.begin_chunk(slot.owner, slot.index);
        Some(slot)
    }

    /// A chunk is on its way, behind all that are.
    pub(super) fn begin_chunk(&mut self, owner: OperationId, index: u32) {
        self.unfinished.push_back(Unfinished {
            owner,
            index,
            moved_before: self.moved,
        });
    }

    /// A chunk moved: whatever waits behind it has not stalled.
    pub(super) fn chunk_moved(&mut self, now: Time, owner: OperationId, index: u32, ended: bool) {
        self.moved = now;
        let is_it = |one: &Unfinished| one.owner == owner && one.index == index;
        // Most end in the order in which they were handed out.
        let Some(at) = self.unfinished.iter().position(is_it) else {
            return;
        };
        let mut behind = at + 1;
        if ended {
            self.unfinished.remove(at);
            behind = at;
        }
        if let Some(behind) = self.unfinished.get_mut(behind) {
            behind.moved_before = now;
        }
    }

    /// An operation ends, with whatever of it was on its way.
    pub(super) fn leave(&mut self, owner: OperationId) {
        let mut moved = Time::default();
        self.unfinished.retain_mut(|one| {
            one.moved_before = one.moved_before.max(std::mem::take(&mut moved));
            let stays = one.owner != owner;
            if !stays {
                moved = one.moved_before;
            }
            stays
        });
    }

    /// When a chunk last moved.
    pub(super) fn moved(&self) -> Time {
        self.moved
    }

    /// When something last moved that the operation's oldest chunk waits behind. Everything is
    /// before a chunk that was not handed out.
    pub(super) fn moved_before(&self, owner: OperationId) -> Time {
        match self.unfinished.iter().position(|one| one.owner == owner) {
            Some(at) => {
                let before = self.unfinished.range(..=at).map(|one| one.moved_before);
                before.max().unwrap_or_default()
            }
            None => self.moved,
        }
    }

    /// A posted chunk's place is free again.
    pub(super) fn release(&mut self, chunk: &Chunk) {
        let in_flight = match &mut self.order {
            Order::Numbered(numbered) => {
                let lane = numbered.lanes.get_mut(usize::from(chunk.channel));
                lane.map(|lane| &mut lane.in_flight)
            }
            Order::Turns(turns) => Some(&mut turns.in_flight),
        };
        // Most end in the order in which they were posted.
        if let Some(in_flight) = in_flight
            && let Some(at) = in_flight.iter().position(|one| *one == chunk.sequence)
        {
            in_flight.remove(at);
        }
    }

    /// No chunk is in flight.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        match &self.order {
            Order::Numbered(numbered) => {
                numbered.lanes.iter().all(|lane| lane.in_flight.is_empty())
            }
            Order::Turns(turns) => turns.in_flight.is_empty(),
        }
    }
}

/// Transfers take turns.
#[derive(Debug, Default)]
struct Turns {
    window: usize,
    /// As in [`Config`](super::Config).
    turn_bytes: u32,
    /// In the order of their numbers.
    transfers: VecDeque<Turn>,
    /// Whose turn it is.
    at: usize,
    /// Sequence numbers; at most `window`.
    in_flight: VecDeque<u64>,
}

/// Of a transfer.
#[derive(Clone, Copy, Debug)]
struct Turn {
    owner: OperationId,
    first: u64,
    /// The chunk to post next.
    next: u64,
    end: u64,
    /// Chunks of a turn, and how many are left of this one.
    each: u32,
    left: u32,
}

impl Turns {
    fn drop_from(&mut self, owner: OperationId, first: u64) {
        let at = self.transfers.partition_point(|turn| turn.first < first);
        let found = self.transfers.get(at);
        if found.is_some_and(|turn| turn.first == first && turn.owner == owner) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) {
        self.transfers.remove(at);
        self.at -= usize::from(at < self.at);
    }

    fn next(&mut self) -> Option<Slot> {
        if self.in_flight.len() >= self.window {
            return None;
        }
        if self.at >= self.transfers.len() {
            self.at = 0;
        }
        let at = self.at;
        let turn = self.transfers.get_mut(at)?;
        let slot = Slot {
            owner: turn.owner,
            // A transfer has at most u32::MAX chunks.
            index: (turn.next - turn.first) as u32,
        };
        self.in_flight.push_back(turn.next);
        turn.next += 1;
        turn.left -= 1;
        if turn.next == turn.end {
            self.remove(at);
        } else if turn.left == 0 {
            turn.left = turn.each;
            self.at += 1;
        }
        Some(slot)
    }
}

#[derive(Clone, Copy, Debug)]
struct Span {
    first: u64,
    end: u64,
    /// `None` once its transfer was dropped.
    owner: Option<OperationId>,
}

#[derive(Clone, Debug)]
struct LaneOrder {
    /// Next sequence number of this channel.
    next: u64,
    /// Sequence numbers in flight, ascending; at most `window`.
    in_flight: VecDeque<u64>,
}

/// Chunks follow each other by their numbers. A channel carries every `channels`-th one and at most
/// `window` at a time.
#[derive(Debug, Default)]
struct Numbered {
    window: usize,
    transfers: VecDeque<Span>,
    lanes: Vec<LaneOrder>,
}

impl Numbered {
    fn configure(&mut self, channels: u16, window: usize) {
        self.window = window;
        self.lanes = (0..u64::from(channels))
            .map(|next| LaneOrder {
                next,
                in_flight: VecDeque::new(),
            })
            .collect();
    }

    /// Whether the channel's next chunk may be posted now.
    fn has_room(&self, channel: usize) -> bool {
        let lane = self.lanes.get(channel);
        lane.is_some_and(|lane| lane.in_flight.len() < self.window)
    }

    fn drop_from(&mut self, owner: OperationId, first: u64) {
        let at = self.transfers.partition_point(|span| span.end <= first);
        let owned = |span: &&mut Span| span.first == first && span.owner == Some(owner);
        let Some(span) = self.transfers.get_mut(at).filter(owned) else {
            return;
        };
        span.owner = None;
        // Neighbours that were dropped too become one, which bounds the list by the live transfers.
        let dropped = |spans: &VecDeque<Span>, at: usize| {
            spans.get(at).is_some_and(|span| span.owner.is_none())
        };
        if dropped(&self.transfers, at + 1) {
            self.transfers[at].end = self.transfers[at + 1].end;
            self.transfers.remove(at + 1);
        }
        if at > 0 && dropped(&self.transfers, at - 1) {
            self.transfers[at - 1].end = self.transfers[at].end;
            self.transfers.remove(at);
        }
        for channel in 0..self.lanes.len() {
            self.peek(channel);
        }
        self.trim();
    }

    /// Takes the next chunk in sequence order among the channels with room.
    fn next(&mut self) -> Option<Slot> {
        loop {
            let channel = (0..self.lanes.len())
                .filter(|&channel| self.has_room(channel))
                .min_by_key(|&channel| self.lanes[channel].next)?;
            let before = self.lanes[channel].next;
            let slot = self.peek(channel);
            if self.lanes[channel].next == before {
                return slot.map(|slot| self.take(channel, slot));
            }
            // Dropped chunks were skipped: another channel may come first now.
        }
    }

    fn take(&mut self, channel: usize, slot: Slot) -> Slot {
        let channels = self.lanes.len() as u64;
        let lane = &mut self.lanes[channel];
        lane.in_flight.push_back(lane.next);
        lane.next += channels;
        let next = lane.next;
        if self
            .transfers
            .front()
            .is_some_and(|front| next >= front.end)
        {
            self.trim();
        }
        slot
    }

    /// Moves the channel past dropped transfers; its next chunk, if granted.
    fn peek(&mut self, channel: usize) -> Option<Slot> {
        let channels = self.lanes.len() as u64;
        let lane = &mut self.lanes[channel];
        loop {
            let at = self.transfers.partition_point(|span| span.end <= lane.next);
            let span = self.transfers.get(at)?;
            if let Some(owner) = span.owner {
                // A span is at most u32::MAX long.
                let index = (lane.next - span.first) as u32;
                return Some(Slot { owner, index });
            }
            lane.next += (span.end - lane.next).div_ceil(channels) * channels;
        }
    }

    fn trim(&mut self) {
        let passed = self.lanes.iter().map(|lane| lane.next).min().unwrap_or(0);
        while self
            .transfers
            .front()
            .is_some_and(|span| span.end <= passed)
        {
            self.transfers.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::Role;

    const CHUNK: u64 = 1 << 20;

    fn stream(is_addressed: bool, channels: u16, window: u16, chunks: u32) -> (ChunkStream, Plan) {
        let mut stream = ChunkStream::new(is_addressed, 4 << 20);
        stream.configure(channels, window);
        let plan = Plan::new(cut(chunks), 0, channels, 0);
        stream.append(owner(0), &plan.cut);
        (stream, plan)
    }

    fn owner(number: u64) -> OperationId {
        OperationId::new(Role::Sender, number)
    }

    fn cut(chunks: u32) -> ChunkPlan {
        ChunkPlan::even(u64::from(chunks) * CHUNK, CHUNK as u32)
    }

    fn post_all(stream: &mut ChunkStream) -> Vec<u32> {
        std::iter::from_fn(|| stream.next())
            .map(|slot| slot.index)
            .collect()
    }

    /// However many transfers are granted and given up behind one that is stuck.
    #[test]
    fn what_was_dropped_takes_one_place_in_whichever_order() {
        for backwards in [false, true] {
            let (mut stream, _) = stream(false, 1, 1, 10);
            assert_eq!(post_all(&mut stream), [0]);
            let mut dropped: Vec<_> = (1..100)
                .map(|number| {
                    let first = stream.end();
                    stream.append(owner(number), &cut(3));
                    (owner(number), first)
                })
                .collect();
            if backwards {
                dropped.reverse();
            }
            for (owner, first) in dropped {
                stream.drop_from(owner, first);
            }
            let Order::Numbered(numbered) = &stream.order else {
                panic!("{stream:?}");
            };
            assert_eq!(numbered.transfers.len(), 2, "backwards: {backwards}");
        }
    }

    #[test]
    fn only_the_number_in_flight_counts() {
        for is_addressed in [false, true] {
            let (mut stream, plan) = stream(is_addressed, 1, 4, 100);
            assert_eq!(post_all(&mut stream), [0, 1, 2, 3]);
            for index in 1..4 {
                stream.release(&plan.chunk(index));
            }
            assert_eq!(post_all(&mut stream), [4, 5, 6]);
        }
    }

    #[test]
    fn what_waits_behind_what_moves_has_not_stalled() {
        for is_addressed in [false, true] {
            let (mut stream, _) = stream(is_addressed, 2, 8, 2);
            stream.append(owner(1), &cut(2));
            assert_eq!(post_all(&mut stream), [0, 1, 0, 1]);
            stream.chunk_moved(Time(1), owner(0), 1, false);
            assert_eq!(
                stream.moved_before(owner(0)),
                Time(0),
                "it is behind the oldest"
            );
            assert_eq!(stream.moved_before(owner(1)), Time(1));
            stream.chunk_moved(Time(2), owner(1), 0, true);
            assert_eq!(stream.moved_before(owner(0)), Time(0));
            assert_eq!(stream.moved_before(owner(1)), Time(2));
            stream.chunk_moved(Time(3), owner(1), 1, false);
            assert_eq!(
                stream.moved_before(owner(1)),
                Time(2),
                "its last one moved itself"
            );
            stream.chunk_moved(Time(4), owner(0), 0, true);
            assert_eq!(stream.moved_before(owner(0)), Time(4));
            assert_eq!(stream.moved_before(owner(1)), Time(4));
            assert_eq!(
                stream.moved_before(owner(2)),
                Time(4),
                "nothing of it is on its way"
            );
        }
    }

    #[test]
    fn what_an_operation_that_ends_waited_for_stays_known() {
        let (mut stream, _) = stream(true, 1, 8, 1);
        stream.append(owner(1), &cut(2));
        stream.append(owner(2), &cut(1));
        assert_eq!(post_all(&mut stream), [0, 0, 1, 0]);
        stream.chunk_moved(Time(5), owner(0), 0, false);
        stream.leave(owner(1));
        assert_eq!(stream.moved_before(owner(0)), Time(0));
        assert_eq!(stream.moved_before(owner(2)), Time(5));
        assert_eq!(stream.unfinished.len(), 2);
    }

    #[test]
    fn a_place_is_given_back_once() {
        for is_addressed in [false, true] {
            let (mut stream, plan) = stream(is_addressed, 1, 2, 100);
            assert_eq!(post_all(&mut stream), [0, 1]);
            stream.release(&plan.chunk(0));
            stream.release(&plan.chunk(0));
            assert_eq!(post_all(&mut stream), [2]);
        }
    }

    #[test]
    fn a_short_transfer_does_not_wait_for_the_end_of_a_long_one() {
        let (mut stream, _) = stream(true, 1, 64, 1000);
        stream.append(owner(1), &cut(6));
        stream.append(owner(2), &cut(1));
        let mut next = |count| -> Vec<_> {
            let slots = std::iter::from_fn(|| stream.next()).take(count);
            slots.map(|slot| (slot.owner, slot.index)).collect()
        };
        let turn = |number, chunks: std::ops::Range<u32>| -> Vec<_> {
            chunks.map(|index| (owner(number), index)).collect()
        };
        assert_eq!(next(4), turn(0, 0..4));
        assert_eq!(next(4), turn(1, 0..4));
        assert_eq!(next(1), turn(2, 0..1));
        assert_eq!(next(4), turn(0, 4..8));
        assert_eq!(next(2), turn(1, 4..6));
        assert_eq!(next(9), turn(0, 8..17));
    }

    proptest! {
        /// Whatever comes, goes and ends meanwhile, each transfer's chunks are posted in order, and
        /// none of one that was dropped; nobody waits for more than a turn of each other one.
        #[test]
        fn transfers_take_turns(
            steps in prop::collection::vec((0u8..4, any::<prop::sample::Index>(), 0u32..12), 1..200),
        ) {
            let mut stream = ChunkStream::new(true, 4 << 20);
            stream.configure(1, 3);
            let mut live: Vec<(OperationId, Plan, u32, usize)> = Vec::new();
            let mut in_flight = Vec::new();
            for (number, (step, which, chunks)) in steps.into_iter().enumerate() {
                match step {
                    0 => {
                        let owner = owner(number as u64);
                        let plan = Plan::new(cut(chunks), stream.end(), 1, 0);
                        stream.append(owner, &plan.cut);
                        if chunks > 0 {
                            live.push((owner, plan, 0, 0));
                        }
                    }
                    1 if !live.is_empty() => {
                        let (owner, plan, ..) = live.remove(which.index(live.len()));
                        stream.drop_from(owner, plan.first_sequence);
                    }
                    2 if !in_flight.is_empty() => {
                        let chunk = in_flight.remove(which.index(in_flight.len()));
                        stream.release(&chunk);
                    }
                    _ => {
                        let slot = stream.next();
                        prop_assert_eq!(slot.is_none(), in_flight.len() == 3 || live.is_empty());
                        let Some(slot) = slot else { continue };
                        let others = live.len();
                        for (_, _, _, waited) in &mut live {
                            *waited += 1;
                        }
                        let at = live.iter().position(|(owner, ..)| *owner == slot.owner);
                        let (_, plan, next, waited) = &mut live[at.unwrap()];
                        prop_assert_eq!(slot.index, *next);
                        prop_assert!(*waited <= 4 * (others + number));
                        (*next, *waited) = (*next + 1, 0);
                        in_flight.push(plan.chunk(slot.index));
                        if *next == plan.chunks {
                            live.remove(at.unwrap());
                        }
                    }
                }
            }
        }
    }
}
