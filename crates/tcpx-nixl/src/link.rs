//! The way to another agent: a connection when there is one, what waits for it meanwhile, and a new
//! one after the loss of the old.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tcpx::{Auth, Endpoint, Error, Gpu, NetworkError};
use tcpx_net::SocketError;
use tcpx_wire::handshake::HandshakeError;

use crate::abi::Status;
use crate::agent::Agent;
use crate::conn::{Conn, Work};
use crate::info::ConnectionInfo;
use crate::lock;

/// Longest time that connecting takes, over all addresses.
const CONNECT: Duration = Duration::from_secs(10);
/// Before an agent is dialled again that is taking as many others as it can.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Link {
    agent: Weak<Agent>,
    name: String,
    info: Arc<ConnectionInfo>,
    gpu: Option<Gpu>,
    port: u16,
    state: Mutex<State>,
    /// Where it was connected last, which is tried first.
    last_good: Mutex<Option<SocketAddr>>,
}

#[derive(Debug)]
enum State {
    Idle,
    Dialling(Vec<Work>),
    Up(Arc<Conn>),
    Closed,
}

impl Link {
    pub(crate) fn new(
        agent: &Arc<Agent>,
        name: &str,
        info: Arc<ConnectionInfo>,
        gpu: Option<Gpu>,
        port: u16,
    ) -> Self {
        Self {
            agent: Arc::downgrade(agent),
            name: name.to_owned(),
            info,
            gpu,
            port,
            state: Mutex::new(State::Idle),
            last_good: Mutex::default(),
        }
    }

    /// Gives work to the connection, or keeps it until there is one.
    pub(crate) fn submit(self: &Arc<Self>, work: Work) -> Status {
        let mut state = lock(&self.state);
        match &mut *state {
            State::Up(conn) if !conn.is_dead() => {
                let conn = Arc::clone(conn);
                drop(state);
                conn.submit(work);
                Status::SUCCESS
            }
            State::Dialling(waiting) => {
                waiting.push(work);
                Status::SUCCESS
            }
            State::Closed => Status::NOT_FOUND,
            State::Idle | State::Up(_) => {
                *state = State::Dialling(vec![work]);
                drop(state);
                self.start()
            }
        }
    }

    /// Begins to connect, unless that was begun.
    pub(crate) fn dial(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        let is_up = matches!(&*state, State::Up(conn) if !conn.is_dead());
        if is_up || matches!(&*state, State::Dialling(_) | State::Closed) {
            return;
        }
        *state = State::Dialling(Vec::new());
        drop(state);
        self.start();
    }

    fn start(self: &Arc<Self>) -> Status {
        let Some(agent) = self.agent.upgrade() else {
            return Status::BACKEND;
        };
        let (link, owner) = (Arc::clone(self), Arc::clone(&agent));
        let started = agent.spawn("tcpx-nixl-dial", move || link.connect(&owner));
        match started {
            Ok(()) => Status::SUCCESS,
            Err(error) => {
                tracing::error!("no thread to connect to {}: {error}", self.name);
                self.fail();
                Status::BACKEND
            }
        }
    }

    fn connect(&self, agent: &Arc<Agent>) {
        let connected = self.try_addresses(agent);
        let mut state = lock(&self.state);
        match (connected, &mut *state) {
            (Some(conn), State::Dialling(waiting)) => {
                let waiting = std::mem::take(waiting);
                *state = State::Up(Arc::clone(&conn));
                // With the lock, so that what is submitted meanwhile comes behind it.
                for work in waiting {
                    conn.submit(work);
                }
            }
            (Some(conn), _) => {
                drop(state);
                conn.say_goodbye();
            }
            (None, _) => {
                drop(state);
                self.fail();
            }
        }
    }

    fn try_addresses(&self, agent: &Arc<Agent>) -> Option<Arc<Conn>> {
        let Some(key) = self
            .info
            .key
            .clone()
            .or_else(|| Some(agent.config.shared_key.as_ref()?.client_key()))
        else {
            tracing::error!(
                "agent {} was given a key and this one was not; give TCPX_KEY or TCPX_KEY_FILE to both",
                self.name
            );
            return None;
        };
        let mut candidates = self.info.candidates(&agent.host, self.port);
        let last_good = *lock(&self.last_good);
        candidates.sort_by_key(|address| Some(*address) != last_good);
        let (until, mut pause) = (Instant::now() + CONNECT, FIRST_PAUSE);
        let mut last = "it named no address that can be reached from here".to_owned();
        while !candidates.is_empty() && !agent.is_stopping() {
            let mut options = agent
                .config
                .options(Auth::Client(key.clone()), self.gpu.clone());
            options.connect_timeout = until.saturating_duration_since(Instant::now());
            let connection = match Endpoint::connect(&candidates[..], &options) {
                Ok(connection) => connection,
                Err(error) if is_crowded(&error) && Instant::now() + pause < until => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(LONGEST_PAUSE);
                    continue;
                }
                Err(error) => {
                    last = error.to_string();
                    break;
                }
            };
            let (address, path) = (connection.peer().address, connection.path());
            match Conn::dialled(agent, connection, &self.name, self.info.agent) {
                Ok(conn) => {
                    tracing::info!("connected to {} at {address}: {path}", self.name);
                    *lock(&self.last_good) = Some(address);
                    return Some(conn);
                }
                Err(why) => {
                    // Another one has that address as well.
                    tracing::debug!("agent {} at {address}: {why}", self.name);
                    last = format!("{address}: {why}");
                    candidates.retain(|candidate| *candidate != address);
                }
            }
        }
        tracing::warn!(
            "agent {} cannot be reached; {last}; the next transfer tries again",
            self.name
        );
        None
    }

    /// What waited has failed.
    fn fail(&self) {
        let mut state = lock(&self.state);
        let waiting = match &mut *state {
            State::Dialling(waiting) => std::mem::take(waiting),
            _ => return,
        };
        *state = State::Idle;
        drop(state);
        for work in waiting {
            work.fail(&self.name, Status::REMOTE_DISCONNECT);
        }
    }

    /// Ends it: what waits fails, and the connection says goodbye.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        let old = std::mem::replace(&mut *state, State::Closed);
        drop(state);
        match old {
            State::Dialling(waiting) => {
                for work in waiting {
                    work.fail(&self.name, Status::REMOTE_DISCONNECT);
                }
            }
            State::Up(conn) => conn.say_goodbye(),
            State::Idle | State::Closed => {}
        }
    }
}

/// Whether so many agents connect there at a time that one more was turned away.
fn is_crowded(error: &Error) -> bool {
    let crowded = HandshakeError::Busy;
    let of_socket = |error: &SocketError| matches!(error, SocketError::Handshake { error, .. } if *error == crowded);
    matches!(error, Error::Network(NetworkError::Socket(error)) if of_socket(error))
}
