//! Threads of which one runs at a time. Whoever waits chooses who is next: a thread that can go on,
//! or a step of the network; when there is neither, the clock moves on to the next limit.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{ME, Nanos, OUTSIDE, System, fail, raw, system};
use crate::tally;

/// By so much a copy worker is late at most: the monitor may have gone to sleep meanwhile.
const LATEST_COPY: Nanos = 400 * super::MILLI;

/// Decisions of one run after which it counts as one that never ends.
const MOST_DECISIONS: u64 = 12_000_000;

/// What a thread waits for.
#[derive(Debug)]
pub enum Wait {
    /// It can go on.
    Nothing,
    Futex {
        word: usize,
        bits: u32,
        until: Option<Nanos>,
    },
    Descriptors {
        fds: Vec<libc::pollfd>,
        until: Option<Nanos>,
    },
    Time(Nanos),
    End(usize),
    /// It has ended.
    Ever,
}

impl Wait {
    fn until(&self) -> Option<Nanos> {
        match self {
            Self::Futex { until, .. } | Self::Descriptors { until, .. } => *until,
            Self::Time(until) => Some(*until),
            Self::Nothing | Self::End(_) | Self::Ever => None,
        }
    }
}

pub struct Thread {
    /// 1 while it has the turn.
    turn: Box<AtomicU32>,
    wait: Wait,
    /// Its time was over.
    late: bool,
    /// It does not run before, whatever it waits for.
    dozes_until: Nanos,
    /// By the count of what changes descriptors: it was not ready then.
    unready_at: u64,
    handle: libc::pthread_t,
    name: String,
}

impl Thread {
    pub fn running() -> Self {
        Self {
            turn: Box::new(AtomicU32::new(1)),
            wait: Wait::Nothing,
            late: false,
            dozes_until: 0,
            unready_at: 0,
            handle: 0,
            name: String::new(),
        }
    }

    /// When it has to be looked at again.
    fn limit(&self, now: Nanos) -> Option<Nanos> {
        let until = self.wait.until().map(|until| until.max(self.dozes_until));
        let dozes = (self.dozes_until > now).then_some(self.dozes_until);
        until.into_iter().chain(dozes).min()
    }

    /// It is a copy worker's, and has not ended.
    fn copies(&self) -> bool {
        self.name.starts_with("tcpx-copy") && !matches!(self.wait, Wait::Ever)
    }

    pub fn describe(&self) -> String {
        format!("{}: waits for {:?}", self.name, self.wait)
    }
}

/// Waits, and lets others run; whether the time was over before.
pub fn wait(what: Wait) -> bool {
    let me = ME.get();
    let Some(system) = system() else {
        return false;
    };
    system.threads[me].wait = what;
    system.threads[me].unready_at = 0;
    let next = system.next();
    if next != me {
        let mine: *const AtomicU32 = &raw const *system.threads[me].turn;
        // SAFETY: the words of threads stay where they are until the process ends.
        let mine = unsafe { &*mine };
        mine.store(0, Ordering::SeqCst);
        hand_over(system, next);
        take_turn(mine);
    }
    // SAFETY: this thread has the turn again.
    let system = unsafe { (*super::SYSTEM.0.get()).as_mut() };
    system.is_some_and(|system| std::mem::take(&mut system.threads[me].late))
}

fn hand_over(system: &System, next: usize) {
    let word = &system.threads[next].turn;
    word.store(1, Ordering::SeqCst);
    raw::futex_wake(word);
}

fn take_turn(mine: &AtomicU32) {
    while mine.load(Ordering::SeqCst) == 0 {
        raw::futex_wait(mine, 0);
    }
}

/// Lets others run, sometimes.
pub fn pass() {
    if let Some(system) = system()
        && system.random.one_in(system.settings.preempts)
    {
        wait(Wait::Nothing);
    }
}

/// A call was made that takes so long.
pub fn called(takes: Nanos) {
    if let Some(system) = system() {
        system.called(takes);
        pass();
    }
}

/// Wakes those that wait for a futex.
pub fn wake(word: usize, most: usize, bits: u32) -> usize {
    let Some(system) = system() else {
        return 0;
    };
    let waits = |thread: &Thread| matches!(&thread.wait, Wait::Futex { word: of, bits: mask, .. } if *of == word && mask & bits != 0);
    let mut waiting: Vec<usize> = (0..system.threads.len())
        .filter(|at| waits(&system.threads[*at]))
        .collect();
    let mut woken = 0;
    while woken < most && !waiting.is_empty() {
        let at = waiting.swap_remove(system.random.index(waiting.len()));
        system.threads[at].wait = Wait::Nothing;
        if system.faults_from.is_some()
            && system.threads[at].copies()
            && system.settings.late_copies > 0
        {
            system.settings.late_copies -= 1;
            let until = system.now + system.random.below(LATEST_COPY);
            system.rest(at, until);
        }
        woken += 1;
    }
    woken
}

