//! Event loops: a few threads that move bytes for every lane, in both directions.
//!
//! Lanes are registered edge-triggered, so a lane that rests costs nothing and a change of what it
//! waits for costs no system call. A loop without work sleeps in `epoll_wait`. Loops end when their
//! owner drops them, and then let go of every lane; a forked child leaves its parent's loops alone.
//!
//! A thread that waits for what a lane moves may lead the loop ([`Loop::lead`]): it runs the loop
//! itself, which spares the wake-ups from the socket to the loop's thread, and from there to the
//! waiting one.

mod lead;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::page_pipe::PagePipe;
use crossbeam_queue::ArrayQueue;
use rustix::event::epoll;
use tcpx_memory::awake::{Awake, give_way};

use crate::idle::MAX_LANES;
use crate::lock;
use crate::socket::timespec;
use crate::waker::Waker;
use lead::Leadership;

/// Something that a loop drives: one direction of one lane.
pub trait Source: Send + Debug {
    /// The socket to watch.
    fn socket(&self) -> BorrowedFd<'_>;
    /// What to watch it for.
    fn interest(&self) -> epoll::EventFlags;
    /// Whether it waits for that now, and not for [`Remote::resume`].
    fn waits_for_it(&self) -> bool {
        true
    }
    /// Another socket, which is watched for what comes on it.
    fn answers(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Moves bytes until the socket would block, there is nothing to do, or the turn's share is
    /// used up.
    fn turn(&mut self) -> Turn;
    /// A turn of it has panicked, which is a defect of ours: it reports that it ends;
    /// [`finish`](Self::finish) follows.
    fn broke(&mut self) {}
    /// The loop has let go of the source: report what was in its hands as failed.
    fn finish(&mut self) {}
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Nothing to do before the socket or [`Remote::resume`] says so.
    Rest,
    /// There is more to do; others first.
    Again,
    /// The source has ended; forget it.
    End,
}

const RESUME: u8 = 1;
const REMOVE: u8 = 2;

/// How other threads reach a source: what it is to do, and the loop that looks at that.
#[derive(Debug, Clone)]
pub struct Remote {
    place: Arc<SourcePlace>,
    inbox: Arc<LoopInbox>,
}

/// The place of a source in its loop.
#[derive(Debug)]
struct SourcePlace {
    flags: AtomicU8,
    /// Where the loop has it; [`NOWHERE`] while it has none.
    index: AtomicUsize,
}

const NOWHERE: usize = usize::MAX;

impl Remote {
    /// Hands a source over, the first one or when the one before has been finished. Its first turn
    /// comes at once. A loop that has ended finishes the source instead.
    pub fn start(&self, source: Box<dyn Source>) {
        // What the one before was still to do ended with it.
        self.place.flags.store(0, Ordering::SeqCst);
        let mut entry = Entry {
            source,
            place: Arc::clone(&self.place),
            queued: false,
        };
        let mut arrivals = lock(&self.inbox.arrivals);
        match &mut *arrivals {
            Some(arrivals) => {
                self.inbox.sources.fetch_add(1, Ordering::Relaxed);
                arrivals.push(entry);
            }
            None => {
                drop(arrivals);
                entry.source.finish();
                return;
            }
        }
        drop(arrivals);
        self.resume();
    }

    /// The loop that serves the source.
    pub fn home(&self) -> Loop {
        Loop(Arc::clone(&self.inbox))
    }

    /// Gives the source a turn.
    pub fn resume(&self) {
        self.raise(RESUME);
    }

    /// Ends the source: its `finish` runs and it is dropped.
    pub fn remove(&self) {
        self.raise(REMOVE);
    }

