//! An event loop: a thread that moves bytes for one direction of many lanes.
//!
//! Lanes are watched edge-triggered. A loop without work spins for a moment where the machine has
//! cores to spare, because the next chunk of a running transfer is microseconds away, and then
//! sleeps until a socket or a poster has something.
//!
//! The embedded network (`tcpx-net`) has a loop of its own, and one for both would be two in one: that
//! one lives as long as its process, has each poster name the lane it means, and counts itself among the
//! threads that look for work. This one ends with the last comm, must leave a forked child alone, and
//! takes every kick as news for all of its lanes, as chunks lie in one queue for whichever is free.

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use tcpx_memory::PagePipe;

use super::kick::Kick;

/// Events taken from the kernel in one call.
const EVENTS: usize = 64;
/// The eventfd among the sockets.
const KICK: u64 = u64::MAX;

/// One direction of one lane.
pub(crate) trait Lane: Send + Debug {
    /// The socket to watch.
    fn socket(&self) -> BorrowedFd<'_>;
    /// What to watch it for.
    fn interest(&self) -> epoll::EventFlags;
    /// Moves bytes until nothing can be done or the turn's share is used up.
    fn turn(&mut self) -> Turn;
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing to do before the socket or a kick says so.
    Rest,
    /// There is more to do; others first.
    Again,
    /// The lane has ended; drop it.
    End,
}

/// What others know of a loop.
#[derive(Debug)]
pub(crate) struct Mailbox {
    pub(crate) kick: Kick,
    arrivals: Mutex<Vec<Box<dyn Lane>>>,
    lanes: AtomicUsize,
    stop: AtomicBool,
}

impl Mailbox {
    /// Hands a lane over.
    pub(crate) fn add(&self, lane: Box<dyn Lane>) {
        self.lanes.fetch_add(1, Ordering::Relaxed);
        self.arrivals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(lane);
        self.kick.kick();
    }

    /// Lanes of this loop.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes.load(Ordering::Relaxed)
    }
}

/// A running loop; dropping it ends the thread and closes its lanes.
#[derive(Debug)]
pub(crate) struct Looper {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Looper {
    pub(crate) fn start(name: String, spin: Duration) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox {
            kick: Kick::new()?,
            arrivals: Mutex::new(Vec::new()),
            lanes: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &poller,
            &mailbox.kick,
            epoll::EventData::new_u64(KICK),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        let inner = Arc::clone(&mailbox);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            PagePipe::ignore_broken_pipes();
            Runner {
                poller,
                mailbox: inner,
                entries: Vec::new(),
                spin,
            }
            .run();
        })?;
        Ok(Self {
            mailbox,
            thread: Some(thread),
            process: std::process::id(),
        })
    }

    pub(crate) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }
}

impl Drop for Looper {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.process != std::process::id() {
            // A fork left the thread in the other process; there is nothing to end here.
            std::mem::forget(thread);
            return;
        }
        self.mailbox.stop.store(true, Ordering::SeqCst);
        self.mailbox.kick.kick();
        // Never blocks for long: a loop waits for nothing but its sockets and its kick.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

struct Entry {
    lane: Box<dyn Lane>,
    ready: bool,
}

struct Runner {
    poller: OwnedFd,
    mailbox: Arc<Mailbox>,
    entries: Vec<Option<Entry>>,
    spin: Duration,
}

impl Runner {
    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        let mut seen = u64::MAX;
        let mut quiet_since: Option<Instant> = None;
        loop {
            let count = self.mailbox.kick.count();
            if count != seen {
                seen = count;
                quiet_since = None;
                if self.mailbox.stop.load(Ordering::SeqCst) {
                    return;
                }
                self.take_arrivals();
                self.entries
                    .iter_mut()
                    .flatten()
                    .for_each(|e| e.ready = true);
            }
            let busy = self.turns();
            let wait = if busy {
                quiet_since = None;
                false
            } else {
                let since = *quiet_since.get_or_insert_with(Instant::now);
                since.elapsed() >= self.spin && self.mailbox.kick.sleep(seen)
            };
            let at_once = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            if !busy && !wait {
                // Whoever has work goes first.
                std::thread::yield_now();
            }
            events.clear();
            let timeout = if wait { None } else { Some(&at_once) };
            // EINTR gives no events; any other error would be a descriptor that is not ours.
            let _ = epoll::wait(&self.poller, spare_capacity(&mut events), timeout);
            if wait {
                self.mailbox.kick.awake();
            }
            for event in &events {
                quiet_since = None;
                if let Ok(index) = usize::try_from(event.data.u64())
                    && let Some(Some(entry)) = self.entries.get_mut(index)
                {
                    entry.ready = true;
                }
            }
        }
    }

    /// Gives every ready lane a turn; `true` when one of them has more to do.
    fn turns(&mut self) -> bool {
        let mut busy = false;
        for index in 0..self.entries.len() {
            let Some(entry) = &mut self.entries[index] else {
                continue;
            };
            if !entry.ready {
                continue;
            }
            match entry.lane.turn() {
                Turn::Again => busy = true,
                Turn::Rest => entry.ready = false,
                Turn::End => {
                    // Fails only for a lane that was never added.
                    let _ = epoll::delete(&self.poller, entry.lane.socket());
                    self.entries[index] = None;
                    self.mailbox.lanes.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        busy
    }

    fn take_arrivals(&mut self) {
        let arrivals = std::mem::take(
            &mut *self
                .mailbox
                .arrivals
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for lane in arrivals {
            let index = match self.entries.iter().position(Option::is_none) {
                Some(index) => index,
                None => {
                    self.entries.push(None);
                    self.entries.len() - 1
                }
            };
            let data = epoll::EventData::new_u64(index as u64);
            let flags = lane.interest() | epoll::EventFlags::ET;
            if epoll::add(&self.poller, lane.socket(), data, flags).is_err() {
                // Out of kernel memory for watches: a lane that nobody watches would hang, a
                // dropped one is an end that both sides see.
                self.mailbox.lanes.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            self.entries[index] = Some(Entry { lane, ready: true });
        }
    }
}
