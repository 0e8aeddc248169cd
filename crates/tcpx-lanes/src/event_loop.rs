//! Event loops: a few threads that move bytes for every lane, in both directions.
//!
//! Lanes are registered edge-triggered, so a lane that rests costs nothing and a change of what it
//! waits for costs no system call. A loop without work sleeps in `epoll_wait`. Loops end when their
//! owner drops them, and then let go of every lane; a forked child leaves its parent's loops alone.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::page_pipe::PagePipe;
use crossbeam_queue::ArrayQueue;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use tcpx_memory::awake::{Awake, FEW_CORES, cores, give_way};

use crate::idle::MAX_LANES;
use crate::lock;
use crate::socket::timespec;
use crate::waker::Waker;

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
    /// After a turn: what it waits for comes at once, and the loop looks for it where it would sleep.
    fn is_expectant(&self) -> bool {
        false
    }
    /// A turn of it has panicked, which is a defect of ours: it reports that it ends; [`finish`](Self::finish) follows.
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
    place: Arc<Place>,
    inbox: Arc<Inbox>,
}

/// The place of a source in its loop.
#[derive(Debug)]
struct Place {
    flags: AtomicU8,
    /// Where the loop has it; [`NOWHERE`] while it has none.
    index: AtomicUsize,
}

const NOWHERE: usize = usize::MAX;

impl Remote {
    /// Hands a source over, the first one or when the one before has been finished. Its first turn comes at
    /// once. A loop that has ended finishes the source instead.
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
    place: Arc<Place>,
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

/// What others know of a loop.
#[derive(Debug)]
struct Inbox {
    waker: Waker,
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

impl Inbox {
    fn sources(&self) -> usize {
        self.sources.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct EventLoop {
    inbox: Arc<Inbox>,
    thread: JoinHandle<()>,
}

impl EventLoop {
    fn start(name: String) -> io::Result<Self> {
        let inbox = Arc::new(Inbox {
            waker: Waker::new()?,
            arrivals: Mutex::new(Some(Vec::new())),
            sources: AtomicUsize::new(0),
            raised: ArrayQueue::new(RAISED),
            look_at_all: AtomicBool::new(false),
            resume_all: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            #[cfg(test)]
            looked: AtomicUsize::new(0),
        });
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &poller,
            &inbox.waker,
            epoll::EventData::new_u64(WAKER),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        let inner = Arc::clone(&inbox);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            PagePipe::ignore_broken_pipes();
            Runner {
                poller,
                inbox: inner,
                entries: Vec::new(),
                turns: VecDeque::new(),
                expectant: false,
            }
            .run();
        })?;
        Ok(Self { inbox, thread })
    }

    fn sources(&self) -> usize {
        self.inbox.sources()
    }

    fn handle(&self) -> Loop {
        Loop(Arc::clone(&self.inbox))
    }
}

/// How long a loop looks for the next event without a pause, where there are cores to spare.
const PATIENCE: Duration = Duration::from_micros(300);
/// The same on few cores, for what comes at once: the peer writes 128 KiB in less. To wake the loop takes a good part of
/// that from a peer on the same host.
const EXPECTANCE: Duration = Duration::from_micros(50);
/// The waker among the sockets.
const WAKER: u64 = u64::MAX;
/// Most loops: no channel has more lanes.
const MAX_LOOPS: u16 = MAX_LANES as u16;
const EVENTS: usize = 64;
/// Why a lane ends whose turn has panicked.
pub(crate) const BROKE: &str = "the lane has panicked, which is a defect of tcpx; report it";
/// Room for sources that have something to do; with more of them at once a loop looks at all that it has.
const RAISED: usize = 256;

struct Runner {
    poller: OwnedFd,
    inbox: Arc<Inbox>,
    entries: Vec<Option<Entry>>,
    turns: VecDeque<usize>,
    /// One of those that had a turn last is.
    expectant: bool,
}

impl Runner {
    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let awake = Awake::begin();
        let mut last = Instant::now();
        self.inbox.waker.set_looked_for(true);
        loop {
            let now = timespec(Duration::ZERO);
            // Another event comes soon while bytes move, and waking up takes longer than they do.
            let busy = !self.turns.is_empty();
            let patience = match awake.may_look() {
                true => PATIENCE,
                false if self.expectant && cores() <= FEW_CORES => EXPECTANCE,
                false => Duration::ZERO,
            };
            let looks = busy || last.elapsed() < patience;
            events.clear();
            let mut wait =
                |timeout| epoll::wait(&self.poller, spare_capacity(&mut events), timeout);
            let waited = if looks {
                wait(Some(&now))
            } else {
                // What was sent since the last look makes this end at once.
                self.inbox.waker.set_looked_for(false);
                let waited = awake.asleep(|| wait(None));
                self.inbox.waker.set_looked_for(true);
                waited
            };
            match waited {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    // Only a closed or foreign descriptor gets here, and this one is ours.
                    tracing::error!(%error, "epoll_wait failed; the event loop ends");
                    break;
                }
            }
            for event in &events {
                let (indexes, flags) = (event.data.u64(), event.flags);
                if indexes != WAKER {
                    self.happened(indexes, flags);
                }
            }
            if self.inbox.waker.is_raised() {
                self.inbox.waker.clear();
                if self.inbox.stop.load(Ordering::SeqCst) {
                    break;
                }
                self.read_inbox();
            }
            if !self.turns.is_empty() {
                last = Instant::now();
                self.expectant = false;
            } else if looks {
                give_way();
            }
            for _ in 0..self.turns.len() {
                if let Some(index) = self.turns.pop_front() {
                    self.turn(index);
                }
            }
        }
        // From here on nobody leaves a source behind, which would keep what it refers to for ever.
        let late = lock(&self.inbox.arrivals).take();
        for mut entry in late.into_iter().flatten() {
            entry.source.finish();
        }
        for index in 0..self.entries.len() {
            self.remove(index);
        }
    }

