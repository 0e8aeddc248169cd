//! Who makes progress on a connection: one owner at a time.
//!
//! A thread that waits takes the connection's progress token if it is free and does the engine's
//! work itself. Handing a message from the socket to the engine's thread, and from there to the
//! waiting one, would cost two wake-ups, each longer than a small message takes on the wire. The
//! owner busy-polls for [`BUSY_POLL_BUDGET`](busy_poll::BUSY_POLL_BUDGET) after the last event
//! where it has a core to itself. On few cores it then sleeps on the connection's descriptors, so
//! that the peer's bytes wake it directly.
//!
//! A budget spent in vain means that the peer is slow, or that other threads need the cores.
//! Busy-polling would delay them, so it pauses for [`BUSY_POLL_PAUSE`] budgets.
//!
//! When its wait ends, the owner keeps the connection for [`PROGRESS_LEASE`], because callers
//! usually wait again. So does a thread that polls, after each look: its next one comes soon. The
//! engine's thread is the owner of last resort: it takes the connection when the lease has expired,
//! or at once when a thread waits that does not drive.
//!
//! On few cores the owner also leads the event loop of the connection's first lane, where that
//! serves nothing else, while messages go one at a time each way: it moves their bytes itself, and
//! sleeps on the loop's sockets too. With more than one under way the loop's thread is faster, and
//! has the loop back at once. The lease covers the loop too.
//!
//! Under [`ProgressMode::Manual`](crate::ProgressMode::Manual) there is no lease: the engine's
//! thread hears of nothing but the end of a socket and of what is due, until the connection closes.

mod busy_poll;
mod descriptors;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::event_loop::{Lead, Loop};
use tcpx_lanes::lock;
use tcpx_memory::awake::{FEW_CORES, cores, give_way};

use crate::connection::Shared;
use crate::control::Asks;
use crate::core::Core;
use crate::driver::{MUTED, READ, Turn};
use crate::progress_lease::ProgressLease;
use crate::wait::LIVENESS_CHECK;
use busy_poll::{BUSY_POLL_BUDGET, BusyPoll, poll_end};
use descriptors::{Descriptors, Woken};

/// How long the engine's thread leaves a connection to the thread that drove it last.
pub(crate) const PROGRESS_LEASE: Duration = Duration::from_millis(1);
/// Pause of a thread that waits under manual progress, where another one has the token, or no one
/// descriptor tells of all that it waits for.
const MANUAL_PAUSE: Duration = Duration::from_micros(50);
/// Sleeps in a row that ended without anything to do: something is ready that nobody can take.
const VAIN_SLEEPS: u32 = 3;
/// Looks at the socket alone, before everything is looked at again.
const LOOKS: u32 = 16;
/// After a busy-poll budget was spent in vain, nobody busy-polls the connection for this many times
/// the budget, so that it takes at most a twentieth of a core from others.
const BUSY_POLL_PAUSE: u32 = 20;

/// Why a thread gives the progress token back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    /// It has what it waited for.
    Served,
    /// It polls, and looks again soon.
    ToPoll,
    /// The engine's thread is to go on.
    ToEngine,
}

/// Which thread makes progress on one connection.
#[derive(Debug)]
pub(crate) struct ProgressOwner {
    /// The progress token: a waiting thread has it.
    taken: AtomicBool,
    /// The engine's thread does not hear of the channels either.
    muted: AtomicBool,
    lease: ProgressLease,
    /// The engine's thread leaves the connection to the program.
    manual: AtomicBool,
    /// The lease is that of a thread that polls.
    polls: AtomicBool,
    /// From when on, in microseconds of the connection, a thread may busy-poll; 0 for at any time.
    busy_poll_from: AtomicU64,
    descriptors: Descriptors,
    /// The event loop that the last owner led, and that nobody runs while the lease lasts.
    left_loop: Mutex<Option<Loop>>,
    has_left_loop: AtomicBool,
}

/// A thread or task waits until the engine's thread notifies it.
pub(crate) struct EngineWatch(Arc<Shared>);

impl Drop for EngineWatch {
    fn drop(&mut self) {
        self.0.progress_owner.lease.unwatch();
    }
}

impl fmt::Debug for EngineWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineWatch").finish_non_exhaustive()
    }
}

