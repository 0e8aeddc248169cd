//! The end of the process: the driver is torn down while threads of ours live, and a call of theirs
//! meanwhile would end the process by a signal.

use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::fork;

/// Longest wait for threads that are inside the driver: one may be there for as long as a kernel
/// runs.
const LIMIT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(100);

/// Whether the process ends, in the lowest bit, and twice the number of those who are inside the
/// driver.
static STATE: AtomicUsize = AtomicUsize::new(0);
const ENDS: usize = 1;
const ONE: usize = 2;

/// Somebody is inside the driver, which is not torn down meanwhile.
pub(crate) struct Inside(());

/// `None` once the process ends.
pub(crate) fn enter() -> Option<Inside> {
    let before = STATE.fetch_add(ONE, Ordering::SeqCst);
    let inside = Inside(());
    (before & ENDS == 0).then_some(inside)
}

impl Drop for Inside {
    fn drop(&mut self) {
        STATE.fetch_sub(ONE, Ordering::SeqCst);
    }
}

/// For a thread that cannot go on without the driver: the process ends at any moment.
pub(crate) fn stand_still() -> ! {
    loop {
        thread::park();
    }
}

/// From now on an end of the process first waits for who is inside the driver, and lets nobody in.
/// The driver is loaded: of the handlers of an end the latest comes first.
pub(crate) fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        fork::generation();
        // Fails only without memory.
        // SAFETY: the handler is never unloaded: no library of this project is.
        let _ = unsafe { libc::atexit(end) };
    });
}

extern "C" fn end() {
    let inside = |state| state >= ONE;
    // A fork's child has none of these threads.
    if fork::generation() != 0 {
        return;
    }
    let start = Instant::now();
    let mut state = STATE.fetch_or(ENDS, Ordering::SeqCst);
    while inside(state) && start.elapsed() < LIMIT {
        thread::sleep(PAUSE);
        state = STATE.load(Ordering::SeqCst);
    }
}
