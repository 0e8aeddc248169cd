//! A simulated system: threads that run one at a time, a clock that moves when nothing else can,
//! and TCP connections between sockets of this process.
//!
//! The engine is not changed for it. This program defines the functions of the C library by which
//! Rust's standard library, rustix and socket2 reach the kernel ([`calls`]); those that wait give
//! the turn to another thread, which the seed chooses ([`threads`]); those of TCP sockets go to a
//! network that the seed delays, cuts and breaks ([`network`]). Readiness (`poll`, `epoll`) stays
//! the kernel's: each simulated socket is one end of a local socket pair, whose other end the
//! network holds.

mod calls;
pub mod network;
mod raw;
mod threads;

use std::cell::{Cell, UnsafeCell};
use std::time::Duration;

use crate::random::Random;
use crate::{memory, tally};
use network::{Fault, Network};
pub use raw::exit;
use threads::Thread;

/// Nanoseconds of the clock.
pub type Nanos = u64;
pub const MICRO: Nanos = 1_000;
pub const MILLI: Nanos = 1_000_000;
pub const SECOND: Nanos = 1_000_000_000;

/// Longer than any run.
const FOREVER: Nanos = 100_000 * SECOND;

/// Calls of one run after which it counts as one that never ends.
const MOST_CALLS: u64 = 12_000_000;

/// Calls in which nothing moves after which some thread counts as one that spins: twice what is
/// never reached.
const MOST_IDLE_CALLS: u64 = 10_000;

/// Bytes that a run may have allocated at a time: those of the process, and of each end of a
/// connection.
const MOST_MEMORY: (usize, usize) = (4 << 20, 4 << 20);

/// What a seed chooses of the system.
#[derive(Clone, Debug)]
pub struct Settings {
    pub seed: u64,
    pub cores: usize,
    /// Another thread gets its turn at one of so many calls.
    pub preempts: u64,
    pub network: network::Settings,
    /// So often a copy worker that is woken does so late.
    pub late_copies: u32,
    /// Jobs that have room in the copy worker's queue; others wait beside it.
    pub room: usize,
    /// Ends of connections in this process, liars' apart.
    pub ends: usize,
    /// By scheduling decision.
    pub faults: Vec<(u64, Fault)>,
    pub verbose: bool,
}

pub struct System {
    settings: Settings,
    random: Random,
    now: Nanos,
    calls: u64,
    /// Those since something moved, be it the clock because nobody could go on.
    idle_calls: u64,
    decisions: u64,
    threads: Vec<Thread>,
    /// What may have made a descriptor ready, counted.
    stirs: u64,
    network: Network,
    /// Faults strike from this decision on, counted from there.
    faults_from: Option<u64>,
    next_fault: usize,
    /// By which the clock has jumped, in sum.
    jumped: Nanos,
    /// Which threads were stopped, and from when until when.
    stops: Vec<(usize, Nanos, Nanos)>,
    most_memory: usize,
    /// So many of the copy worker's next jobs fail.
    failing_jobs: u32,
    /// How many times more a thread of lanes is held up before it reads, and for how long at most.
    held_lanes: (u32, Nanos),
    /// No job of the copy workers begins before.
    copies_from: Nanos,
}

struct Global(UnsafeCell<Option<System>>);

// SAFETY: only the thread that has the turn looks at it.
unsafe impl Sync for Global {}

static SYSTEM: Global = Global(UnsafeCell::new(None));

const OUTSIDE: usize = usize::MAX;

thread_local! {
    /// The number of this thread, if it is one of the simulated ones.
    static ME: Cell<usize> = const { Cell::new(OUTSIDE) };
    /// It says that it has read what it has not.
    static LIES: Cell<bool> = const { Cell::new(false) };
}

