//! Waiting without a hand-over: for a short while, a thread that waits does the engine's work.
//!
//! Handing a message from the socket to the engine's thread, and from there to the waiting one, costs
//! two wake-ups, each longer than a small message takes on the wire. So a thread that waits first
//! looks after its connection by itself, without a pause, and only then sleeps. It does so where it
//! has a core to itself, and for at most [`PATIENCE`](looking::PATIENCE) after the last thing that happened. On few cores
//! it then sleeps on the connection's descriptors, so that the peer's bytes wake it directly: through the
//! engine's thread each answer would take two wake-ups, longer than the peer's patience, and both ends
//! would find each other asleep for ever.
//!
//! A thread that finds what it waited for usually comes back at once. So the engine's thread is not
//! woken for the connection before [`LINGER`] has passed in which nobody came.

mod descriptors;
mod looking;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tcpx_memory::awake::{cores, give_way};

use crate::attention::Attention;
use crate::connection::Shared;
use crate::control::Asks;
use crate::core::Core;
use crate::driver::Turn;
use descriptors::{Descriptors, Woken};
use looking::{FEW_CORES, GOOD_PATIENCE, Looker, Looking, look};

/// How long the engine's thread leaves a connection to a thread that has found what it waited for: at
/// first, and at most, as long as somebody comes back each time. Looking costs it a wake-up.
pub(crate) const LINGER: (Duration, Duration) =
    (Duration::from_micros(200), Duration::from_millis(1));
/// How long nothing may happen before a thread that sleeps on the connection's descriptors leaves them to the
/// engine's thread.
const SLEEP: Duration = Duration::from_millis(4);
/// Sleeps in a row that ended without anything to do: something is ready that nobody can take.
const VAIN_SLEEPS: u32 = 3;
/// Looks at the socket alone, before everything is looked at again.
const LOOKS: u32 = 16;
/// Waits that are not tried at most, after a row of tries that came to nothing.
const MOST_SKIPPED: u32 = 64;

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
    attention: Attention,
    /// Threads that look for their own ends beside the one that does the work.
    lookers: AtomicUsize,
    /// Since when, in microseconds of the connection, the engine's thread has left it to others.
    since: AtomicU64,
    descriptors: Descriptors,
}

/// Somebody waits until the engine's thread notifies him.
pub(crate) struct EngineWatch(Arc<Shared>);

impl Drop for EngineWatch {
    fn drop(&mut self) {
        self.0.driving.attention.unwant();
    }
}

impl fmt::Debug for EngineWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineWatch").finish_non_exhaustive()
    }
}

impl Driving {
    pub(crate) fn new() -> Self {
        Self {
            on: AtomicBool::new(false),
            muted: AtomicBool::new(false),
            misses: AtomicU32::new(0),
            skip: AtomicU32::new(0),
            attention: Attention::new(),
            lookers: AtomicUsize::new(0),
            since: AtomicU64::new(0),
            descriptors: Descriptors::default(),
        }
    }

    /// How long the engine's thread waits for somebody to come back: the longer, the longer somebody
    /// always has.
    fn linger(&self, now: u64) -> Duration {
        let lasted = now.saturating_sub(self.since.load(Ordering::Relaxed));
        Duration::from_micros(lasted / 4).clamp(LINGER.0, LINGER.1)
    }

    /// A thread that waits does the engine's work.
    fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    /// A thread that waits does the engine's work, or did a moment ago.
    pub(crate) fn is_attended(&self) -> bool {
        self.is_on() || self.attention.lasts_until().is_some()
    }

    /// When the engine's thread looks whether somebody still attends to the connection.
    pub(crate) fn due(&self, origin: Instant) -> Option<Instant> {
        let until = self.attention.lasts_until()?;
        if self.is_on() {
            let now = Instant::now();
            let passed = now.saturating_duration_since(origin).as_micros();
            return Some(now + self.linger(passed.try_into().unwrap_or(u64::MAX)));
        }
        Some(origin + Duration::from_micros(until))
    }

