//! The last call to a plugin, which blocks the caller that releases it for a bounded time.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::bounded::{NoAnswer, bounded};
use crate::library::{CallObserver, CallReport};
use crate::lock;
use crate::result::ResultCode;
use crate::tables::FinalizeFn;

/// Longest wait for `finalize`, which ends threads and closes sockets and waits for no peer.
pub(crate) const LONGEST: Duration = Duration::from_secs(5);

/// `finalize` of a table, and the context that it ends.
pub(crate) struct Finalize {
    pub(crate) call: FinalizeFn,
    pub(crate) context: *mut c_void,
}

// SAFETY: the ABI ties no call to a thread; nothing else uses the context any more.
unsafe impl Send for Finalize {}

impl Finalize {
    /// Calls it and waits for at most `limit`. The observer gets what it returned. After `limit`
    /// the observer first gets [`ResultCode::InProgress`], and the thread stays with the call.
    ///
    /// # Safety
    /// The plugin is initialised, no comm of it is left, and its library is never unloaded.
    pub(crate) unsafe fn run(self, observer: Option<CallObserver>, limit: Duration) {
        let report = move |rc: ResultCode| {
            if let Some(observer) = &observer {
                let call = "finalize";
                observer(&CallReport { call, rc });
            }
        };
        let report_late = report.clone();
        // Held until the result in time is reported, so that a late result is reported after it.
        let turn = Arc::new(Mutex::new(()));
        let turn_of_late = Arc::clone(&turn);
        let first = lock(&turn);
        let work = move || {
            // Captures the whole value, which may change threads; its pointer alone may not.
            let this = self;
            // SAFETY: the caller's promise.
            ResultCode::from_raw(unsafe { (this.call)(this.context) })
        };
        let late = move |rc| {
            drop(turn_of_late.lock());
            report_late(rc);
        };
        report(match bounded("tcpx-finalize", limit, work, late) {
            Ok(rc) => rc,
            Err(NoAnswer::Stuck) => ResultCode::InProgress,
            // Without a thread the plugin keeps what it has; waiting for it here would be worse.
            Err(NoAnswer::NoThread(_) | NoAnswer::Panicked) => ResultCode::SystemError,
        });
        drop(first);
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::time::Instant;

    use super::*;
    use crate::result::RawResult;

    /// What the test that calls it holds.
    static DOOR: Mutex<()> = Mutex::new(());

    unsafe extern "C" fn waits(_context: *mut c_void) -> RawResult {
        drop(DOOR.lock());
        3
    }

    fn run(limit: Duration) -> Arc<Mutex<Vec<ResultCode>>> {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&heard);
        let observer: CallObserver = Arc::new(move |report: &CallReport| {
            assert_eq!(report.call, "finalize");
            hears.lock().unwrap().push(report.rc);
        });
        let finalize = Finalize {
            call: waits,
            context: ptr::null_mut(),
        };
        // SAFETY: a function of ours that takes any context.
        unsafe { finalize.run(Some(observer), limit) };
        heard
    }

    #[test]
    fn a_late_finalize_is_reported_when_it_returns() {
        let shut = DOOR.lock().unwrap();
        let heard = run(Duration::from_millis(20));
        assert_eq!(*heard.lock().unwrap(), [ResultCode::InProgress]);
        drop(shut);
        let deadline = Instant::now() + Duration::from_secs(60);
        while heard.lock().unwrap().len() < 2 {
            assert!(Instant::now() < deadline, "it came back unheard");
            std::thread::yield_now();
        }
        let both = [ResultCode::InProgress, ResultCode::InternalError];
        assert_eq!(*heard.lock().unwrap(), both);

        let heard = run(Duration::from_secs(60));
        assert_eq!(*heard.lock().unwrap(), [ResultCode::InternalError]);
    }
}
