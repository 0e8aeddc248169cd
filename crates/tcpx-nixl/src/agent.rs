//! An agent of NIXL: its memory, its listeners, the agents that it knows, and what they told it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tcpx::{Auth, Endpoint, Error, Gpu, Region};
use tcpx_net::protocols;

use crate::abi::Status;
use crate::config::{Config, ConfigError};
use crate::conn::{Conn, Work};
use crate::flight::Flight;
use crate::info::{
    AgentId, ConnectionInfo, RegionInfo, RegionName, RegionNames, own_addresses, this_host,
};
use crate::link::Link;
use crate::lock;
use crate::memory::{Kind, Registered};
use crate::message::MOST_NOTICE_BYTES;
use crate::plan::Plan;

/// Longest wait for what still points at memory that is deregistered: a peer that died is noticed
/// before.
const DEREGISTER: Duration = Duration::from_secs(20);
/// Goodbyes of an agent that ends take at most so long.
pub(crate) const GOODBYE: Duration = Duration::from_secs(2);
/// Notifications that wait for the program, and their bytes; peers that send more are not read
/// meanwhile.
const MOST_NOTICES: usize = 1 << 20;
const MOST_NOTICES_BYTES: usize = 256 << 20;

/// Memory of another agent, as its metadata names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteRegion {
    /// Where it lies at its owner: NIXL's lists name memory by address.
    pub(crate) address: usize,
    pub(crate) info: RegionInfo,
}

impl RemoteRegion {
    /// Where `address` lies in it, if all of `len` bytes do.
    pub(crate) fn offset_of(&self, address: usize, len: usize) -> Option<u64> {
        let offset = address.checked_sub(self.address)? as u64;
        let end = offset.checked_add(len as u64)?;
        (end <= self.info.bytes).then_some(offset)
    }
}

/// Another agent.
#[derive(Debug)]
struct Peer {
    info: Arc<ConnectionInfo>,
    links: Mutex<Links>,
}

/// Links to one agent, by the GPU here and the port there.
type Links = HashMap<(Option<u32>, u16), Arc<Link>>;

/// A listening port, for host memory or for that of one GPU.
#[derive(Debug, Clone)]
struct Door {
    gpu: Option<u32>,
    endpoint: Arc<Endpoint>,
}

#[derive(Debug, Default)]
struct Notices {
    waiting: VecDeque<(Arc<[u8]>, Vec<u8>)>,
    bytes: usize,
}

impl Notices {
    fn is_full(&self) -> bool {
        self.waiting.len() >= MOST_NOTICES || self.bytes >= MOST_NOTICES_BYTES
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) name: String,
    pub(crate) id: AgentId,
    pub(crate) config: Config,
    pub(crate) host: [u8; 16],
    info: Arc<ConnectionInfo>,
    names: RegionNames,
    /// By their numbers; of the same memory that is registered more than once, all.
    regions: Mutex<HashMap<u64, Vec<Arc<Registered>>>>,
    next: AtomicU64,
    peers: Mutex<HashMap<String, Arc<Peer>>>,
    doors: Mutex<Vec<Door>>,
    conns: Mutex<Vec<Weak<Conn>>>,
    /// Those that may run, and others that nobody has cleared away yet.
    flights: Mutex<Vec<Weak<Flight>>>,
    notices: Mutex<Notices>,
    room: Condvar,
    stopping: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Bytes in a second, of the last transfers: for estimates.
    rate: AtomicU64,
}

/// Why an agent cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Listen(Error),
    #[error("the system gave no random bytes: {0}")]
    Random(String),
    #[error("a thread cannot be started: {0}; check the limit on threads")]
    Thread(std::io::Error),
}

/// Listens on every address of this host.
fn listen(config: &Config, port: u16, gpu: Option<Gpu>) -> Result<Endpoint, Error> {
    let options = config.options(Auth::Key(config.listener_key.clone()), gpu);
    Endpoint::listen((tcpx_net::every_address(), port).into(), options)
}

