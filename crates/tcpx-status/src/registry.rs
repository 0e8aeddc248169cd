//! The sources of a process, and what is left of those that have ended.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use crate::counters::Counters;
use crate::report::{
    ConnectionReport, FailureReport, ListenerReport, Mappings, Report, SCHEMA, VERSION,
};
use crate::server::{Followed, Port, Server, own_folders};

/// Errors that are kept.
const LAST_ERRORS: usize = 32;

/// The variable that switches the local socket off.
const SWITCH: &str = "TCPX_STATUS";

/// The variable that names an address for metrics.
const METRICS: &str = "TCPX_METRICS";

/// Something that tells about itself when it is asked.
///
/// Asked on the thread that answers, at most for one request at a time, and never with a lock held
/// that [`Registration`]'s methods take. That thread has a share of it meanwhile, so what a source
/// must let go of at its end it lets go of itself, and not by the last share.
pub trait Source: Send + Sync {
    /// How it is now; `None` once it has ended. Whoever cannot look tells zeros: what it told
    /// before stands.
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

static MAPPINGS: OnceLock<fn() -> Mappings> = OnceLock::new();

/// Has this process tell of the GPU memory of others that it has mapped.
pub fn tell_mappings(of: fn() -> Mappings) {
    // The first one's is the process's.
    MAPPINGS.get_or_init(|| of);
}

/// Has this process tell of `source`.
pub fn register(source: Weak<dyn Source>, is_connection: bool) -> Registration {
    let Some(mut state) = lock() else {
        return Registration { id: None };
    };
    let id = state.next_id;
    state.next_id += 1;
    state.connections_opened += u64::from(is_connection);
    state.sources.push(RegisteredSource {
        id,
        source,
        told: Told::default(),
    });
    state.serve();
    Registration { id: Some(id) }
}

/// Serves this process's metrics on a TCP port until it ends; the address with the port that was
/// bound.
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

    /// The source has ended: what it counted becomes part of the process's past.
    pub fn ended(&self, last: impl FnOnce() -> Ended) {
        let (Some(id), Some(mut state)) = (self.id, self.state()) else {
            return;
        };
        if let Some(mut told) = state.take_out(id) {
            let last = last();
            told.raise(&last.counters, last.refused);
            state.past.add(&told);
            state.connections_lost += u64::from(last.lost);
        }
    }

    fn state(&self) -> Option<MutexGuard<'static, State>> {
        self.id.and_then(|_| lock())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let (Some(id), Some(mut state)) = (self.id, self.state())
            && let Some(told) = state.take_out(id)
        {
            state.past.add(&told);
        }
    }
}

/// What a source has told, or all that have ended. Never less than before: a monitoring system
/// takes that for a process that began anew.
#[derive(Debug, Default)]
struct Told {
    counters: Counters,
    refused: u64,
}

impl Told {
    fn raise(&mut self, counters: &Counters, refused: u64) {
        self.counters.raise(counters);
        self.refused = self.refused.max(refused);
    }

    fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        self.refused += other.refused;
    }
}

/// A source of the process.
struct RegisteredSource {
    id: u64,
    source: Weak<dyn Source>,
    told: Told,
}

pub(crate) struct State {
    started: Instant,
    next_id: u64,
    sources: Vec<RegisteredSource>,
    connections_opened: u64,
    connections_lost: u64,
    /// What sources that have ended left.
    past: Told,
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
            connections_lost: 0,
            past: Told::default(),
            errors: VecDeque::new(),
            has_asked: false,
            is_wanted: false,
            metrics: None,
            server: None,
        }
    }

    /// Takes a source out, with what it told; `None` if it was out already.
    fn take_out(&mut self, id: u64) -> Option<Told> {
        let at = self.sources.iter().position(|place| place.id == id)?;
        let RegisteredSource { told, .. } = self.sources.remove(at);
        if self.sources.is_empty() && self.metrics.is_none() {
            // Its thread ends, and its socket is gone when this returns.
            self.server = None;
        }
        Some(told)
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
        let folders = match self.is_wanted {
            true => own_folders(),
            false => Vec::new(),
        };
        match Server::start(&folders, self.metrics.clone()) {
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

/// Asks every source, one after the other: no more than one is kept at a time.
pub(crate) fn collect() -> Option<Report> {
    let places = lock()?
        .sources
        .iter()
        .map(|place| (place.id, Weak::clone(&place.source)))
        .collect::<Vec<_>>();
    let mut report = Report {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        pid: std::process::id(),
        program: program(),
        rank: rank(),
        software: concat!("tcpx ", env!("CARGO_PKG_VERSION")).to_owned(),
        mappings: MAPPINGS.get().map_or_else(Mappings::default, |of| of()),
        ..Report::default()
    };
    for (id, source) in places {
        let description = source.upgrade().and_then(|source| source.describe());
        let Some(description) = description else {
            continue;
        };
        // What has ended meanwhile has left its last word.
        if let Some(place) = lock()?.sources.iter_mut().find(|place| place.id == id) {
            match &description {
                Description::Connection(connection) => place.told.raise(&connection.counters, 0),
                Description::Listener(listener) => {
                    place.told.raise(&Counters::default(), listener.refused)
                }
            }
        }
        match description {
            Description::Connection(mut connection) => {
                connection.id = id;
                report.connections.push(*connection);
            }
            Description::Listener(listener) => report.listeners.push(listener),
        }
    }
    let state = lock()?;
    for told in state
        .sources
        .iter()
        .map(|place| &place.told)
        .chain([&state.past])
    {
        report.totals.add(&told.counters);
        report.peers_refused += told.refused;
    }
    report.connections_opened = state.connections_opened;
    report.connections_lost = state.connections_lost;
    report.at_seconds = state.started.elapsed().as_secs_f64();
    report.errors = state.errors.iter().cloned().collect();
    Some(report)
}

/// The name of the process, as the system shows it.
fn program() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim_end().to_owned()
}

/// Variables in which launchers tell a process its rank, their number, and both among those on the
/// same host.
pub const LAUNCHERS: [[&str; 4]; 5] = [
    // torchrun, and whoever sets them by hand.
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    // Open MPI's mpirun.
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ],
    // mpiexec of MPICH and Intel MPI.
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    // srun.
    [
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ],
    // An indexed job of Kubernetes, whose size nothing but its author says.
    ["JOB_COMPLETION_INDEX", "WORLD_SIZE", "", ""],
];

