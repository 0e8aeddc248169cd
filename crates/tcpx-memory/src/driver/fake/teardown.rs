//! The end of the process, at which the driver tears itself down: whoever is inside it then, or
//! calls it later, ends the process by a signal.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls under way.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// More than all calls together.
const OVER: usize = 1 << 32;

pub(super) struct Call(());

impl Call {
    pub(super) fn begin() -> Self {
        if CALLS.fetch_add(1, Ordering::SeqCst) >= OVER {
            std::process::abort();
        }
        Self(())
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Tears down at the end of the process, and leaves a moment to those who come too late.
#[cfg(feature = "fake-driver")]
pub(super) fn at_exit() {
    extern "C" fn tear_down() {
        if CALLS.fetch_add(OVER, Ordering::SeqCst) > 0 {
            std::process::abort();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    // SAFETY: the handler is never unloaded.
    let _ = unsafe { libc::atexit(tear_down) };
}
