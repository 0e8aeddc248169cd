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

#[derive(Clone, Copy, Debug)]
struct Span {
    first: u64,
    end: u64,
    /// `None` once its transfer was dropped.
    owner: Option<OperationId>,
}

#[derive(Clone, Debug)]
struct Lane {
    /// Next sequence number of this channel.
    next: u64,
    /// Sequence numbers in flight, ascending; at most `window`.
    in_flight: VecDeque<u64>,
}

/// The chunk to post next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) owner: OperationId,
    pub(super) index: u32,
}

/// Chunks of transfers in the order in which they may be sent, or were granted. A channel carries every
/// `channels`-th one in sequence order and at most `window` at a time.
#[derive(Debug, Default)]
pub(super) struct ChunkStream {
    window: usize,
    end: u64,
    transfers: VecDeque<Span>,
    lanes: Vec<Lane>,
    /// When the data plane last said something of a chunk.
    pub(super) moved: Time,
}

impl ChunkStream {
    pub(super) fn configure(&mut self, channels: u16, window: u16) {
        self.window = window.into();
        self.lanes = (0..u64::from(channels))
            .map(|next| Lane {
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

    /// Sequence number of the next chunk to be granted.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn append(&mut self, owner: OperationId, chunks: u32) {
        if chunks == 0 {
            return;
        }
        let first = self.end;
        self.end += u64::from(chunks);
        self.transfers.push_back(Span {
            first,
            end: self.end,
            owner: Some(owner),
        });
    }

    /// Leaves out what was not yet posted of the owner's transfer, whose chunks start at `first`. A
    /// transfer without chunks has none to leave out; the chunk at `first` is then another's.
    pub(super) fn drop_from(&mut self, owner: OperationId, first: u64) {
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
    pub(super) fn next(&mut self) -> Option<Slot> {
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

    /// A posted chunk's place is free again.
    pub(super) fn release(&mut self, chunk: &Chunk) {
        if let Some(lane) = self.lanes.get_mut(usize::from(chunk.channel))
            && let Ok(at) = lane.in_flight.binary_search(&chunk.sequence)
        {
            lane.in_flight.remove(at);
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

    /// No chunk is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.in_flight.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Role;

    fn stream(channels: u16, window: u16, chunks: u32) -> (ChunkStream, Plan) {
        let mut stream = ChunkStream::default();
        stream.configure(channels, window);
        stream.append(OperationId::new(Role::Sender, 0), chunks);
        (
            stream,
            Plan::new(
                ChunkPlan::new(u64::from(chunks) * 4096, 4096, None).unwrap(),
                0,
                channels,
                0,
            ),
        )
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
            let (mut stream, _) = stream(1, 1, 10);
            assert_eq!(post_all(&mut stream), [0]);
            let mut dropped: Vec<_> = (1..100)
                .map(|number| {
                    let (owner, first) = (OperationId::new(Role::Sender, number), stream.end());
                    stream.append(owner, 3);
                    (owner, first)
                })
                .collect();
            if backwards {
                dropped.reverse();
            }
            for (owner, first) in dropped {
                stream.drop_from(owner, first);
            }
            assert_eq!(stream.transfers.len(), 2, "backwards: {backwards}");
        }
    }

    #[test]
    fn only_the_number_in_flight_counts() {
        let (mut stream, plan) = stream(1, 4, 100);
        assert_eq!(post_all(&mut stream), [0, 1, 2, 3]);
        for index in 1..4 {
            stream.release(&plan.chunk(index));
        }
        assert_eq!(post_all(&mut stream), [4, 5, 6]);
    }

    #[test]
    fn a_place_is_given_back_once() {
        let (mut stream, plan) = stream(1, 2, 100);
        assert_eq!(post_all(&mut stream), [0, 1]);
        stream.release(&plan.chunk(0));
        stream.release(&plan.chunk(0));
        assert_eq!(post_all(&mut stream), [2]);
    }
}