/// What a launcher tells this process of its rank.
fn rank() -> Option<String> {
    let mut told = LAUNCHERS.iter();
    told.find_map(|[rank, ..]| std::env::var(rank).ok())
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

    /// A connection that tells what the test last gave it.
    #[derive(Default)]
    struct Given(Mutex<Option<u64>>);

    impl Source for Given {
        fn describe(&self) -> Option<Description> {
            let bytes_sent = (*self.0.lock().unwrap_or_else(PoisonError::into_inner))?;
            let mut report = ConnectionReport::default();
            report.counters.bytes_sent = bytes_sent;
            Some(Description::Connection(Box::new(report)))
        }
    }

    /// Tests of what a process tells run one after the other.
    static ALONE: Mutex<()> = Mutex::new(());

    fn alone() -> MutexGuard<'static, ()> {
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sent() -> u64 {
        collect().expect("this process's own").totals.bytes_sent
    }

    #[test]
    fn a_total_never_goes_back_however_a_source_ends() {
        let _alone = alone();
        let before = sent();
        for is_told in [true, false] {
            let given = Arc::new(Given::default());
            let source = Arc::downgrade(&given);
            let registration = register(source, true);
            let tell = |bytes| *given.0.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
            let start = sent();
            tell(Some(5));
            assert_eq!(sent(), start + 5);
            // It cannot look; it has ended and nobody has said so; it is being dropped.
            for told in [Some(0), None] {
                tell(told);
                assert_eq!(sent(), start + 5);
            }
            drop(given);
            assert_eq!(sent(), start + 5);
            let counters = Counters {
                bytes_sent: 4,
                ..Counters::default()
            };
            if is_told {
                registration.ended(|| Ended {
                    counters,
                    ..Ended::default()
                });
            }
            drop(registration);
            assert_eq!(sent(), start + 5);
        }
        assert_eq!(sent(), before + 10);
    }

    /// Counts the shares of another source while it is asked itself.
    struct Counting {
        other: Mutex<Weak<Self>>,
        shares: Mutex<usize>,
    }

    impl Source for Counting {
        fn describe(&self) -> Option<Description> {
            let other = self.other.lock().unwrap_or_else(PoisonError::into_inner);
            *self.shares.lock().unwrap_or_else(PoisonError::into_inner) = other.strong_count();
            None
        }
    }

    #[test]
    fn a_source_is_kept_only_while_it_is_asked() {
        let _alone = alone();
        let both = [(); 2].map(|()| {
            Arc::new(Counting {
                other: Mutex::new(Weak::new()),
                shares: Mutex::new(0),
            })
        });
        let _places = both.each_ref().map(|one| {
            let source: Weak<dyn Source> = Arc::<Counting>::downgrade(one);
            register(source, false)
        });
        for (one, other) in [(0, 1), (1, 0)] {
            *both[one]
                .other
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&both[other]);
        }
        collect().expect("this process's own");
        for one in &both {
            // The test's own.
            assert_eq!(
                *one.shares.lock().unwrap_or_else(PoisonError::into_inner),
                1
            );
        }
    }

    #[test]
    fn what_ends_while_it_is_asked_counts_once() {
        let _alone = alone();
        let before = collect().expect("this process's own");
        let (sent_before, lost_before) = (before.totals.bytes_sent, before.connections_lost);
        let opened_before = before.connections_opened;
        let ending = Arc::new(Ending {
            bytes: 7,
            ..Ending::default()
        });
        let source = Arc::downgrade(&ending);
        let registration = register(source, true);
        registration.failed("a peer".to_owned(), "an error".to_owned());
        ending.registration.set(registration).expect("set once");

        let first = collect().expect("this process's own");
        assert_eq!(first.totals.bytes_sent - sent_before, 7);
        assert_eq!(first.connections.len(), 1);
        assert_eq!(first.errors[0].error, "an error");
        for _ in 0..2 {
            let later = collect().expect("this process's own");
            assert_eq!(later.totals.bytes_sent - sent_before, 7);
            assert!(later.connections.is_empty());
            assert_eq!(later.connections_opened - opened_before, 1);
            assert_eq!(later.connections_lost - lost_before, 1);
        }
    }
}
