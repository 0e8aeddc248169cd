//! Numbers of free slots, taken by their place: slots that are adjacent in memory can be copied as
//! one.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

/// A set without a lock.
#[derive(Debug)]
pub(crate) struct FreeSlots {
    /// A bit for each slot, set while it is free.
    words: Box<[AtomicU64]>,
    /// Where the search for the next slot in turn begins.
    turn: AtomicUsize,
}

const BITS: usize = u64::BITS as usize;

impl FreeSlots {
    /// An empty set for slots below `slots`.
    pub(crate) fn new(slots: usize) -> Self {
        let words = 0..slots.div_ceil(BITS);
        Self {
            words: words.map(|_| AtomicU64::new(0)).collect(),
            turn: AtomicUsize::new(0),
        }
    }

    /// Slots in the set; while others use it, about as many.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        let free = |word: &AtomicU64| word.load(SeqCst).count_ones() as usize;
        self.words.iter().map(free).sum()
    }

    /// Returns a slot that is not in the set.
    pub(crate) fn give_back(&self, slot: u32) {
        let slot = slot as usize;
        self.words[slot / BITS].fetch_or(1 << (slot % BITS), SeqCst);
    }

    /// Takes the first slot.
    pub(crate) fn take_first(&self) -> Option<u32> {
        self.take_among(0..self.words.len() * BITS)
    }

    /// Takes the slots before `end` in turn; one behind those where none of them is free.
    pub(crate) fn take_in_turn(&self, end: usize) -> Option<u32> {
        let all = self.words.len() * BITS;
        let end = end.min(all);
        let turn = self.turn.load(SeqCst).min(end);
        let slot = [turn..end, 0..turn, end..all]
            .into_iter()
            .find_map(|among| self.take_among(among))?;
        self.turn.store((slot as usize + 1) % end.max(1), SeqCst);
        Some(slot)
    }

    /// Takes the first slot of a range.
    pub(crate) fn take_among(&self, among: Range<usize>) -> Option<u32> {
        let words = among.start / BITS..among.end.div_ceil(BITS).min(self.words.len());
        words.into_iter().find_map(|word| {
            let first = word * BITS;
            // Bits of this word from the range's start on, without those from its end on.
            let from = |place: usize| match place.saturating_sub(first) {
                bit if bit < BITS => u64::MAX << bit,
                _ => 0,
            };
            self.take_in(word, from(among.start) & !from(among.end))
        })
    }

    /// Takes the lowest slot of a word among these bits.
    fn take_in(&self, word: usize, among: u64) -> Option<u32> {
        let lowest = |free: u64| free & among & (free & among).wrapping_neg();
        let before = self.words[word]
            .fetch_update(SeqCst, SeqCst, |free| {
                Some(free & !lowest(free)).filter(|left| *left != free)
            })
            .ok()?;
        // Below the number of slots, which is an u32 here.
        Some((word * BITS) as u32 + lowest(before).trailing_zeros())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn full(slots: u32) -> FreeSlots {
        let free = FreeSlots::new(slots as usize);
        (0..slots).for_each(|slot| free.give_back(slot));
        free
    }

    #[test]
    fn the_first_slot_of_a_range_is_taken() {
        let free = FreeSlots::new(200);
        assert_eq!((free.take_first(), free.len()), (None, 0));
        for slot in [3, 63, 64, 150] {
            free.give_back(slot);
        }
        assert_eq!(free.take_among(4..63), None);
        assert_eq!(free.take_among(65..150), None);
        assert_eq!(free.take_among(150..1000), Some(150));
        assert_eq!(free.take_among(4..200), Some(63));
        assert_eq!(free.take_among(4..200), Some(64));
        assert_eq!((free.take_first(), free.len()), (Some(3), 0));
        assert_eq!(free.take_among(900..1000), None);
    }

    #[test]
    fn slots_in_turn_differ_and_fall_back_to_later_ones() {
        let free = full(130);
        for round in 0..3 {
            for slot in 0..70 {
                assert_eq!(free.take_in_turn(70), Some(slot), "round {round}");
                free.give_back(slot);
            }
        }
        let all: Vec<_> = std::iter::from_fn(|| free.take_in_turn(70)).collect();
        assert_eq!(all, (0..130).collect::<Vec<_>>());
    }

    #[test]
    fn a_slot_has_one_holder_whoever_takes_and_gives_back() {
        const SLOTS: u32 = 5;
        let free = full(SLOTS);
        let holders: Vec<AtomicU32> = (0..SLOTS).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for start in 0..4 {
                let (free, holders) = (&free, &holders);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let held = [free.take_among(start..5), free.take_in_turn(4)];
                        for slot in held.into_iter().flatten() {
                            let before = holders[slot as usize].fetch_add(1, SeqCst);
                            assert_eq!(before, 0, "slot {slot} has two holders");
                            holders[slot as usize].fetch_sub(1, SeqCst);
                            free.give_back(slot);
                        }
                    }
                });
            }
        });
        let rest: Vec<_> = std::iter::from_fn(|| free.take_first()).collect();
        assert_eq!(rest, [0, 1, 2, 3, 4]);
    }
}
