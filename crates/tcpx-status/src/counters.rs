//! Counts since a connection, or a process, began.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a connection counts; of a process the sum over all that it had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Payload bytes that lanes or channels sent.
    pub bytes_sent: u64,
    /// Payload bytes that they received.
    pub bytes_received: u64,
    /// Bytes of the control connection, small messages among them, sent.
    pub control_bytes_sent: u64,
    /// The same, received.
    pub control_bytes_received: u64,
    /// Bytes of cancelled or repeated chunks that were read and dropped.
    pub bytes_discarded: u64,
    /// Chunks that were sent.
    pub chunks_sent: u64,
    /// Chunks that were received.
    pub chunks_received: u64,
    /// Chunks that were sent again because their lane failed.
    pub chunks_resent: u64,
    /// Lanes that failed.
    pub lanes_lost: u64,
    /// Lanes that came back.
    pub lanes_restored: u64,
    /// Lanes that failed because something had changed what the peer sealed.
    pub lanes_forged: u64,
    /// Operations of this side that ended well.
    pub operations_completed: u64,
    /// Operations of this side that ended with an error.
    pub operations_failed: u64,
    /// How long those that ended well took.
    pub durations: Histogram,
}

impl Counters {
    /// Adds another connection's.
    pub fn add(&mut self, other: &Self) {
        self.combine(other, |into, from| *into = into.saturating_add(from));
    }

    /// Takes what the same connection counts now; what it cannot tell any more stays.
    pub(crate) fn raise(&mut self, now: &Self) {
        self.combine(now, |into, from| *into = from.max(*into));
    }

    fn combine(&mut self, other: &Self, change: impl Fn(&mut u64, u64)) {
        let Self {
            bytes_sent,
            bytes_received,
            control_bytes_sent,
            control_bytes_received,
            bytes_discarded,
            chunks_sent,
            chunks_received,
            chunks_resent,
            lanes_lost,
            lanes_restored,
            lanes_forged,
            operations_completed,
            operations_failed,
            durations,
        } = self;
        for (into, from) in [
            (bytes_sent, other.bytes_sent),
            (bytes_received, other.bytes_received),
            (control_bytes_sent, other.control_bytes_sent),
            (control_bytes_received, other.control_bytes_received),
            (bytes_discarded, other.bytes_discarded),
            (chunks_sent, other.chunks_sent),
            (chunks_received, other.chunks_received),
            (chunks_resent, other.chunks_resent),
            (lanes_lost, other.lanes_lost),
            (lanes_restored, other.lanes_restored),
            (lanes_forged, other.lanes_forged),
            (operations_completed, other.operations_completed),
            (operations_failed, other.operations_failed),
            (&mut durations.above, other.durations.above),
            (&mut durations.sum_us, other.durations.sum_us),
        ] {
            change(into, from);
        }
        for (into, from) in durations.buckets.iter_mut().zip(other.durations.buckets) {
            change(into, from);
        }
    }
}

/// Buckets of [`Histogram`], each four times as long as the one before.
const BUCKETS: usize = 12;

/// The first bucket's bound, in microseconds.
const FIRST: u64 = 16;

/// How many operations took how long.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// Operations that took up to 16 us, 64 us, 256 us and so on; those above the last bound, 67 s,
    /// are in [`above`](Self::above).
    pub buckets: [u64; BUCKETS],
    /// Operations that took longer than the last bound.
    pub above: u64,
    /// The sum of all times, in microseconds.
    pub sum_us: u64,
}

impl Histogram {
    /// Counts one operation.
    pub fn record(&mut self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.sum_us = self.sum_us.saturating_add(micros);
        match Self::bounds().position(|bound| micros <= bound) {
            Some(index) => self.buckets[index] += 1,
            None => self.above += 1,
        }
    }

    /// The buckets' bounds, in microseconds.
    pub fn bounds() -> impl Iterator<Item = u64> {
        (0..BUCKETS).map(|index| FIRST << (2 * index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_counts_in_the_first_bucket_that_holds_it() {
        let mut histogram = Histogram::default();
        for micros in [0, 16, 17, 64, 65, 67_108_864, 67_108_865, u64::MAX] {
            histogram.record(Duration::from_micros(micros));
        }
        assert_eq!(histogram.buckets[..3], [2, 2, 1]);
        assert_eq!((histogram.buckets[BUCKETS - 1], histogram.above), (1, 2));
        assert_eq!(histogram.sum_us, u64::MAX);
        assert_eq!(Histogram::bounds().last(), Some(67_108_864));
    }
}