    fn read_inbox(&mut self) {
        let resume_all = self.inbox.resume_all.swap(false, Ordering::Acquire);
        let arrivals = lock(&self.inbox.arrivals).as_mut().map(std::mem::take);
        for entry in arrivals.into_iter().flatten() {
            self.insert(entry);
        }
        let all = resume_all || self.inbox.look_at_all.swap(false, Ordering::SeqCst);
        if all {
            (0..self.entries.len()).for_each(|index| self.look(index, resume_all));
        }
        for _ in 0..RAISED {
            let Some(index) = self.inbox.raised.pop() else {
                break;
            };
            self.look(index, false);
        }
    }

    /// Does what a source was told to do.
    fn look(&mut self, index: usize, resume: bool) {
        #[cfg(test)]
        self.inbox.looked.fetch_add(1, Ordering::SeqCst);
        let Some(Some(entry)) = self.entries.get(index) else {
            return;
        };
        let flags = entry.place.flags.swap(0, Ordering::SeqCst);
        if flags & REMOVE != 0 {
            self.remove(index);
        } else if resume || flags & RESUME != 0 {
            self.queue(index);
        }
    }

    fn insert(&mut self, entry: Entry) {
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
        // From here on whoever raises a flag puts it on the list; what was raised before is seen now.
        entry.place.index.store(index, Ordering::SeqCst);
        self.entries[index] = Some(entry);
        let mut sockets = sockets.into_iter().flatten();
        match sockets.try_for_each(|socket| self.watch(socket)) {
            Ok(()) => self.look(index, false),
            Err(error) => {
                tracing::error!(%error, "a lane could not be watched and is dropped");
                self.remove(index);
            }
        }
    }

    /// Watches a socket for those that want it: as a rule both halves of a lane.
    fn watch(&self, socket: RawFd) -> rustix::io::Result<()> {
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
        match epoll::modify(&self.poller, descriptor, data, interest) {
            Err(rustix::io::Errno::NOENT) => epoll::add(&self.poller, descriptor, data, interest),
            done => done,
        }
    }

