//! The thread that drives connections: it sleeps in one `epoll` over control sockets, channel
//! events and wake-ups, and calls `progress` on whatever is due.
//!
//! Connections of the embedded network share one driver per process. A network that calls foreign
//! code (a plugin) has a driver to itself, so that a call that hangs delays nobody else.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

/// Longest sleep, so that a driver notices its own end and proves that it lives.
const MAX_SLEEP: Duration = Duration::from_millis(500);
/// Rounds without any result after which a poll-only network is polled with pauses.
const BUSY_ROUNDS: u32 = 200;
/// Pause between polls of a poll-only network that has been quiet.
const POLL_PAUSE: Duration = Duration::from_micros(50);

/// What a driver needs from a connection.
pub(crate) trait Driven: Send + Sync {
    /// Does everything that can be done now.
    fn progress(&self) -> Turn;
}

/// Outcome of [`Driven::progress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// When it must be called again even if nothing happens.
    pub(crate) next: Option<Instant>,
    /// Requests are in flight on a network that can only be polled.
    pub(crate) poll: bool,
    /// Its share was used up with work left over that no descriptor announces.
    pub(crate) more: bool,
    /// Something was done in this call.
    pub(crate) busy: bool,
    /// Nothing is left to do, ever.
    pub(crate) finished: bool,
}

/// Names a connection at its driver.
pub(crate) type DrivenId = u64;

/// A driver thread's shared half.
pub(crate) struct Driver {
    epoll: OwnedFd,
    wake: OwnedFd,
    state: Mutex<State>,
    name: String,
}

#[derive(Default)]
struct State {
    next_id: DrivenId,
    added: Vec<(DrivenId, Arc<dyn Driven>)>,
    woken: Vec<DrivenId>,
    running: bool,
}

impl Driver {
    /// The driver of all connections whose networks announce their completions.
    pub(crate) fn shared() -> std::io::Result<Arc<Self>> {
        static SHARED: OnceLock<Arc<Driver>> = OnceLock::new();
        if let Some(driver) = SHARED.get() {
            return Ok(Arc::clone(driver));
        }
        let driver = Self::new("tcpx-engine")?;
        Ok(Arc::clone(SHARED.get_or_init(|| driver)))
    }

    /// A driver of its own for a network that calls foreign code.
    pub(crate) fn new(name: &str) -> std::io::Result<Arc<Self>> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Arc::new(Self {
            epoll,
            wake,
            state: Mutex::new(State::default()),
            name: name.to_owned(),
        }))
    }

    /// Reserves an id, so that a connection can watch descriptors before it is added.
    pub(crate) fn reserve(&self) -> DrivenId {
        let mut state = self.lock();
        state.next_id += 1;
        state.next_id
    }

    /// Drives `driven` until it is finished; the thread starts with the first one and ends after
    /// the last.
    pub(crate) fn add(
        self: &Arc<Self>,
        id: DrivenId,
        driven: Arc<dyn Driven>,
    ) -> std::io::Result<()> {
        let mut state = self.lock();
        state.added.push((id, driven));
        if !state.running {
            let driver = Arc::clone(self);
            std::thread::Builder::new()
                .name(self.name.clone())
                .spawn(move || driver.run())?;
            state.running = true;
        }
        drop(state);
        self.signal();
        Ok(())
    }

    /// Watches a descriptor on behalf of `id`.
    pub(crate) fn watch(
        &self,
        id: DrivenId,
        fd: BorrowedFd<'_>,
        write: bool,
    ) -> std::io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(id), flags(write))?;
        Ok(())
    }

    /// Changes whether writability of a watched descriptor matters.
    pub(crate) fn rewatch(
        &self,
        id: DrivenId,
        fd: BorrowedFd<'_>,
        write: bool,
    ) -> std::io::Result<()> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(id), flags(write))?;
        Ok(())
    }

    /// Stops watching a descriptor.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        // A descriptor that was never watched is no longer watched either.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Has `progress` of `id` called soon.
    pub(crate) fn wake(&self, id: DrivenId) {
        let mut state = self.lock();
        let first = state.woken.is_empty();
        if !state.woken.contains(&id) {
            state.woken.push(id);
        }
        drop(state);
        if first {
            self.signal();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self) {
        // A full counter means that a wake-up is already pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn run(&self) {
        let mut driven: HashMap<DrivenId, (Arc<dyn Driven>, Turn)> = HashMap::new();
        let mut events = Vec::with_capacity(64);
        let mut due = Vec::new();
        let mut idle_rounds = 0;
        loop {
            self.wait(&mut events, sleep_time(&driven, idle_rounds));
            due.clear();
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        // Draining an empty counter is no error worth knowing.
                        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
                    }
                    id => due.push(id),
                }
            }
            {
                let mut state = self.lock();
                due.append(&mut state.woken);
                for (id, added) in state.added.drain(..) {
                    driven.insert(id, (added, START));
                    due.push(id);
                }
            }
            let now = Instant::now();
            due.extend(driven.iter().filter_map(|(id, (_, turn))| {
                let due = turn.poll || turn.more || turn.next.is_some_and(|next| next <= now);
                due.then_some(*id)
            }));
            due.sort_unstable();
            due.dedup();
            let mut busy = false;
            for id in &due {
                let Some((connection, turn)) = driven.get_mut(id) else {
                    continue;
                };
                *turn = connection.progress();
                busy |= turn.busy;
                if turn.finished {
                    driven.remove(id);
                }
            }
            idle_rounds = if busy { 0 } else { idle_rounds + 1 };
            if driven.is_empty() {
                let mut state = self.lock();
                if state.added.is_empty() {
                    state.running = false;
                    return;
                }
            }
        }
    }

    fn wait(&self, events: &mut Vec<epoll::Event>, sleep: Duration) {
        events.clear();
        let timeout = timespec(sleep);
        // Interrupted or not, the caller looks at the events there are.
        let _ = epoll::wait(&self.epoll, spare_capacity(events), Some(&timeout));
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// How long nothing needs to be done, unless something happens.
fn sleep_time(driven: &HashMap<DrivenId, (Arc<dyn Driven>, Turn)>, idle_rounds: u32) -> Duration {
    let now = Instant::now();
    let mut sleep = MAX_SLEEP;
    for (_, turn) in driven.values() {
        if turn.more {
            return Duration::ZERO;
        }
        if turn.poll {
            let pause = if idle_rounds < BUSY_ROUNDS {
                std::thread::yield_now();
                Duration::ZERO
            } else {
                POLL_PAUSE
            };
            sleep = sleep.min(pause);
        }
        if let Some(next) = turn.next {
            sleep = sleep.min(next.saturating_duration_since(now));
        }
    }
    sleep
}

/// A span of time as the system's waits take it.
pub(crate) fn timespec(span: Duration) -> Timespec {
    Timespec {
        tv_sec: span.as_secs().cast_signed(),
        tv_nsec: span.subsec_nanos().into(),
    }
}

const fn flags(write: bool) -> EventFlags {
    if write {
        EventFlags::IN.union(EventFlags::OUT)
    } else {
        EventFlags::IN
    }
}

/// Everything is to be looked at.
pub(crate) const START: Turn = Turn {
    next: None,
    poll: false,
    more: false,
    busy: true,
    finished: false,
};
const WAKE: u64 = 0;

impl AsFd for Driver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
