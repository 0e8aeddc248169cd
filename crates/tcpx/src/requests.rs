//! What is asked of the engine without waiting for its lock.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tcpx_lanes::lock;
use tcpx_wire::session::OperationId;

use crate::core::Core;

/// Requests that the next turn sees to. The engine may hang inside the network's library while it
/// holds its lock; leaving a request never waits for that.
#[derive(Default)]
pub(crate) struct Requests {
    asked: Mutex<Vec<Ask>>,
    /// There may be some; for looking without the lock.
    any: AtomicBool,
}

pub(crate) enum Ask {
    Cancel(OperationId),
    /// Closes a window.
    Revoke(u64),
    /// Closes the connection, within this time.
    Close(Duration),
    /// The same, as the program has let go of it.
    Leave,
}

impl Requests {
    pub(crate) fn add(&self, asks: impl IntoIterator<Item = Ask>) {
        lock(&self.asked).extend(asks);
        self.any.store(true, Ordering::Release);
    }

    /// Passes everything asked so far to the session.
    pub(crate) fn see_to(&self, core: &mut Core) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        self.any.store(false, Ordering::Relaxed);
        let asked = std::mem::take(&mut *lock(&self.asked));
        let now = core.clock.now();
        for ask in asked {
            match ask {
                Ask::Cancel(operation) => core.session.cancel(now, operation),
                Ask::Revoke(window) => core.revoke(window),
                Ask::Close(limit) => core.session.close(now, limit),
                Ask::Leave if core.session.closing() => {}
                Ask::Leave => core.session.close(now, core.bounds.leave),
            }
        }
    }
}
