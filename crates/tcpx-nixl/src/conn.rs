//! A connection to another agent: how it begins and ends, and what is said on it. What this side
//! wants of the peer is in `asking`, what the peer wants in `serving`; both run on the connection's
//! thread or the program's.

mod asking;
mod serving;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use tcpx::{Connection, Error, ErrorKind, Region, Transfer};

use crate::abi::Status;
use crate::agent::{Agent, GOODBYE};
use crate::flight::Flight;
use crate::info::AgentId;
use crate::lock;
use crate::message::{MOST_BYTES, Message};
use asking::PeerWindows;
use serving::{Doorway, Partial};

/// How often the thread of a connection looks whether it is to end.
const LOOK: Duration = Duration::from_secs(1);
/// Runs of a transfer that its poster starts itself.
const MOST_RUNS_AT_ONCE: usize = 256;
/// How often what waits for room is tried again.
const RETRY: Duration = Duration::from_millis(1);
/// Longest wait for the first words of a peer.
const GREETING: Duration = Duration::from_secs(10);
/// Messages that may be under way; more wait.
const MOST_MESSAGES: usize = 512;
/// Answers to a peer that may wait for it to read; it is not read meanwhile.
const MOST_ANSWERS: usize = 64;
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

/// Messages on their way, and those that wait.
#[derive(Debug, Default)]
struct Outbox {
    under_way: VecDeque<Transfer>,
    waiting: VecDeque<Vec<u8>>,
}

/// See the module's documentation.
pub(crate) struct Conn {
    pub(crate) agent: Arc<Agent>,
    connection: Connection,
    name: OnceLock<Arc<[u8]>>,
    dead: AtomicBool,
    outbox: Mutex<Outbox>,
    flights: Mutex<Flights>,
    windows: Mutex<PeerWindows>,
    doorway: Mutex<Doorway>,
    /// GPU memory of this side that it writes from, by its region's name: one for all transfers, so
    /// that a peer on this host maps it once.
    sources: Mutex<HashMap<u64, Region>>,
    partial: Mutex<HashMap<u64, Partial>>,
    /// The thread that reads what the peer says.
    reader: OnceLock<Thread>,
}

/// Flights that need more than their posters.
#[derive(Debug, Default)]
struct Flights {
    /// They wait for windows, or for others to end.
    waiting: VecDeque<Arc<Flight>>,
    /// A notification follows them that is too long for the engine.
    watched: Vec<Arc<Flight>>,
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn")
            .field("connection", &self.connection)
            .field("dead", &self.dead)
            .finish_non_exhaustive()
    }
}