    fn raise(&self, flag: u8) {
        // Whoever raised the first flag has put it on the list.
        if self.place.flags.fetch_or(flag, Ordering::SeqCst) == 0 {
            let index = self.place.index.load(Ordering::SeqCst);
            if index != NOWHERE && self.inbox.raised.push(index).is_err() {
                self.inbox.look_at_all.store(true, Ordering::SeqCst);
            }
        }
        self.inbox.waker.wake();
    }
}

#[derive(Debug)]
struct Entry {
    source: Box<dyn Source>,
    place: Arc<SourcePlace>,
    queued: bool,
}

impl Entry {
    /// Its sockets, and what for.
    fn watched(&self) -> [Option<(BorrowedFd<'_>, epoll::EventFlags)>; 2] {
        let incoming = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let socket = (self.source.socket(), self.source.interest());
        [
            Some(socket),
            self.source.answers().map(|one| (one, incoming)),
        ]
    }
}

/// A loop, which whoever has the lock of its runner runs.
#[derive(Debug)]
struct LoopInbox {
    poller: OwnedFd,
    waker: Waker,
    runner: Mutex<Runner>,
    leadership: Leadership,
    thread: OnceLock<Thread>,
    origin: Instant,
    /// Sources that the loop has not taken yet; `None` once it has ended.
    arrivals: Mutex<Option<Vec<Entry>>>,
    sources: AtomicUsize,
    /// Sources that have something to do since the loop has looked, each once.
    raised: ArrayQueue<usize>,
    /// There are more than the list has room for.
    look_at_all: AtomicBool,
    resume_all: AtomicBool,
    stop: AtomicBool,
    /// Sources whose flags the loop has looked at.
    #[cfg(test)]
    looked: AtomicUsize,
}

impl Loop {
    /// One that runs on a thread of this name.
    fn start(name: String) -> io::Result<(Self, JoinHandle<()>)> {
        let inbox = Arc::new(LoopInbox {
            poller: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            waker: Waker::new()?,
            runner: Mutex::default(),
            leadership: Leadership::new(),
            thread: OnceLock::new(),
            origin: Instant::now(),
            arrivals: Mutex::new(Some(Vec::new())),
            sources: AtomicUsize::new(0),
            raised: ArrayQueue::new(RAISED),
            look_at_all: AtomicBool::new(false),
            resume_all: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            #[cfg(test)]
            looked: AtomicUsize::new(0),
        });
        epoll::add(
            &inbox.poller,
            &inbox.waker,
            epoll::EventData::new_u64(WAKER),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        let inner = Arc::clone(&inbox);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            PagePipe::ignore_broken_pipes();
            inner.run();
        })?;
        // It parks only once somebody leads, which nobody can before this is returned.
        let _ = inbox.thread.set(thread.thread().clone());
        Ok((Self(inbox), thread))
    }
}

/// How long a loop looks for the next event without a pause, where there are cores to spare.
const LOOP_BUSY_POLL: Duration = Duration::from_micros(300);
/// The waker among the sockets.
const WAKER: u64 = u64::MAX;
/// Most loops: no channel has more lanes.
const MAX_LOOPS: u16 = MAX_LANES as u16;
const EVENTS: usize = 64;
type Events = [MaybeUninit<epoll::Event>; EVENTS];
/// Why a lane ends whose turn has panicked.
pub(crate) const BROKE: &str = "the lane has panicked, which is a defect of tcpx; report it";
/// Room for sources that have something to do; with more of them at once a loop looks at all that
/// it has.
const RAISED: usize = 256;

impl LoopInbox {
    fn micros(&self, at: Instant) -> u64 {
        let micros = at.saturating_duration_since(self.origin).as_micros();
        u64::try_from(micros).unwrap_or(u64::MAX - 1)
    }

    /// Whether the loop ends. A leader that asks leaves it alone then: what its look takes wakes
    /// the loop's thread no more.
    fn ends(&self, runner: &Runner) -> bool {
        let ends = self.stop.load(Ordering::SeqCst);
        if ends && runner.waits {
            self.waker.interrupt();
        }
        ends
    }

    fn is_led(&self) -> bool {
        self.leadership.is_led(|| self.micros(Instant::now()))
    }

