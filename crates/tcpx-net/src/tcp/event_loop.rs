//! The process's event loops: a few threads that move bytes for every lane of every channel.
//!
//! They start with the first channel and then live as long as the process; without work they sleep
//! in `epoll_wait`. Lanes are registered edge-triggered, so a lane that rests costs nothing and a
//! change of what it waits for costs no system call.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use tcpx_memory::PagePipe;
use tcpx_memory::awake::{Awake, give_way};

use super::shared::MAX_LANES;
use super::signal::Signal;
use crate::error::IoError;
use crate::socket::timespec;

/// Something that a loop drives: one direction of one lane.
pub(super) trait Source: Send + Debug {
    /// The socket to watch.
    fn socket(&self) -> BorrowedFd<'_>;
    /// What to watch it for.
    fn interest(&self) -> epoll::EventFlags;
    /// Moves bytes until the socket would block, there is nothing to do, or the turn's share is
    /// used up.
    fn turn(&mut self) -> Turn;
    /// The loop has let go of the source: report what was in its hands as failed.
    fn finish(&mut self);
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing to do before the socket or [`Remote::resume`] says so.
    Rest,
    /// As `Rest`, but it takes another turn after a [`NAP`] even so.
    Nap,
    /// There is more to do; others first.
    Again,
    /// The source has ended; forget it.
    End,
}

const RESUME: u8 = 1;
const REMOVE: u8 = 2;

/// How other threads reach a source: its flags, and the loop that looks at them.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    flags: Arc<AtomicU8>,
    mailbox: Arc<Mailbox>,
}

impl Remote {
    /// Gives the source a turn.
    pub(super) fn resume(&self) {
        self.raise(RESUME);
    }

    /// Ends the source: its `finish` runs and it is dropped.
    pub(super) fn remove(&self) {
        self.raise(REMOVE);
    }

    fn raise(&self, flag: u8) {
        self.flags.fetch_or(flag, Ordering::Release);
        self.mailbox.signal.raise();
    }
}

#[derive(Debug)]
struct Entry {
    source: Box<dyn Source>,
    flags: Arc<AtomicU8>,
    queued: bool,
    naps: bool,
}

#[derive(Debug)]
struct Mailbox {
    signal: Signal,
    arrivals: Mutex<Vec<Entry>>,
    sources: AtomicUsize,
}

/// A handle on one loop thread.
#[derive(Debug)]
pub(super) struct EventLoop {
    mailbox: Arc<Mailbox>,
}

impl EventLoop {
    fn start(name: String) -> std::io::Result<Self> {
        let mailbox = Arc::new(Mailbox {
            signal: Signal::new()?,
            arrivals: Mutex::new(Vec::new()),
            sources: AtomicUsize::new(0),
        });
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &poller,
            &mailbox.signal,
            epoll::EventData::new_u64(SIGNAL),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        let inner = Arc::clone(&mailbox);
        std::thread::Builder::new().name(name).spawn(move || {
            PagePipe::ignore_broken_pipes();
            Runner {
                poller,
                mailbox: inner,
                entries: Vec::new(),
                turns: VecDeque::new(),
                woken_by: None,
            }
            .run();
        })?;
        Ok(Self { mailbox })
    }

    /// A remote for a source that must be given to [`add`](Self::add).
    pub(super) fn remote(&self) -> Remote {
        Remote {
            flags: Arc::new(AtomicU8::new(0)),
            mailbox: Arc::clone(&self.mailbox),
        }
    }

    /// Hands a source over. Its first turn comes at once.
    pub(super) fn add(&self, source: Box<dyn Source>, remote: &Remote) {
        let entry = Entry {
            source,
            flags: Arc::clone(&remote.flags),
            queued: false,
            naps: false,
        };
        self.mailbox
            .arrivals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(entry);
        remote.resume();
    }
}

/// How long a source naps at most, or a millisecond more: the system waits for whole ones.
pub(super) const NAP: Duration = Duration::from_millis(1);
/// How long a loop looks for the next event without a pause, where there are cores to spare.
const PATIENCE: Duration = Duration::from_micros(300);
const SIGNAL: u64 = u64::MAX;
/// Most loops of a direction: no channel has more lanes.
const MAX_LOOPS: u16 = MAX_LANES;
const EVENTS: usize = 64;

struct Runner {
    poller: OwnedFd,
    mailbox: Arc<Mailbox>,
    entries: Vec<Option<Entry>>,
    turns: VecDeque<usize>,
    /// When those that nap get their turn.
    woken_by: Option<Instant>,
}

