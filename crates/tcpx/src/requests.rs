//! What is asked of the engine without waiting for its lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tcpx_wire::session::OperationId;

use crate::core::Core;

/// Requests that the next turn sees to. The engine may hang inside the network's library while it
/// holds its lock; leaving a request never waits for that.
#[derive(Default)]
pub(crate) struct Requests {
    asked: Mutex<Asked>,
    /// There may be some; for looking without the lock.
    any: AtomicBool,
}

#[derive(Default)]
struct Asked {
    cancels: Vec<OperationId>,
    revokes: Vec<u64>,
    close: bool,
}

impl Requests {
    pub(crate) fn cancel(&self, operations: impl Iterator<Item = OperationId>) {
        self.lock().cancels.extend(operations);
        self.any.store(true, Ordering::Release);
    }

    /// Closes a window.
    pub(crate) fn revoke(&self, window: u64) {
        self.lock().revokes.push(window);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn close(&self) {
        self.lock().close = true;
        self.any.store(true, Ordering::Release);
    }

    /// Passes everything asked so far to the session.
    pub(crate) fn see_to(&self, core: &mut Core) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        self.any.store(false, Ordering::Relaxed);
        let asked = std::mem::take(&mut *self.lock());
        let now = core.now();
        for operation in asked.cancels {
            core.session.cancel(now, operation);
        }
        for window in asked.revokes {
            core.revoke(window);
        }
        if asked.close {
            core.session.close(now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
