//! Sequences whose chunks, should they still come, are to be dropped.

use std::collections::VecDeque;
use std::ops::Range;

/// Most separate ranges that are remembered. A transfer's cancelled chunks are one range, so this
/// is about the number of cancelled transfers whose chunks may still be under way. The oldest range
/// is forgotten first; a chunk of it would then be a protocol error, never a wrong write.
const CAPACITY: usize = 256;

/// Ranges of sequence numbers, ascending, neither overlapping nor touching.
#[derive(Debug, Default)]
pub(super) struct Discards(VecDeque<Range<u64>>);

impl Discards {
    pub(super) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|held| held.end < range.start);
        let behind = self.0.partition_point(|held| held.start <= range.end);
        let mut merged = range;
        for held in self.0.drain(first..behind) {
            merged = merged.start.min(held.start)..merged.end.max(held.end);
        }
        self.0.insert(first, merged);
        if self.0.len() > CAPACITY {
            self.0.pop_front();
        }
    }

    pub(super) fn contains(&self, sequence: u64) -> bool {
        let behind = self.0.partition_point(|held| held.end <= sequence);
        self.0
            .get(behind)
            .is_some_and(|held| held.contains(&sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn holds_exactly_what_was_inserted(ranges in prop::collection::vec((0u64..200, 0u64..12), 0..60)) {
            let mut discards = Discards::default();
            let mut model = std::collections::BTreeSet::new();
            for (start, length) in ranges {
                discards.insert(start..start + length);
                model.extend(start..start + length);
            }
            for sequence in 0..220 {
                prop_assert_eq!(discards.contains(sequence), model.contains(&sequence));
            }
            let ranges: Vec<_> = discards.0.iter().cloned().collect();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }

    #[test]
    fn stays_bounded_and_forgets_the_oldest() {
        let mut discards = Discards::default();
        for index in 0..2 * CAPACITY as u64 {
            discards.insert(index * 10..index * 10 + 1);
        }
        assert_eq!(discards.0.len(), CAPACITY);
        assert!(!discards.contains(0));
        assert!(discards.contains((2 * CAPACITY as u64 - 1) * 10));
    }
}
