//! The data plane of one side, and everything a session must never do to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::*;
use crate::crc::crc32c;
use crate::frame::TransferId;
use crate::plan::ChunkPlan;

/// A small seeded generator; the same seed is the same run.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In `0..bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// One operation as the application sees it.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// The program collects it once it has come.
    pub(super) is_notification: bool,
    pub(super) bytes: u64,
    pub(super) tag: u64,
    /// When it is to end, at the latest.
    pub(super) due: Option<Time>,
    pub(super) outcome: Option<Result<Completed, OperationError>>,
    pub(super) memory: Option<Memory>,
    pub(super) matched: Option<(TransferId, u32)>,
    pub(super) transfer: Option<TransferId>,
    /// Chunks given to the data plane and not yet returned.
    pub(super) held: BTreeSet<u32>,
    pub(super) placed: BTreeSet<u32>,
    pub(super) placed_bytes: u64,
    pub(super) copying: bool,
    pub(super) copied: Option<Vec<u8>>,
    pub(super) digesting: bool,
    /// When its data plane was told to let go of it.
    pub(super) stopped: Option<Time>,
    pub(super) quiet: bool,
    /// It waits again once it is quiet.
    pub(super) withdrawn: bool,
    /// The window that it goes to, or that is open for it.
    pub(super) window: Option<u64>,
    pub(super) window_open: bool,
    /// How often it was withdrawn: what the data plane did before is over.
    pub(super) generation: u32,
}

impl Watched {
    pub(super) fn touches_memory(&self) -> bool {
        !self.quiet && (self.window_open || !self.held.is_empty() || self.copying || self.digesting)
    }
}

/// Order and windows of one direction on one side.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    last: BTreeMap<u16, u64>,
    in_flight: BTreeMap<u16, u32>,
    pub(super) sequences: BTreeSet<u64>,
    /// Posted receives per channel.
    pub(super) posted: BTreeMap<u16, VecDeque<(u64, OperationId, Chunk)>>,
}

impl Lanes {
    pub(super) fn post(&mut self, chunk: Chunk, agreed: &Agreed, window: u16, in_order: bool) {
        assert_eq!(
            u64::from(chunk.channel),
            chunk.sequence % u64::from(agreed.channels)
        );
        let last = self.last.insert(chunk.channel, chunk.sequence);
        assert!(
            last < Some(chunk.sequence) || !in_order,
            "channel out of order: {chunk:?}"
        );
        assert!(self.sequences.insert(chunk.sequence));
        let in_flight = self.in_flight.entry(chunk.channel).or_default();
        *in_flight += 1;
        assert!(*in_flight <= window.into(), "window exceeded: {chunk:?}");
    }

    pub(super) fn release(&mut self, channel: u16) {
        *self.in_flight.get_mut(&channel).unwrap() -= 1;
    }
}

/// A window that is open to chunks.
#[derive(Debug)]
pub(super) struct OpenWindow {
    pub(super) operation: OperationId,
    pub(super) cut: ChunkPlan,
    /// How the transfer is cut that has come to it.
    pub(super) plan: Option<ChunkPlan>,
    pub(super) seen: BTreeSet<u32>,
}

/// CRC32C that the model gives the bytes of a transfer that has no payload.
pub(super) fn digest_of(bytes: u64) -> u32 {
    crc32c(&bytes.to_le_bytes())
}
