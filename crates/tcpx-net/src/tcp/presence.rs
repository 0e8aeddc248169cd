//! When the peer's process was last heard. Its system answers for it while it is stopped, so that only
//! what it says by itself tells a lane that hangs from a peer that rests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Presence {
    origin: Instant,
    /// Microseconds from the origin; 0: never.
    heard: AtomicU64,
    /// When it was first heard after it had rested.
    back: AtomicU64,
}

impl Presence {
    pub(super) fn new() -> Self {
        Self {
            origin: Instant::now(),
            heard: AtomicU64::new(0),
            back: AtomicU64::new(0),
        }
    }

    /// It was heard now; `rested`: after a silence that a process at work does not keep.
    pub(super) fn note(&self, rested: bool) {
        let now = u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX);
        let now = now.max(1);
        if rested {
            self.back.store(now, Ordering::Relaxed);
        }
        // Behind the other: whoever sees that it was heard sees that it had rested.
        self.heard.store(now, Ordering::Release);
    }

    /// From when until when it was at work, as far as is known; `now` where nobody tells.
    pub(super) fn at_work(&self, now: Instant) -> (Instant, Instant) {
        let at = |micros| self.origin + Duration::from_micros(micros);
        match self.heard.load(Ordering::Acquire) {
            0 => (self.origin, now),
            heard => (at(self.back.load(Ordering::Relaxed)), at(heard)),
        }
    }
}
