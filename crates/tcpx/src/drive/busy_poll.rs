//! Busy-polling: which thread may, for how long, and which one only polls for its own end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tcpx_memory::awake::{Awake, FEW_CORES, cores};
use tcpx_net::PerProcess;

use crate::driver::Turn;

/// How long the owner polls after the last event: three round trips of 64 KiB on one host.
pub(super) const BUSY_POLL_BUDGET: Duration = Duration::from_micros(150);
/// The same where there are cores to spare: longer than the peer takes to wake up.
const SPARE_BUDGET: Duration = Duration::from_micros(200);
/// The same while chunks are moving, where there are cores to spare.
const MOVING_BUDGET: Duration = Duration::from_micros(500);

/// Whether a thread of this process looks without a pause; only where cores are few.
static BUSY_POLLING: PerProcess<AtomicBool> = PerProcess::new();

/// One thread of those that look without a pause, of which few cores bear only one.
pub(super) struct BusyPoll(Awake);

impl BusyPoll {
    pub(super) fn begin() -> Option<Self> {
        let awake = Awake::begin();
        match cores() {
            1 => None,
            cores if cores <= FEW_CORES => {
                let first = !BUSY_POLLING.get().swap(true, Ordering::Relaxed);
                first.then(|| Self(awake))
            }
            _ => awake.may_look().then(|| Self(awake)),
        }
    }

    /// How long nothing may happen before the thread sleeps.
    pub(super) fn budget(&self, turn: Option<Turn>) -> Duration {
        match turn {
            _ if !self.0.may_look() => BUSY_POLL_BUDGET,
            Some(turn) if turn.moving => MOVING_BUDGET,
            _ => SPARE_BUDGET,
        }
    }
}

impl Drop for BusyPoll {
    fn drop(&mut self) {
        BUSY_POLLING.get().store(false, Ordering::Relaxed);
    }
}

/// Another thread does the work; this one looks for its own end. Without pauses of the processor,
/// which the host of a virtual machine may take for idleness.
pub(super) fn poll_end(ended: &impl Fn() -> bool, limit: Instant) -> bool {
    let limit = limit.min(Instant::now() + BUSY_POLL_BUDGET);
    while !ended() {
        if Instant::now() >= limit {
            return false;
        }
    }
    true
}