impl Agent {
    /// Starts an agent, which listens from now on.
    pub(crate) fn start(name: &str, config: Config) -> Result<Arc<Self>, StartError> {
        let mut id = AgentId::default();
        let random = |error: getrandom::Error| StartError::Random(error.to_string());
        getrandom::fill(&mut id).map_err(random)?;
        let names = RegionNames::generate().map_err(random)?;
        let endpoint = listen(&config, config.port, None).map_err(StartError::Listen)?;
        let (port, takes_v6) = (
            endpoint.local_addr().port(),
            endpoint.local_addr().is_ipv6(),
        );
        let mut addresses = own_addresses(config.interfaces.as_deref());
        addresses.retain(|address| takes_v6 || address.is_ipv4());
        let host = this_host();
        let info = ConnectionInfo {
            build: *protocols::own_build(),
            agent: id,
            host,
            port,
            key: match config.shared_key {
                Some(_) => None,
                None => Some(config.listener_key.client_key()),
            },
            addresses,
        };
        tracing::info!(
            "agent {name:?} listens on port {port}, addresses {:?}, {}",
            info.addresses,
            match config.shared_key {
                Some(_) => "with the key of its settings",
                None => "with a key of its own, which travels with its metadata",
            }
        );
        let agent = Arc::new(Self {
            name: name.to_owned(),
            id,
            config,
            host,
            info: Arc::new(info),
            names,
            regions: Mutex::default(),
            next: AtomicU64::new(1),
            peers: Mutex::default(),
            doors: Mutex::default(),
            conns: Mutex::default(),
            flights: Mutex::default(),
            notices: Mutex::default(),
            room: Condvar::new(),
            stopping: AtomicBool::new(false),
            threads: Mutex::default(),
            rate: AtomicU64::new(1_000_000_000),
        });
        agent
            .accept_at(endpoint, None)
            .map_err(StartError::Thread)?;
        Ok(agent)
    }

