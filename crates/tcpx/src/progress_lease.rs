//! The lease that keeps the engine's thread from a connection.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// The thread that drove a connection last has a lease on it, unless another one waits for the
/// engine's thread. Whichever of the two comes second sees the other.
#[derive(Debug)]
pub(crate) struct ProgressLease {
    /// Until when, in microseconds of the connection; 0 where the engine's thread watches.
    until: AtomicU64,
    /// Threads and tasks that wait for the engine's thread.
    watchers: AtomicUsize,
}

impl ProgressLease {
    pub(crate) fn new() -> Self {
        Self {
            until: AtomicU64::new(0),
            watchers: AtomicUsize::new(0),
        }
    }

    /// Begins, or goes on, until this time. Whoever began asks
    /// [`is_watched`](Self::is_watched) afterwards, and ends it if so.
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
    pub(crate) fn is_watched(&self) -> bool {
        fence(Ordering::SeqCst);
        self.watchers.load(Ordering::SeqCst) > 0
    }

    /// The calling thread is about to sleep: it ends what [`lasts_until`](Self::lasts_until) says
    /// first.
    pub(crate) fn watch(&self) {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// It sleeps no longer.
    pub(crate) fn unwatch(&self) {
        self.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_is_seen_as_long_as_it_does() {
        let lease = ProgressLease::new();
        assert_eq!(lease.lasts_until(), None);
        lease.begin(0);
        assert_eq!(lease.lasts_until(), Some(1));
        lease.watch();
        assert!(lease.is_watched());
        lease.unwatch();
        assert!(!lease.is_watched());
        lease.end();
        assert_eq!(lease.lasts_until(), None);
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
            let shared = Arc::new((ProgressLease::new(), AtomicBool::new(true)));
            let leaving = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (lease, progress_owner) = &*shared;
                    lease.begin(1);
                    progress_owner.store(false, Ordering::SeqCst);
                    if lease.is_watched() {
                        lease.end();
                    }
                })
            };
            let (lease, progress_owner) = &*shared;
            lease.watch();
            if lease.lasts_until().is_some() && !progress_owner.load(Ordering::SeqCst) {
                lease.end();
            }
            leaving.join().expect("it leaves");
            assert_eq!(lease.lasts_until(), None);
            lease.unwatch();
        });
    }
}
