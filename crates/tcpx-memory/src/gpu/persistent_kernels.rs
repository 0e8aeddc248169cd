//! Which connections may launch the persistent copy kernel.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::Gpu;
use crate::lock;

/// How many connections of a context may launch it at a time. Each kernel occupies a block of a
/// multiprocessor and polls across the bus without a pause.
const MOST: usize = 2;
/// How long a place belongs to its holder after a launch: far longer than a kernel stays, although
/// one that finds no room on the GPU starts even later.
const TERM: Duration = Duration::from_millis(20);

/// A context's part in persistent kernels.
#[derive(Default)]
pub(super) struct PersistentKernels {
    /// Who may launch, and until when.
    places: Mutex<Vec<(u64, Instant)>>,
}

impl Gpu {
    /// Whether this caller may launch a persistent kernel now; it then holds a place.
    pub(crate) fn may_launch_persistent(&self, caller: u64, now: Instant) -> bool {
        let mut places = lock(&self.0.persistent_kernels.places);
        places.retain(|(holder, until)| *holder != caller && *until > now);
        let free = places.len() < MOST;
        if free {
            places.push((caller, now + TERM));
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_limited_and_places_expire() {
        let gpu = Gpu::fake();
        let now = Instant::now();
        for caller in 0..MOST as u64 {
            assert!(gpu.may_launch_persistent(caller, now));
        }
        let late = MOST as u64;
        assert!(!gpu.may_launch_persistent(late, now));
        // A holder that continues keeps its place.
        assert!(gpu.may_launch_persistent(0, now + TERM / 2));
        assert!(gpu.may_launch_persistent(late, now + TERM));
        assert!(!gpu.may_launch_persistent(1, now + TERM));
        assert!(gpu.may_launch_persistent(1, now + TERM + TERM / 2));
    }
}