    /// The loop's own thread.
    fn run(&self) {
        let awake = Awake::begin();
        let mut last = Instant::now();
        self.waker.set_looked_for(true);
        while !self.stop.load(Ordering::SeqCst) {
            let mut runner = lock(&self.runner);
            let busy = !runner.turns.is_empty() || self.waker.is_raised();
            let led = self.is_led();
            if led && !busy {
                drop(runner);
                awake.asleep(|| self.park());
                continue;
            }
            // Another event comes soon while bytes move, and waking up takes longer than they do.
            let looks = busy || awake.may_look() && last.elapsed() < LOOP_BUSY_POLL;
            let mut space = [const { MaybeUninit::uninit() }; EVENTS];
            let waited = if looks {
                self.poll_events(&mut space)
            } else {
                // What was sent since the last look makes this end at once.
                self.waker.set_looked_for(false);
                runner.waits = true;
                drop(runner);
                let waited = awake.asleep(|| epoll::wait(&self.poller, &mut space, None));
                runner = lock(&self.runner);
                runner.waits = false;
                // A leader sees to that, and leaves it so.
                if !self.is_led() {
                    self.waker.set_looked_for(true);
                }
                waited.map(|(events, _)| events)
            };
            // Long turns are patience enough: what follows them has come meanwhile.
            let now = Instant::now();
            match self.serve(&mut runner, waited) {
                Err(_) => break,
                Ok(true) => last = now,
                Ok(false) if looks => {
                    drop(runner);
                    give_way();
                }
                Ok(false) => {}
            }
        }
        // From here on nobody leaves a source behind, which would keep what it refers to for ever.
        let late = lock(&self.arrivals).take();
        for mut entry in late.into_iter().flatten() {
            self.sources.fetch_sub(1, Ordering::Relaxed);
            entry.source.finish();
        }
        let mut runner = lock(&self.runner);
        for index in 0..runner.entries.len() {
            runner.remove(self, index);
        }
    }

    /// Ends the parking of the loop's thread.
    fn wake_thread(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Leaves the loop to whoever leads it, until that is over.
    fn park(&self) {
        let now = self.micros(Instant::now());
        self.leadership.park(now, |until| match until {
            _ if self.stop.load(Ordering::SeqCst) => {}
            None => std::thread::park(),
            Some(until) => {
                std::thread::park_timeout(Duration::from_micros(until.saturating_sub(now)));
            }
        });
    }

    /// What has happened by now.
    fn poll_events<'a>(&self, space: &'a mut Events) -> rustix::io::Result<&'a mut [epoll::Event]> {
        let now = timespec(Duration::ZERO);
        epoll::wait(&self.poller, space, Some(&now)).map(|(events, _)| events)
    }

    /// Gives a turn to every source that has something to do, also because this has happened;
    /// whether any had.
    ///
    /// # Errors
    /// The loop is broken.
    fn serve(
        &self,
        runner: &mut Runner,
        happened: rustix::io::Result<&mut [epoll::Event]>,
    ) -> rustix::io::Result<bool> {
        match happened {
            Ok(events) => {
                for event in events {
                    let (indexes, flags) = (event.data.u64(), event.flags);
                    if indexes != WAKER {
                        runner.happened(indexes, flags);
                    }
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                // Only a closed or foreign descriptor gets here, and this one is ours.
                tracing::error!(%error, "epoll_wait failed; the event loop ends");
                return Err(error);
            }
        }
        if self.waker.is_raised() {
            self.waker.clear();
            runner.read_inbox(self);
        }
        let count = runner.turns.len();
        for _ in 0..count {
            if let Some(index) = runner.turns.pop_front() {
                runner.turn(self, index);
            }
        }
        Ok(count > 0)
    }
}

/// What a loop serves.
#[derive(Debug, Default)]
struct Runner {
    entries: Vec<Option<Entry>>,
    turns: VecDeque<usize>,
    /// The loop's thread sleeps until something happens.
    waits: bool,
}

impl Runner {
    fn read_inbox(&mut self, inbox: &LoopInbox) {
        let resume_all = inbox.resume_all.swap(false, Ordering::Acquire);
        let arrivals = lock(&inbox.arrivals).as_mut().map(std::mem::take);
        for entry in arrivals.into_iter().flatten() {
            self.insert(inbox, entry);
        }
        let all = resume_all || inbox.look_at_all.swap(false, Ordering::SeqCst);
        if all {
            (0..self.entries.len()).for_each(|index| self.serve_source(inbox, index, resume_all));
        }
        for _ in 0..RAISED {
            let Some(index) = inbox.raised.pop() else {
                break;
            };
            self.serve_source(inbox, index, false);
        }
    }