impl Runner {
    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let awake = Awake::begin();
        let mut last = Instant::now();
        self.mailbox.signal.set_looked_for(true);
        loop {
            let now = timespec(Duration::ZERO);
            // Another event comes soon while bytes move, and waking up takes longer than they do.
            let busy = !self.turns.is_empty();
            let looks = busy || last.elapsed() < PATIENCE && awake.may_look();
            events.clear();
            let mut wait =
                |timeout| epoll::wait(&self.poller, spare_capacity(&mut events), timeout);
            let waited = if looks {
                wait(Some(&now))
            } else {
                // What was sent since the last look makes this end at once.
                self.mailbox.signal.set_looked_for(false);
                let left = |at: Instant| at.saturating_duration_since(Instant::now());
                let nap = self.woken_by.map(|at| timespec(left(at)));
                let waited = awake.asleep(|| wait(nap.as_ref()));
                self.mailbox.signal.set_looked_for(true);
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
                if index != SIGNAL {
                    self.queue(usize::try_from(index).unwrap_or(usize::MAX));
                }
            }
            if self.mailbox.signal.is_raised() {
                self.read_mail();
            }
            if self.woken_by.is_some_and(|at| at <= Instant::now()) {
                self.wake_napping();
            }
            if !self.turns.is_empty() {
                last = Instant::now();
            } else if looks {
                give_way();
            }
            for _ in 0..self.turns.len() {
                if let Some(index) = self.turns.pop_front() {
                    self.turn(index);
                }
            }
        }
        for index in 0..self.entries.len() {
            self.remove(index);
        }
    }

    fn read_mail(&mut self) {
        self.mailbox.signal.clear();
        let arrivals = std::mem::take(
            &mut *self
                .mailbox
                .arrivals
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for entry in arrivals {
            self.insert(entry);
        }
        for index in 0..self.entries.len() {
            let Some(entry) = &self.entries[index] else {
                continue;
            };
            let flags = entry.flags.swap(0, Ordering::Acquire);
            if flags & REMOVE != 0 {
                self.remove(index);
            } else if flags & RESUME != 0 {
                self.queue(index);
            }
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
        let added = epoll::add(
            &self.poller,
            entry.source.socket(),
            epoll::EventData::new_u64(index as u64),
            entry.source.interest() | epoll::EventFlags::ET,
        );
        self.entries[index] = Some(entry);
        if let Err(error) = added {
            tracing::error!(%error, "a lane could not be watched and is dropped");
            self.remove(index);
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

    fn wake_napping(&mut self) {
        self.woken_by = None;
        for index in 0..self.entries.len() {
            if self.entries[index].as_ref().is_some_and(|entry| entry.naps) {
                self.queue(index);
            }
        }
    }

    fn turn(&mut self, index: usize) {
        let Some(Some(entry)) = self.entries.get_mut(index) else {
            return;
        };
        entry.queued = false;
        let turn = entry.source.turn();
        entry.naps = turn == Turn::Nap;
        match turn {
            Turn::Rest => {}
            Turn::Nap => {
                self.woken_by.get_or_insert_with(|| Instant::now() + NAP);
            }
            Turn::Again => self.queue(index),
            Turn::End => self.remove(index),
        }
    }

    fn remove(&mut self, index: usize) {
        let Some(mut entry) = self.entries.get_mut(index).and_then(Option::take) else {
            return;
        };
        // Fails only for a source that was never added.
        let _ = epoll::delete(&self.poller, entry.source.socket());
        self.mailbox.sources.fetch_sub(1, Ordering::Relaxed);
        entry.source.finish();
    }
}

/// The loops of this process.
#[derive(Debug)]
pub(super) struct Loops {
    transmit: Vec<EventLoop>,
    receive: Vec<EventLoop>,
}

static LOOPS: OnceLock<Result<Loops, IoError>> = OnceLock::new();

impl Loops {
    /// The process's loops. The first use starts them: `asked` in each direction, or with 0 as many as
    /// suit the machine; later ones take what there is.
    pub(super) fn get(asked: u16) -> Result<&'static Self, IoError> {
        LOOPS
            .get_or_init(|| Self::start(wanted(asked)).map_err(IoError::from))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// How many there are in each direction.
    pub(super) fn per_direction(&self) -> usize {
        self.receive.len()
    }

    fn start(count: usize) -> std::io::Result<Self> {
        let start = |kind: &str| -> std::io::Result<Vec<EventLoop>> {
            (0..count)
                .map(|index| EventLoop::start(format!("tcpx-{kind}-{index}")))
                .collect()
        };
        Ok(Self {
            transmit: start("tx")?,
            receive: start("rx")?,
        })
    }

    /// The loop that takes the next lane's sending half; counts it as given.
    pub(super) fn transmit(&self) -> &EventLoop {
        least_loaded(&self.transmit)
    }

    /// The loop that takes the next lane's receiving half; counts it as given.
    pub(super) fn receive(&self) -> &EventLoop {
        least_loaded(&self.receive)
    }
}

fn least_loaded(loops: &[EventLoop]) -> &EventLoop {
    let chosen = loops
        .iter()
        .min_by_key(|one| one.mailbox.sources.load(Ordering::Relaxed))
        .unwrap_or(&loops[0]);
    chosen.mailbox.sources.fetch_add(1, Ordering::Relaxed);
    chosen
}

/// Event loops per direction: those that run, else those that would be started.
pub(super) fn loops_per_direction(asked: u16) -> usize {
    match LOOPS.get() {
        Some(Ok(loops)) => loops.per_direction(),
        _ => wanted(asked),
    }
}

fn wanted(asked: u16) -> usize {
    match asked {
        0 => loops_for(std::thread::available_parallelism().map_or(1, usize::from)),
        asked => usize::from(asked.min(MAX_LOOPS)),
    }
}

/// One loop up to 4 cores, then one for every 2 cores, at most 12. A loop copies cold memory through
/// a socket at about 4 GB/s, so fewer would not keep up with a GPU's copies; more than 12 only take
/// each other's cache.
fn loops_for(cores: usize) -> usize {
    if cores <= 4 { 1 } else { (cores / 2).min(12) }
}

#[cfg(test)]
mod tests {
    use super::{MAX_LOOPS, loops_for, wanted};

    #[test]
    fn loops_grow_with_the_cores_up_to_a_limit() {
        let counted = [1, 2, 4, 5, 8, 16, 24, 32, 256].map(loops_for);
        assert_eq!(counted, [1, 1, 1, 2, 4, 8, 12, 12, 12]);
    }

    #[test]
    fn a_number_that_was_asked_for_counts_within_reason() {
        let counted = [1, 3, MAX_LOOPS, u16::MAX].map(wanted);
        assert_eq!(counted, [1, 3, MAX_LOOPS.into(), MAX_LOOPS.into()]);
        assert!(wanted(0) > 0);
    }
}