/// The system, for a thread of it; others go to the kernel.
fn system() -> Option<&'static mut System> {
    if ME.get() == OUTSIDE {
        return None;
    }
    // SAFETY: this thread has the turn, and nobody keeps the reference over a call that gives it
    // away.
    unsafe { (*SYSTEM.0.get()).as_mut() }
}

/// Whether the copy worker's next job fails, which begins late where copies are slow.
fn job_fails() -> bool {
    if let Some(system) = system() {
        system.copy_late();
    }
    let Some(system) = system().filter(|system| system.failing_jobs > 0) else {
        return false;
    };
    system.failing_jobs -= 1;
    tally::saw("failed copy");
    note(|| "a job of the copy worker fails".to_owned());
    true
}

/// Makes the calling thread the first one of a new system.
pub fn begin(settings: Settings) {
    let system = System {
        random: Random::new(settings.seed ^ 0x5157_EA11),
        now: 1_000 * SECOND,
        calls: 0,
        decisions: 0,
        threads: vec![Thread::running()],
        stirs: 1,
        idle_calls: 0,
        network: Network::new(settings.network.clone()),
        faults_from: None,
        next_fault: 0,
        jumped: 0,
        stops: Vec::new(),
        most_memory: 0,
        failing_jobs: 0,
        held_lanes: (0, 0),
        copies_from: 0,
        settings,
    };
    tcpx_memory::FAILS.get_or_init(|| job_fails);
    tcpx_memory::HOST_ROOM.get_or_init(|| system.settings.room);
    // SAFETY: there is one thread.
    unsafe { *SYSTEM.0.get() = Some(system) };
    ME.set(0);
}

/// From now on faults strike.
pub fn begin_faults() {
    if let Some(system) = system() {
        system.faults_from = Some(system.decisions);
    }
}

/// No fault strikes any more, and what was stopped goes on.
pub fn end_faults() {
    if let Some(system) = system() {
        system.faults_from = None;
        heal();
        system.end_dozes();
        system.failing_jobs = 0;
        system.held_lanes = (0, 0);
        system.copies_from = 0;
    }
}

/// Links that stalled, for ever too, go on.
pub fn heal() {
    if let Some(system) = system() {
        system.network.heal();
    }
}

/// Time since the beginning.
pub fn now() -> Nanos {
    system().map_or(0, |system| system.now)
}

/// A program does its next thing: it waits for nothing.
pub fn goes_on() {
    if let Some(system) = system() {
        system.idle_calls = 0;
    }
}

/// What this thread reads may be something else by now: it has said before that it has read it.
pub fn lie() {
    LIES.set(true);
}

fn is_honest() -> bool {
    !LIES.get()
}

/// Sockets that are open.
pub fn open_sockets() -> usize {
    system().map_or(0, |system| system.network.open())
}

/// Forks this process; the child does this, past the simulated system, and ends.
pub fn fork(child: impl FnOnce()) {
    // SAFETY: the child has this thread alone, and ends before it returns from here.
    let process = unsafe { libc::fork() };
    if process == 0 {
        ME.set(OUTSIDE);
        // One that waits for a thread of its parent ends so.
        // SAFETY: a limit of this process.
        unsafe { libc::alarm(20) };
        child();
        raw::exit(0);
    }
    let mut status = 0;
    // SAFETY: our own child.
    let ended = unsafe { libc::waitpid(process, &raw mut status, 0) };
    if ended != process || status != 0 {
        fail(&format!("a fork's child ended with status {status:#x}"));
    }
    if let Some(system) = system() {
        system.network.recount();
    }
}

/// By how much the clock has jumped until now.
pub fn jumped() -> Duration {
    Duration::from_nanos(system().map_or(0, |system| system.jumped))
}

/// For how long threads that see to deadlines were stopped until now.
pub fn stopped() -> Duration {
    Duration::from_nanos(system().map_or(0, |system| system.stopped()))
}

/// Most bytes that were allocated at a time, for each end of a connection.
pub fn needed() -> usize {
    system().map_or(0, |system| system.most_memory / system.settings.ends.max(1))
}