    /// A number that this agent never uses again.
    pub(crate) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Starts a thread that the agent's end waits for.
    pub(crate) fn spawn(
        &self,
        name: &str,
        body: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    fn accept_at(self: &Arc<Self>, endpoint: Endpoint, gpu: Option<u32>) -> std::io::Result<()> {
        let endpoint = Arc::new(endpoint);
        let door = Door {
            gpu,
            endpoint: Arc::clone(&endpoint),
        };
        lock(&self.doors).push(door);
        let agent = Arc::clone(self);
        self.spawn("tcpx-nixl-door", move || {
            while !agent.is_stopping() {
                match endpoint.accept(Duration::MAX) {
                    Ok(connection) => {
                        if let Err(error) = Conn::accepted(&agent, connection) {
                            tracing::warn!("a peer's connection was not taken: {error}");
                        }
                    }
                    Err(_) if agent.is_stopping() => {}
                    Err(error) => tracing::warn!("a peer did not get in: {error}"),
                }
            }
        })
    }

    pub(crate) fn keep(&self, conn: &Arc<Conn>) {
        let mut conns = lock(&self.conns);
        conns.retain(|conn| conn.strong_count() > 0);
        conns.push(Arc::downgrade(conn));
    }

    // Memory.

    /// Registers memory of the host, or of a GPU.
    pub(crate) fn register(
        self: &Arc<Self>,
        address: usize,
        len: usize,
        gpu: Option<u64>,
    ) -> Result<Arc<Registered>, Status> {
        if address == 0 {
            return Err(Status::INVALID_PARAM);
        }
        let kind = match gpu {
            None => Kind::Host,
            Some(number) => {
                let number = u32::try_from(number).map_err(|_| Status::INVALID_PARAM)?;
                let gpu = Gpu::open(number).map_err(|error| {
                    tracing::error!("memory of GPU {number} cannot be registered: {error}");
                    Status::NOT_SUPPORTED
                })?;
                Kind::Cuda(gpu)
            }
        };
        Region::check_address(kind.gpu(), address, len).map_err(|error| {
            tracing::error!("memory cannot be registered: {error}");
            Status::INVALID_PARAM
        })?;
        if let Some(gpu) = kind.gpu() {
            self.open_door(gpu)?;
        }
        let name = self.names.of(address, len, kind.gpu().map(Gpu::ordinal));
        let memory = Arc::new(Registered::new(name, address, len, kind));
        let mut regions = lock(&self.regions);
        regions
            .entry(name.id)
            .or_default()
            .push(Arc::clone(&memory));
        Ok(memory)
    }

    /// Connections for a GPU's memory have a port of their own.
    fn open_door(self: &Arc<Self>, gpu: &Gpu) -> Result<(), Status> {
        if self.door(Some(gpu.ordinal())).is_some() {
            return Ok(());
        }
        let failed = |error: String| {
            tracing::error!("no port for memory of GPU {}: {error}", gpu.ordinal());
            Status::BACKEND
        };
        let endpoint = listen(&self.config, 0, Some(gpu.clone()))
            .map_err(|error| failed(error.to_string()))?;
        self.accept_at(endpoint, Some(gpu.ordinal()))
            .map_err(|error| failed(error.to_string()))
    }

    fn door(&self, gpu: Option<u32>) -> Option<u16> {
        let doors = lock(&self.doors);
        let door = doors.iter().find(|door| door.gpu == gpu)?;
        Some(door.endpoint.local_addr().port())
    }

    /// Ends the use of registered memory, and waits for that: transfers that move it are cancelled,
    /// for their peer may stall.
    pub(crate) fn deregister(&self, memory: &Arc<Registered>) -> Status {
        self.forget_region(memory);
        memory.close();
        let flights: Vec<_> = lock(&self.flights)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for flight in flights.iter().filter(|flight| flight.plan.uses(memory)) {
            if flight.check() == Status::IN_PROGRESS {
                flight.end(Status::CANCELED);
            }
        }
        drop(flights);
        for conn in self.living() {
            conn.revoke(memory.name.id);
        }
        if memory.wait_unused(DEREGISTER) {
            return Status::SUCCESS;
        }
        tracing::error!(
            "memory at {:#x} of {} bytes is deregistered, but a transfer still uses it after {DEREGISTER:?}; end transfers first",
            memory.address,
            memory.len
        );
        Status::BACKEND
    }

    fn forget_region(&self, memory: &Arc<Registered>) {
        let mut regions = lock(&self.regions);
        if let Some(same) = regions.get_mut(&memory.name.id) {
            same.retain(|one| !Arc::ptr_eq(one, memory));
            if same.is_empty() {
                regions.remove(&memory.name.id);
            }
        }
    }

    fn living(&self) -> Vec<Arc<Conn>> {
        lock(&self.conns).iter().filter_map(Weak::upgrade).collect()
    }

    /// Registered memory, for whoever has its metadata.
    pub(crate) fn region(&self, name: &RegionName) -> Option<Arc<Registered>> {
        let memory = lock(&self.regions).get(&name.id)?.last().cloned();
        memory.filter(|memory| memory.name.secret == name.secret)
    }

    /// Whether all of these bytes lie in one registered region.
    pub(crate) fn is_registered(&self, address: usize, len: usize) -> bool {
        lock(&self.regions)
            .values()
            .flatten()
            .any(|memory| memory.offset_of(address, len).is_some())
    }

    /// What peers are told of a region.
    pub(crate) fn region_info(&self, memory: &Registered) -> RegionInfo {
        RegionInfo {
            name: memory.name,
            bytes: memory.len as u64,
            port: self.door(memory.gpu()).unwrap_or(self.info.port),
            on_gpu: !memory.is_host(),
        }
    }

    // Other agents.

    /// What peers are told of this agent.
    pub(crate) fn info(&self) -> Vec<u8> {
        self.info.to_bytes()
    }

    /// Learns where another agent listens.
    pub(crate) fn load(&self, name: &str, info: ConnectionInfo) {
        let mut peers = lock(&self.peers);
        if peers.get(name).is_some_and(|peer| *peer.info == info) {
            return;
        }
        let peer = Arc::new(Peer {
            info: Arc::new(info),
            links: Mutex::default(),
        });
        let old = peers.insert(name.to_owned(), peer);
        drop(peers);
        if let Some(old) = old {
            old.close();
        }
    }

    /// Forgets an agent, and ends what runs with it.
    pub(crate) fn forget(&self, name: &str) {
        let old = lock(&self.peers).remove(name);
        if let Some(old) = old {
            old.close();
        }
    }

    /// The way to an agent's memory behind `port`, from memory of `gpu`.
    fn link(
        self: &Arc<Self>,
        name: &str,
        gpu: Option<&Gpu>,
        port: Option<u16>,
    ) -> Result<Arc<Link>, Status> {
        let mut peers = lock(&self.peers);
        if name == self.name && !peers.contains_key(name) {
            let own = Peer {
                info: Arc::clone(&self.info),
                links: Mutex::default(),
            };
            peers.insert(name.to_owned(), Arc::new(own));
        }
        let peer = peers.get(name).ok_or(Status::NOT_FOUND)?;
        let port = port.unwrap_or(peer.info.port);
        let mut links = lock(&peer.links);
        let link = links
            .entry((gpu.map(Gpu::ordinal), port))
            .or_insert_with(|| {
                let link = Link::new(self, name, Arc::clone(&peer.info), gpu.cloned(), port);
                Arc::new(link)
            });
        Ok(Arc::clone(link))
    }

    /// Begins to connect, so that the first transfer finds the connection there.
    pub(crate) fn connect(self: &Arc<Self>, name: &str) -> Status {
        if name == self.name {
            return Status::SUCCESS;
        }
        match self.link(name, None, None) {
            Ok(link) => {
                link.dial();
                Status::SUCCESS
            }
            Err(status) => status,
        }
    }

    /// Sends a notification; it is on its way when this returns.
    pub(crate) fn notify(self: &Arc<Self>, name: &str, bytes: &[u8]) -> Status {
        if bytes.len() > MOST_NOTICE_BYTES {
            tracing::error!(
                "a notification of {} bytes is too long; at most {MOST_NOTICE_BYTES} are possible",
                bytes.len()
            );
            return Status::INVALID_PARAM;
        }
        match self.link(name, None, None) {
            Ok(link) => link.submit(Work::Notice(bytes.to_vec())),
            Err(status) => status,
        }
    }

    // Notifications for the program.

    /// Keeps a notification of a peer until the program asks; waits while too many are kept.
    pub(crate) fn push_notice(&self, from: &Arc<[u8]>, bytes: Vec<u8>) {
        let mut notices = lock(&self.notices);
        while notices.is_full() && !self.is_stopping() {
            notices = self
                .room
                .wait(notices)
                .unwrap_or_else(PoisonError::into_inner);
        }
        notices.bytes += bytes.len();
        notices.waiting.push_back((Arc::clone(from), bytes));
    }

    /// Gives all notifications to `give`: who sent it, and its bytes.
    pub(crate) fn take_notices(&self, mut give: impl FnMut(&[u8], &[u8])) {
        let taken = {
            let mut notices = lock(&self.notices);
            if notices.waiting.is_empty() {
                return;
            }
            std::mem::take(&mut *notices)
        };
        // To wake nobody is a call of the kernel too.
        if taken.is_full() {
            self.room.notify_all();
        }
        for (from, bytes) in taken.waiting {
            give(&from, &bytes);
        }
    }

    // Transfers.

    /// Starts a transfer with agent `name`.
    pub(crate) fn post(
        self: &Arc<Self>,
        name: &str,
        plan: &Arc<Plan>,
        notice: Option<Vec<u8>>,
    ) -> Result<Arc<Flight>, Status> {
        if notice
            .as_ref()
            .is_some_and(|bytes| bytes.len() > MOST_NOTICE_BYTES)
        {
            return Err(Status::INVALID_PARAM);
        }
        let flight = Flight::new(Arc::clone(plan), notice);
        if name == self.name && self.move_within(&flight) {
            self.note_flight(&flight);
            return Ok(flight);
        }
        let mut gpus = plan.locals.iter().filter_map(|memory| match &memory.kind {
            Kind::Host => None,
            Kind::Cuda(gpu) => Some(gpu),
        });
        let gpu = gpus.next();
        if let (Some(one), Some(other)) = (
            gpu,
            gpus.find(|other| !gpu.is_some_and(|gpu| gpu.is_same(other))),
        ) {
            tracing::error!(
                "one transfer with memory of GPU {} and of GPU {}: post one for each",
                one.ordinal(),
                other.ordinal()
            );
            return Err(Status::NOT_SUPPORTED);
        }
        let remotes = || plan.remotes.iter().map(|region| region.info);
        let on_gpu = || remotes().filter(|region| region.on_gpu);
        let port = on_gpu().chain(remotes()).next().map(|region| region.port);
        if on_gpu().any(|region| Some(region.port) != port) {
            tracing::error!("one transfer with memory of two GPUs of {name}: post one for each");
            return Err(Status::NOT_SUPPORTED);
        }
        let link = self.link(name, gpu, port)?;
        self.note_flight(&flight);
        match link.submit(Work::Flight(Arc::clone(&flight))) {
            Status::SUCCESS => Ok(flight),
            refused => Err(refused),
        }
    }

    /// Keeps it in sight until it is over. Each time that there is no room for one more, those that
    /// are over go.
    fn note_flight(&self, flight: &Arc<Flight>) {
        let mut flights = lock(&self.flights);
        if flights.len() == flights.capacity() {
            flights.retain(|flight| flight.upgrade().is_some_and(|flight| !flight.is_over()));
            let living = flights.len();
            flights.reserve(living.max(64));
        }
        flights.push(Arc::downgrade(flight));
    }

    /// Notes how fast a transfer was.
    pub(crate) fn note_rate(&self, bytes: u64, took: Duration) {
        let nanoseconds = took.as_nanos().max(1);
        let rate = u128::from(bytes) * 1_000_000_000 / nanoseconds;
        let old = u128::from(self.rate.load(Ordering::Relaxed));
        let new = u64::try_from((old * 7 + rate) / 8)
            .unwrap_or(u64::MAX)
            .max(1);
        self.rate.store(new, Ordering::Relaxed);
    }

    /// How long so many bytes will take, in microseconds.
    pub(crate) fn estimate(&self, bytes: u64) -> i64 {
        let rate = u128::from(self.rate.load(Ordering::Relaxed).max(1));
        i64::try_from(30 + u128::from(bytes) * 1_000_000 / rate).unwrap_or(i64::MAX)
    }

    /// Ends the agent: goodbyes to all peers, at most for a short while, and then nothing of it
    /// runs.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // Whoever has looked already waits before this has the lock.
        drop(lock(&self.notices));
        self.room.notify_all();
        for door in lock(&self.doors).drain(..) {
            door.endpoint.close();
        }
        let peers: Vec<_> = lock(&self.peers).drain().map(|(_, peer)| peer).collect();
        for peer in &peers {
            peer.close();
        }
        let until = Instant::now() + GOODBYE;
        let conns = self.living();
        for conn in &conns {
            conn.say_goodbye();
        }
        for conn in conns {
            conn.close(until.saturating_duration_since(Instant::now()));
        }
        // What starts a thread may be one of those that are waited for.
        loop {
            let threads = std::mem::take(&mut *lock(&self.threads));
            if threads.is_empty() {
                break;
            }
            for thread in threads {
                // A panic of it was logged where it was caught.
                let _ = thread.join();
            }
        }
    }
}

