//! A connection to another agent: what it asks is answered here, on a thread of the connection; what is
//! asked of it is carried out by the [mover](crate::mover).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use tcpx::{After, Connection, Error, ErrorKind, Rights, Transfer, Window, WindowKey};

use crate::abi::Status;
use crate::agent::Agent;
use crate::flight::{Advance, Direct, Flight};
use crate::info::AgentId;
use crate::memory::{Hold, Staging, copy};
use crate::message::{MOST_BYTES, MOST_NOTICE_BYTES, Message, Piece};
use crate::mover::{Mover, Pull};
use crate::plan::FEW_RUNS;

/// How often the thread of a connection looks whether it is to end.
const LOOK: Duration = Duration::from_secs(1);
/// Longest wait for the first words of a peer.
const GREETING: Duration = Duration::from_secs(10);
/// Staging memory that a peer puts gathered pieces into.
const SLOTS: u32 = 8;
const SLOT_BYTES: u32 = 512 * 1024;
/// Messages that may be under way; more wait.
const MOST_MESSAGES: usize = 512;
/// Windows that a peer may have open at a time.
const MOST_WINDOWS: usize = 4096;
/// Pieces that a peer may wait for.
const MOST_PULLED: usize = 1 << 20;
/// Notifications in parts that may be incomplete.
const MOST_PARTIAL: usize = 16;
/// The wire's own words about a notice, beside its bytes.
const NOTICE_BYTES: usize = 32;

/// What a connection is asked to do.
#[derive(Debug)]
pub(crate) enum Work {
    Flight(Arc<Flight>),
    Notice(Vec<u8>),
}

impl Work {
    /// It cannot be done.
    pub(crate) fn fail(self, peer: &str, status: Status) {
        match self {
            Self::Flight(flight) => flight.end(status),
            Self::Notice(_) => tracing::warn!("a notification to {peer} was not sent"),
        }
    }
}

/// What the mover is told.
#[derive(Debug)]
pub(crate) enum Event {
    Flight(Arc<Flight>),
    /// A transfer of the engine has ended.
    Ended(u64),
    /// A slot of the peer's staging memory may be used again.
    SlotFree(u32),
    /// The peer's staging memory.
    Staging {
        key: WindowKey,
        slots: u32,
        slot_bytes: u32,
    },
    /// A window came, or bytes.
    Look,
    /// The peer wants these pieces.
    Pull(Pull),
    Stop,
}

/// What waits for the mover.
#[derive(Debug, Default)]
struct Events {
    waiting: VecDeque<Event>,
    stopped: bool,
}

/// Messages on their way, and those that wait.
#[derive(Debug, Default)]
struct Outbox {
    under_way: VecDeque<Transfer>,
    waiting: VecDeque<Vec<u8>>,
}

/// Windows of the peer over one of its regions.
#[derive(Debug, Default)]
struct Keys {
    free: Vec<WindowKey>,
    /// Asked for and not answered.
    asked: usize,
    /// There is no such region any more.
    refused: bool,
}

/// The peer's way into memory of this agent.
#[derive(Debug, Default)]
struct Doorway {
    windows: Vec<(u64, Window)>,
    staging: Option<(Arc<Staging>, Window)>,
}

#[derive(Debug)]
struct Partial {
    bytes: Vec<u8>,
    /// Bytes that are there.
    filled: usize,
}

