//! A bound on the pinned slots that lanes may keep.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a send holds along with its part of a pinned slot.
#[derive(Debug)]
pub(super) struct Permit {
    /// How many slots of the same pool may be lent to lanes.
    lent: Arc<AtomicUsize>,
    /// As many slots has the pool.
    most: usize,
    is_lent: bool,
}

impl Permit {
    /// Of a pool of so many slots.
    pub(super) fn new(lent: &Arc<AtomicUsize>, most: usize) -> Self {
        Self {
            lent: Arc::clone(lent),
            most,
            is_lent: false,
        }
    }

    /// Whether the slot may be lent to a lane's socket, which may keep it for as long as its peer
    /// reads nothing: never all of them, as others go on over the last one.
    pub(super) fn lend(&mut self) -> bool {
        let more = |lent| (lent + 1 < self.most).then_some(lent + 1);
        self.is_lent = self.is_lent
            || self
                .lent
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
                .is_ok();
        self.is_lent
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_lent {
            self.lent.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane that is silent keeps those that were lent to it, though nobody wants their chunks any
    /// more.
    #[test]
    fn one_that_is_not_lent_comes_back_whatever_lanes_keep() {
        for slots in 2..9 {
            let lent = Arc::default();
            let all = (0..slots).map(|_| Permit::new(&lent, slots));
            let (mut kept, mut rest): (Vec<_>, Vec<_>) = all
                .map(|mut permit| (permit.lend(), permit))
                .partition(|(is_lent, _)| *is_lent);
            let [(_, last)] = &mut rest[..] else {
                panic!("{} of {slots} are lent", kept.len())
            };
            assert!(!last.lend());
            let given_back = kept.pop().is_some();
            assert_eq!(last.lend(), given_back);
        }
    }
}