    /// Something has happened to the socket of these, each counted from 1.
    fn happened(&mut self, indexes: u64, flags: epoll::EventFlags) {
        let ends = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
        for index in [indexes >> 32, indexes & u64::from(u32::MAX)] {
            let index = usize::try_from(index).unwrap_or(0).wrapping_sub(1);
            let entry = self.entries.get(index).and_then(Option::as_ref);
            // Of two that share a socket, what one waits for is nothing to the other: a look would be a call.
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

    fn turn(&mut self, index: usize) {
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
        self.expectant |= entry.source.is_expectant();
        match turn {
            Turn::Rest => {}
            Turn::Again => self.queue(index),
            Turn::End => self.remove(index),
        }
    }

    fn remove(&mut self, index: usize) {
        let Some(mut entry) = self.entries.get_mut(index).and_then(Option::take) else {
            return;
        };
        for (socket, _) in entry.watched().into_iter().flatten() {
            // Fails only for a source that was never added.
            let _ = epoll::delete(&self.poller, socket);
            let _ = self.watch(socket.as_raw_fd());
        }
        self.inbox.sources.fetch_sub(1, Ordering::Relaxed);
        entry.place.index.store(NOWHERE, Ordering::SeqCst);
        if catch_unwind(AssertUnwindSafe(|| entry.source.finish())).is_err() {
            tracing::error!("a lane has panicked at its end; report this");
        }
    }
}

/// Loops for lanes. Dropping them ends the threads and finishes every source.
#[derive(Debug)]
pub struct EventLoops {
    loops: Vec<EventLoop>,
    /// Places that were given out together: first lanes, which are awake most, spread over the loops.
    spreads: AtomicUsize,
    process: u32,
}

impl EventLoops {
    /// Starts `count` loops; their threads' names begin with `name`.
    ///
    /// # Errors
    /// The system gives no more threads or descriptors.
    pub fn start(name: &str, count: usize) -> io::Result<Self> {
        let mut loops = Self {
            loops: Vec::with_capacity(count),
            spreads: AtomicUsize::new(0),
            process: std::process::id(),
        };
        for index in 0..count {
            loops
                .loops
                .push(EventLoop::start(format!("{name}-loop-{index}"))?);
        }
        Ok(loops)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.loops.len()
    }

    /// So many loops, for a lane each: all of them before any comes twice, those with the fewest sources first.
    pub fn spread(&self, lanes: usize) -> Vec<Loop> {
        let mut loops: Vec<_> = self.loops.iter().collect();
        let first = self.spreads.fetch_add(1, Ordering::Relaxed) % loops.len().max(1);
        loops.rotate_left(first);
        loops.sort_by_key(|one| one.sources());
        let places = loops.iter().cycle().take(lanes);
        places.map(|one| one.handle()).collect()
    }

    /// All loops, for a thread that accepts lanes or has news for every one of them.
    pub fn all(&self) -> Loops {
        Loops(self.loops.iter().map(EventLoop::handle).collect())
    }
}

impl Drop for EventLoops {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            for one in &self.loops {
                one.inbox.stop.store(true, Ordering::SeqCst);
                one.inbox.waker.wake();
            }
        }
        for one in self.loops.drain(..) {
            if self.process != std::process::id() {
                // A fork left the thread in the other process; there is nothing to end here.
                std::mem::forget(one.thread);
            } else if one.thread.thread().id() != std::thread::current().id() {
                // Never for long: a loop waits for nothing but its sockets and its waker. A panic
                // has ended the loop too.
                let _ = one.thread.join();
            }
        }
    }
}

/// A loop, as other threads reach it. It keeps none running.
#[derive(Debug, Clone)]
pub struct Loop(Arc<Inbox>);