impl System {
    /// A thread that has not ended does not run for a while.
    pub(super) fn doze(&mut self, which: usize, span: Nanos) {
        let lives = |at: &usize| !matches!(self.threads[*at].wait, Wait::Ever);
        let living: Vec<usize> = (0..self.threads.len()).filter(lives).collect();
        self.rest(living[which % living.len()], self.now + span);
    }

    /// The calling thread reads what a peer has sent: one of lanes is held up before, as by another
    /// connection's bytes.
    pub(super) fn read_held_up(&mut self) {
        let me = ME.get();
        let (times, span) = self.held_lanes;
        if times > 0 && self.threads[me].name.contains("-loop-") && self.random.one_in(4) {
            tally::saw("held lane");
            self.held_lanes.0 -= 1;
            let until = self.now + self.random.below(span);
            self.rest(me, until);
            wait(Wait::Nothing);
        }
    }

    fn rest(&mut self, at: usize, until: Nanos) {
        let until = until.max(self.threads[at].dozes_until);
        self.threads[at].dozes_until = until;
        self.stops.push((at, self.now, until));
    }

    /// For how long a thread was stopped until now that may hold a connection's lock: a program's,
    /// which has no name, or the engine's, which waits for those.
    pub(super) fn stopped(&self) -> Nanos {
        let holds = |at: usize| ["", "tcpx-engine"].contains(&&*self.threads[at].name);
        let (mut stopped, mut counted) = (0, 0);
        for &(at, from, until) in &self.stops {
            if holds(at) {
                stopped += until.min(self.now).saturating_sub(from.max(counted));
                counted = counted.max(until);
            }
        }
        stopped
    }

    /// Every thread runs again.
    pub(super) fn end_dozes(&mut self) {
        for (_, _, until) in &mut self.stops {
            *until = self.now.min(*until);
        }
        for thread in &mut self.threads {
            thread.dozes_until = 0;
        }
    }

    /// A job of the calling copy worker begins, when copies are no longer slow: nobody else waits
    /// for anything that it holds.
    pub(super) fn copy_late(&mut self) {
        if self.copies_from > self.now {
            tally::saw("slow copies");
            self.rest(ME.get(), self.copies_from);
            wait(Wait::Nothing);
        }
    }

    /// The calling thread reads what a peer may let go of, some of it late.
    pub(super) fn read_late(&mut self) {
        let is_late = self.faults_from.is_some() && self.settings.late_copies > 0;
        if is_late && self.random.one_in(8) {
            self.settings.late_copies -= 1;
            let until = self.now + self.random.below(LATEST_COPY);
            self.rest(ME.get(), until);
            wait(Wait::Nothing);
        }
    }

    /// Who runs next; until somebody can, the network and the clock move.
    fn next(&mut self) -> usize {
        let mut looked = false;
        loop {
            self.decisions += 1;
            if self.decisions > MOST_DECISIONS {
                fail("the run makes no end: too many decisions");
            }
            self.strike();
            match self.choose() {
                Choice::Thread(next) => return next,
                Choice::Step => continue,
                // Whatever else changes descriptors is seen before the clock moves.
                Choice::Nobody if !std::mem::replace(&mut looked, true) => {
                    self.stirs += 1;
                    continue;
                }
                Choice::Nobody => {}
            }
            let limits = self.threads.iter().filter_map(|one| one.limit(self.now));
            let next = limits.chain(self.network.next_event(self.now)).min();
            match next {
                Some(next) => {
                    if next > self.now + 500 * super::MILLI {
                        for link in self.network.unread() {
                            super::note(|| {
                                format!(
                                    "nobody reads link {link} for {} ms",
                                    (next - self.now) / super::MILLI
                                )
                            });
                        }
                    }
                    self.now = self.now.max(next);
                    self.idle_calls = 0;
                }
                None => fail("deadlock: every thread waits, and nothing is due"),
            }
        }
    }

