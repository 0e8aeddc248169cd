//! Forks: connections, locks and threads that a process had before one belong to it alone.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks between the process that loaded this crate and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Names this process among those that forks made, at the price of one load. What was made under
/// another number belongs to another process: its threads do not exist here, its locks may be held
/// for ever, and what is written to its sockets goes out on its connections.
pub fn generation() -> u32 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // Fails only without memory; forks go unseen then. SAFETY: the handler touches one atomic,
        // which a handler in a fork's child may, and is never unloaded: no library of this project
        // is.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    FORKS.load(Ordering::Relaxed)
}
