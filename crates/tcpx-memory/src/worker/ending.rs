//! Threads of GPU workers that have not ended yet.
//!
//! A worker's thread gives its streams, events and memory back after the worker was dropped. The driver must
//! not be torn down meanwhile, as the end of the process does.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;

/// The threads of this process.
static THREADS: Count = Count::new();

struct Count {
    running: Mutex<usize>,
    ended: Condvar,
}

/// Counts as running until dropped.
pub(super) struct Ending(&'static Count);

impl Ending {
    pub(super) fn announce() -> Self {
        THREADS.announce()
    }

    /// Runs the thread's work. What that owns is gone before the thread counts as ended: the last
    /// reference to a GPU speaks to the driver, too.
    pub(super) fn around(self, run: impl FnOnce()) {
        let _counted = self;
        run();
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let Count { running, ended } = self.0;
        *lock(running) -= 1;
        ended.notify_all();
    }
}

impl Count {
    const fn new() -> Self {
        Self {
            running: Mutex::new(0),
            ended: Condvar::new(),
        }
    }

    fn announce(&'static self) -> Ending {
        *lock(&self.running) += 1;
        Ending(self)
    }

    fn wait(&self, limit: Duration) -> bool {
        let running = lock(&self.running);
        let waited = self
            .ended
            .wait_timeout_while(running, limit, |running| *running > 0);
        let (running, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *running == 0
    }
}

/// Waits until no thread runs, or `limit` has passed; whether none runs.
pub(super) fn wait(limit: Duration) -> bool {
    THREADS.wait(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_ended_when_nothing_of_its_work_is_left() {
        static COUNT: Count = Count::new();
        /// As the last reference to a GPU, which gives its context back.
        struct Owned;
        impl Drop for Owned {
            fn drop(&mut self) {
                assert!(!COUNT.wait(Duration::ZERO), "counted as ended");
            }
        }
        assert!(COUNT.wait(Duration::ZERO));
        let (ending, owned) = (COUNT.announce(), Owned);
        let thread = std::thread::spawn(move || {
            ending.around(move || {
                let _used = &owned;
            });
        });
        assert!(COUNT.wait(Duration::from_secs(60)));
        thread.join().unwrap();
    }
}
