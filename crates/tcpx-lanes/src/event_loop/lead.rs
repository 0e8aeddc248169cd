//! Who runs a loop: its own thread, or for a while a leader, a thread that waits for what the loop
//! moves.
//!
//! A leader begins at any time: whoever runs the loop holds its lock for a round, so that the
//! loop's thread may still be in one, or wake up in its sleep for one more. Then it parks, until
//! the lease of the leader that left last has ended. Who leaves wakes it only if it would else
//! sleep for longer.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A leader runs the loop.
const LED: u64 = u64::MAX;

/// Times are in microseconds of the loop; 0 is none.
#[derive(Debug)]
pub(super) struct Leadership {
    /// Until when the loop's thread leaves the loop alone: [`LED`], or the end of a lease.
    until: AtomicU64,
    /// Until when it was to leave the loop alone when a leader last left.
    lease: AtomicU64,
    /// Until when the loop's thread is parked.
    parked_until: AtomicU64,
}

impl Leadership {
    pub(super) fn new() -> Self {
        Self {
            until: AtomicU64::new(0),
            lease: AtomicU64::new(0),
            parked_until: AtomicU64::new(0),
        }
    }

    /// The calling thread is the leader from now on, unless there is one.
    pub(super) fn lead(&self) -> bool {
        self.until.swap(LED, Ordering::SeqCst) != LED
    }

    /// The leader leaves, and nobody runs the loop until then; whether the loop's thread is to be
    /// woken for that.
    pub(super) fn begin_lease(&self, until: u64) -> bool {
        self.lease.store(until, Ordering::Relaxed);
        self.until.store(until, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.parked_until.load(Ordering::SeqCst) > until
    }

    /// Ends a lease; whether the loop's thread is to be woken for that.
    pub(super) fn end_lease(&self) -> bool {
        let ended = |until| (until != LED).then_some(0);
        let before = self
            .until
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, ended);
        fence(Ordering::SeqCst);
        before.is_ok_and(|until| until > 0) && self.parked_until.load(Ordering::SeqCst) > 0
    }

    /// Whether the loop's thread leaves the loop alone.
    pub(super) fn is_led(&self, now: impl FnOnce() -> u64) -> bool {
        match self.until.load(Ordering::SeqCst) {
            0 => false,
            LED => true,
            // Another leader may come first: then it is led again.
            until if until <= now() => self
                .until
                .compare_exchange(until, 0, Ordering::SeqCst, Ordering::SeqCst)
                .is_err_and(|now| now != 0),
            _ => true,
        }
    }

    /// The loop's thread parks: calls `park` with the time until which it does, if there is one,
    /// unless it would be too long by now. While there is a leader it parks until somebody wakes
    /// it, but for one that left a moment ago, and will soon again: as long as that lease lasts, so
    /// that nobody need wake it.
    pub(super) fn park(&self, now: u64, park: impl FnOnce(Option<u64>)) {
        let until = match self.until.load(Ordering::SeqCst) {
            LED => match self.lease.load(Ordering::Relaxed) {
                lease if lease > now => lease,
                _ => LED,
            },
            until => until,
        };
        self.parked_until.store(until, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // Who leaves for a shorter time sees how long this one sleeps, or is seen here.
        if until <= self.until.load(Ordering::SeqCst) {
            park(Some(until).filter(|until| *until != LED));
        }
        self.parked_until.store(0, Ordering::SeqCst);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;

    /// A leader leaves while the loop's thread parks: the thread sleeps no longer than the lease,
    /// or is woken.
    #[test]
    fn nobody_sleeps_while_nobody_leads() {
        for lease in [0, 5] {
            loom::model(move || {
                let shared = Arc::new((Leadership::new(), AtomicBool::new(false)));
                assert!(shared.0.lead());
                let leader = {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || {
                        let wakes = shared.0.begin_lease(lease);
                        shared.1.store(wakes, Ordering::SeqCst);
                    })
                };
                let mut leader = Some(leader);
                if shared.0.is_led(|| 0) {
                    shared.0.park(0, |until| {
                        // It sleeps until it is woken.
                        let leader = leader.take().map(loom::thread::JoinHandle::join);
                        leader.expect("it leads").expect("it leaves");
                        let woken = shared.1.load(Ordering::SeqCst);
                        assert!(woken || until.is_some(), "asleep without an end");
                    });
                }
                if let Some(leader) = leader {
                    leader.join().expect("it leaves");
                }
                assert!(!shared.0.is_led(|| 6));
            });
        }
    }

    /// The lease ends while a leader comes: the loop's thread runs the loop for good only if nobody
    /// leads.
    #[test]
    fn a_leader_that_comes_at_the_end_of_the_lease_is_seen() {
        loom::model(|| {
            let shared = Arc::new(Leadership::new());
            assert!(shared.lead());
            assert!(!shared.begin_lease(5));
            let leader = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || assert!(shared.lead()))
            };
            let led = shared.is_led(|| 6);
            leader.join().expect("it leads");
            assert!(shared.is_led(|| 6), "a leader is forgotten, {led}");
        });
    }

    #[test]
    fn one_of_two_leads() {
        loom::model(|| {
            let shared = Arc::new(Leadership::new());
            let other = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || shared.lead())
            };
            let here = shared.lead();
            assert!(here != other.join().expect("it ends"));
        });
    }
}