impl Peer {
    fn close(&self) {
        for (_, link) in lock(&self.links).drain() {
            link.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_not_registered() {
        let config = Config::read(&[], |_| None).unwrap();
        let agent = Agent::start("agent", config).unwrap();
        let byte = 0_u8;
        let address = (&raw const byte).addr();
        for (address, len) in [(0x1000, 64), (address, usize::MAX), (address, 1 << 62)] {
            let refused = agent.register(address, len, None).map(drop);
            assert_eq!(refused, Err(Status::INVALID_PARAM), "{len} at {address:#x}");
        }
        agent.stop();
    }

    #[test]
    fn a_region_is_found_with_its_own_secret_alone() {
        let config = Config::read(&[], |_| None).unwrap();
        let agent = Agent::start("agent", config).unwrap();
        let bytes = [0_u8; 128];
        let register = |at: usize| {
            agent
                .register(bytes[at..].as_ptr().addr(), 64, None)
                .unwrap()
        };
        let (one, other) = (register(0), register(64));
        assert!(
            agent
                .region(&one.name)
                .is_some_and(|found| Arc::ptr_eq(&found, &one))
        );
        let guessed = RegionName {
            id: other.name.id,
            secret: one.name.secret,
        };
        assert!(agent.region(&guessed).is_none());
        assert_eq!(agent.deregister(&other), Status::SUCCESS);
        assert!(agent.region(&other.name).is_none());
        agent.stop();
    }

    #[test]
    fn memory_registered_twice_stays_until_both_are_gone() {
        let agent = Agent::start("agent", Config::read(&[], |_| None).unwrap()).unwrap();
        let bytes = [0_u8; 64];
        let address = bytes.as_ptr().addr();
        let register = || agent.register(address, 64, None).unwrap();
        let (one, other) = (register(), register());
        assert_eq!(one.name, other.name);
        assert_eq!(agent.deregister(&other), Status::SUCCESS);
        let found = agent.region(&one.name);
        assert!(found.is_some_and(|found| Arc::ptr_eq(&found, &one)));
        assert_eq!(agent.deregister(&one), Status::SUCCESS);
        assert!(agent.region(&one.name).is_none() && !agent.is_registered(address, 1));
        agent.stop();
    }
}