    /// Does what a source was told to do.
    fn serve_source(&mut self, inbox: &LoopInbox, index: usize, resume: bool) {
        #[cfg(test)]
        inbox.looked.fetch_add(1, Ordering::SeqCst);
        let Some(Some(entry)) = self.entries.get(index) else {
            return;
        };
        let flags = entry.place.flags.swap(0, Ordering::SeqCst);
        if flags & REMOVE != 0 {
            self.remove(inbox, index);
        } else if resume || flags & RESUME != 0 {
            self.queue(index);
        }
    }

    fn insert(&mut self, inbox: &LoopInbox, entry: Entry) {
        let index = self
            .entries
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.entries.len());
        if index == self.entries.len() {
            self.entries.push(None);
        }
        let sockets = entry
            .watched()
            .map(|one| one.map(|(socket, _)| socket.as_raw_fd()));
        // From here on whoever raises a flag puts it on the list; what was raised before is seen
        // now.
        entry.place.index.store(index, Ordering::SeqCst);
        self.entries[index] = Some(entry);
        let mut sockets = sockets.into_iter().flatten();
        match sockets.try_for_each(|socket| self.watch(inbox, socket)) {
            Ok(()) => self.serve_source(inbox, index, false),
            Err(error) => {
                tracing::error!(%error, "a lane could not be watched and is dropped");
                self.remove(inbox, index);
            }
        }
    }

    /// Watches a socket for those that want it: as a rule both halves of a lane.
    fn watch(&self, inbox: &LoopInbox, socket: RawFd) -> rustix::io::Result<()> {
        let mut interest = epoll::EventFlags::ET;
        let (mut indexes, mut descriptor) = (0, None);
        for (index, entry) in (1u64..).zip(&self.entries) {
            for (own, wanted) in entry.iter().flat_map(Entry::watched).flatten() {
                if own.as_raw_fd() == socket {
                    // At most two want one.
                    indexes = indexes << 32 | index;
                    interest |= wanted;
                    descriptor = Some(own);
                }
            }
        }
        let Some(descriptor) = descriptor else {
            return Ok(());
        };
        let data = epoll::EventData::new_u64(indexes);
        match epoll::modify(&inbox.poller, descriptor, data, interest) {
            Err(rustix::io::Errno::NOENT) => epoll::add(&inbox.poller, descriptor, data, interest),
            done => done,
        }
    }

    /// Something has happened to the socket of these, each counted from 1.
    fn happened(&mut self, indexes: u64, flags: epoll::EventFlags) {
        let ends = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
        for index in [indexes >> 32, indexes & u64::from(u32::MAX)] {
            let index = usize::try_from(index).unwrap_or(0).wrapping_sub(1);
            let entry = self.entries.get(index).and_then(Option::as_ref);
            // Of two that share a socket, what one waits for is nothing to the other: a look would
            // be a call.
            let is_alone = indexes >> 32 == 0;
            let waited_for = |it: &Entry| {
                let has_come = flags.intersects(it.source.interest()) && it.source.waits_for_it();
                is_alone || has_come || flags.intersects(ends)
            };
            if entry.is_some_and(waited_for) {
                self.queue(index);
            }
        }
    }

    fn queue(&mut self, index: usize) {
        if let Some(Some(entry)) = self.entries.get_mut(index)
            && !entry.queued
        {
            entry.queued = true;
            self.turns.push_back(index);
        }
    }

    fn turn(&mut self, inbox: &LoopInbox, index: usize) {
        let Some(Some(entry)) = self.entries.get_mut(index) else {
            return;
        };
        entry.queued = false;
        let source = &mut entry.source;
        // Its connection ends, and no other one that the loop serves.
        let turn = catch_unwind(AssertUnwindSafe(|| source.turn())).unwrap_or_else(|_| {
            tracing::error!("a lane has panicked and ends; report this");
            let _ = catch_unwind(AssertUnwindSafe(|| source.broke()));
            Turn::End
        });
        match turn {
            Turn::Rest => {}
            Turn::Again => self.queue(index),
            Turn::End => self.remove(inbox, index),
        }
    }

