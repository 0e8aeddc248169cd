//! How many threads of the library run, so that none looks for work without a pause where another needs
//! the core.
//!
//! Waking a thread takes 5 to 40 microseconds, and a transfer of medium size waits for a dozen of them in a
//! row. So a thread that has just had work looks for the next for a short while before it sleeps: where
//! there are cores to spare, and never when nothing has happened.

use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// Up to this many cores a looking thread takes the core from a working one.
const FEW_CORES: usize = 4;

static AWAKE: AtomicUsize = AtomicUsize::new(0);

/// A thread that runs; it sleeps when this is dropped.
#[derive(Debug)]
pub struct Awake {
    // Of the thread that made it.
    _here: PhantomData<*const ()>,
}

impl Awake {
    /// The calling thread runs from now on.
    pub fn begin() -> Self {
        AWAKE.fetch_add(1, Ordering::Relaxed);
        Self { _here: PhantomData }
    }

    /// Sleeps as `sleep` says, and does not count meanwhile.
    pub fn asleep<R>(&self, sleep: impl FnOnce() -> R) -> R {
        AWAKE.fetch_sub(1, Ordering::Relaxed);
        let result = sleep();
        AWAKE.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Whether this thread may look for work without a pause: half of the cores are left to the program
    /// and to others.
    pub fn may_look(&self) -> bool {
        has_spare_cores()
    }
}

/// Between two looks: lets a thread run that waits for this core. A thread that was just woken waits there
/// while another looks for work, for longer than its own work takes.
///
/// It is no pause of the processor, which the host of a virtual machine may take for idleness: it would stop
/// the processor for longer than a copy takes.
pub fn give_way() {
    std::thread::yield_now();
}

/// Whether threads that look for work without a pause leave half of the cores to the program and to others.
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