/// The server of this address takes nothing more of what its client sends, until faults end.
pub fn stop_peer(port: u16) {
    if let Some(system) = system() {
        tally::saw("peer that takes nothing");
        system.network.stop(port, system.now + FOREVER);
    }
}

/// Decisions and calls until now, bytes that were allocated at a time, and a number in which every
/// decision has its part.
pub fn trail() -> String {
    system().map_or_else(String::new, |system| {
        let trail = system.random.clone().next();
        format!(
            "{} decisions, {} calls, {} KiB at most, trail {trail:016x}",
            system.decisions,
            system.calls,
            system.most_memory >> 10
        )
    })
}

/// Ends the run: something must not be.
pub fn fail(what: &str) -> ! {
    let mut text = format!("FAILED: {what}\n");
    if let Some(system) = system() {
        text += &system.describe();
    }
    raw::print(&text);
    // From here on the kernel answers.
    ME.set(OUTSIDE);
    let trace = std::backtrace::Backtrace::force_capture().to_string();
    let ours = trace
        .lines()
        .filter(|line| line.contains("tcpx") && !line.contains("simulator::system"));
    for line in ours.take(24) {
        raw::print(&format!("{line}\n"));
    }
    raw::exit(3)
}

/// For replays.
pub fn note(text: impl FnOnce() -> String) {
    if let Some(system) = system()
        && system.settings.verbose
    {
        let me = ME.get();
        let micros = (system.now - 1_000 * SECOND) / MICRO;
        raw::print(&format!("{micros:>10} us  t{me:<2} {}\n", text()));
    }
}

impl System {
    /// A call was made: time passes, and sometimes another thread's turn comes.
    fn called(&mut self, takes: Nanos) {
        self.now += takes;
        self.calls += 1;
        self.most_memory = self.most_memory.max(memory::live());
        let most = MOST_MEMORY.0 + self.settings.ends * MOST_MEMORY.1;
        // What a panic tells of itself takes much, and must not be interrupted.
        if self.most_memory > most && !std::thread::panicking() {
            fail("the process needs more memory than its connections may");
        }
        self.idle_calls += 1;
        if self.idle_calls > MOST_IDLE_CALLS {
            fail("a thread goes on and on, and nothing moves");
        }
        if self.calls > MOST_CALLS {
            fail("the run makes no end: too many calls");
        }
    }

    fn describe(&self) -> String {
        let micros = (self.now - 1_000 * SECOND) / MICRO;
        let mut text = format!(
            "after {micros} us, {} decisions, {} calls\n",
            self.decisions, self.calls
        );
        for (at, thread) in self.threads.iter().enumerate() {
            text += &format!("  thread {at}: {}\n", thread.describe());
        }
        text + &self.network.describe(self.now)
    }

    fn strike(&mut self) {
        let Some(from) = self.faults_from else {
            return;
        };
        while let Some((at, fault)) = self.settings.faults.get(self.next_fault)
            && self.decisions >= from + at
        {
            let fault = fault.clone();
            match fault {
                Fault::TimeJump(span) => {
                    tally::saw("time jump");
                    self.now += span;
                    self.jumped += span;
                }
                Fault::Doze(which, span) => {
                    tally::saw("thread that rests");
                    self.doze(which, span);
                }
                Fault::HeldLanes(times, span) => self.held_lanes = (times, span),
                // Those that are slow do not become slower.
                Fault::SlowCopies(span) if self.copies_from <= self.now => {
                    self.copies_from = self.now + span;
                }
                Fault::SlowCopies(_) => {}
                Fault::FailedCopies(jobs) => self.failing_jobs = jobs,
                _ if self.network.strike(&fault, self.now, &mut self.random) => {}
                _ => return,
            }
            note(|| format!("fault: {fault:?}"));
            self.next_fault += 1;
        }
    }
}
