//! Copies under way in the copy worker, seen from the thread that polls.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use tcpx_memory::{CompletionSink, MemoryError};

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
const DONE: u8 = 2;
const FAILED: u8 = 3;

/// Longest wait for copies when a comm is closed.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// State of up to `N` copies, each named by its token.
#[derive(Debug)]
pub(crate) struct Copies<const N: usize> {
    states: [AtomicU8; N],
    error: OnceLock<MemoryError>,
}

impl<const N: usize> Copies<N> {
    pub(crate) fn new() -> Self {
        Self {
            states: std::array::from_fn(|_| AtomicU8::new(IDLE)),
            error: OnceLock::new(),
        }
    }

    /// Marks a copy as submitted; call it before the worker can see the job.
    pub(crate) fn start(&self, slot: usize) {
        self.states[slot].store(RUNNING, Ordering::Release);
    }

    /// The copy was not taken by the worker, or its result has been used.
    pub(crate) fn reset(&self, slot: usize) {
        self.states[slot].store(IDLE, Ordering::Release);
    }

    /// Whether the copy has ended well; an error when it failed.
    pub(crate) fn finished(&self, slot: usize) -> Result<bool, String> {
        match self.states[slot].load(Ordering::Acquire) {
            DONE => Ok(true),
            FAILED => Err(self
                .error
                .get()
                .map_or_else(|| "unknown error".to_owned(), ToString::to_string)),
            _ => Ok(false),
        }
    }

    /// Waits until the worker touches none of the memory any more; `false` when it still does
    /// after 5 s.
    pub(crate) fn wait_quiet(&self) -> bool {
        let deadline = Instant::now() + CLOSE_WAIT;
        loop {
            let running = self
                .states
                .iter()
                .any(|state| state.load(Ordering::Acquire) == RUNNING);
            if !running {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            // The worker reports by memory only; closing is rare and not worth a condition.
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl<const N: usize> CompletionSink for Copies<N> {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        let Some(state) = usize::try_from(token).ok().and_then(|t| self.states.get(t)) else {
            return;
        };
        let end = match result {
            Ok(_) => DONE,
            Err(error) => {
                // The first error explains the others.
                let _ = self.error.set(error);
                FAILED
            }
        };
        state.store(end, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_runs_ends_and_can_run_again() {
        let copies = Copies::<2>::new();
        assert_eq!(copies.finished(1), Ok(false));
        copies.start(1);
        assert_eq!(copies.finished(1), Ok(false));
        copies.complete(1, Ok(0));
        assert_eq!(copies.finished(1), Ok(true));
        copies.reset(1);
        assert_eq!(copies.finished(1), Ok(false));
        assert!(copies.wait_quiet());
        copies.complete(7, Ok(0));
    }

    #[test]
    fn a_failed_copy_says_why() {
        let copies = Copies::<1>::new();
        copies.start(0);
        let error = MemoryError::OutOfBounds {
            start: 5,
            end: 9,
            len: 7,
        };
        copies.complete(0, Err(error.clone()));
        assert_eq!(copies.finished(0), Err(error.to_string()));
    }
}
