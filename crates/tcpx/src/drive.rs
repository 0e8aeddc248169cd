//! Waiting without a hand-over: for a short while, a thread that waits does the engine's work.
//!
//! Handing a message from the socket to the engine's thread, and from there to the waiting one, costs
//! two wake-ups, each longer than a small message takes on the wire. So a thread that waits first
//! looks after its connection by itself, without a pause, and only then sleeps. It does so where it
//! has a core to itself, and for at most [`PATIENCE`] after the last thing that happened.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tcpx_memory::awake::{Awake, cores, give_way};

use crate::connection::Shared;
use crate::core::Core;
use crate::driver::Turn;

/// How long nothing may happen before the thread sleeps.
const PATIENCE: Duration = Duration::from_micros(50);
/// The same where there are cores to spare: longer than the peer takes to wake up.
const SPARE_PATIENCE: Duration = Duration::from_micros(200);
/// The same while chunks are moving, where there are cores to spare.
const MOVING_PATIENCE: Duration = Duration::from_micros(500);
/// Up to this many cores nobody looks without a pause while chunks are moving: the lanes need them.
const FEW_CORES: usize = 4;
/// Waits that are not tried at most, after a row of tries that came to nothing.
const MOST_SKIPPED: u32 = 64;

/// Whether a thread of this process looks without a pause; only where cores are few.
static LOOKING: AtomicBool = AtomicBool::new(false);

/// Whether, and with what luck, waiting threads do the engine's work on one connection.
#[derive(Debug)]
pub(crate) struct Driving {
    on: AtomicBool,
    /// The engine's thread does not hear of the channels either.
    muted: AtomicBool,
    /// Tries in a row that came to nothing.
    misses: AtomicU32,
    /// Waits that are not tried because of them.
    skip: AtomicU32,
}

/// One thread of those that look without a pause, of which few cores bear only one.
struct Looking(Awake);

impl Looking {
    fn begin() -> Option<Self> {
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
    fn patience(&self, turn: Option<Turn>) -> Duration {
        match turn {
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

impl Driving {
    pub(crate) fn new() -> Self {
        Self {
            on: AtomicBool::new(false),
            muted: AtomicBool::new(false),
            misses: AtomicU32::new(0),
            skip: AtomicU32::new(0),
        }
    }

    /// A thread that waits does the engine's work.
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    /// Whether a try is worth it.
    fn may_try(&self) -> bool {
        self.skip
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_err()
    }

    fn tried(&self, hit: bool) {
        if hit {
            self.misses.store(0, Ordering::Relaxed);
            return;
        }
        let misses = self.misses.fetch_add(1, Ordering::Relaxed).min(6);
        self.skip
            .store((1 << misses).min(MOST_SKIPPED), Ordering::Relaxed);
    }
}

impl Shared {
    /// Looks after the connection until `ended`, for a short while; whether it has ended.
    pub(crate) fn drive(&self, ended: impl Fn() -> bool) -> bool {
        if ended() {
            return true;
        }
        if !self.announces || !self.driving.may_try() {
            return false;
        }
        let Some(looking) = Looking::begin() else {
            return false;
        };
        let hit = if self.driving.on.swap(true, Ordering::SeqCst) {
            look(&ended)
        } else {
            self.work_until(&looking, &ended)
        };
        self.driving.tried(hit);
        hit
    }

    /// The engine's thread is not to be woken: this one looks.
    fn take_over(&self, core: &mut Core) {
        core.set_looked_for(true);
        self.watch_control(core);
        if core.standing().moving {
            for descriptor in core.channel_descriptors() {
                // Not muted, the engine's thread wakes and finds nothing to do.
                drop(self.driver.mute(self.id, descriptor));
            }
            self.driving.muted.store(true, Ordering::Relaxed);
        }
    }

    /// Has the engine's thread woken again, at once if anything is left to do.
    fn hand_back(&self, more: bool) {
        let mut core = self.lock();
        self.driving.on.store(false, Ordering::SeqCst);
        core.set_looked_for(false);
        let mut turn = core.standing();
        turn.more |= more;
        if self.driving.muted.swap(false, Ordering::Relaxed) && !turn.finished {
            for descriptor in core.channel_descriptors() {
                drop(self.driver.rewatch(self.id, descriptor, false));
            }
        }
        let results = core.sink.has_results();
        self.after(core, turn);
        if results {
            self.driver.wake(self.id);
        }
    }

    fn work_until(&self, looking: &Looking, ended: &impl Fn() -> bool) -> bool {
        let mut last = Instant::now();
        let mut taken_over = false;
        let mut more = false;
        let hit = loop {
            let turn = self.try_lock().map(|mut core| {
                if !std::mem::replace(&mut taken_over, true) {
                    self.take_over(&mut core);
                }
                self.turn(&mut core)
            });
            more = turn.map_or(more, |turn| turn.more);
            if ended() {
                break true;
            }
            if turn.is_some_and(|turn| turn.busy) {
                last = Instant::now();
            } else if last.elapsed() > looking.patience(turn) {
                break false;
            } else if turn.is_some_and(|turn| turn.moving) {
                give_way();
            }
            if turn.is_some_and(|turn| turn.finished || turn.moving && cores() <= FEW_CORES) {
                break false;
            }
        };
        if taken_over {
            self.hand_back(more);
        } else {
            self.driving.on.store(false, Ordering::SeqCst);
        }
        hit
    }
}

/// Another thread does the work; this one looks for its own end. Without pauses of the processor, which
/// the host of a virtual machine may take for idleness.
fn look(ended: &impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !ended() {
        if start.elapsed() > PATIENCE {
            return false;
        }
    }
    true
}
