//! Event loops: a few threads that move bytes for every lane.
//!
//! Lanes are registered edge-triggered, so a lane that rests costs nothing and a change of what it
//! waits for costs no system call. A loop without work sleeps in `epoll_wait`. Loops end when their
//! owner drops them, and then let go of every lane; a forked child leaves its parent's loops alone.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
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

    fn remote(inbox: &Arc<Self>) -> Remote {
        let place = Place {
            flags: AtomicU8::new(0),
            index: AtomicUsize::new(NOWHERE),
        };
        Remote {
            place: Arc::new(place),
            inbox: Arc::clone(inbox),
        }
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

    fn remote(&self) -> Remote {
        Inbox::remote(&self.inbox)
    }
}

/// How long a loop looks for the next event without a pause, where there are cores to spare.
const PATIENCE: Duration = Duration::from_micros(300);
/// The same on few cores, for what comes at once: the peer writes 128 KiB in less. To wake the loop takes a good part of
/// that from a peer on the same host.
const EXPECTANCE: Duration = Duration::from_micros(50);
/// The waker among the sockets.
const WAKER: u64 = u64::MAX;
/// Most loops of a direction: no channel has more lanes.
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
                let index = event.data.u64();
                if index != WAKER {
                    self.queue(usize::try_from(index).unwrap_or(usize::MAX));
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
        let watch = |socket, interest| {
            let data = epoll::EventData::new_u64(index as u64);
            epoll::add(&self.poller, socket, data, interest | epoll::EventFlags::ET)
        };
        let incoming = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let added = watch(entry.source.socket(), entry.source.interest()).and_then(|()| {
            entry
                .source
                .answers()
                .map_or(Ok(()), |one| watch(one, incoming))
        });
        // From here on whoever raises a flag puts it on the list; what was raised before is seen now.
        entry.place.index.store(index, Ordering::SeqCst);
        self.entries[index] = Some(entry);
        match added {
            Ok(()) => self.look(index, false),
            Err(error) => {
                tracing::error!(%error, "a lane could not be watched and is dropped");
                self.remove(index);
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
        for socket in [Some(entry.source.socket()), entry.source.answers()] {
            // Fails only for a source that was never added.
            let _ = socket.map(|socket| epoll::delete(&self.poller, socket));
        }
        self.inbox.sources.fetch_sub(1, Ordering::Relaxed);
        entry.place.index.store(NOWHERE, Ordering::SeqCst);
        if catch_unwind(AssertUnwindSafe(|| entry.source.finish())).is_err() {
            tracing::error!("a lane has panicked at its end; report this");
        }
    }
}

/// Loops for both directions of lanes. Dropping them ends the threads and finishes every source.
#[derive(Debug)]
pub struct EventLoops {
    transmit: Vec<EventLoop>,
    receive: Vec<EventLoop>,
    /// Places that were given out together: first lanes, which are awake most, spread over the loops.
    spreads: AtomicUsize,
    process: u32,
}

impl EventLoops {
    /// Starts `count` loops for each direction; their threads' names begin with `name`.
    ///
    /// # Errors
    /// The system gives no more threads or descriptors.
    pub fn start(name: &str, count: usize) -> io::Result<Self> {
        let mut loops = Self {
            transmit: Vec::with_capacity(count),
            receive: Vec::with_capacity(count),
            spreads: AtomicUsize::new(0),
            process: std::process::id(),
        };
        for index in 0..count {
            let transmit = EventLoop::start(format!("{name}-tx-{index}"))?;
            loops.transmit.push(transmit);
            loops
                .receive
                .push(EventLoop::start(format!("{name}-rx-{index}"))?);
        }
        Ok(loops)
    }

    /// How many there are in each direction.
    pub fn per_direction(&self) -> usize {
        self.receive.len()
    }

    /// The place of one more lane's sending half, in the loop that has the fewest.
    pub fn transmit(&self) -> Remote {
        least_loaded(&self.transmit).remote()
    }

    /// The places of so many sending halves: one for each loop, those with the fewest sources first,
    /// before any loop gets a second.
    pub fn transmit_spread(&self, lanes: usize) -> Vec<Remote> {
        self.spread(&self.transmit, lanes)
    }

    /// The place of one more lane's receiving half, in the loop that has the fewest.
    pub fn receive(&self) -> Remote {
        least_loaded(&self.receive).remote()
    }

    /// As [`transmit_spread`](Self::transmit_spread), of receiving halves.
    pub fn receive_spread(&self, lanes: usize) -> Vec<Remote> {
        self.spread(&self.receive, lanes)
    }

    fn spread(&self, loops: &[EventLoop], lanes: usize) -> Vec<Remote> {
        let mut loops: Vec<_> = loops.iter().collect();
        let first = self.spreads.fetch_add(1, Ordering::Relaxed) / 2 % loops.len().max(1);
        loops.rotate_left(first);
        loops.sort_by_key(|one| one.sources());
        let places = loops.iter().cycle().take(lanes);
        places.map(|one| one.remote()).collect()
    }

    /// All receiving loops, for a thread that accepts lanes or has news for every one of them.
    pub fn receivers(&self) -> Receivers {
        Receivers(self.receive.iter().map(|one| one.inbox.clone()).collect())
    }
}

impl Drop for EventLoops {
    fn drop(&mut self) {
        let loops = || self.transmit.iter().chain(&self.receive);
        if self.process == std::process::id() {
            for one in loops() {
                one.inbox.stop.store(true, Ordering::SeqCst);
                one.inbox.waker.wake();
            }
        }
        for one in self.transmit.drain(..).chain(self.receive.drain(..)) {
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

fn least_loaded(loops: &[EventLoop]) -> &EventLoop {
    let fewest = loops.iter().min_by_key(|one| one.sources());
    fewest.unwrap_or(&loops[0])
}

/// The receiving loops, as other threads reach them. It keeps none running.
#[derive(Debug, Clone)]
pub struct Receivers(Vec<Arc<Inbox>>);

impl Receivers {
    /// Gives every source a turn.
    pub fn resume_all(&self) {
        for inbox in &self.0 {
            inbox.resume_all.store(true, Ordering::Release);
            inbox.waker.wake();
        }
    }

    /// Sources of all loops.
    pub fn sources(&self) -> usize {
        self.0.iter().map(|inbox| inbox.sources()).sum()
    }

    /// The place of one more source, in the loop that has the fewest; there is at least one.
    pub fn place(&self) -> Option<Remote> {
        let fewest = self.0.iter().min_by_key(|inbox| inbox.sources());
        fewest.map(Inbox::remote)
    }
}

/// Event loops for each direction: as many as are asked for, or with 0 as suit this machine.
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
            for place in [loops.transmit(), loops.receive()] {
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
        let (place, receivers) = (loops.transmit(), loops.receivers());
        drop(loops);
        for place in [place, receivers.place().unwrap()] {
            place.start(Box::new(counted(&place, &counts, &listener)));
        }
        assert_eq!(counts.map(|count| count.load(Ordering::SeqCst)), [2; 2]);
        assert_eq!(receivers.sources(), 0);
    }

    #[test]
    fn sending_halves_spread_over_all_loops_before_one_has_two() {
        let loops = EventLoops::start("test", 3).unwrap();
        let places = loops.transmit_spread(7);
        let of = |inbox: &Arc<Inbox>| {
            let same = places
                .iter()
                .filter(|place| Arc::ptr_eq(&place.inbox, inbox));
            same.count()
        };
        let mut counts: Vec<_> = loops.transmit.iter().map(|one| of(&one.inbox)).collect();
        counts.sort_unstable();
        assert_eq!(counts, [2, 2, 3]);
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
        let places = [loops.transmit(), loops.transmit()];
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
        let place = loops.transmit();
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
        let places: Vec<_> = (0..RAISED + 50).map(|_| loops.transmit()).collect();
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