/// See the module's documentation.
pub(crate) struct Conn {
    pub(crate) agent: Arc<Agent>,
    connection: Connection,
    name: OnceLock<Arc<[u8]>>,
    dead: AtomicBool,
    events: Mutex<Events>,
    wake: Condvar,
    outbox: Mutex<Outbox>,
    flights: Mutex<HashMap<u64, Arc<Flight>>>,
    keys: Mutex<HashMap<u64, Keys>>,
    doorway: Mutex<Doorway>,
    partial: Mutex<HashMap<u64, Partial>>,
    pulled: AtomicUsize,
    /// Flights that the mover has not finished.
    pub(crate) moving: AtomicUsize,
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn")
            .field("connection", &self.connection)
            .field("dead", &self.dead)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Conn {
    fn new(agent: &Arc<Agent>, connection: Connection) -> Arc<Self> {
        let conn = Arc::new(Self {
            agent: Arc::clone(agent),
            connection,
            name: OnceLock::new(),
            dead: AtomicBool::new(false),
            events: Mutex::default(),
            wake: Condvar::new(),
            outbox: Mutex::default(),
            flights: Mutex::default(),
            keys: Mutex::default(),
            doorway: Mutex::default(),
            partial: Mutex::default(),
            pulled: AtomicUsize::new(0),
            moving: AtomicUsize::new(0),
        });
        agent.keep(&conn);
        conn
    }

    /// A peer has connected: who it is will be read on the connection's own thread.
    pub(crate) fn accepted(agent: &Arc<Agent>, connection: Connection) -> Result<(), String> {
        let conn = Self::new(agent, connection);
        let serving = Arc::clone(&conn);
        let started = agent.spawn("tcpx-nixl-serve", move || match serving.welcome() {
            Ok(()) => serving.serve(true),
            Err(why) => {
                tracing::warn!("a peer's connection was refused: {why}");
                serving.say_goodbye();
            }
        });
        started.map_err(|error| format!("no thread for it: {error}"))
    }

    fn first_words(&self) -> Result<Vec<u8>, String> {
        let until = Instant::now() + GREETING;
        while Instant::now() < until && !self.is_dead() {
            match self.connection.notification(LOOK) {
                Ok(Some(bytes)) => return Ok(bytes),
                Ok(None) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(format!(
            "it said nothing within {GREETING:?}; is the peer a NIXL agent with the backend TCPX?"
        ))
    }

    fn welcome(self: &Arc<Self>) -> Result<(), String> {
        let first = self.first_words()?;
        let Some(Message::Hello { name, wanted, .. }) = Message::from_bytes(&first) else {
            return Err("it speaks another version; use the same tcpx at both ends".to_owned());
        };
        if wanted != self.agent.id {
            self.send(&Message::Stranger);
            return Err(format!(
                "{} looked for an agent that is not here any more",
                String::from_utf8_lossy(name)
            ));
        }
        let _ = self.name.set(Arc::from(name));
        self.send(&Message::Welcome);
        self.start_mover()
    }

    /// Greets the peer that was connected to.
    pub(crate) fn dialled(
        agent: &Arc<Agent>,
        connection: Connection,
        name: &str,
        wanted: AgentId,
    ) -> Result<Arc<Self>, String> {
        let conn = Self::new(agent, connection);
        let _ = conn.name.set(Arc::from(name.as_bytes()));
        conn.send(&Message::Hello {
            name: agent.name.as_bytes(),
            agent: agent.id,
            wanted,
        });
        let answer = conn.first_words()?;
        match Message::from_bytes(&answer) {
            Some(Message::Welcome) => {}
            Some(Message::Stranger) => return Err("another agent listens there now".to_owned()),
            _ => return Err("it speaks another version; use the same tcpx at both ends".to_owned()),
        }
        conn.start_mover()?;
        let serving = Arc::clone(&conn);
        let started = agent.spawn("tcpx-nixl-serve", move || serving.serve(false));
        started.map_err(|error| format!("no thread for it: {error}"))?;
        Ok(conn)
    }

    fn start_mover(self: &Arc<Self>) -> Result<(), String> {
        let conn = Arc::clone(self);
        let started = self.agent.spawn("tcpx-nixl-move", move || {
            let _end = DieAtEnd(Arc::clone(&conn));
            Mover::new(conn).run();
        });
        started.map_err(|error| format!("no thread for it: {error}"))
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    fn peer(&self) -> Arc<[u8]> {
        self.name.get().cloned().unwrap_or_default()
    }

    fn peer_text(&self) -> String {
        String::from_utf8_lossy(&self.peer()).into_owned()
    }

    // The end.

    /// The connection is over: everything that runs on it has failed.
    fn die(&self, why: &str) {
        if !self.dead.swap(true, Ordering::AcqRel) && !self.agent.is_stopping() {
            tracing::info!("connection with {} is over: {why}", self.peer_text());
        }
        self.post(Event::Stop);
        let flights: Vec<_> = lock(&self.flights)
            .drain()
            .map(|(_, flight)| flight)
            .collect();
        for flight in flights {
            flight.end(Status::REMOTE_DISCONNECT);
        }
        let doorway = std::mem::take(&mut *lock(&self.doorway));
        drop(doorway);
        lock(&self.keys).clear();
    }

    /// What a failed transfer of the engine means for NIXL. A connection that is lost is over.
    pub(crate) fn failed(&self, error: &Error) -> Status {
        match error.kind() {
            ErrorKind::ConnectionLost
            | ErrorKind::Closed
            | ErrorKind::TimedOut
            | ErrorKind::Defect => {
                tracing::warn!("transfer with {} failed: {error}", self.peer_text());
                self.die(&error.to_string());
                // The peer learns it, where it lives.
                let _ = self.connection.clone().close(Duration::ZERO);
                Status::REMOTE_DISCONNECT
            }
            ErrorKind::Cancelled => Status::CANCELED,
            _ => {
                tracing::error!("transfer with {} failed: {error}", self.peer_text());
                Status::BACKEND
            }
        }
    }

    /// Ends it in order, without waiting.
    pub(crate) fn say_goodbye(&self) {
        // It says that the goodbye was not over at once.
        let _ = self.connection.clone().close(Duration::ZERO);
        self.die("this side ends it");
    }

    /// Waits for the goodbye.
    pub(crate) fn close(&self, limit: Duration) {
        if let Err(error) = self.connection.clone().close(limit) {
            tracing::debug!("goodbye to {}: {error}", self.peer_text());
        }
    }

    // The mover's events.

    pub(crate) fn post(&self, event: Event) {
        let mut events = lock(&self.events);
        if events.stopped {
            drop(events);
            if let Event::Flight(flight) = event {
                flight.end(Status::REMOTE_DISCONNECT);
            }
            return;
        }
        events.stopped = matches!(event, Event::Stop);
        events.waiting.push_back(event);
        drop(events);
        self.wake.notify_one();
    }

    /// Events for the mover, which waits for some, at most for `limit`.
    pub(crate) fn take_events(&self, limit: Option<Duration>) -> VecDeque<Event> {
        let mut events = lock(&self.events);
        let until = limit.map(|limit| Instant::now() + limit);
        while events.waiting.is_empty() {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            events = match left {
                Some(Duration::ZERO) => break,
                Some(left) => {
                    let waited = self.wake.wait_timeout(events, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self
                    .wake
                    .wait(events)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
        std::mem::take(&mut events.waiting)
    }

    /// Takes work; it fails by itself if the connection is over.
    pub(crate) fn submit(&self, work: Work) {
        match work {
            Work::Flight(flight) => {
                self.moving.fetch_add(1, Ordering::AcqRel);
                self.post(Event::Flight(flight));
            }
            Work::Notice(bytes) => self.send_notice(&bytes),
        }
    }

    // Messages.

    /// Sends a message; it waits here while many are under way.
    pub(crate) fn send(&self, message: &Message<'_>) {
        self.send_bytes(message.to_bytes());
    }

    fn send_bytes(&self, bytes: Vec<u8>) {
        let mut outbox = lock(&self.outbox);
        outbox.forget_ended();
        if !outbox.waiting.is_empty() || outbox.under_way.len() >= MOST_MESSAGES {
            outbox.waiting.push_back(bytes);
            drop(outbox);
            self.post(Event::Look);
            return;
        }
        match self.connection.notify(&bytes) {
            Ok(transfer) => outbox.under_way.push_back(transfer),
            Err(error) => {
                let is_room = matches!(error, Error::Request { .. });
                if is_room {
                    outbox.waiting.push_back(bytes);
                }
                drop(outbox);
                match is_room {
                    true => self.post(Event::Look),
                    false => drop(self.failed(&error)),
                }
            }
        }
    }

    /// Sends what waited; `true` if some still waits.
    pub(crate) fn flush(&self) -> bool {
        let mut outbox = lock(&self.outbox);
        outbox.forget_ended();
        while outbox.under_way.len() < MOST_MESSAGES
            && let Some(bytes) = outbox.waiting.front()
        {
            match self.connection.notify(bytes) {
                Ok(transfer) => {
                    outbox.under_way.push_back(transfer);
                    outbox.waiting.pop_front();
                }
                Err(Error::Request { .. }) => break,
                Err(error) => {
                    drop(outbox);
                    self.failed(&error);
                    return false;
                }
            }
        }
        !outbox.waiting.is_empty()
    }

    /// Sends a notification of NIXL, in parts where it is long.
    pub(crate) fn send_notice(&self, bytes: &[u8]) {
        let id = self.agent.next_id();
        let part_bytes = MOST_BYTES - NOTICE_BYTES;
        let mut offset = 0;
        loop {
            let part = &bytes[offset..bytes.len().min(offset + part_bytes)];
            self.send(&notice_part(id, bytes.len(), offset, part));
            offset += part.len();
            if offset >= bytes.len() {
                return;
            }
        }
    }

    // Windows of the peer.

    /// A window of the peer over each region, for one flight alone; `None` while some are asked for, or an
    /// error where there is no such region.
    pub(crate) fn take_keys(
        &self,
        regions: &[u64],
    ) -> Result<Option<Vec<(u64, WindowKey)>>, Status> {
        let mut keys = lock(&self.keys);
        if self.is_dead() {
            return Err(Status::REMOTE_DISCONNECT);
        }
        let mut missing = Vec::new();
        for region in regions {
            let known = keys.entry(*region).or_default();
            if known.refused {
                return Err(Status::NOT_FOUND);
            }
            if known.free.is_empty() {
                if known.asked == 0 {
                    known.asked += 1;
                    missing.push(*region);
                } else {
                    missing.push(u64::MAX);
                }
            }
        }
        if missing.is_empty() {
            let take = |region: &u64| {
                let key = keys.get_mut(region)?.free.pop()?;
                Some((*region, key))
            };
            return Ok(regions.iter().map(take).collect());
        }
        drop(keys);
        for region in missing.into_iter().filter(|region| *region != u64::MAX) {
            self.send(&Message::AskWindow { region });
        }
        Ok(None)
    }

    /// Windows that nothing uses any more.
    pub(crate) fn give_back(&self, free: Vec<(u64, WindowKey)>) {
        if free.is_empty() {
            return;
        }
        let mut keys = lock(&self.keys);
        for (region, key) in free {
            if let Some(known) = keys.get_mut(&region) {
                known.free.push(key);
            }
        }
        drop(keys);
        if self.moving.load(Ordering::Acquire) > 0 {
            self.post(Event::Look);
        }
    }

    /// Windows that something may still use at the peer: nothing of this side does any more.
    pub(crate) fn close_windows(&self, keys: Vec<(u64, WindowKey)>) {
        for (_, key) in keys {
            if !self.is_dead() {
                self.send(&Message::CloseWindow { window: key.window });
            }
        }
    }

    // Flights.

    /// A flight whose bytes are counted here.
    pub(crate) fn add_flight(self: &Arc<Self>, flight: &Arc<Flight>) {
        flight.set_conn(self);
        lock(&self.flights).insert(flight.id, Arc::clone(flight));
        if self.is_dead() {
            self.remove_flight(flight.id);
            flight.end(Status::REMOTE_DISCONNECT);
        }
    }

    pub(crate) fn remove_flight(&self, id: u64) {
        lock(&self.flights).remove(&id);
    }

    fn flight(&self, id: u64) -> Option<Arc<Flight>> {
        lock(&self.flights).get(&id).cloned()
    }

    /// So many bytes of a flight are in place. `false` if that cannot be.
    pub(crate) fn advance(&self, flight: &Arc<Flight>, bytes: u64) -> bool {
        match flight.advance(bytes) {
            Advance::Going => true,
            Advance::TooMany => false,
            Advance::Complete => {
                if let Some(notice) = &flight.notice {
                    self.send_notice(notice);
                }
                self.remove_flight(flight.id);
                flight.end(Status::SUCCESS);
                true
            }
        }
    }

    /// Starts a flight on its poster's thread, if that needs nothing but a call or two; else the mover does it.
    pub(crate) fn start_at_once(self: &Arc<Self>, flight: &Arc<Flight>) -> bool {
        if self.moving.load(Ordering::Acquire) > 0 || self.is_dead() {
            return false;
        }
        let plan = &flight.plan;
        if plan.bytes == 0 {
            self.advance(flight, 0);
            return true;
        }
        if !plan.gathered.is_empty() || plan.alone.len() > FEW_RUNS {
            return false;
        }
        let notice = flight.notice.as_deref().unwrap_or_default();
        if notice.len() > MOST_BYTES - NOTICE_BYTES {
            return false;
        }
        let regions: Vec<u64> = plan.remotes.iter().map(|region| region.id).collect();
        let Ok(Some(keys)) = self.take_keys(&regions) else {
            return false;
        };
        let Some(holds) = flight.holds() else {
            return true;
        };
        let locals: Vec<_> = holds
            .iter()
            .map(|hold| hold.region(flight.token()))
            .collect();
        let mut batch = self.connection.batch().after(After::Nothing);
        for run in &plan.alone {
            let (start, len) = (run.local_offset as usize, run.len as usize);
            let Ok(slice) = locals[run.local as usize].slice(start..start + len) else {
                return false;
            };
            let key = &keys[run.remote as usize].1;
            batch = match plan.is_write {
                true => batch.put(slice, key, run.remote_offset),
                false => batch.get(slice, key, run.remote_offset),
            };
        }
        if flight.notice.is_some() {
            let message = notice_part(self.agent.next_id(), notice.len(), 0, notice);
            batch = batch.notify(&message.to_bytes());
        }
        match batch.start() {
            Ok(transfer) => {
                flight.set_direct(Direct {
                    transfer: Arc::new(transfer),
                    conn: Arc::clone(self),
                    keys,
                });
                true
            }
            Err(error) => {
                tracing::debug!("left to the mover: {error}");
                self.give_back(keys);
                false
            }
        }
    }

    // What the peer says.

    /// What the peer says next, `None` where it says nothing for a while. `drives`: this thread makes the
    /// connection's progress meanwhile. Else that is left to whoever polls for a transfer, who learns of its end
    /// without a wake-up of this thread then.
    fn next(&self, drives: bool) -> Result<Option<Vec<u8>>, Error> {
        if drives {
            return self.connection.notification(LOOK);
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        match self
            .connection
            .poll_notification_late(&mut Context::from_waker(&waker))
        {
            Poll::Ready(outcome) => outcome.map(Some),
            Poll::Pending => {
                std::thread::park_timeout(LOOK);
                Ok(None)
            }
        }
    }

    fn serve(self: &Arc<Self>, drives: bool) {
        let _end = DieAtEnd(Arc::clone(self));
        loop {
            match self.next(drives) {
                Ok(Some(bytes)) => {
                    let handled = Message::from_bytes(&bytes)
                        .ok_or("it said what is no message")
                        .and_then(|message| self.handle(message));
                    if let Err(why) = handled {
                        tracing::error!("agent {} broke the rules: {why}", self.peer_text());
                        self.say_goodbye();
                        return;
                    }
                }
                Ok(None) if self.is_dead() => return,
                Ok(None) => {}
                Err(error) => {
                    self.die(&error.to_string());
                    return;
                }
            }
        }
    }

    fn handle(self: &Arc<Self>, message: Message<'_>) -> Result<(), &'static str> {
        match message {
            Message::Hello { .. } | Message::Welcome | Message::Stranger => {
                return Err("it greets twice");
            }
            Message::Notice {
                id,
                bytes,
                offset,
                part,
            } => return self.notice(id, bytes, offset, part),
            Message::AskWindow { region } => self.open_window(region)?,
            Message::Window { region, key } => self.window_came(region, key)?,
            Message::CloseWindow { window } => {
                let mut doorway = lock(&self.doorway);
                let windows = std::mem::take(&mut doorway.windows);
                let (gone, kept): (Vec<_>, Vec<_>) = windows
                    .into_iter()
                    .partition(|(_, open)| open.key().window == window);
                doorway.windows = kept;
                drop(doorway);
                drop(gone);
            }
            Message::AskStaging => self.open_staging()?,
            Message::Staging {
                key,
                slots,
                slot_bytes,
            } => self.post(Event::Staging {
                key,
                slots,
                slot_bytes,
            }),
            Message::Push {
                transfer,
                is_answer,
                slot,
                pieces,
            } => match is_answer {
                false => self.pushed(transfer, &pieces, slot)?,
                true => self.answered(transfer, &pieces, slot)?,
            },
            Message::Applied {
                transfer,
                slot,
                bytes,
                status,
            } => self.applied(transfer, slot, bytes, status)?,
            Message::SlotFree { slot } => self.post(Event::SlotFree(slot)),
            Message::Pull {
                transfer,
                first,
                pieces,
            } => self.pull(transfer, first, pieces)?,
            Message::PullFailed { transfer, status } => {
                if let Some(flight) = self.flight(transfer) {
                    self.remove_flight(transfer);
                    flight.end(refusal(status));
                }
            }
        }
        Ok(())
    }

    fn notice(&self, id: u64, bytes: u64, offset: u64, part: &[u8]) -> Result<(), &'static str> {
        let (Ok(bytes), Ok(offset)) = (usize::try_from(bytes), usize::try_from(offset)) else {
            return Err("a notification is too long");
        };
        if bytes > MOST_NOTICE_BYTES {
            return Err("a notification is too long");
        }
        if part.len() == bytes && offset == 0 {
            self.agent.push_notice(&self.peer(), part.to_vec());
            return Ok(());
        }
        let mut partial = lock(&self.partial);
        if partial.len() >= MOST_PARTIAL && !partial.contains_key(&id) {
            return Err("too many notifications are incomplete");
        }
        let whole = partial.entry(id).or_insert_with(|| Partial {
            bytes: vec![0; bytes],
            filled: 0,
        });
        let end = offset.checked_add(part.len());
        let place = end.and_then(|end| whole.bytes.get_mut(offset..end));
        place
            .ok_or("a part does not fit in its notification")?
            .copy_from_slice(part);
        whole.filled += part.len();
        if whole.filled >= whole.bytes.len()
            && let Some(whole) = partial.remove(&id)
        {
            drop(partial);
            self.agent.push_notice(&self.peer(), whole.bytes);
        }
        Ok(())
    }

    fn open_window(&self, region: u64) -> Result<(), &'static str> {
        let key = self.agent.region(region).and_then(|memory| {
            let hold = Arc::new(memory.hold()?);
            let exposed = hold.region(Arc::new(()));
            let opened = self.connection.expose(exposed.all(), Rights::GetAndPut);
            match opened {
                Ok(window) => {
                    let key = window.key();
                    lock(&self.doorway).windows.push((region, window));
                    Some(key)
                }
                Err(error) => {
                    tracing::error!("no window for {}: {error}", self.peer_text());
                    None
                }
            }
        });
        if lock(&self.doorway).windows.len() > MOST_WINDOWS {
            return Err("it asks for too many windows");
        }
        if key.is_some() && self.agent.region(region).is_none() {
            // It was deregistered meanwhile.
            self.revoke(region);
        }
        self.send(&Message::Window { region, key });
        Ok(())
    }

    fn window_came(&self, region: u64, key: Option<WindowKey>) -> Result<(), &'static str> {
        let mut keys = lock(&self.keys);
        let known = keys.get_mut(&region).filter(|known| known.asked > 0);
        let known = known.ok_or("a window came that was not asked for")?;
        known.asked -= 1;
        match key {
            Some(key) => known.free.push(key),
            None => known.refused = true,
        }
        drop(keys);
        self.post(Event::Look);
        Ok(())
    }

    /// The peer may not touch the region any more.
    pub(crate) fn revoke(&self, region: u64) {
        let mut doorway = lock(&self.doorway);
        let windows = std::mem::take(&mut doorway.windows);
        let (gone, kept): (Vec<_>, Vec<_>) = windows.into_iter().partition(|(id, _)| *id == region);
        doorway.windows = kept;
        drop(doorway);
        drop(gone);
    }

    fn open_staging(&self) -> Result<(), &'static str> {
        let mut doorway = lock(&self.doorway);
        if doorway.staging.is_some() {
            return Err("it asks for staging memory twice");
        }
        let staging =
            Staging::new((SLOTS * SLOT_BYTES) as usize).ok_or("no memory for staging is left")?;
        let opened = self.connection.expose(staging.region().all(), Rights::Put);
        let window = opened.map_err(|_| "the connection is over")?;
        let key = window.key();
        doorway.staging = Some((staging, window));
        drop(doorway);
        self.send(&Message::Staging {
            key,
            slots: SLOTS,
            slot_bytes: SLOT_BYTES,
        });
        Ok(())
    }

    /// Runs `read` with the address of what a slot of the staging memory holds.
    fn with_slot<R>(
        &self,
        slot: u32,
        pieces: &[Piece],
        read: impl FnOnce(*const u8) -> R,
    ) -> Result<R, &'static str> {
        let staging = {
            let doorway = lock(&self.doorway);
            let staging = doorway.staging.as_ref();
            staging.map(|(staging, _)| Arc::clone(staging))
        };
        let staging = staging.ok_or("it names a slot without staging memory")?;
        let len = bytes_of(pieces);
        if slot >= SLOTS || len > u64::from(SLOT_BYTES) {
            return Err("it names a slot that there is not");
        }
        let offset = slot as usize * SLOT_BYTES as usize;
        let part = staging.part(offset, len as usize);
        Ok(read(part.ok_or("it names a slot that there is not")?))
    }

    /// Bytes of the peer for memory of this agent.
    fn pushed(&self, transfer: u64, pieces: &[Piece], slot: u32) -> Result<(), &'static str> {
        let status = self.with_slot(slot, pieces, |from| self.apply(pieces, from))?;
        self.send(&Message::Applied {
            transfer,
            slot,
            bytes: bytes_of(pieces),
            status: status.0,
        });
        Ok(())
    }

    /// Puts bytes in place, all of them or none. `from` is valid for the sum of the pieces.
    fn apply(&self, pieces: &[Piece], from: *const u8) -> Status {
        let mut holds = HeldRegions::default();
        let mut places = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let Some(hold) = holds.of(&self.agent, piece.what) else {
                return Status::NOT_FOUND;
            };
            let Some(place) = hold.host_piece(piece.offset, piece.len as usize) else {
                tracing::error!(
                    "agent {} wrote outside of registered memory; nothing was written",
                    self.peer_text()
                );
                return Status::INVALID_PARAM;
            };
            places.push(place);
        }
        let mut at = 0;
        for (piece, place) in pieces.iter().zip(places) {
            let len = piece.len as usize;
            // SAFETY: the place lies in memory that is held, and the source has bytes for the sum of all pieces.
            unsafe { copy(from.add(at), place, len) };
            at += len;
        }
        Status::SUCCESS
    }

    /// Bytes that this side asked for.
    fn answered(&self, transfer: u64, pieces: &[Piece], slot: u32) -> Result<(), &'static str> {
        let flight = self.flight(transfer);
        let placed = self.with_slot(slot, pieces, |from| {
            let Some(flight) = &flight else {
                // It was released meanwhile.
                return Ok(());
            };
            let placed = flight.with_memory(|holds| {
                let mut places = Vec::with_capacity(pieces.len());
                for piece in pieces {
                    let run = usize::try_from(piece.what)
                        .ok()
                        .and_then(|what| flight.plan.gathered.get(what))
                        .ok_or("an answer names a piece that there is not")?;
                    let len = u64::from(piece.len);
                    let fits = piece
                        .offset
                        .checked_add(len)
                        .is_some_and(|end| end <= run.len);
                    let place = holds[run.local as usize]
                        .host_piece(run.local_offset.wrapping_add(piece.offset), len as usize);
                    match place {
                        Some(place) if fits => places.push((place, len as usize)),
                        _ => return Err("an answer does not fit in its piece"),
                    }
                }
                let mut at = 0;
                for (place, len) in places {
                    // SAFETY: the place lies in memory that is held, and the source has bytes for the sum of all
                    // pieces.
                    unsafe { copy(from.add(at), place, len) };
                    at += len;
                }
                Ok(())
            });
            placed.unwrap_or(Ok(()))
        })?;
        placed?;
        self.send(&Message::SlotFree { slot });
        if let Some(flight) = flight {
            if !self.advance(&flight, bytes_of(pieces)) {
                return Err("it answered more than was asked");
            }
            if flight.is_over() {
                self.remove_flight(transfer);
            } else if self.moving.load(Ordering::Acquire) > 0 {
                self.post(Event::Look);
            }
        }
        Ok(())
    }

    fn applied(
        &self,
        transfer: u64,
        slot: u32,
        bytes: u64,
        status: i32,
    ) -> Result<(), &'static str> {
        self.post(Event::SlotFree(slot));
        let Some(flight) = self.flight(transfer) else {
            return Ok(());
        };
        if status != 0 {
            self.remove_flight(transfer);
            flight.end(refusal(status));
            return Ok(());
        }
        if flight.is_over() {
            self.remove_flight(transfer);
            return Ok(());
        }
        match self.advance(&flight, bytes) {
            true => Ok(()),
            false => Err("it answered more than was asked"),
        }
    }

    /// The peer wants bytes of memory of this agent.
    fn pull(
        self: &Arc<Self>,
        transfer: u64,
        first: u64,
        pieces: Vec<Piece>,
    ) -> Result<(), &'static str> {
        let mut holds = HeldRegions::default();
        let mut status = Status::SUCCESS;
        for piece in &pieces {
            match holds.of(&self.agent, piece.what) {
                None => status = Status::NOT_FOUND,
                Some(hold) if hold.host_piece(piece.offset, piece.len as usize).is_none() => {
                    status = Status::INVALID_PARAM;
                }
                Some(_) => {}
            }
        }
        if status != Status::SUCCESS {
            tracing::error!(
                "agent {} wanted what is not registered memory; nothing was sent",
                self.peer_text()
            );
            self.send(&Message::PullFailed {
                transfer,
                status: status.0,
            });
            return Ok(());
        }
        let waiting = self.pulled.fetch_add(pieces.len(), Ordering::AcqRel);
        if waiting + pieces.len() > MOST_PULLED {
            return Err("it wants too many pieces at a time");
        }
        self.post(Event::Pull(Pull {
            transfer,
            first,
            pieces,
            holds: holds.0,
            next: 0,
            offset: 0,
        }));
        Ok(())
    }

