//! How many comms use something, and the end with the last one.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The last user left: nobody enters any more.
const CLOSED: usize = usize::MAX;

/// A count that ends when it comes back to 0.
#[derive(Debug, Default)]
pub(super) struct Users(AtomicUsize);

impl Users {
    /// One more; `false` when the last one has left.
    pub(super) fn enter(&self) -> bool {
        self.0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |users| {
                (users != CLOSED).then(|| users + 1)
            })
            .is_ok()
    }

    /// One less; `true` for the last one. Counting and closing are one step: who enters meanwhile
    /// is counted before, or sees the end.
    pub(super) fn leave(&self) -> bool {
        self.0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |users| match users {
                0 | CLOSED => None,
                1 => Some(CLOSED),
                more => Some(more - 1),
            })
            .is_ok_and(|before| before == 1)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.0.load(Ordering::SeqCst) == CLOSED
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn who_enters_while_the_last_one_leaves_is_counted_or_sees_the_end() {
        const ROUNDS: usize = 20_000;
        let rounds: Vec<_> = (0..ROUNDS).map(|_| Users::default()).collect();
        let start = Barrier::new(2);
        let closed_under_a_user = std::thread::scope(|scope| {
            scope.spawn(|| {
                for users in &rounds {
                    assert!(users.enter());
                    start.wait();
                    users.leave();
                }
            });
            let round = |users: &Users| {
                start.wait();
                if !users.enter() {
                    return false;
                }
                let closed = (0..100).any(|_| users.is_closed());
                users.leave();
                closed
            };
            // Every round, so that the other thread is never left waiting.
            rounds.iter().filter(|users| round(users)).count()
        });
        // Both have left each of them by now.
        let open = rounds.iter().filter(|users| !users.is_closed()).count();
        assert_eq!((closed_under_a_user, open), (0, 0));
    }

    #[test]
    fn the_end_is_final_and_a_count_too_many_is_nothing() {
        let users = Users::default();
        assert!(!users.leave() && users.enter() && users.enter());
        assert!(!users.leave() && !users.is_closed());
        assert!(users.leave() && users.is_closed());
        assert!(!users.enter() && !users.leave() && users.is_closed());
    }
}