impl ProgressOwner {
    pub(crate) fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            muted: AtomicBool::new(false),
            lease: ProgressLease::new(),
            manual: AtomicBool::new(false),
            polls: AtomicBool::new(false),
            busy_poll_from: AtomicU64::new(0),
            descriptors: Descriptors::default(),
            left_loop: Mutex::default(),
            has_left_loop: AtomicBool::new(false),
        }
    }

    /// The event loop that the last owner led is its own thread's at once.
    fn give_loop_back(&self) {
        // As a rule there is none.
        if self.has_left_loop.load(Ordering::SeqCst)
            && self.has_left_loop.swap(false, Ordering::SeqCst)
            && let Some(left) = lock(&self.left_loop).take()
        {
            left.end_lease();
        }
    }

    /// A waiting thread makes progress.
    fn is_taken(&self) -> bool {
        self.taken.load(Ordering::SeqCst)
    }

    pub(crate) fn is_manual(&self) -> bool {
        self.manual.load(Ordering::SeqCst)
    }

    /// The program makes progress: a thread waits, has the lease, or nobody else may.
    pub(crate) fn is_attended(&self) -> bool {
        self.is_manual() || self.is_taken() || self.lease.lasts_until().is_some()
    }

    /// When the engine's thread looks whether the lease has expired. Never, while a thread has the
    /// token for longer: it begins another lease, and wakes the engine's thread for that.
    pub(crate) fn due(&self, origin: Instant) -> Option<Instant> {
        let until = origin + Duration::from_micros(self.lease.lasts_until()?);
        (!self.is_taken() || Instant::now() < until).then_some(until)
    }

    /// Another connection has taken the control connection's place.
    pub(crate) fn control_replaced(&self) {
        self.descriptors.control_replaced();
    }
}

/// The progress token, while a thread has it, and how the thread leaves it: by a panic to the
/// engine's thread.
struct TakenToken<'a> {
    shared: &'a Shared,
    leaves: Leaves,
    /// There is more to do at once.
    more: bool,
    /// The thread moves what goes one at a time itself.
    lead: Option<Lead>,
}

impl Drop for TakenToken<'_> {
    fn drop(&mut self) {
        self.shared
            .release(self.leaves, self.more, self.lead.take());
    }
}

