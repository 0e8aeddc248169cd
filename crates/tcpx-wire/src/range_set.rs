//! Sets of numbers that come in ranges: chunks by their number, bytes by their place.

use std::collections::VecDeque;
use std::ops::Range;

/// Ranges of numbers, ascending, neither overlapping nor touching.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet(VecDeque<Range<u64>>);

impl RangeSet {
    /// Ranges, not numbers.
    pub fn ranges(&self) -> usize {
        self.0.len()
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = &Range<u64>> {
        self.0.iter()
    }

    /// The first range.
    pub fn first(&self) -> Option<&Range<u64>> {
        self.0.front()
    }

    /// Whether no number is there.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds the numbers of a range.
    pub fn insert(&mut self, range: Range<u64>) {
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
    }

    /// Removes the numbers of a range.
    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|held| held.end <= range.start);
        let behind = self.0.partition_point(|held| held.start < range.end);
        let (mut left, mut right) = (None, None);
        for held in self.0.drain(first..behind) {
            if held.start < range.start {
                left = Some(held.start..range.start);
            }
            if range.end < held.end {
                right = Some(range.end..held.end);
            }
        }
        for rest in right.into_iter().chain(left) {
            self.0.insert(first, rest);
        }
    }

    /// Removes the first range if this number is in it; the first number from there on that is not
    /// in the set.
    pub fn take_first(&mut self, number: u64) -> u64 {
        match self.0.front() {
            Some(first) if first.contains(&number) => {
                let end = first.end;
                self.0.pop_front();
                end
            }
            _ => number,
        }
    }

    /// Whether a number of the range is there.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        let at = self.0.partition_point(|held| held.end <= range.start);
        let next = self.0.get(at).filter(|_| !range.is_empty());
        next.is_some_and(|held| held.start < range.end)
    }

    /// Whether a number is there.
    pub fn contains(&self, number: u64) -> bool {
        let at = self.0.partition_point(|held| held.end <= number);
        self.0.get(at).is_some_and(|held| held.contains(&number))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn holds_exactly_what_was_inserted_and_not_removed(
            changes in prop::collection::vec((0u64..200, 0u64..12, prop::bool::weighted(0.7)), 0..80),
        ) {
            let (mut set, mut model) = (RangeSet::default(), BTreeSet::new());
            for (start, length, adds) in changes {
                let range = start..start + length;
                let overlaps = range.clone().any(|number| model.contains(&number));
                prop_assert_eq!(set.overlaps(&range), overlaps);
                if adds {
                    set.insert(range.clone());
                    model.extend(range);
                } else {
                    set.remove(range.clone());
                    model.retain(|number| !range.contains(number));
                }
                let apart = |pair: (&Range<u64>, &Range<u64>)| pair.0.end < pair.1.start;
                prop_assert!(set.0.iter().zip(set.0.iter().skip(1)).all(apart), "{:?}", set);
                prop_assert!(set.0.iter().all(|held| !held.is_empty()));
            }
            for number in 0..220 {
                prop_assert_eq!(set.contains(number), model.contains(&number));
            }
            prop_assert_eq!(set.is_empty(), model.is_empty());
            let number = model.first().copied().unwrap_or(7);
            let passed = set.take_first(number);
            prop_assert!((number..passed).all(|number| model.contains(&number)));
            prop_assert!(!model.contains(&passed) && !set.contains(number));
        }
    }
}
