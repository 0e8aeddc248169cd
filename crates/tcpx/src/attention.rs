//! Whether the engine's thread may leave a connection to the program for a moment.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// A thread that looked after a connection may leave it unwatched for a moment, unless another thread
/// sleeps until the engine wakes it. Whichever of the two comes second sees the other.
#[derive(Debug)]
pub(crate) struct Attention {
    /// Until when, in microseconds of the connection; 0 where the engine's thread watches.
    until: AtomicU64,
    sleepers: AtomicUsize,
}

impl Attention {
    pub(crate) fn new() -> Self {
        Self {
            until: AtomicU64::new(0),
            sleepers: AtomicUsize::new(0),
        }
    }

    /// Begins, or goes on, until this time. Whoever began asks
    /// [`is_wanted_elsewhere`](Self::is_wanted_elsewhere) afterwards, and ends it if so.
    pub(crate) fn begin(&self, until: u64) {
        self.until.store(until.max(1), Ordering::SeqCst);
    }

    pub(crate) fn end(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    pub(crate) fn lasts_until(&self) -> Option<u64> {
        Some(self.until.load(Ordering::SeqCst)).filter(|until| *until > 0)
    }

    /// A thread sleeps until the engine wakes it. Comes after [`begin`](Self::begin).
    pub(crate) fn is_wanted_elsewhere(&self) -> bool {
        fence(Ordering::SeqCst);
        self.sleepers.load(Ordering::SeqCst) > 0
    }

    /// The calling thread is about to sleep: it ends what [`lasts_until`](Self::lasts_until) says
    /// first.
    pub(crate) fn want(&self) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// It sleeps no longer.
    pub(crate) fn unwant(&self) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_is_seen_as_long_as_it_does() {
        let attention = Attention::new();
        assert_eq!(attention.lasts_until(), None);
        attention.begin(0);
        assert_eq!(attention.lasts_until(), Some(1));
        attention.want();
        assert!(attention.is_wanted_elsewhere());
        attention.unwant();
        assert!(!attention.is_wanted_elsewhere());
        attention.end();
        assert_eq!(attention.lasts_until(), None);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;

    /// One thread leaves the connection unwatched while another goes to sleep.
    #[test]
    fn nobody_sleeps_while_nobody_watches() {
        loom::model(|| {
            let shared = Arc::new((Attention::new(), AtomicBool::new(true)));
            let leaving = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (attention, driving) = &*shared;
                    attention.begin(1);
                    driving.store(false, Ordering::SeqCst);
                    if attention.is_wanted_elsewhere() {
                        attention.end();
                    }
                })
            };
            let (attention, driving) = &*shared;
            attention.want();
            if attention.lasts_until().is_some() && !driving.load(Ordering::SeqCst) {
                attention.end();
            }
            leaving.join().expect("it leaves");
            assert_eq!(attention.lasts_until(), None);
            attention.unwant();
        });
    }
}