    fn remove(&mut self, inbox: &LoopInbox, index: usize) {
        let Some(mut entry) = self.entries.get_mut(index).and_then(Option::take) else {
            return;
        };
        for (socket, _) in entry.watched().into_iter().flatten() {
            // Fails only for a source that was never added.
            let _ = epoll::delete(&inbox.poller, socket);
            let _ = self.watch(inbox, socket.as_raw_fd());
        }
        inbox.sources.fetch_sub(1, Ordering::Relaxed);
        entry.place.index.store(NOWHERE, Ordering::SeqCst);
        if catch_unwind(AssertUnwindSafe(|| entry.source.finish())).is_err() {
            tracing::error!("a lane has panicked at its end; report this");
        }
    }
}

/// Loops for lanes. Dropping them ends the threads and finishes every source.
#[derive(Debug)]
pub struct EventLoops {
    loops: Loops,
    threads: Vec<JoinHandle<()>>,
    /// Places that were given out together: first lanes, which are awake most, spread over the
    /// loops.
    spreads: AtomicUsize,
    process: u32,
}

impl EventLoops {
    /// Starts `count` loops; their threads' names begin with `name`.
    ///
    /// # Errors
    /// The system gives no more threads or descriptors.
    pub fn start(name: &str, count: usize) -> io::Result<Self> {
        let start = |index| Loop::start(format!("{name}-loop-{index}"));
        let started = (0..count).map(start).collect::<io::Result<Vec<_>>>()?;
        let (loops, threads) = started.into_iter().unzip();
        Ok(Self {
            loops: Loops(loops),
            threads,
            spreads: AtomicUsize::new(0),
            process: std::process::id(),
        })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// So many loops, for a lane each: all of them before any comes twice, those with the fewest
    /// sources first.
    pub fn spread(&self, lanes: usize) -> Vec<Loop> {
        let mut loops = self.loops.0.clone();
        let first = self.spreads.fetch_add(1, Ordering::Relaxed) % loops.len().max(1);
        loops.rotate_left(first);
        loops.sort_by_key(Loop::sources);
        loops.iter().cycle().take(lanes).cloned().collect()
    }

    /// All loops, for a thread that accepts lanes or has news for every one of them.
    pub fn all(&self) -> Loops {
        self.loops.clone()
    }
}

impl Drop for EventLoops {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A fork left the threads in the other process; there is nothing to end here.
            return self.threads.drain(..).for_each(std::mem::forget);
        }
        for Loop(inbox) in &self.loops.0 {
            inbox.stop.store(true, Ordering::SeqCst);
            // A leader that looks has the waker quiet, and the thread may still be in its sleep.
            inbox.waker.interrupt();
            inbox.wake_thread();
        }
        for thread in self.threads.drain(..) {
            if thread.thread().id() != std::thread::current().id() {
                // Never for long: a loop waits for nothing but its sockets and its waker. A panic
                // has ended the loop too.
                let _ = thread.join();
            }
        }
    }
}

/// A loop, as other threads reach it. It keeps none running.
#[derive(Debug, Clone)]
pub struct Loop(Arc<LoopInbox>);

impl Loop {
    /// The place of one more source.
    pub fn place(&self) -> Remote {
        let place = SourcePlace {
            flags: AtomicU8::new(0),
            index: AtomicUsize::new(NOWHERE),
        };
        Remote {
            place: Arc::new(place),
            inbox: Arc::clone(&self.0),
        }
    }

    /// How many sources it serves.
    pub fn sources(&self) -> usize {
        self.0.sources.load(Ordering::Relaxed)
    }

    /// Whether it is the same.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Has the calling thread run the loop in its thread's place, unless another one does. It
    /// serves every source, also those of others, until it leaves.
    pub fn lead(&self) -> Option<Lead> {
        self.0.leadership.lead().then(|| Lead {
            led: self.clone(),
            lease: None,
        })
    }

