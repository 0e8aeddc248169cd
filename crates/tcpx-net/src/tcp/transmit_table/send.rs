//! What a send slot holds from one stage to the next.

use tcpx_memory::{Fence, RegionSlice};
use tcpx_wire::TransferId;
use tcpx_wire::chunk_header::{ChunkHeader, ChunkPayload};

use super::super::local::Exposed;
use super::super::permits::Permit;
use crate::channel::SendChunk;
use crate::error::ChunkPosition;

/// A chunk that a lane can send as it is.
#[derive(Debug)]
pub(in crate::tcp) struct Outgoing {
    pub(in crate::tcp) slot: u16,
    pub(in crate::tcp) header: [u8; ChunkHeader::BYTES],
    pub(in crate::tcp) position: ChunkPosition,
    /// The peer reads the payload where it lies, until this is dropped: before the payload is.
    pub(in crate::tcp) exposed: Option<Exposed>,
    /// The source itself, or a pinned slot with a copy of it.
    pub(in crate::tcp) payload: RegionSlice,
    /// How many lanes died with it.
    pub(in crate::tcp) attempt: u8,
    /// Held along with a pinned slot, and given back after it.
    pub(in crate::tcp) permit: Option<Permit>,
    /// The last lane whose socket refers to the payload's pages.
    pub(in crate::tcp) spliced: Option<u16>,
}

impl Outgoing {
    /// As no lane has had it yet.
    pub(in crate::tcp) fn new(
        slot: u16,
        header: [u8; ChunkHeader::BYTES],
        position: ChunkPosition,
        payload: RegionSlice,
    ) -> Self {
        Self {
            slot,
            header,
            position,
            exposed: None,
            payload,
            attempt: 0,
            permit: None,
            spliced: None,
        }
    }

    /// The peer may have it already: marks the header so. A copy worker of the peer's may be
    /// reading the memory of a GPU, and counts that: it stays exposed.
    pub(super) fn mark_again(&mut self) {
        self.exposed
            .take_if(|_| self.payload.kind().is_cpu_accessible());
        self.attempt = self.attempt.saturating_add(1);
        self.encode(match self.exposed {
            Some(_) => ChunkPayload::Exposed { entry: self.slot },
            None => ChunkPayload::Follows,
        });
    }

    /// Says in the header that the peer reads the payload where it lies.
    pub(in crate::tcp) fn expose(&mut self, exposed: Exposed) {
        self.exposed = Some(exposed);
        self.encode(ChunkPayload::Exposed { entry: self.slot });
    }

    fn encode(&mut self, payload: ChunkPayload) {
        ChunkHeader::renew(&mut self.header, self.attempt, payload);
    }
}

/// A chunk whose bytes must be copied to a pinned slot first.
#[derive(Debug)]
pub(in crate::tcp) struct Unstaged {
    pub(in crate::tcp) header: [u8; ChunkHeader::BYTES],
    pub(in crate::tcp) position: ChunkPosition,
    pub(in crate::tcp) source: RegionSlice,
    pub(in crate::tcp) fence: Option<Fence>,
}

#[derive(Debug)]
pub(in crate::tcp) enum SendState {
    Free,
    /// Waits in order for a pinned slot.
    Waiting(Unstaged),
    /// The copy worker fills the pinned slot in `Outgoing::payload`.
    Copying {
        outgoing: Outgoing,
        cancelled: bool,
        /// The next send that the same copy takes along.
        next: Option<u16>,
    },
    /// In the queue.
    Queued(Outgoing),
    /// In a lane's hands, or written and kept by it until the peer has placed it, or its end is
    /// being reported.
    Taken {
        lane: u16,
        sequence: u64,
        /// It ends once the lane lets go.
        settled: Option<Settled>,
    },
    /// Ended while it was in the queue; whoever finds the queue's entry frees the slot.
    Withdrawn,
}

/// Why a chunk in a lane's hands ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tcp) enum Settled {
    /// The peer has placed it.
    Placed,
    /// Nobody wants it any more.
    Unwanted,
}

/// The header of a chunk whose length was checked, and its position with nothing done.
pub(in crate::tcp) fn describe(chunk: &SendChunk) -> ([u8; ChunkHeader::BYTES], ChunkPosition) {
    let length = chunk.source.len();
    let position = ChunkPosition {
        sequence: chunk.sequence,
        transfer: chunk.transfer,
        offset: chunk.offset,
        length: length as u64,
        done: 0,
    };
    let header = ChunkHeader {
        sequence: chunk.index.into(),
        transfer: TransferId(chunk.window),
        offset: chunk.offset,
        total: chunk.total,
        length: u32::try_from(length).unwrap_or(u32::MAX),
        attempt: 0,
        payload: ChunkPayload::Follows,
    };
    (header.encode(), position)
}
