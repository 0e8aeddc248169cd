//! Threads of GPU workers that have not ended yet.
//!
//! A worker's thread gives its streams, events and memory back after the worker was dropped. The driver must
//! not be torn down meanwhile, as the end of the process does.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// Counts as running until dropped.
pub(super) struct Ending(());

impl Ending {
    pub(super) fn announce() -> Self {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self(())
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDED.notify_all();
    }
}

/// Waits until no thread runs, or `limit` has passed; whether none runs.
pub(super) fn wait(limit: Duration) -> bool {
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = ENDED.wait_timeout_while(running, limit, |running| *running > 0);
    let (running, _) = waited.unwrap_or_else(PoisonError::into_inner);
    *running == 0
}
