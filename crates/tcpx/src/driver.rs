//! The thread that drives connections: it sleeps in one `epoll` over control sockets, channel
//! events and wake-ups, and calls `progress` on whatever is due.
//!
//! Connections of the embedded network share one driver per process. A network that calls foreign
//! code (a plugin) has a driver to itself, so that a call that hangs delays nobody else.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use tcpx_lanes::lock;
use tcpx_memory::awake::Awake;
use tcpx_net::PerProcess;

use crate::wait::{micros_since, wait};

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

    /// When `progress` must be called even if nothing happens.
    fn due(&self) -> Option<Instant>;
}

/// Outcome of [`Driven::progress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Requests are in flight on a network that can only be polled.
    pub(crate) poll: bool,
    /// Only small copies of a GPU are, which whoever looks without a pause sees by himself.
    pub(crate) copying: bool,
    /// Its share was used up with work left over that no descriptor announces.
    pub(crate) more: bool,
    /// Something was done in this call.
    pub(crate) busy: bool,
    /// Chunks are in flight, or wait for a channel.
    pub(crate) moving: bool,
    /// Nothing is left to do, ever.
    pub(crate) finished: bool,
}

/// Names a connection at its driver.
pub(crate) type DrivenId = u64;

type AllDriven = HashMap<DrivenId, (Arc<dyn Driven>, Turn)>;

/// A driver thread's shared half.
pub(crate) struct Driver {
    epoll: OwnedFd,
    wake: OwnedFd,
    state: Mutex<State>,
    name: String,
    origin: Instant,
    /// Until when the thread sleeps, in microseconds from `origin`; 0 while it works.
    asleep_until: AtomicU64,
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
        static SHARED: PerProcess<OnceLock<Arc<Driver>>> = PerProcess::new();
        let shared = SHARED.get();
        if let Some(driver) = shared.get() {
            return Ok(Arc::clone(driver));
        }
        let driver = Self::new("tcpx-engine")?;
        Ok(Arc::clone(shared.get_or_init(|| driver)))
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
            origin: Instant::now(),
            asleep_until: AtomicU64::new(0),
        }))
    }

    /// Reserves an id, so that a connection can watch descriptors before it is added.
    pub(crate) fn reserve(&self) -> DrivenId {
        let mut state = lock(&self.state);
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
        let mut state = lock(&self.state);
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
        for_what: EventFlags,
    ) -> std::io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(id), for_what)?;
        Ok(())
    }

    /// Changes what a watched descriptor is watched for.
    pub(crate) fn rewatch(
        &self,
        id: DrivenId,
        fd: BorrowedFd<'_>,
        for_what: EventFlags,
    ) -> std::io::Result<()> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(id), for_what)?;
        Ok(())
    }

    /// Stops watching a descriptor.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        // A descriptor that was never watched is no longer watched either.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Has `progress` of `id` called soon.
    pub(crate) fn wake(&self, id: DrivenId) {
        let mut state = lock(&self.state);
        let first = state.woken.is_empty();
        if !state.woken.contains(&id) {
            state.woken.push(id);
        }
        drop(state);
        if first {
            self.signal();
        }
    }

    /// As [`wake`](Self::wake), unless the thread will look before `due` by itself. What
    /// [`Driven::due`] answers must have been changed before.
    pub(crate) fn wake_by(&self, id: DrivenId, due: Instant) {
        let asleep_until = self.asleep_until.load(Ordering::SeqCst);
        // Awake, it will look at every limit before it sleeps.
        if asleep_until > 0 && self.since_origin(due) < asleep_until {
            self.wake(id);
        }
    }

    fn since_origin(&self, at: Instant) -> u64 {
        micros_since(self.origin, at)
    }

    fn signal(&self) {
        // A full counter means that a wake-up is already pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn run(&self) {
        let awake = Awake::begin();
        let mut driven = AllDriven::new();
        let mut events = Vec::with_capacity(64);
        let mut due = Vec::new();
        let mut idle_rounds = 0;
        loop {
            awake.asleep(|| self.wait(&mut events, &driven, idle_rounds));
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
                let mut state = lock(&self.state);
                due.append(&mut state.woken);
                for (id, added) in state.added.drain(..) {
                    driven.insert(id, (added, START));
                    due.push(id);
                }
            }
            let now = Instant::now();
            due.extend(driven.iter().filter_map(|(id, (connection, turn))| {
                let timed_out = || connection.due().is_some_and(|due| due <= now);
                (turn.poll || turn.more || timed_out()).then_some(*id)
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
                let mut state = lock(&self.state);
                if state.added.is_empty() {
                    state.running = false;
                    return;
                }
            }
        }
    }

    fn wait(&self, events: &mut Vec<epoll::Event>, driven: &AllDriven, idle_rounds: u32) {
        events.clear();
        let pause = pause(driven, idle_rounds);
        // Announced, and then one more look: a limit that was brought forward meanwhile is either
        // seen here, or found before the end of the sleep by whoever brought it forward. The sleep
        // is no longer than was announced, although a limit may have gone.
        let until = Instant::now() + pause.min(until_due(driven));
        self.asleep_until
            .store(self.since_origin(until).max(1), Ordering::SeqCst);
        let sleep = until_due(driven).min(until.saturating_duration_since(Instant::now()));
        // Interrupted or not, the caller looks at the events there are.
        let _ = wait(&self.epoll, spare_capacity(events), sleep);
        self.asleep_until.store(0, Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// How long the thread may sleep, as far as unannounced work goes.
fn pause(driven: &AllDriven, idle_rounds: u32) -> Duration {
    if driven.values().any(|(_, turn)| turn.more) {
        return Duration::ZERO;
    }
    match driven.values().any(|(_, turn)| turn.poll) {
        true if idle_rounds < BUSY_ROUNDS => {
            std::thread::yield_now();
            Duration::ZERO
        }
        true => POLL_PAUSE,
        false => MAX_SLEEP,
    }
}

/// How long until the first limit, at most [`MAX_SLEEP`].
fn until_due(driven: &AllDriven) -> Duration {
    let now = Instant::now();
    driven
        .values()
        .filter_map(|(connection, _)| connection.due())
        .map(|due| due.saturating_duration_since(now))
        .fold(MAX_SLEEP, Duration::min)
}

/// A span of time as the system's waits take it.
pub(crate) fn timespec(span: Duration) -> Timespec {
    Timespec {
        tv_sec: span.as_secs().cast_signed(),
        tv_nsec: span.subsec_nanos().into(),
    }
}

/// To be read.
pub(crate) const READ: EventFlags = EventFlags::IN;
pub(crate) const READ_WRITE: EventFlags = EventFlags::IN.union(EventFlags::OUT);
/// Nothing but its end.
pub(crate) const MUTED: EventFlags = EventFlags::empty();

/// Everything is to be looked at.
pub(crate) const START: Turn = Turn {
    poll: false,
    copying: false,
    more: false,
    busy: true,
    moving: false,
    finished: false,
};
const WAKE: u64 = 0;

impl AsFd for Driver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