impl Loop {
    /// The place of one more source.
    pub fn place(&self) -> Remote {
        let place = Place {
            flags: AtomicU8::new(0),
            index: AtomicUsize::new(NOWHERE),
        };
        Remote {
            place: Arc::new(place),
            inbox: Arc::clone(&self.0),
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
        self.0.iter().map(|one| one.0.sources()).sum()
    }

    /// The loop that has the fewest sources; there is at least one.
    pub fn fewest(&self) -> Option<&Loop> {
        self.0.iter().min_by_key(|one| one.0.sources())
    }
}

/// Event loops: as many as are asked for, or with 0 as suit this machine.
pub fn loops_wanted(asked: u16) -> usize {
    match asked {
        0 => loops_for(std::thread::available_parallelism().map_or(1, usize::from)),
        asked => usize::from(asked.min(MAX_LOOPS)),
    }
}

/// One loop for every 2 cores, at most 12, and at least two where there are two cores: a message goes into a socket
/// at half the speed at which it comes out, so one sender alone leaves a core half idle. A loop copies cold memory through
/// a socket at about 4 GB/s, so fewer would not keep up with a GPU's copies; more than 12 only take each other's cache.
fn loops_for(cores: usize) -> usize {
    (cores / 2).clamp(cores.min(2), 12)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    /// It knows its own place, as lanes do: a loop that kept it would keep itself.
    #[derive(Debug)]
    struct Counted {
        socket: TcpStream,
        _place: Remote,
        finished: Arc<AtomicUsize>,
        dropped: Arc<AtomicUsize>,
    }

    impl Source for Counted {
        fn socket(&self) -> BorrowedFd<'_> {
            self.socket.as_fd()
        }

        fn interest(&self) -> epoll::EventFlags {
            epoll::EventFlags::IN
        }

        fn turn(&mut self) -> Turn {
            Turn::Rest
        }

        fn finish(&mut self) {
            self.finished.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn counted(place: &Remote, counts: &[Arc<AtomicUsize>; 2], near: &TcpListener) -> Counted {
        Counted {
            socket: near
                .local_addr()
                .and_then(TcpStream::connect)
                .expect("it listens"),
            _place: place.clone(),
            finished: Arc::clone(&counts[0]),
            dropped: Arc::clone(&counts[1]),
        }
    }

    #[test]
    fn loops_that_end_let_go_of_what_they_were_just_given() {
        const ROUNDS: usize = 200;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let counts = [Arc::default(), Arc::default()];
        for _ in 0..ROUNDS {
            let loops = EventLoops::start("test", 1).unwrap();
            for place in loops.spread(2).iter().map(Loop::place) {
                place.start(Box::new(counted(&place, &counts, &listener)));
            }
            drop(loops);
            drop(listener.accept());
            drop(listener.accept());
        }
        assert_eq!(
            counts.map(|count| count.load(Ordering::SeqCst)),
            [2 * ROUNDS; 2]
        );
    }

    #[test]
    fn a_loop_that_has_ended_finishes_a_source_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let counts = [Arc::default(), Arc::default()];
        let loops = EventLoops::start("test", 1).unwrap();
        let all = loops.all();
        drop(loops);
        let place = all.fewest().unwrap().place();
        for place in [place.clone(), place] {
            place.start(Box::new(counted(&place, &counts, &listener)));
        }
        assert_eq!(counts.map(|count| count.load(Ordering::SeqCst)), [2; 2]);
        assert_eq!(all.sources(), 0);
    }

    #[test]
    fn lanes_spread_over_all_loops_before_one_has_two() {
        let loops = EventLoops::start("test", 3).unwrap();
        let spread = loops.spread(7);
        let of = |one: &EventLoop| {
            let same = |place: &&Loop| Arc::ptr_eq(&place.0, &one.inbox);
            spread.iter().filter(same).count()
        };
        let mut counts: Vec<_> = loops.loops.iter().map(of).collect();
        counts.sort_unstable();
        assert_eq!(counts, [2, 2, 3]);
        assert!(
            !Arc::ptr_eq(&loops.spread(1)[0].0, &spread[0].0),
            "each begins elsewhere"
        );
    }

    /// It moves a byte a turn, as often as one has come.
    #[derive(Debug)]
    struct Reading(Arc<TcpStream>, Arc<AtomicUsize>);

    impl Source for Reading {
        fn socket(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn interest(&self) -> epoll::EventFlags {
            epoll::EventFlags::IN
        }

        fn turn(&mut self) -> Turn {
            let mut byte = [0];
            match rustix::io::read(&self.0, &mut byte) {
                Ok(1) => {
                    self.1.fetch_add(1, Ordering::SeqCst);
                    Turn::Again
                }
                _ => Turn::Rest,
            }
        }
    }

    /// It counts its turns.
    #[derive(Debug)]
    struct Writing(Arc<TcpStream>, Arc<AtomicUsize>);

    impl Source for Writing {
        fn socket(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn interest(&self) -> epoll::EventFlags {
            epoll::EventFlags::OUT
        }

        fn turn(&mut self) -> Turn {
            match self.1.fetch_add(1, Ordering::SeqCst) {
                0 => Turn::Rest,
                _ => Turn::End,
            }
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (TcpStream, Arc<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let far = listener.local_addr().and_then(TcpStream::connect);
        let near = listener.accept().expect("it connects").0;
        near.set_nonblocking(true).expect("a socket");
        (far.expect("it listens"), Arc::new(near))
    }

    #[test]
    fn both_halves_of_a_lane_are_watched_and_one_when_the_other_ends() {
        let (mut far, near) = pair();
        let loops = EventLoops::start("test", 1).unwrap();
        let [here] = loops.spread(1).try_into().unwrap();
        let (read, turns): (Arc<AtomicUsize>, Arc<AtomicUsize>) = Default::default();
        let places = [here.place(), here.place()];
        places[0].start(Box::new(Writing(Arc::clone(&near), Arc::clone(&turns))));
        places[1].start(Box::new(Reading(near, Arc::clone(&read))));
        let until = Instant::now() + LONG;
        for count in 1..=3 {
            far.write_all(&[0]).unwrap();
            while read.load(Ordering::SeqCst) < count {
                assert!(Instant::now() < until, "byte {count} was not read");
                std::thread::yield_now();
            }
            // It ends, and the other half goes on.
            places[0].resume();
        }
        assert!(turns.load(Ordering::SeqCst) >= 2);
    }

    #[test]
    fn loops_grow_with_the_cores_up_to_a_limit() {
        let counted = [1, 2, 4, 5, 8, 16, 24, 32, 256].map(loops_for);
        assert_eq!(counted, [1, 2, 2, 2, 4, 8, 12, 12, 12]);
    }

    #[test]
    fn a_number_that_was_asked_for_counts_within_reason() {
        let counted = [1, 3, MAX_LOOPS, u16::MAX].map(loops_wanted);
        assert_eq!(counted, [1, 3, MAX_LOOPS.into(), MAX_LOOPS.into()]);
        assert!(loops_wanted(0) > 0);
    }

    /// What it does in a turn, and how it ended.
    #[derive(Debug)]
    struct Odd {
        socket: TcpStream,
        panics: bool,
        told: std::sync::mpsc::Sender<&'static str>,
    }

    impl Odd {
        fn new(
            near: &TcpListener,
            panics: bool,
            told: &std::sync::mpsc::Sender<&'static str>,
        ) -> Box<Self> {
            let socket = near.local_addr().and_then(TcpStream::connect);
            Box::new(Self {
                socket: socket.expect("it listens"),
                panics,
                told: told.clone(),
            })
        }
    }

    impl Source for Odd {
        fn socket(&self) -> BorrowedFd<'_> {
            self.socket.as_fd()
        }

        fn interest(&self) -> epoll::EventFlags {
            epoll::EventFlags::IN
        }

        fn turn(&mut self) -> Turn {
            self.told.send("turn").expect("the test listens");
            assert!(!self.panics, "this is what the test is about");
            Turn::Rest
        }

        fn broke(&mut self) {
            self.told.send("broke").expect("the test listens");
        }

        fn finish(&mut self) {
            // The test may be over.
            let _ = self.told.send("finish");
        }
    }

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_source_that_panics_ends_and_the_loop_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let loops = EventLoops::start("test", 1).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let here = &loops.spread(1)[0];
        let places = [here.place(), here.place()];
        places[0].start(Odd::new(&listener, true, &tell));
        let hear = || told.recv_timeout(LIMIT).expect("it is told");
        assert_eq!([hear(), hear(), hear()], ["turn", "broke", "finish"]);
        for _ in 0..2 {
            places[1].start(Odd::new(&listener, false, &tell));
            assert_eq!(hear(), "turn");
            places[1].remove();
            assert_eq!(hear(), "finish");
        }
    }

    #[test]
    fn a_removal_that_comes_late_leaves_the_next_source_of_the_place_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let loops = EventLoops::start("test", 1).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let place = loops.spread(1)[0].place();
        let hear = || told.recv_timeout(LIMIT).expect("it is told");
        for _ in 0..100 {
            place.start(Odd::new(&listener, false, &tell));
            assert_eq!(hear(), "turn");
            place.remove();
            assert_eq!(hear(), "finish");
            // Whoever looks at the lane finds it dead too.
            place.remove();
        }
        place.start(Odd::new(&listener, false, &tell));
        assert_eq!(hear(), "turn");
        place.resume();
        assert_eq!(hear(), "turn");
    }

    #[test]
    fn a_loop_of_many_sources_looks_at_those_alone_that_were_raised() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let loops = EventLoops::start("test", 1).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let hear = || told.recv_timeout(LIMIT).expect("it is told");
        // More than the list has room for.
        let here = &loops.spread(1)[0];
        let places: Vec<_> = (0..RAISED + 50).map(|_| here.place()).collect();
        for place in &places {
            place.start(Odd::new(&listener, false, &tell));
            drop(listener.accept());
        }
        let turns = |count: usize| (0..count).for_each(|_| assert_eq!(hear(), "turn"));
        turns(places.len());
        let inbox = &places[0].inbox;
        let looked = inbox.looked.load(Ordering::SeqCst);
        for _ in 0..10 {
            places[7].resume();
            turns(1);
        }
        assert!(inbox.looked.load(Ordering::SeqCst) <= looked + 10);
        // None is forgotten, however many are raised at once.
        for _ in 0..20 {
            places.iter().for_each(Remote::resume);
            turns(places.len());
        }
    }
}
