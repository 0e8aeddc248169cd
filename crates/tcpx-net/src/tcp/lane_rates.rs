//! How fast lanes are, and whether one that is much slower than others should take another chunk.
//!
//! Whoever can write takes the next chunk, which shares them out well until few are left: then a
//! slow lane would still be at its chunk when all others have long been placed. Such a lane leaves
//! a chunk alone if the others are done with everything sooner than it would be with this one.

use std::sync::atomic::{AtomicU64, Ordering};

/// The rates of a channel's lanes, in bytes a second; 0: not known.
#[derive(Debug)]
pub(super) struct LaneRates(Box<[AtomicU64]>);

/// What is done sooner than this holds nobody up, and is too short to be judged by.
const WORTH_MICROS: u128 = 50_000;

/// Lanes of one kind differ by less for want of a core alone.
const SLOW: u64 = 4;

/// No lane is faster, and the sum of all lanes' rates is a number.
const FASTEST: u64 = 1 << 50;

/// What there is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    /// Bytes of a chunk.
    pub(super) chunk: u64,
    /// Chunks that nobody has taken.
    pub(super) queued: u64,
    /// Chunks that others have taken and the peer has not placed.
    pub(super) with_others: u64,
    /// Bytes that this lane's socket still has.
    pub(super) backlog: u64,
}

impl LaneRates {
    pub(super) fn new(lanes: u16) -> Self {
        Self((0..lanes).map(|_| AtomicU64::new(0)).collect())
    }

    fn rate(&self, lane: u16) -> u64 {
        let rate = self.0.get(usize::from(lane));
        rate.map_or(0, |rate| rate.load(Ordering::Relaxed))
    }

    fn set(&self, lane: u16, rate: u64) {
        if let Some(place) = self.0.get(usize::from(lane)) {
            place.store(rate.min(FASTEST), Ordering::Relaxed);
        }
    }

    /// The peer's system has acknowledged so many bytes in so many microseconds, throughout which
    /// the lane had something under way.
    pub(super) fn measured(&self, lane: u16, bytes: u64, micros: u64) {
        let now = bytes.saturating_mul(1_000_000) / micros.max(1);
        self.set(
            lane,
            match self.rate(lane) {
                0 => now,
                before => (before / 4 * 3).saturating_add(now / 4),
            }
            .max(1),
        );
    }

    /// The lane had nothing to send for a while: a slow one may have become faster.
    pub(super) fn rested(&self, lane: u16) {
        let rate = self.rate(lane);
        let fastest = self.fastest();
        if rate > 0 && rate < fastest {
            self.set(lane, rate + rate / 8 + fastest / 64);
        }
    }

    fn fastest(&self) -> u64 {
        let rates = self.0.iter().map(|rate| rate.load(Ordering::Relaxed));
        rates.max().unwrap_or(0)
    }

    /// Nothing is known of the lane any more.
    pub(super) fn forget(&self, lane: u16) {
        self.set(lane, 0);
    }

    /// Whether a lane is so much slower than another one that this is no accident.
    pub(super) fn is_slow(&self, lane: u16) -> bool {
        let own = self.rate(lane);
        own > 0 && self.fastest() / SLOW > own
    }

    /// Whether the others are done with everything before this lane would be with the next chunk.
    pub(super) fn is_too_slow(&self, lane: u16, load: Load) -> bool {
        let own = self.rate(lane);
        let all: u64 = self.0.iter().map(|rate| rate.load(Ordering::Relaxed)).sum();
        let others = all.saturating_sub(own);
        let until_done =
            |bytes: u64, rate: u64| u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
        let left = (load.queued + load.with_others).saturating_mul(load.chunk);
        let own_time = until_done(load.backlog + load.chunk, own);
        own_time >= WORTH_MICROS && own_time > until_done(left, others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;
    const CHUNK: u64 = 1 << 20;

    /// Three lanes of 25 MB/s and one of a tenth of it.
    fn lane_rates() -> LaneRates {
        let lane_rates = LaneRates::new(4);
        for lane in 0..3 {
            lane_rates.measured(lane, 25_000_000, SECOND);
        }
        lane_rates.measured(3, 2_500_000, SECOND);
        lane_rates
    }

    fn left(queued: u64) -> Load {
        Load {
            chunk: CHUNK,
            queued,
            with_others: 3,
            backlog: 100_000,
        }
    }

    #[test]
    fn a_slow_lane_leaves_the_last_chunks_to_the_others() {
        let lane_rates = lane_rates();
        assert!(lane_rates.is_slow(3) && !lane_rates.is_slow(0));
        // It takes 460 ms for one, in which the others carry 32 of them.
        assert!(!lane_rates.is_too_slow(3, left(40)));
        assert!(lane_rates.is_too_slow(3, left(20)));
        assert!(!lane_rates.is_too_slow(0, left(20)));
        let small = Load {
            chunk: 64 << 10,
            queued: 0,
            with_others: 0,
            backlog: 0,
        };
        assert!(!lane_rates.is_too_slow(3, small), "26 ms are not worth it");
    }

    #[test]
    fn a_lane_of_which_nothing_is_known_is_not_slow() {
        let lane_rates = lane_rates();
        lane_rates.forget(3);
        assert!(!lane_rates.is_slow(3));
        // Nor is any where the fast ones are not known.
        for lane in 0..3 {
            lane_rates.forget(lane);
        }
        lane_rates.measured(3, 2_500_000, SECOND);
        assert!(!lane_rates.is_slow(3));
    }

    #[test]
    fn a_lane_that_was_slow_once_is_tried_again() {
        let lane_rates = lane_rates();
        lane_rates.measured(3, 0, SECOND);
        let tries = (0..).find(|_| {
            lane_rates.rested(3);
            !lane_rates.is_slow(3)
        });
        assert!(tries.is_some_and(|tries| tries < 20), "{tries:?}");
    }

    #[test]
    fn nothing_overflows() {
        let lane_rates = LaneRates::new(2);
        lane_rates.measured(0, u64::MAX, 0);
        lane_rates.measured(1, 0, SECOND);
        for _ in 0..2000 {
            lane_rates.rested(0);
        }
        let load = Load {
            chunk: 1 << 30,
            queued: 1 << 16,
            with_others: 1 << 16,
            backlog: 1 << 40,
        };
        assert!(lane_rates.is_too_slow(1, load));
    }
}