    /// Ends the lease of the leader that left last: the loop's thread serves it at once.
    pub fn end_lease(&self) {
        if self.0.leadership.end_lease() {
            self.0.wake_thread();
        }
    }
}

/// The lead of a loop. Dropping it leaves the loop to its thread.
#[derive(Debug)]
pub struct Lead {
    led: Loop,
    /// Until when nobody runs the loop after this.
    lease: Option<Instant>,
}

impl Lead {
    /// The loop.
    pub fn led(&self) -> &Loop {
        &self.led
    }

    /// Gives a turn to every source that has something to do now; whether any had.
    pub fn round(&self) -> bool {
        let Loop(inbox) = &self.led;
        let mut runner = lock(&inbox.runner);
        if inbox.ends(&runner) {
            return false;
        }
        inbox.waker.set_looked_for(true);
        let mut space = [const { MaybeUninit::uninit() }; EVENTS];
        let happened = inbox.poll_events(&mut space);
        // The loop's thread finds a loop that has broken too, and ends it.
        inbox.serve(&mut runner, happened).unwrap_or(false)
    }

    /// The calling thread is about to sleep until the loop's [descriptor](Loop::as_fd) is readable;
    /// whether nothing is left to do before.
    pub fn prepare_sleep(&self) -> bool {
        let Loop(inbox) = &self.led;
        let runner = lock(&inbox.runner);
        inbox.waker.set_looked_for(false);
        inbox.ends(&runner) || runner.turns.is_empty()
    }

    /// Leaves the loop alone until then, as the caller usually comes back. If not, the loop's
    /// thread serves it from then on. Returns the loop.
    pub fn leave_until(mut self, lease: Instant) -> Loop {
        self.lease = Some(lease);
        self.led.clone()
    }
}

impl AsFd for Loop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.poller.as_fd()
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        let Loop(inbox) = &self.led;
        let runner = lock(&inbox.runner);
        let lease = self.lease.filter(|_| runner.turns.is_empty());
        // Where the loop's thread never woke up meanwhile, it is woken as if nobody had led.
        inbox.waker.set_looked_for(lease.is_some() || !runner.waits);
        let until = lease.map_or(0, |lease| inbox.micros(lease));
        if inbox.leadership.begin_lease(until) {
            inbox.wake_thread();
        }
        // To be parked, or for turns that are left: what they are for was the leader's to see, and
        // comes to nobody again.
        let needs_it = lease.is_some() || !runner.turns.is_empty();
        if !inbox.ends(&runner) && runner.waits && needs_it {
            inbox.waker.interrupt();
        }
    }
}

/// All loops, as other threads reach them. It keeps none running.
#[derive(Debug, Clone)]
pub struct Loops(Vec<Loop>);

impl Loops {
    /// Gives every source a turn.
    pub fn resume_all(&self) {
        for Loop(inbox) in &self.0 {
            inbox.resume_all.store(true, Ordering::Release);
            inbox.waker.wake();
        }
    }

    /// Sources of all loops.
    pub fn sources(&self) -> usize {
        self.0.iter().map(Loop::sources).sum()
    }

    /// The loop that has the fewest sources; there is at least one.
    pub fn fewest(&self) -> Option<&Loop> {
        self.0.iter().min_by_key(|one| one.sources())
    }
}

/// Event loops: as many as are asked for, or with 0 as suit this machine.
pub fn loops_wanted(asked: u16) -> usize {
    match asked {
        0 => loops_for(std::thread::available_parallelism().map_or(1, usize::from)),
        asked => usize::from(asked.min(MAX_LOOPS)),
    }
}

/// One loop for every 2 cores, at most 12, and at least two where there are two cores: a message
/// goes into a socket at half the speed at which it comes out, so one sender alone leaves a core
/// half idle. A loop copies cold memory through a socket at about 4 GB/s, so fewer would not keep
/// up with a GPU's copies; more than 12 only take each other's cache.
fn loops_for(cores: usize) -> usize {
    (cores / 2).clamp(cores.min(2), 12)
}
