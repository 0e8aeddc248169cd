//! Looking without a pause: who may, for how long, and who looks for his own end only.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tcpx_memory::awake::{Awake, cores};

use crate::driver::Turn;

/// How long nothing may happen before the thread sleeps.
pub(super) const PATIENCE: Duration = Duration::from_micros(50);
/// The same where there are cores to spare: longer than the peer takes to wake up.
const SPARE_PATIENCE: Duration = Duration::from_micros(200);
/// The same after a try that was worth it: longer than a peer takes that had to wake two threads, or
/// both would find each other asleep for ever.
pub(super) const GOOD_PATIENCE: Duration = Duration::from_micros(150);
/// The same while chunks are moving, where there are cores to spare.
const MOVING_PATIENCE: Duration = Duration::from_micros(500);
/// Up to this many cores nobody looks without a pause while chunks are moving: the lanes need them.
pub(super) const FEW_CORES: usize = 4;

/// Whether a thread of this process looks without a pause; only where cores are few.
static LOOKING: AtomicBool = AtomicBool::new(false);

/// One thread of those that look without a pause, of which few cores bear only one.
pub(super) struct Looking(Awake);

impl Looking {
    pub(super) fn begin() -> Option<Self> {
        let awake = Awake::begin();
        match cores() {
            1 => None,
            cores if cores <= FEW_CORES => {
                let first = !LOOKING.swap(true, Ordering::Relaxed);
                first.then(|| Self(awake))
            }
            _ => awake.may_look().then(|| Self(awake)),
        }
    }

    /// How long nothing may happen before the thread sleeps.
    pub(super) fn patience(&self, turn: Option<Turn>, good: bool) -> Duration {
        match turn {
            _ if !self.0.may_look() && good => GOOD_PATIENCE,
            _ if !self.0.may_look() => PATIENCE,
            Some(turn) if turn.moving => MOVING_PATIENCE,
            _ => SPARE_PATIENCE,
        }
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        LOOKING.store(false, Ordering::Relaxed);
    }
}

/// A thread that looks for its own end only, and does nothing about it.
pub(super) struct Looker<'a>(&'a AtomicUsize);

impl<'a> Looker<'a> {
    pub(super) fn begin(lookers: &'a AtomicUsize) -> Self {
        lookers.fetch_add(1, Ordering::Relaxed);
        Self(lookers)
    }
}

impl Drop for Looker<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Another thread does the work; this one looks for its own end. Without pauses of the processor, which
/// the host of a virtual machine may take for idleness.
pub(super) fn look(ended: &impl Fn() -> bool, limit: Instant) -> bool {
    let limit = limit.min(Instant::now() + PATIENCE);
    while !ended() {
        if Instant::now() >= limit {
            return false;
        }
    }
    true
}