impl Conn {
    fn new(agent: &Arc<Agent>, connection: Connection) -> Arc<Self> {
        let conn = Arc::new(Self {
            agent: Arc::clone(agent),
            connection,
            name: OnceLock::new(),
            dead: AtomicBool::new(false),
            outbox: Mutex::default(),
            flights: Mutex::default(),
            windows: Mutex::default(),
            doorway: Mutex::default(),
            sources: Mutex::default(),
            partial: Mutex::default(),
            reader: OnceLock::new(),
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
            return Err("it is no NIXL agent, or breaks the rules".to_owned());
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
        Ok(())
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
            _ => return Err("it is no NIXL agent, or breaks the rules".to_owned()),
        }
        let serving = Arc::clone(&conn);
        let started = agent.spawn("tcpx-nixl-serve", move || serving.serve(false));
        started.map_err(|error| format!("no thread for it: {error}"))?;
        Ok(conn)
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
        let Flights { waiting, watched } = std::mem::take(&mut *lock(&self.flights));
        for flight in waiting.into_iter().chain(watched) {
            flight.end(Status::REMOTE_DISCONNECT);
        }
        let doorway = std::mem::take(&mut *lock(&self.doorway));
        let sources = std::mem::take(&mut *lock(&self.sources));
        drop((doorway, sources));
        lock(&self.windows).clear();
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
                let _ = self.connection.begin_close(GOODBYE);
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
        // In a fork's child there is nobody to say it to.
        let _ = self.connection.begin_close(GOODBYE);
        self.die("this side ends it");
    }

    /// Waits for the goodbye.
    pub(crate) fn close(&self, limit: Duration) {
        if let Err(error) = self.connection.clone().close(limit) {
            tracing::debug!("goodbye to {}: {error}", self.peer_text());
        }
    }

    // Transfers.

    /// Takes work; it fails by itself if the connection is over.
    pub(crate) fn submit(self: &Arc<Self>, work: Work) {
        match work {
            Work::Flight(flight) => {
                let mut flights = lock(&self.flights);
                let waits = !flights.waiting.is_empty();
                drop(flights);
                // To list many pieces takes a while, which is not the poster's.
                let is_long = flight.plan.runs.len() > MOST_RUNS_AT_ONCE;
                if waits || is_long || !self.start(&flight) {
                    flights = lock(&self.flights);
                    flights.waiting.push_back(flight);
                    drop(flights);
                    self.wake_reader();
                }
            }
            Work::Notice(bytes) => self.send_notice(&bytes),
        }
    }

    /// Whatever waits may go on now.
    fn wake_reader(&self) {
        if let Some(reader) = self.reader.get() {
            reader.unpark();
        }
        if self.is_dead() {
            self.die("it is over");
        }
    }

    /// Starts what waited, as far as that goes; `true` if something still waits.
    fn go_on(self: &Arc<Self>) -> bool {
        let mut flights = lock(&self.flights);
        let watched = std::mem::take(&mut flights.watched);
        while !lock(&self.windows).are_coming()
            && let Some(flight) = flights.waiting.pop_front()
        {
            drop(flights);
            let started = self.start(&flight);
            flights = lock(&self.flights);
            if !started {
                flights.waiting.push_front(flight);
                break;
            }
        }
        drop(flights);
        let running = |flight: &Arc<Flight>| flight.check() == Status::IN_PROGRESS;
        let watched: Vec<_> = watched.into_iter().filter(running).collect();
        let mut flights = lock(&self.flights);
        flights.watched.extend(watched);
        let waits = !flights.waiting.is_empty() || !flights.watched.is_empty();
        drop(flights);
        self.flush() || waits
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
            self.wake_reader();
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
                    true => self.wake_reader(),
                    false => drop(self.failed(&error)),
                }
            }
        }
    }

    /// Sends what waited; `true` if some still waits.
    fn flush(&self) -> bool {
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

    // What the peer says.

    /// What the peer says next, `None` where it says nothing for `limit`. `drives`: this thread
    /// makes the connection's progress meanwhile. Else that is left to whoever polls for a
    /// transfer, who learns of its end without a wake-up of this thread then.
    fn next(&self, drives: bool, limit: Duration) -> Result<Option<Vec<u8>>, Error> {
        if drives {
            return self.connection.notification(limit);
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        match self
            .connection
            .poll_notification_late(&mut Context::from_waker(&waker))
        {
            Poll::Ready(outcome) => outcome.map(Some),
            Poll::Pending => {
                std::thread::park_timeout(limit);
                Ok(None)
            }
        }
    }

    fn serve(self: &Arc<Self>, drives: bool) {
        let _end = DieAtEnd(Arc::clone(self));
        let _ = self.reader.set(std::thread::current());
        loop {
            // The agent's end says goodbye to the connections that it finds; one that came about
            // amid it is not among them.
            if self.agent.is_stopping() {
                self.say_goodbye();
                return;
            }
            let limit = match self.go_on() {
                true => RETRY,
                false => LOOK,
            };
            if drives && lock(&self.outbox).waiting.len() > MOST_ANSWERS && !self.is_dead() {
                std::thread::park_timeout(limit);
                continue;
            }
            match self.next(drives, limit) {
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
            Message::AskWindows { regions } => self.open_windows(regions),
            Message::Windows { windows } => self.windows_came(windows)?,
        }
        Ok(())
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

impl Outbox {
    fn forget_ended(&mut self) {
        while let Some(first) = self.under_way.front()
            && first.test().is_some()
        {
            self.under_way.pop_front();
        }
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