    /// One of the threads that can go on, or a step of the network, each as likely: what
    /// descriptors say is asked only where it matters.
    fn choose(&mut self) -> Choice {
        let mut threads: Vec<usize> = (0..self.threads.len())
            .filter(|at| self.may_go_on(*at))
            .collect();
        let steps = self.network.steps(self.now);
        while threads.len() + steps.len() > 0 {
            let choice = self.random.index(threads.len() + steps.len());
            if let Some(step) = choice.checked_sub(threads.len()) {
                self.stirs += 1;
                self.idle_calls = 0;
                self.network.step(&steps[step], self.now, &mut self.random);
                return Choice::Step;
            }
            let at = threads.swap_remove(choice);
            let thread = &mut self.threads[at];
            let is_ready = match &mut thread.wait {
                Wait::Descriptors { fds, .. } => raw::poll(fds) > 0,
                wait => wait.until().is_none_or(|until| until > self.now),
            };
            if is_ready || thread.wait.until().is_some_and(|until| until <= self.now) {
                thread.wait = Wait::Nothing;
                thread.late = !is_ready;
                return Choice::Thread(at);
            }
            thread.unready_at = self.stirs;
        }
        Choice::Nobody
    }

    /// Whether a thread can go on, unless its descriptors say otherwise.
    fn may_go_on(&self, at: usize) -> bool {
        let thread = &self.threads[at];
        let is_able = match &thread.wait {
            Wait::Nothing => true,
            Wait::Descriptors { .. } if thread.unready_at < self.stirs => true,
            Wait::End(of) => matches!(self.threads[*of].wait, Wait::Ever),
            Wait::Ever => false,
            Wait::Descriptors { .. } | Wait::Futex { .. } | Wait::Time(_) => {
                thread.wait.until().is_some_and(|until| until <= self.now)
            }
        };
        is_able && thread.dozes_until <= self.now
    }
}

/// What comes next.
enum Choice {
    Thread(usize),
    /// The network has made a step.
    Step,
    /// Nothing can go on now.
    Nobody,
}

struct Start {
    run: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
    me: usize,
    turn: *const AtomicU32,
}

extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: made by `spawn` for this thread.
    let start = unsafe { Box::from_raw(start.cast::<Start>()) };
    // SAFETY: the words of threads stay where they are until the process ends.
    take_turn(unsafe { &*start.turn });
    ME.set(start.me);
    let result = (start.run)(start.argument);
    if let Some(system) = system() {
        system.threads[start.me].wait = Wait::Ever;
        let next = system.next();
        ME.set(OUTSIDE);
        hand_over(system, next);
    }
    result
}

type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> libc::c_int;
type Join = unsafe extern "C" fn(libc::pthread_t, *mut *mut c_void) -> libc::c_int;

fn real(name: &std::ffi::CStr) -> *mut c_void {
    // SAFETY: a name that ends.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Starts a thread, which waits for its turn.
///
/// # Safety
/// As for `pthread_create`.
pub unsafe fn spawn(
    handle: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> libc::c_int {
    // SAFETY: the C library's function has this type.
    let create: Create = unsafe { std::mem::transmute(real(c"pthread_create")) };
    let Some(system) = system() else {
        // SAFETY: the caller's.
        return unsafe { create(handle, attributes, start, argument) };
    };
    let mut thread = Thread::running();
    thread.turn.store(0, Ordering::SeqCst);
    let me = system.threads.len();
    let start = Start {
        run: start,
        argument,
        me,
        turn: &raw const *thread.turn,
    };
    let start = Box::into_raw(Box::new(start)).cast();
    // SAFETY: the caller's, with our start in place of its own.
    let made = unsafe { create(handle, attributes, run, start) };
    if made == 0 {
        // SAFETY: written by the call.
        thread.handle = unsafe { *handle };
        system.threads.push(thread);
    }
    made
}

/// A thread has this name.
pub fn named(handle: libc::pthread_t, name: &std::ffi::CStr) {
    let of =
        system().and_then(|system| system.threads.iter_mut().rfind(|one| one.handle == handle));
    if let Some(thread) = of {
        thread.name = name.to_string_lossy().into_owned();
    }
}

/// Waits for a thread's end.
///
/// # Safety
/// As for `pthread_join`.
pub unsafe fn join(handle: libc::pthread_t, result: *mut *mut c_void) -> libc::c_int {
    let of = system().and_then(|system| {
        system
            .threads
            .iter()
            .rposition(|thread| thread.handle == handle)
    });
    if let Some(of) = of {
        wait(Wait::End(of));
    }
    // SAFETY: the C library's function has this type.
    let join: Join = unsafe { std::mem::transmute(real(c"pthread_join")) };
    // SAFETY: the caller's.
    unsafe { join(handle, result) }
}
