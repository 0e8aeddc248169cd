//! Coalesced acknowledgements of placed chunks.

use std::collections::VecDeque;

use super::Session;
use super::action::OperationId;
use super::config::Config;
use super::incoming::ReceiveStage;
use crate::frame::{Frame, PlacedChunks};
use crate::time::Time;

/// Which receives owe acknowledgements, and by when.
#[derive(Debug, Default)]
pub(super) struct Acks {
    /// Each once, the longest in debt first. Keeps its room: there is one for nearly every chunk.
    dirty: VecDeque<OperationId>,
    pending: u32,
    pub(super) due: Option<Time>,
    ready: bool,
}

impl Acks {
    /// A chunk was placed; `first` when the operation owed no acknowledgement before.
    pub(super) fn placed(
        &mut self,
        now: Time,
        operation: OperationId,
        first: bool,
        config: &Config,
    ) {
        if first {
            self.dirty.push_back(operation);
        }
        self.pending += 1;
        self.due.get_or_insert(now + config.ack_delay);
        self.ready |= self.pending >= config.ack_batch;
    }

    pub(super) fn ready(&self, now: Time) -> bool {
        self.ready || self.due.is_some_and(|due| due <= now)
    }

    fn paid(&mut self, operation: OperationId, chunks: usize) {
        if let Some(at) = self.dirty.iter().position(|owing| *owing == operation) {
            self.dirty.remove(at);
        }
        self.pending = self
            .pending
            .saturating_sub(u32::try_from(chunks).unwrap_or(u32::MAX));
        if self.dirty.is_empty() {
            self.forget();
        }
    }

    fn forget(&mut self) {
        self.dirty.clear();
        (self.pending, self.due, self.ready) = (0, None, false);
    }
}

impl Session {
    /// Turns every pending acknowledgement into frames.
    pub(super) fn flush_acks(&mut self) {
        while let Some(operation) = self.acks.dirty.front().copied() {
            self.flush_acks_of(operation);
        }
    }

    pub(super) fn flush_acks_of(&mut self, operation: OperationId) {
        let mut chunks = Vec::new();
        if let Some(receive) = self.receives.get_mut(&operation)
            && let Some(matched) = &mut receive.matched
            && let ReceiveStage::Granted(granted) = &mut matched.stage
        {
            std::mem::swap(&mut chunks, &mut granted.unacked);
            chunks.sort_unstable();
            let transfer = matched.transfer;
            for chunks in placed(&chunks) {
                self.transmit.push_back(Frame::Placed { transfer, chunks });
            }
            let paid = chunks.len();
            // The buffer is used again.
            chunks.clear();
            std::mem::swap(&mut chunks, &mut granted.unacked);
            self.acks.paid(operation, paid);
        } else {
            self.acks.paid(operation, 0);
        }
    }

    pub(super) fn forget_acks(&mut self) {
        self.acks.forget();
    }
}

/// What reports ascending chunks.
fn placed(chunks: &[u32]) -> impl Iterator<Item = PlacedChunks> {
    let mut rest = chunks;
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let end = rest.partition_point(|chunk| chunk - first < PlacedChunks::SPAN);
        let (run, tail) = rest.split_at(end);
        rest = tail;
        let bits = run
            .iter()
            .fold(0, |bits, chunk| bits | 1 << (chunk - first));
        Some(PlacedChunks { first, bits })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::config;

    #[test]
    fn acknowledgements_go_with_the_last_chunk_of_a_batch_and_the_next_batch_starts_anew() {
        let config = Config {
            ack_batch: 3,
            ..config()
        };
        let (now, owing) = (Time(0), OperationId::receive(0));
        let mut acks = Acks::default();
        for _ in 0..2 {
            acks.placed(now, owing, true, &config);
            acks.placed(now, owing, false, &config);
            assert!(!acks.ready(now));
            acks.placed(now, owing, false, &config);
            assert!(acks.ready(now));
            acks.paid(owing, 3);
            assert!(!acks.ready(now + config.ack_delay));
        }
    }

    #[test]
    fn what_one_operation_paid_no_longer_counts_towards_the_batch_of_others() {
        let config = Config {
            ack_batch: 3,
            ..config()
        };
        let [paid, owing] = [0, 1].map(OperationId::receive);
        let now = Time(0);
        let mut acks = Acks::default();
        acks.placed(now, paid, true, &config);
        acks.placed(now, owing, true, &config);
        acks.paid(paid, 1);
        acks.placed(now, owing, false, &config);
        assert!(!acks.ready(now), "two chunks of three");
        acks.placed(now, owing, false, &config);
        assert!(acks.ready(now));
    }

    #[test]
    fn sets_span_at_most_one_frame() {
        let chunks = [0, 5, 63, 64, 127, 128, u32::MAX - 1, u32::MAX];
        let sets: Vec<PlacedChunks> = placed(&chunks).collect();
        let firsts: Vec<u32> = sets.iter().map(|set| set.first).collect();
        assert_eq!(firsts, [0, 64, 128, u32::MAX - 1]);
        let all = sets.iter().flat_map(|set| set.iter());
        assert!(all.eq(chunks));
    }
}
