//! How many threads of the library run, so that no thread busy-polls on a core that another needs.
//!
//! Waking a thread takes 5 to 40 microseconds, and a transfer of medium size waits for a dozen
//! wake-ups in a row. So a thread that has just had work polls for more for a short while before it
//! sleeps, if cores are spare, and never if nothing has happened.

use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// On hosts with up to this many cores a polling thread takes the core of a working one.
pub const FEW_CORES: usize = 4;

static AWAKE: AtomicUsize = AtomicUsize::new(0);

/// A thread that runs; it sleeps when this is dropped.
#[derive(Debug)]
pub struct Awake {
    // Bound to the thread that made it.
    _here: PhantomData<*const ()>,
}

impl Awake {
    /// The calling thread runs from now on.
    pub fn begin() -> Self {
        AWAKE.fetch_add(1, Ordering::Relaxed);
        Self { _here: PhantomData }
    }

    /// Calls `sleep`; the thread does not count meanwhile.
    pub fn asleep<R>(&self, sleep: impl FnOnce() -> R) -> R {
        AWAKE.fetch_sub(1, Ordering::Relaxed);
        let result = sleep();
        AWAKE.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Whether this thread may busy-poll: polling threads leave half of the cores to the program
    /// and to others.
    pub fn may_look(&self) -> bool {
        has_spare_cores()
    }
}

/// Between two polls: yields the core to a thread that waits for it. A thread that was just woken
/// would wait for a polling one longer than its own work takes.
///
/// Not a pause instruction: a hypervisor may take that for idleness and stop the virtual processor
/// for longer than a copy takes.
pub fn give_way() {
    std::thread::yield_now();
}

/// Whether busy-polling threads leave half of the cores to the program and to others.
pub fn has_spare_cores() -> bool {
    let cores = cores();
    cores > FEW_CORES && AWAKE.load(Ordering::Relaxed) <= cores / 2
}

impl Drop for Awake {
    fn drop(&mut self) {
        AWAKE.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Cores that this process may use.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| available_parallelism().map_or(1, usize::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_does_not_count() {
        let before = AWAKE.load(Ordering::Relaxed);
        let awake = Awake::begin();
        assert!(AWAKE.load(Ordering::Relaxed) >= 1);
        awake.asleep(|| ());
        // Other tests of this process have threads too: only what is left over can be compared.
        drop(awake);
        assert!(before < usize::MAX / 2 && AWAKE.load(Ordering::Relaxed) < usize::MAX / 2);
    }
}
