//! Where the copy worker leaves its results for the engine.

use std::sync::{Arc, Mutex, PoisonError};

use tcpx_memory::{CompletionSink, MemoryError};

use crate::driver::{DrivenId, Driver};

/// Result of one job of the copy worker.
pub(crate) type Finished = (u64, Result<u64, MemoryError>);

/// Collects results and wakes the driver of the connection.
#[derive(Debug)]
pub(crate) struct Sink {
    finished: Mutex<Vec<Finished>>,
    driver: Arc<Driver>,
    id: DrivenId,
}

impl Sink {
    pub(crate) fn new(driver: Arc<Driver>, id: DrivenId) -> Arc<Self> {
        Arc::new(Self {
            finished: Mutex::new(Vec::new()),
            driver,
            id,
        })
    }

    /// Moves the results so far to `into`, which is empty; both vectors keep their room.
    pub(crate) fn take(&self, into: &mut Vec<Finished>) {
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *finished, into);
    }
}

impl CompletionSink for Sink {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        self.finished
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((token, result));
        self.driver.wake(self.id);
    }
}
