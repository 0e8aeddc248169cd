//! Where the copy worker leaves its results for the engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tcpx_lanes::lock;
use tcpx_memory::{CompletionSink, MemoryError};

use crate::driver::{DrivenId, Driver};

/// Result of one job of the copy worker.
pub(crate) type Finished = (u64, Result<u64, MemoryError>);

/// Collects results and wakes the driver of the connection.
#[derive(Debug)]
pub(crate) struct Sink {
    finished: Mutex<Vec<Finished>>,
    /// A thread of the program looks for results by itself.
    looked_for: AtomicBool,
    driver: Arc<Driver>,
    id: DrivenId,
}

impl Sink {
    pub(crate) fn new(driver: Arc<Driver>, id: DrivenId) -> Arc<Self> {
        Arc::new(Self {
            finished: Mutex::new(Vec::new()),
            looked_for: AtomicBool::new(false),
            driver,
            id,
        })
    }

    /// Says whether somebody looks for results without being woken. Whoever stops takes a last look
    /// afterwards.
    pub(crate) fn set_looked_for(&self, looked_for: bool) {
        self.looked_for.store(looked_for, Ordering::SeqCst);
    }

    pub(crate) fn has_results(&self) -> bool {
        !lock(&self.finished).is_empty()
    }

    /// Moves the results so far to `into`, which is empty; both vectors keep their room.
    pub(crate) fn take(&self, into: &mut Vec<Finished>) {
        let mut finished = lock(&self.finished);
        std::mem::swap(&mut *finished, into);
    }
}

impl CompletionSink for Sink {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        lock(&self.finished).push((token, result));
        if !self.looked_for.load(Ordering::SeqCst) {
            self.driver.wake(self.id);
        }
    }
}
