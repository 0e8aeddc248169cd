//! Which connections may launch the persistent copy kernel.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::Gpu;
use crate::lock;

/// How many connections of a context may launch it at a time. Each kernel occupies a block of a
/// multiprocessor and polls across the bus without a pause.
pub(crate) const PLACES: usize = 2;
/// How long a place belongs to its holder after a launch: far longer than a kernel stays, although
/// one that finds no room on the GPU starts even later.
const TERM: Duration = Duration::from_millis(20);

/// A context's part in persistent kernels.
#[derive(Default)]
pub(super) struct PersistentKernels {
    /// Who may launch, and until when. Each place has a stream.
    places: Mutex<[Option<(u64, Instant)>; PLACES]>,
}

impl Gpu {
    /// The place in which this caller may launch a persistent kernel now, and which it then holds.
    pub(crate) fn place_for_persistent(&self, caller: u64, now: Instant) -> Option<usize> {
        let mut places = lock(&self.0.persistent_kernels.places);
        let is_its = |place: &Option<(u64, Instant)>| place.is_some_and(|(of, _)| of == caller);
        let is_free = |place: &Option<(u64, Instant)>| place.is_none_or(|(_, until)| until <= now);
        let own = places.iter().position(is_its);
        let place = own.or_else(|| places.iter().position(is_free))?;
        places[place] = Some((caller, now + TERM));
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_limited_and_places_expire() {
        let gpu = Gpu::fake();
        let now = Instant::now();
        let place = |caller, now| gpu.place_for_persistent(caller, now);
        for caller in 0..PLACES {
            assert_eq!(place(caller as u64, now), Some(caller));
        }
        let late = PLACES as u64;
        assert_eq!(place(late, now), None);
        // A holder that continues keeps its place.
        assert_eq!(place(0, now + TERM / 2), Some(0));
        assert_eq!(place(late, now + TERM), Some(1));
        assert_eq!(place(1, now + TERM), None);
        assert_eq!(place(1, now + TERM + TERM / 2), Some(0));
    }
}
