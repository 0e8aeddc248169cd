//! The sources of a process, and what is left of those that have ended.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::counters::Counters;
use crate::report::{ConnectionReport, FailureReport, ListenerReport, Report, SCHEMA, VERSION};
use crate::server::{Followed, Port, Server};

/// Errors that are kept.
const LAST_ERRORS: usize = 32;

/// The variable that switches the local socket off.
const SWITCH: &str = "TCPX_STATUS";

/// The variable that names an address for metrics.
const METRICS: &str = "TCPX_METRICS";

/// Something that tells about itself when it is asked.
///
/// Asked on the thread that answers, at most for one request at a time, and never with a lock held that
/// [`Registration`]'s methods take.
pub trait Source: Send + Sync {
    /// How it is now; `None` once it has ended.
    fn describe(&self) -> Option<Description>;
}

/// What a [`Source`] tells.
#[derive(Debug)]
pub enum Description {
    /// A connection; the registry numbers it.
    Connection(Box<ConnectionReport>),
    /// A listening endpoint.
    Listener(ListenerReport),
}

/// The last of a source.
#[derive(Debug, Default)]
pub struct Ended {
    /// What a connection had counted.
    pub counters: Counters,
    /// An error ended it.
    pub lost: bool,
    /// What a listener had refused.
    pub refused: u64,
}

/// A source's place in the process. Dropping it takes the source out.
#[derive(Debug)]
pub struct Registration {
    /// `None` in a fork's child of a process that had sources: nobody answers there.
    id: Option<u64>,
}

/// Has this process tell of `source`.
pub fn register(source: Weak<dyn Source>, is_connection: bool) -> Registration {
    let Some(mut state) = lock() else {
        return Registration { id: None };
    };
    let id = state.next_id;
    state.next_id += 1;
    state.connections_opened += u64::from(is_connection);
    state.sources.push((id, source));
    state.serve();
    Registration { id: Some(id) }
}

/// Serves this process's metrics on a TCP port until it ends; the address with the port that was bound.
///
/// # Errors
/// The address has no meaning here, or cannot be bound.
pub fn serve_metrics(address: &str) -> io::Result<SocketAddr> {
    let Some(mut state) = lock() else {
        return Err(io::Error::other("a fork's child serves no metrics"));
    };
    let listener = bind(address)?;
    let bound = listener.local_addr()?;
    state.metrics = Some(Arc::new(Followed::new(listener)));
    state.serve();
    Ok(bound)
}

impl Registration {
    /// Keeps an error of the source among the last ones of the process.
    pub fn failed(&self, peer: String, error: String) {
        let Some(mut state) = self.state() else {
            return;
        };
        let at_seconds = state.started.elapsed().as_secs_f64();
        if state.errors.len() == LAST_ERRORS {
            state.errors.pop_front();
        }
        state.errors.push_back(FailureReport {
            at_seconds,
            peer,
            error,
        });
    }

    /// The source has ended: what it counted becomes part of the process's totals. Its
    /// [`Source::describe`] must say so from before this call on.
    pub fn ended(&self, last: impl FnOnce() -> Ended) {
        let (Some(id), Some(mut state)) = (self.id, self.state()) else {
            return;
        };
        if state.take_out(id) {
            let last = last();
            match state.is_collecting {
                true => state.recent.push((id, last)),
                false => state.past.add(&last),
            }
        }
    }

    fn state(&self) -> Option<MutexGuard<'static, State>> {
        self.id.and_then(|_| lock())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let (Some(id), Some(mut state)) = (self.id, self.state()) {
            state.take_out(id);
        }
    }
}

/// What sources that have ended left.
#[derive(Debug, Default)]
struct Past {
    counters: Counters,
    lost: u64,
    refused: u64,
}

impl Past {
    fn add(&mut self, ended: &Ended) {
        self.counters.add(&ended.counters);
        self.lost += u64::from(ended.lost);
        self.refused += ended.refused;
    }
}

pub(crate) struct State {
    started: Instant,
    next_id: u64,
    sources: Vec<(u64, Weak<dyn Source>)>,
    connections_opened: u64,
    past: Past,
    /// A report is being made; what ends meanwhile may be in it already.
    is_collecting: bool,
    recent: Vec<(u64, Ended)>,
    errors: VecDeque<FailureReport>,
    has_asked: bool,
    /// The local socket is wanted.
    is_wanted: bool,
    metrics: Option<Port>,
    server: Option<Server>,
}

/// The process whose state [`STATE`] is; 0 before the first use.
static OWNER: AtomicU32 = AtomicU32::new(0);
static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::new()));

/// Locks the state; `None` in a fork's child, whose copy may be locked for ever.
fn lock() -> Option<MutexGuard<'static, State>> {
    let own = std::process::id();
    let owner = OWNER.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire);
    if owner.is_err_and(|owner| owner != own) {
        return None;
    }
    Some(STATE.lock().unwrap_or_else(PoisonError::into_inner))
}