    /// A pull of so many pieces is over.
    pub(crate) fn pull_ended(&self, pieces: usize) {
        self.pulled.fetch_sub(pieces, Ordering::AcqRel);
    }

    /// Wakes the mover when a transfer of the engine ends.
    pub(crate) fn waker(self: &Arc<Self>, key: u64) -> Waker {
        Arc::new(EndWaker {
            conn: Arc::downgrade(self),
            key,
        })
        .into()
    }
}

/// A thread of a connection ends, also by a panic: then so does the connection.
struct DieAtEnd(Arc<Conn>);

impl Drop for DieAtEnd {
    fn drop(&mut self) {
        self.0.die("a thread of it has ended");
    }
}

struct Unpark(Thread);

impl std::task::Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

struct EndWaker {
    conn: Weak<Conn>,
    key: u64,
}

impl std::task::Wake for EndWaker {
    fn wake(self: Arc<Self>) {
        if let Some(conn) = self.conn.upgrade() {
            conn.post(Event::Ended(self.key));
        }
    }
}

impl Outbox {
    fn forget_ended(&mut self) {
        while let Some(first) = self.under_way.front()
            && first.test().is_some()
        {
            self.under_way.pop_front();
        }
    }
}

/// Regions of this agent that a message names, held.
#[derive(Debug, Default)]
pub(crate) struct HeldRegions(pub(crate) HashMap<u64, Arc<Hold>>);

impl HeldRegions {
    fn of(&mut self, agent: &Agent, id: u64) -> Option<&Arc<Hold>> {
        match self.0.entry(id) {
            Entry::Occupied(held) => Some(held.into_mut()),
            Entry::Vacant(place) => {
                let hold = agent.region(id)?.hold()?;
                Some(place.insert(Arc::new(hold)))
            }
        }
    }
}

fn bytes_of(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

/// A status that a peer named: it is never a success.
fn refusal(status: i32) -> Status {
    match Status(status) {
        Status::NOT_FOUND => Status::NOT_FOUND,
        Status::INVALID_PARAM => Status::INVALID_PARAM,
        _ => Status::BACKEND,
    }
}

fn notice_part(id: u64, bytes: usize, offset: usize, part: &[u8]) -> Message<'_> {
    Message::Notice {
        id,
        bytes: bytes as u64,
        offset: offset as u64,
        part,
    }
}