    /// Whether a try is worth it.
    fn may_try(&self) -> bool {
        self.skip
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_err()
    }

    /// Another connection has taken the control connection's place.
    pub(crate) fn control_replaced(&self) {
        self.descriptors.control_replaced();
    }

    /// A wait has ended for which a little more patience would have been enough.
    pub(crate) fn was_short(&self, waited: Duration) {
        if waited < GOOD_PATIENCE {
            self.misses.store(0, Ordering::Relaxed);
            self.skip.store(0, Ordering::Relaxed);
        }
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
    /// Looks after the connection until `ended`, for a short while and at most until `limit`; whether it
    /// has ended.
    pub(crate) fn drive(&self, ended: impl Fn() -> bool, limit: Instant) -> bool {
        if ended() {
            return true;
        }
        if !self.announces {
            return false;
        }
        let looking = self.driving.may_try().then(Looking::begin).flatten();
        if looking.is_none() && !self.may_sleep() {
            return false;
        }
        if !self.driving.on.swap(true, Ordering::SeqCst) {
            return self.work_until(looking, &ended, limit);
        }
        // Somebody does the work.
        if looking.is_none() || self.driving.descriptors.is_asleep() {
            return false;
        }
        let looker = Looker::begin(&self.driving.lookers);
        let hit = look(&ended, limit);
        drop(looker);
        self.driving.tried(hit);
        hit
    }

    /// Whether a thread that does the engine's work may sleep meanwhile: on few cores, where the engine's
    /// thread could not run beside it, and where nothing else than descriptors tells of news.
    fn may_sleep(&self) -> bool {
        cores() <= FEW_CORES && !self.is_foreign() && !self.has_gpu()
    }

    /// The engine's thread is not to be woken: this one looks.
    fn take_over(&self, core: &mut Core) {
        core.set_looked_for(true);
        core.tick();
        core.pace.waits(core.ticked());
        self.watch_control(core);
        if core.standing().moving {
            self.mute_channels(core);
        }
    }

    /// Has the engine's thread hear nothing of the channels.
    fn mute_channels(&self, core: &Core) {
        if !self.driving.muted.swap(true, Ordering::Relaxed) {
            for descriptor in core.channel_descriptors() {
                // Not muted, the engine's thread wakes and finds nothing to do.
                drop(self.driver.mute(self.id, descriptor));
            }
        }
    }

    /// Has the engine's thread woken again: at once if anything is left to do, in a while if the thread
    /// has what it waited for and is likely to come back.
    fn hand_back(&self, hit: bool, more: bool) {
        let mut core = self.lock();
        let mut turn = core.standing();
        turn.more |= more;
        // Where it would have to share a core with the lanes, the engine's thread leaves chunks too.
        let still = self.may_sleep() || !turn.moving && !self.driving.muted.load(Ordering::Relaxed);
        let quiet = still && !turn.more && !turn.poll && !turn.finished;
        // What the socket does not take now goes out with the next wait.
        let written = self.may_sleep() || !core.control.wants_write();
        let leaves = hit && quiet && written && !core.sink.has_results();
        if leaves {
            let now = core.ticked();
            core.pace.leaves(now);
            let is_alone = self.driving.lookers.load(Ordering::Relaxed) == 0;
            core.speak(is_alone);
            let micros = self.since_origin(now);
            if self.driving.attention.lasts_until().is_none() {
                self.driving.since.store(micros, Ordering::Relaxed);
            }
            let until = now + self.driving.linger(micros);
            self.driving.attention.begin(self.since_origin(until));
            self.driving.on.store(false, Ordering::SeqCst);
            core.set_looked_for(false);
            if !self.driving.attention.is_wanted_elsewhere() && !core.sink.has_results() {
                drop(core);
                return self.driver.wake_by(self.id, until);
            }
        } else {
            self.driving.on.store(false, Ordering::SeqCst);
        }
        self.release(&mut core);
        core.set_looked_for(false);
        turn = core.guarded_start();
        turn.more |= more;
        let results = core.sink.has_results();
        self.after(core, turn);
        if results {
            self.driver.wake(self.id);
        }
    }

    /// The engine's thread looks after the connection again.
    fn release(&self, core: &mut Core) {
        self.driving.attention.end();
        core.pace.attend(false);
        if self.driving.muted.swap(false, Ordering::Relaxed) && !core.standing().finished {
            for descriptor in core.channel_descriptors() {
                drop(self.driver.rewatch(self.id, descriptor, false));
            }
        }
    }

    /// Wakes the thread that sleeps on the connection's descriptors, if others have done what it waits for
    /// or left it something to do. Called with the lock held by whoever has changed anything.
    pub(crate) fn call(&self, core: &Core) {
        let descriptors = &self.driving.descriptors;
        if descriptors.is_asleep() && (core.has_ended_some() || core.control.wants_write()) {
            descriptors.call();
        }
    }

    /// Sleeps until the connection has news, at most until `until`; `None` if that cannot be had here.
    fn sleep(&self, ended: &impl Fn() -> bool, until: Instant) -> Option<Woken> {
        let mut core = self.lock();
        // Nobody writes soon what would be held back, nor what was.
        core.pace.attend(false);
        core.speak(false);
        self.watch_control(&mut core);
        let turn = core.standing();
        let unfit = turn.more || turn.poll || turn.finished;
        if unfit || core.control_done() || core.control.is_away() {
            return None;
        }
        self.mute_channels(&core);
        core.forget_ended();
        let write = core.control.wants_write();
        let (descriptors, channels) = (&self.driving.descriptors, core.channel_descriptors());
        if !descriptors.lie_down(core.control.as_fd(), write, channels) {
            return None;
        }
        // What was raised meanwhile makes a descriptor readable, but for the copy worker's results.
        core.set_looked_for(false);
        if core.sink.has_results() {
            descriptors.get_up();
            return Some(Woken::by_anything());
        }
        let until = core.due.map_or(until, |due| due.min(until));
        // Acknowledgements of a transfer's first chunks are not worth a wake-up of their own.
        let exact = !turn.moving;
        drop(core);
        if ended() {
            descriptors.get_up();
            return Some(Woken::by_anything());
        }
        Some(descriptors.sleep(until, exact))
    }

    /// The engine's thread looks: nobody has come back in time.
    pub(crate) fn lapse(&self, core: &mut Core) {
        let until = self.driving.attention.lasts_until();
        let over = until.is_some_and(|until| until <= self.since_origin(Instant::now()));
        if over && !self.driving.is_on() {
            self.release(core);
        }
    }

    /// The program looks whether a transfer has ended, and does not wait: the engine's thread watches.
    pub(crate) fn watches_from_afar(&self) {
        if self.driving.attention.lasts_until().is_none() || self.driving.is_on() {
            return;
        }
        if let Some(mut core) = self.try_lock() {
            self.leave_to_engine(&mut core);
            core.tick();
            let turn = core.guarded_start();
            self.after(core, turn);
        }
    }

    /// Whether the program streams: it waits for one of the transfers under way soon, and until then the
    /// engine's thread would only take the core from it.
    pub(crate) fn comes_back(&self, core: &Core) -> bool {
        self.may_sleep() && core.standing().moving
    }

    /// What the program began takes more than a moment: the engine's thread is to see to it.
    pub(crate) fn leave_to_engine(&self, core: &mut Core) {
        if self.driving.attention.lasts_until().is_some() && !self.driving.is_on() {
            self.release(core);
        }
    }

    /// Somebody waits for the engine's thread without driving the connection: as long as what this returns
    /// lives, that thread is not kept from its work.
    pub(crate) fn watch(self: &Arc<Self>) -> EngineWatch {
        self.driving.attention.want();
        let watch = EngineWatch(Arc::clone(self));
        if self.driving.attention.lasts_until().is_some() && !self.driving.is_on() {
            let mut core = self.lock();
            if !self.driving.is_on() {
                self.release(&mut core);
                core.tick();
                let turn = core.guarded_start();
                self.after(core, turn);
            }
        }
        watch
    }

    fn work_until(
        &self,
        mut looking: Option<Looking>,
        ended: &impl Fn() -> bool,
        limit: Instant,
    ) -> bool {
        let began = Instant::now();
        let mut last = began;
        let good = self.driving.misses.load(Ordering::Relaxed) == 0;
        let may_sleep = self.may_sleep();
        let _context = self.stay_in_context();
        let mut taken_over = false;
        let mut more = false;
        let mut looks = 0_u32;
        let mut vain = 0;
        let mut missed = false;
        let mut turn: Option<Turn> = None;
        let mut has_frames = true;
        let hit = loop {
            looks = looks.wrapping_add(1);
            let at_rest = turn.is_some_and(|turn| {
                let polls = turn.poll && !turn.copying;
                !(turn.busy || turn.more || polls || turn.moving || turn.finished)
            });
            let only_looks = looking.is_some() && at_rest && !looks.is_multiple_of(LOOKS);
            let mut core = match looking {
                Some(_) => self.try_lock(),
                None => Some(self.lock()),
            };
            if only_looks {
                core = core.and_then(|mut core| core.has_news().then_some(core));
            }
            let taken = core.map(|mut core| {
                let starts = !std::mem::replace(&mut taken_over, true);
                if starts {
                    self.take_over(&mut core);
                }
                core.pace.attend(true);
                core.pace.drive(true);
                // A thread that is about to sleep hears of frames from the descriptor.
                let soon = looking.is_none() || starts && core.standing().moving;
                let sleeps = soon && may_sleep && limit > began + SLEEP;
                core.control.ask(match (sleeps, has_frames && !starts) {
                    (false, _) => Asks::Always,
                    (true, true) => Asks::Once,
                    (true, false) => Asks::Not,
                });
                let turn = self.turn(&mut core);
                core.control.ask(Asks::Always);
                core.pace.drive(false);
                turn
            });
            if taken.is_some() || !only_looks {
                turn = taken;
            }
            more = turn.map_or(more, |turn| turn.more);
            if ended() {
                break true;
            }
            let now = Instant::now();
            if now >= limit || turn.is_some_and(|turn| turn.finished) {
                break false;
            }
            let busy = turn.is_some_and(|turn| turn.busy);
            if busy {
                // Frames may have come since: the next turn reads them.
                (last, vain, has_frames) = (now, 0, true);
                continue;
            }
            let moving = turn.is_some_and(|turn| turn.moving);
            if let Some(one) = &looking {
                let lanes_need_it = moving && cores() <= FEW_CORES;
                let patient = now.saturating_duration_since(last) <= one.patience(turn, good);
                if patient && !lanes_need_it {
                    if moving {
                        give_way();
                    }
                    continue;
                }
                missed = !patient;
                looking = None;
            }
            let until = limit.min(last + SLEEP);
            let sleeps = may_sleep && now < until && vain < VAIN_SLEEPS;
            match sleeps.then(|| self.sleep(ended, until)) {
                Some(Some(woken)) => has_frames = woken.for_control,
                Some(None) | None => break false,
            }
            vain += 1;
        };
        // Also where others have held the lock all the time: they saw that somebody looks, and left it to him.
        self.hand_back(hit, more);
        if missed || looking.is_some() {
            self.driving.tried(hit && !missed);
        }
        if hit && looking.is_none() {
            self.driving.was_short(began.elapsed());
        }
        hit
    }
}