impl Shared {
    /// Takes the token, if no other thread has it.
    fn take_token(&self) -> Option<TakenToken<'_>> {
        let taken = self.progress_owner.taken.swap(true, Ordering::SeqCst);
        (!taken).then(|| TakenToken {
            shared: self,
            leaves: Leaves::ToEngine,
            more: true,
            lead: None,
        })
    }

    /// Makes progress until `ended`, at most until `limit`; `false` if the caller has to sleep
    /// until the engine's thread, or the owner, notifies it.
    pub(crate) fn drive(&self, ended: impl Fn() -> bool, limit: Instant) -> bool {
        if ended() {
            return true;
        }
        if !self.announces {
            return false;
        }
        if self.progress_owner.is_manual() {
            return self.drive_manual(&ended, limit);
        }
        let busy_poll = self.begin_busy_poll();
        if busy_poll.is_none() && !self.may_sleep() {
            return false;
        }
        if let Some(token) = self.take_token() {
            return self.progress_until(token, busy_poll, &ended, limit);
        }
        // Somebody does the work.
        if busy_poll.is_none() || self.progress_owner.descriptors.is_asleep() {
            return false;
        }
        let hit = poll_end(&ended, limit);
        if !hit {
            self.pause_busy_poll(BUSY_POLL_BUDGET);
        }
        hit
    }

    /// As [`drive`](Self::drive), where no other thread would do it.
    fn drive_manual(&self, ended: &impl Fn() -> bool, limit: Instant) -> bool {
        while self.progress_owner.is_manual() && Instant::now() < limit {
            if let Some(token) = self.take_token() {
                let busy_poll = self.begin_busy_poll();
                if self.progress_until(token, busy_poll, ended, limit) {
                    return true;
                }
            }
            if ended() {
                return true;
            }
            std::thread::sleep(MANUAL_PAUSE);
        }
        ended()
    }

    /// Makes all the progress that can be made now, without waiting; whether there may be more at
    /// once.
    pub(crate) fn progress_once(&self) -> bool {
        // Whoever has the lock makes progress.
        let Some(mut core) = self.try_lock() else {
            return false;
        };
        let turn = self.turn(&mut core);
        self.watch_descriptors(&core);
        self.finish_turn(core, turn);
        turn.busy || turn.more
    }

    /// Makes progress where only the program does; whether that is so.
    pub(crate) fn progress_if_manual(&self) -> bool {
        let is_manual = self.progress_owner.is_manual();
        if is_manual {
            self.progress_once();
        }
        is_manual
    }

    /// A descriptor that is readable when [`progress_once`](Self::progress_once) finds something to
    /// do.
    pub(crate) fn progress_descriptor(&self) -> Option<BorrowedFd<'_>> {
        let core = self.lock();
        let descriptors = &self.progress_owner.descriptors;
        let write = core.control.wants_write();
        let watches = descriptors.watch(
            core.control.as_fd(),
            write,
            core.channels.descriptors(),
            None,
        );
        watches.then(|| descriptors.as_fd()).flatten()
    }

    /// Keeps what [`progress_descriptor`](Self::progress_descriptor) has given true.
    fn watch_descriptors(&self, core: &Core) {
        let descriptors = &self.progress_owner.descriptors;
        if descriptors.as_fd().is_some() && !core.ending.control_done() && !core.control.is_away() {
            let write = core.control.wants_write();
            descriptors.watch(
                core.control.as_fd(),
                write,
                core.channels.descriptors(),
                None,
            );
            descriptors.take_call();
        }
    }

    /// Has the engine's thread leave the connection to the program, until
    /// [`end_manual`](Self::end_manual).
    pub(crate) fn begin_manual(&self) {
        self.progress_owner.manual.store(true, Ordering::SeqCst);
        let mut core = self.lock();
        self.watch_control(&mut core);
        self.mute_channels(&core);
        self.progress_owner.give_loop_back();
    }

    /// The connection closes or is lost: the engine's thread sees to the rest.
    pub(crate) fn end_manual(&self, core: &mut Core) {
        if self.progress_owner.manual.swap(false, Ordering::SeqCst) {
            self.end_lease(core);
        }
    }

    /// One look at everything, for a thread that polls: it never waits, and the engine's thread
    /// need not wake up for what this one finds.
    pub(crate) fn drive_once(&self, ended: impl Fn() -> bool) {
        let owner = &self.progress_owner;
        if self.progress_if_manual() || !self.announces || ended() || owner.lease.is_watched() {
            return;
        }
        let Some(mut token) = self.take_token() else {
            return;
        };
        owner.give_loop_back();
        let Some(mut core) = self.try_lock() else {
            token.more = false;
            return;
        };
        if !self.may_sleep() && core.standing().moving && owner.lease.lasts_until().is_none() {
            // With cores to spare, the engine's thread is as fast where chunks are moving.
            std::mem::forget(token);
            owner.taken.store(false, Ordering::SeqCst);
            return self.watch_control(&mut core);
        }
        let _context = self.stay_in_context();
        self.take_over(&mut core);
        core.pace.attend(true);
        core.pace.drive(true);
        let more = self.turn(&mut core).more;
        core.pace.drive(false);
        drop(core);
        owner.polls.store(true, Ordering::Relaxed);
        let leaves = match ended() {
            true => Leaves::Served,
            false => Leaves::ToPoll,
        };
        (token.leaves, token.more) = (leaves, more);
        // In the GPU's context.
        drop(token);
    }

    fn begin_busy_poll(&self) -> Option<BusyPoll> {
        self.may_busy_poll().then(BusyPoll::begin).flatten()
    }

    fn may_busy_poll(&self) -> bool {
        let from = &self.progress_owner.busy_poll_from;
        // Zero spares a look at the clock.
        let may = match from.load(Ordering::Relaxed) {
            0 => return true,
            from => from <= self.since_origin(Instant::now()),
        };
        if may {
            from.store(0, Ordering::Relaxed);
        }
        may
    }

    /// This budget was spent in vain: nothing came, or the kernel gave the core to another thread.
    fn pause_busy_poll(&self, spent: Duration) {
        let from = self.since_origin(Instant::now() + spent * BUSY_POLL_PAUSE);
        self.progress_owner
            .busy_poll_from
            .store(from, Ordering::Relaxed);
    }

    /// Whether a thread that does the engine's work may sleep meanwhile: on few cores, where the
    /// engine's thread could not run beside it, and where nothing else than descriptors tells of
    /// news.
    fn may_sleep(&self) -> bool {
        let alone = cores() <= FEW_CORES || self.progress_owner.is_manual();
        alone && !self.is_foreign() && !self.has_gpu()
    }

    /// Whether a thread that does the engine's work may lead an event loop too: never where code of
    /// the program is called in the middle of that work.
    fn may_lead(&self) -> bool {
        self.may_sleep() && !self.progress_owner.is_manual() && !self.is_observed()
    }

    /// Leads the event loop of what goes one at a time, or leaves it to its thread. Comes before
    /// the lock is let go of, which calls the program's wakers.
    fn lead_or_follow(&self, core: &Core, lead: &mut Option<Lead>) {
        if !core.program.wakers.is_empty() || core.go_several_at_a_time() {
            *lead = None;
        } else if lead.is_none() && core.goes_one_at_a_time() {
            *lead = core.channels.own_loop().and_then(|own| own.lead());
        }
        if lead.is_none() {
            self.progress_owner.give_loop_back();
        }
    }

    /// More than one goes over the channels at a time, which needs the event loop's thread at once.
    pub(crate) fn see_to_lanes(&self, core: &Core) {
        if core.go_several_at_a_time() {
            self.progress_owner.give_loop_back();
        }
    }

    /// The engine's thread is not to be woken: this one looks.
    fn take_over(&self, core: &mut Core) {
        core.set_looked_for(true);
        core.clock.tick();
        core.pace.waits();
        self.watch_control(core);
        if core.standing().moving {
            self.mute_channels(core);
        }
    }

    /// Has the engine's thread hear nothing of the channels.
    fn mute_channels(&self, core: &Core) {
        if !self.progress_owner.muted.swap(true, Ordering::Relaxed) {
            for descriptor in core.channels.descriptors() {
                // Not muted, the engine's thread wakes and finds nothing to do.
                drop(self.driver.rewatch(self.id, descriptor, MUTED));
            }
        }
    }

    /// Gives the token back: with a lease if the thread comes back and nothing is left to do, else
    /// to the engine's thread at once.
    fn release(&self, leaves: Leaves, more: bool, lead: Option<Lead>) {
        let mut core = self.lock();
        if self.progress_owner.is_manual() {
            drop(lead);
            // Nobody would write later what is held back now.
            core.pace.attend(false);
            core.speak();
            core.set_looked_for(false);
            self.watch_descriptors(&core);
            self.progress_owner.taken.store(false, Ordering::SeqCst);
            let turn = core.guarded_start();
            return self.finish_turn(core, turn);
        }
        let mut turn = core.standing();
        turn.more |= more;
        let quiet = !turn.more && !turn.poll && !turn.finished;
        // What the socket does not take now goes out with the next wait.
        let written = self.may_sleep() || !core.control.wants_write();
        let comes_back = leaves != Leaves::ToEngine;
        if comes_back && quiet && written && !core.jobs.has_results() {
            core.speak();
            if leaves == Leaves::Served {
                // To write takes longer than a program that answers at once.
                core.clock.tick();
                let now = core.clock.ticked();
                core.pace.leaves(now);
            }
            let until = core.clock.now() + PROGRESS_LEASE;
            self.progress_owner.lease.begin(until.0);
            // Others' lanes may have come to the loop, which wait for nobody.
            let lead = lead.filter(|_| core.channels.own_loop().is_some());
            let left_loop = lead.map(|lead| lead.leave_until(core.clock.instant_of(until)));
            if left_loop.is_some() {
                *lock(&self.progress_owner.left_loop) = left_loop;
                self.progress_owner
                    .has_left_loop
                    .store(true, Ordering::SeqCst);
            }
            self.progress_owner.taken.store(false, Ordering::SeqCst);
            core.set_looked_for(false);
            if !self.progress_owner.lease.is_watched() && !core.jobs.has_results() {
                let until = core.clock.instant_of(until);
                drop(core);
                return self.driver.wake_by(self.id, until);
            }
        } else {
            drop(lead);
            self.progress_owner.taken.store(false, Ordering::SeqCst);
        }
        self.end_lease(&mut core);
        core.set_looked_for(false);
        turn = core.guarded_start();
        turn.more |= more;
        let results = core.jobs.has_results();
        self.finish_turn(core, turn);
        if results {
            self.driver.wake(self.id);
        }
    }

    /// The engine's thread takes the connection.
    fn end_lease(&self, core: &mut Core) {
        self.progress_owner.lease.end();
        self.progress_owner.give_loop_back();
        self.progress_owner.polls.store(false, Ordering::Relaxed);
        core.pace.attend(false);
        if self.progress_owner.muted.swap(false, Ordering::Relaxed) && !core.standing().finished {
            for descriptor in core.channels.descriptors() {
                drop(self.driver.rewatch(self.id, descriptor, READ));
            }
        }
    }

    /// Wakes the thread that sleeps on the connection's descriptors, if others have done what it
    /// waits for or left it something to do. Called with the lock held by whoever has changed
    /// anything.
    pub(crate) fn wake_sleeper(&self, core: &Core) {
        let descriptors = &self.progress_owner.descriptors;
        if descriptors.is_asleep() && (core.program.ended_some || core.control.wants_write()) {
            descriptors.wake_sleeper();
        }
    }

    /// Sleeps until the connection has news, or the event loop that this thread leads, at most
    /// until `until`. `None` if that cannot be had here.
    fn sleep(
        &self,
        ended: &impl Fn() -> bool,
        until: Instant,
        lead: &mut Option<Lead>,
    ) -> Option<Woken> {
        let mut core = self.lock();
        // Nobody writes soon what would be held back, nor what was.
        core.pace.attend(false);
        core.speak();
        if !core.program.wakers.is_empty() {
            *lead = None;
        }
        let lead = lead.as_ref();
        self.watch_control(&mut core);
        let turn = core.standing();
        let unfit = turn.more || turn.poll || turn.finished;
        if unfit || core.ending.control_done() || core.control.is_away() {
            return None;
        }
        self.mute_channels(&core);
        core.program.ended_some = false;
        let write = core.control.wants_write();
        let descriptors = &self.progress_owner.descriptors;
        let channels = core.channels.descriptors();
        let lanes = lead.map(Lead::led);
        if !descriptors.prepare_sleep(core.control.as_fd(), write, channels, lanes) {
            return None;
        }
        // What was raised meanwhile makes a descriptor readable, but for the copy worker's results.
        core.set_looked_for(false);
        let is_at_rest = lead.is_none_or(Lead::prepare_sleep);
        if core.jobs.has_results() || !is_at_rest {
            descriptors.wake_up();
            return Some(Woken::default());
        }
        let due = core.clock.due.map(|due| core.clock.instant_of(due));
        let until = due.map_or(until, |due| due.min(until));
        // Acknowledgements of a transfer's first chunks are not worth a wake-up of their own.
        let exact = !turn.moving;
        drop(core);
        if ended() {
            descriptors.wake_up();
            return Some(Woken::default());
        }
        let woken = descriptors.sleep(until, exact);
        if let Some(lead) = lead.filter(|_| woken.for_lanes) {
            // What they report now is looked for at once; what they have reported was announced.
            if !woken.for_channels {
                self.lock().set_looked_for(true);
            }
            lead.round();
        }
        Some(woken)
    }

    /// The engine's thread takes the connection if the lease has expired.
    pub(crate) fn expire_lease(&self, core: &mut Core) {
        let until = self.progress_owner.lease.lasts_until();
        let over = until.is_some_and(|until| until <= self.since_origin(Instant::now()));
        if over && !self.progress_owner.is_taken() {
            self.end_lease(core);
        }
    }

    /// Whether the program polls, or streams: it looks for one of the transfers under way soon, and
    /// until then the engine's thread would only take the core from it.
    pub(crate) fn comes_back(&self, core: &Core) -> bool {
        let polls = self.progress_owner.polls.load(Ordering::Relaxed);
        polls || core.standing().moving
    }

    /// What the program began takes more than a moment: the engine's thread is to see to it.
    pub(crate) fn leave_to_engine(&self, core: &mut Core) {
        if self.progress_owner.lease.lasts_until().is_some() && !self.progress_owner.is_taken() {
            self.end_lease(core);
        }
    }

    /// A thread or task waits without driving the connection: no lease keeps the engine's thread
    /// from its work while what this returns lives.
    pub(crate) fn watch(self: &Arc<Self>) -> EngineWatch {
        self.progress_owner.lease.watch();
        let watch = EngineWatch(Arc::clone(self));
        if self.progress_owner.lease.lasts_until().is_some() && !self.progress_owner.is_taken() {
            let mut core = self.lock();
            if !self.progress_owner.is_taken() {
                self.end_lease(&mut core);
                core.clock.tick();
                let turn = core.guarded_start();
                self.finish_turn(core, turn);
            }
        }
        watch
    }

    /// Waits until `ended`, at most until `limit`: makes the progress itself where it can, and else
    /// sleeps, as often as that is not so; whether it is.
    pub(crate) fn wait(
        self: &Arc<Self>,
        limit: Instant,
        ended: impl Fn() -> bool,
        sleep: impl Fn(Duration),
    ) -> bool {
        if self.drive(&ended, limit) {
            return true;
        }
        let _watch = self.watch();
        loop {
            let left = limit.saturating_duration_since(Instant::now());
            if ended() || left.is_zero() {
                return ended();
            }
            sleep(left.min(LIVENESS_CHECK));
        }
    }

    fn progress_until(
        &self,
        mut token: TakenToken<'_>,
        mut busy_poll: Option<BusyPoll>,
        ended: &impl Fn() -> bool,
        limit: Instant,
    ) -> bool {
        let began = Instant::now();
        let mut last = began;
        let may_sleep = self.may_sleep();
        let may_lead = self.may_lead();
        let _context = self.stay_in_context();
        let mut taken_over = false;
        let mut more = false;
        let mut looks = 0_u32;
        let mut vain = 0;
        let mut turn: Option<Turn> = None;
        let mut has_frames = true;
        let hit = loop {
            looks = looks.wrapping_add(1);
            let at_rest = turn.is_some_and(|turn| {
                let polls = turn.poll && !turn.copying;
                !(turn.busy || turn.more || polls || turn.moving || turn.finished)
            });
            let only_looks = busy_poll.is_some() && at_rest && !looks.is_multiple_of(LOOKS);
            let mut core = match busy_poll {
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
                let soon = busy_poll.is_none() || starts && core.standing().moving;
                let sleeps = soon && may_sleep && limit > began + PROGRESS_LEASE;
                core.control
                    .set_asks(match (sleeps, has_frames && !starts) {
                        (false, _) => Asks::Always,
                        (true, true) => Asks::Once,
                        (true, false) => Asks::Not,
                    });
                let turn = self.turn(&mut core);
                core.control.set_asks(Asks::Always);
                core.pace.drive(false);
                if may_lead {
                    self.lead_or_follow(&core, &mut token.lead);
                }
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
            let led = token.lead.as_ref().is_some_and(Lead::round);
            let busy = led || turn.is_some_and(|turn| turn.busy);
            let moving = turn.is_some_and(|turn| turn.moving);
            // On few cores nobody looks without a pause while chunks are moving.
            let lanes_need_it = moving && cores() <= FEW_CORES || token.lead.is_some();
            if busy {
                // Frames may have come since: the next turn reads them.
                (last, vain, has_frames) = (now, 0, true);
                if busy_poll.is_none() && !lanes_need_it {
                    busy_poll = self.begin_busy_poll();
                }
                continue;
            }
            if let Some(one) = &busy_poll {
                let budget = one.budget(turn);
                let patient = now.saturating_duration_since(last) <= budget;
                if patient && !lanes_need_it {
                    if moving {
                        give_way();
                    }
                    continue;
                }
                if !patient {
                    self.pause_busy_poll(budget);
                }
                busy_poll = None;
            }
            let sleeps = may_sleep && vain < VAIN_SLEEPS;
            match sleeps.then(|| self.sleep(ended, limit, &mut token.lead)) {
                Some(Some(woken)) => {
                    has_frames = woken.for_control;
                    vain = if woken.for_lanes { 0 } else { vain + 1 };
                }
                Some(None) | None => break false,
            }
        };
        // Also where others have held the lock all the time: they saw that somebody looks, and left
        // it to him.
        let leaves = match hit {
            true => Leaves::Served,
            false => Leaves::ToEngine,
        };
        (token.leaves, token.more) = (leaves, more);
        drop(token);
        hit
    }
}
