//! A bound on the pinned slots that hold bytes to send, and on those of them that lanes may keep.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::roster::Roster;

/// The slots of one pool that sends may hold.
#[derive(Debug, Default)]
pub(super) struct Permits {
    taken: AtomicUsize,
    /// Of those, how many are of slots that may be lent to lanes.
    lent: AtomicUsize,
    has_waiting: AtomicBool,
}

/// The right to hold one slot for a send; dropping it wakes those who wait.
#[derive(Debug)]
pub(super) struct Permit {
    permits: Arc<Permits>,
    roster: Arc<Roster>,
    /// As many are there.
    most: usize,
    is_lent: bool,
}

impl Permit {
    /// Whether the slot may be lent to a lane's socket, which may keep it for as long as its peer reads nothing: never
    /// all of them, as others go on over the last one.
    pub(super) fn lend(&mut self) -> bool {
        let most = self.most.saturating_sub(1);
        self.is_lent = self.is_lent || add_below(&self.permits.lent, most);
        self.is_lent
    }
}

/// Counts one more, if that makes no more than `most`.
fn add_below(count: &AtomicUsize, most: usize) -> bool {
    let more = |count| (count < most).then_some(count + 1);
    count
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
        .is_ok()
}

impl Permits {
    /// Takes a permit while fewer than `most` are taken. Otherwise `roster` is woken once one is given back.
    pub(super) fn take(self: &Arc<Self>, most: usize, roster: &Arc<Roster>) -> Option<Permit> {
        self.try_take(most, roster).or_else(|| {
            self.has_waiting.store(true, Ordering::SeqCst);
            // A second look: one given back before the line above woke nobody.
            self.try_take(most, roster)
        })
    }

    /// Whether sends hold slots.
    pub(super) fn are_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed) > 0
    }

    fn try_take(self: &Arc<Self>, most: usize, roster: &Arc<Roster>) -> Option<Permit> {
        add_below(&self.taken, most).then(|| Permit {
            permits: Arc::clone(self),
            roster: Arc::clone(roster),
            most,
            is_lent: false,
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_lent {
            self.permits.lent.fetch_sub(1, Ordering::SeqCst);
        }
        self.permits.taken.fetch_sub(1, Ordering::SeqCst);
        if self.permits.has_waiting.swap(false, Ordering::SeqCst) {
            self.roster.wake_any_sender();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane that is silent keeps those that were lent to it, though nobody wants their chunks any more.
    #[test]
    fn one_that_is_not_lent_comes_back_whatever_lanes_keep() {
        let roster = Arc::new(Roster::new(1).expect("an eventfd"));
        for slots in 2..9 {
            let permits = Arc::<Permits>::default();
            let mut kept = Vec::new();
            for _ in 0..2 * slots {
                let mut taken = permits.take(slots, &roster).expect("one is left");
                if taken.lend() {
                    kept.push(taken);
                }
            }
            let mut last = permits.take(slots, &roster).expect("one is left");
            assert!(permits.take(slots, &roster).is_none() && !last.lend());
            let given_back = kept.pop().is_some();
            assert_eq!(last.lend(), given_back);
        }
    }

    #[test]
    fn one_given_back_between_the_look_and_the_wait_is_taken() {
        let permits = Arc::<Permits>::default();
        let roster = Arc::new(Roster::new(1).expect("an eventfd"));
        let all: Vec<Permit> = (0..3)
            .map(|_| permits.take(3, &roster).expect("three"))
            .collect();
        assert!(permits.try_take(3, &roster).is_none());
        // Nobody waits yet, so this wakes nobody.
        drop(all);
        assert!(!permits.has_waiting.load(Ordering::SeqCst));
        let late = permits.take(3, &roster);
        assert!(late.is_some(), "it would wait for what is there");
    }
}