impl State {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            next_id: 1,
            sources: Vec::new(),
            connections_opened: 0,
            past: Past::default(),
            is_collecting: false,
            recent: Vec::new(),
            errors: VecDeque::new(),
            has_asked: false,
            is_wanted: false,
            metrics: None,
            server: None,
        }
    }

    /// Takes a source out; `false` if it was out already.
    fn take_out(&mut self, id: u64) -> bool {
        let before = self.sources.len();
        self.sources.retain(|(other, _)| *other != id);
        if self.sources.is_empty() && self.metrics.is_none() {
            // Its thread ends, and its socket is gone when this returns.
            self.server = None;
        }
        self.sources.len() < before
    }

    /// Has a thread answer. A process that nobody can ask works all the same.
    fn serve(&mut self) {
        if !std::mem::replace(&mut self.has_asked, true) {
            self.ask_variables();
        }
        if let Some(server) = &self.server {
            return server.renew(self.metrics.clone());
        }
        if !self.is_wanted && self.metrics.is_none() {
            return;
        }
        match Server::start(self.is_wanted, self.metrics.clone()) {
            Ok(server) => self.server = Some(server),
            Err(error) => tracing::debug!(%error, "nobody can ask this process for its status"),
        }
    }

    fn ask_variables(&mut self) {
        self.is_wanted = std::env::var(SWITCH).map_or(true, |value| value != "0");
        let address = std::env::var(METRICS).unwrap_or_default();
        if self.metrics.is_some() || address.is_empty() {
            return;
        }
        match bind(&address) {
            Ok(listener) => self.metrics = Some(Arc::new(Followed::new(listener))),
            Err(error) => tracing::warn!(
                %address, %error,
                "no metrics are served: give {METRICS} an address of this host with a free port"
            ),
        }
    }
}

fn bind(address: &str) -> io::Result<TcpListener> {
    let mut found = address.to_socket_addrs()?;
    let first = found.next();
    let listener = TcpListener::bind(first.ok_or_else(|| io::Error::other("it has no address"))?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Asks every source.
pub(crate) fn collect() -> Option<Report> {
    let mut state = lock()?;
    state.is_collecting = true;
    let sources: Vec<_> = state
        .sources
        .iter()
        .filter_map(|(id, source)| Some((*id, source.upgrade()?)))
        .collect();
    drop(state);
    let mut report = Report {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        pid: std::process::id(),
        program: program(),
        rank: rank(),
        software: concat!("tcpx ", env!("CARGO_PKG_VERSION")).to_owned(),
        ..Report::default()
    };
    let mut described = Vec::new();
    for (id, source) in sources {
        match source.describe() {
            None => continue,
            Some(Description::Connection(mut connection)) => {
                connection.id = id;
                report.totals.add(&connection.counters);
                report.connections.push(*connection);
            }
            Some(Description::Listener(listener)) => {
                report.peers_refused += listener.refused;
                report.listeners.push(listener);
            }
        }
        described.push(id);
    }
    let mut state = lock()?;
    state.is_collecting = false;
    let State { past, recent, .. } = &mut *state;
    // What ended after it was asked is in the report, so it counts as past from the next report on.
    for (id, ended) in recent.extract_if(.., |(id, _)| !described.contains(id)) {
        tracing::trace!(id, "ended while a report was made");
        past.add(&ended);
    }
    report.totals.add(&past.counters);
    report.peers_refused += past.refused;
    report.connections_lost = past.lost;
    for (_, ended) in std::mem::take(recent) {
        past.add(&ended);
    }
    report.connections_opened = state.connections_opened;
    report.at_seconds = state.started.elapsed().as_secs_f64();
    report.errors = state.errors.iter().cloned().collect();
    Some(report)
}

/// The name of the process, as the system shows it.
fn program() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim_end().to_owned()
}

/// What torchrun, Open MPI, MPICH, Slurm or Kubernetes tells a process of its rank.
fn rank() -> Option<String> {
    let told = [
        "RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
        "JOB_COMPLETION_INDEX",
    ];
    told.iter().find_map(|name| std::env::var(name).ok())
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;

    /// A connection that has sent `bytes`, and ends just after it was asked.
    #[derive(Default)]
    struct Ending {
        bytes: u64,
        registration: OnceLock<Registration>,
    }

    impl Ending {
        fn counters(&self) -> Counters {
            Counters {
                bytes_sent: self.bytes,
                ..Counters::default()
            }
        }
    }

    impl Source for Ending {
        fn describe(&self) -> Option<Description> {
            let registration = self.registration.get()?;
            registration.ended(|| Ended {
                counters: self.counters(),
                lost: true,
                refused: 0,
            });
            let report = ConnectionReport {
                counters: self.counters(),
                ..ConnectionReport::default()
            };
            Some(Description::Connection(Box::new(report)))
        }
    }

    #[test]
    fn what_ends_while_it_is_asked_counts_once() {
        let ending = Arc::new(Ending {
            bytes: 7,
            ..Ending::default()
        });
        let source = Arc::downgrade(&ending);
        let registration = register(source, true);
        registration.failed("a peer".to_owned(), "an error".to_owned());
        ending.registration.set(registration).expect("set once");

        let first = collect().expect("this process's own");
        assert_eq!((first.totals.bytes_sent, first.connections.len()), (7, 1));
        assert_eq!(first.errors[0].error, "an error");
        for _ in 0..2 {
            let later = collect().expect("this process's own");
            assert_eq!((later.totals.bytes_sent, later.connections.len()), (7, 0));
            assert_eq!((later.connections_opened, later.connections_lost), (1, 1));
        }
    }
}
