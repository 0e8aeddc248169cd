//! Numbers of free slots, the last one given back on top.
//!
//! A stack and not a queue: the slot that was used last is the one whose bytes still lie in the caches, and
//! a pool that needs few slots at a time touches only those few.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};

/// A stack without a lock.
#[derive(Debug)]
pub(crate) struct FreeSlots {
    /// The top slot's number and one, 0 when there is none; above it a count of changes, so that a top
    /// which went and came back meanwhile is not taken for the same.
    top: AtomicU64,
    /// What lies below each slot, in the same notation.
    below: Box<[AtomicU32]>,
    len: AtomicUsize,
}

const CHANGE: u64 = 1 << 32;

impl FreeSlots {
    /// An empty stack for slots below `slots`.
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            top: AtomicU64::new(0),
            below: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            len: AtomicUsize::new(0),
        }
    }

    /// Slots on the stack; while others use it, at some time during the call.
    pub(crate) fn len(&self) -> usize {
        self.len.load(SeqCst)
    }

    /// Puts a slot on top that is not on the stack.
    pub(crate) fn push(&self, slot: u32) {
        // Counted first, so that the count never falls below what others have taken.
        self.len.fetch_add(1, SeqCst);
        self.change(|top| {
            self.below[slot as usize].store(number(top), SeqCst);
            Some(slot + 1)
        });
    }

    /// Takes the top slot.
    pub(crate) fn pop(&self) -> Option<u32> {
        // Another thread may take the same top meanwhile and change what is below it; then the top has
        // changed too, and what was read here counts for nothing.
        let before = self.change(|top| {
            let slot = number(top).checked_sub(1)?;
            Some(self.below[slot as usize].load(SeqCst))
        })?;
        self.len.fetch_sub(1, SeqCst);
        number(before).checked_sub(1)
    }

    /// Replaces the top; what it was before.
    fn change(&self, next: impl Fn(u64) -> Option<u32>) -> Option<u64> {
        self.top
            .fetch_update(SeqCst, SeqCst, |top| {
                let changes = (top & !(CHANGE - 1)).wrapping_add(CHANGE);
                Some(changes | u64::from(next(top)?))
            })
            .ok()
    }
}

fn number(top: u64) -> u32 {
    // The low half.
    top as u32
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn the_last_slot_given_back_is_the_next_one_taken() {
        let free = FreeSlots::new(4);
        assert_eq!((free.pop(), free.len()), (None, 0));
        [2, 0, 3].into_iter().for_each(|slot| free.push(slot));
        assert_eq!((free.pop(), free.len()), (Some(3), 2));
        free.push(1);
        let rest: Vec<_> = std::iter::from_fn(|| free.pop()).collect();
        assert_eq!(rest, [1, 0, 2]);
    }

    #[test]
    fn a_slot_has_one_holder_whoever_takes_and_gives_back() {
        const SLOTS: u32 = 5;
        let free = FreeSlots::new(SLOTS as usize);
        (0..SLOTS).for_each(|slot| free.push(slot));
        let holders: Vec<AtomicU32> = (0..SLOTS).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let held: Vec<_> = (0..2).filter_map(|_| free.pop()).collect();
                        for slot in held {
                            let before = holders[slot as usize].fetch_add(1, SeqCst);
                            assert_eq!(before, 0, "slot {slot} has two holders");
                            holders[slot as usize].fetch_sub(1, SeqCst);
                            free.push(slot);
                        }
                    }
                });
            }
        });
        let mut rest: Vec<_> = std::iter::from_fn(|| free.pop()).collect();
        rest.sort_unstable();
        assert_eq!(rest, [0, 1, 2, 3, 4]);
    }
}
