//! What all comms of the process share: event loops, the door for lanes, the lanes to each peer.
//!
//! It starts with the first comm that can use it and ends with the last one: then its threads are
//! gone and its sockets closed. A process that forked gets a runtime of its own.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use tcpx_lanes::event_loop::{EventLoops, Loop};
use tcpx_lanes::lock;
use tcpx_lanes::monitor::{Monitor, Watched};
use tcpx_memory::awake::{FEW_CORES, cores};
use tcpx_memory::{CopyWorker, FreeWatch};
use tcpx_wire::Key;

use super::door::LaneDoor;
use super::group::Registry;
use super::lane_set::{LaneSet, Peer, Tended};
use super::retention::Retention;
use crate::config::{Config, Mode};
use crate::device::Device;
use crate::error;
use crate::handle::Door;
use crate::listener;
use crate::plugin::{ProcessState, random};

/// How long a peer to which no lanes could be opened is left alone.
const UNREACHABLE_TIME: Duration = Duration::from_secs(60);

/// Which lanes: the peer's runtime, its address, our address.
type Route = (u64, SocketAddr, IpAddr);

/// The process's part in lanes.
#[derive(Debug)]
pub(crate) struct Runtime {
    id: u64,
    lanes: usize,
    splice: bool,
    log: Arc<Log>,
    secret: [u8; Key::BYTES],
    doors: Mutex<Vec<LaneDoor>>,
    sets: Mutex<HashMap<Route, Arc<LaneSet>>>,
    pub(crate) registry: Arc<Registry>,
    loops: EventLoops,
    /// Of each loop that sends.
    retentions: Vec<Arc<Retention>>,
    /// Dials lanes again, and comms' own connections.
    pub(crate) monitor: Monitor,
    /// Wake the receiving lanes when a pinned slot is free again; with the workers whose slots they
    /// are.
    watches: Mutex<Vec<(Arc<CopyWorker>, FreeWatch)>>,
}

impl Runtime {
    pub(crate) fn start(shared: &ProcessState) -> Result<Self, NetError> {
        crate::pin::keep_loaded();
        let cores = cores();
        let (lanes, threads) = match shared.takes_lanes() {
            true => (
                shared.lanes,
                shared.config.threads.unwrap_or_else(|| threads_for(cores)),
            ),
            // A door and a monitor, for the comms' own connections.
            false => (0, 0),
        };
        let loops = EventLoops::start("tcpx-nccl", 2 * threads).map_err(|error| {
            error::system(
                "starting event loops",
                &error,
                "raise the limits on processes and open files",
            )
        })?;
        let retentions = (0..threads).map(|_| Retention::new());
        let retentions = retentions.collect::<Result<_, _>>().map_err(|error| {
            let error = io::Error::other(error);
            error::system(
                "allocating copies of sends",
                &error,
                "raise the limit on memory",
            )
        })?;
        let runtime = Self {
            id: u64::from_ne_bytes(random()?),
            lanes,
            splice: shared.config.splice,
            log: shared.log.clone(),
            secret: random()?,
            doors: Mutex::new(Vec::new()),
            sets: Mutex::new(HashMap::new()),
            registry: Arc::new(Registry::default()),
            loops,
            retentions,
            monitor: Monitor::new("tcpx-nccl-watch"),
            watches: Mutex::default(),
        };
        if lanes > 0 {
            shared.log.info(&format!(
                "messages above {} bytes leave NCCL's thread: {lanes} lanes to each peer process, \
             {threads} pairs of event loops, on {cores} cores",
                shared.config.inline_bytes
            ));
        }
        Ok(runtime)
    }

    /// Prepares for receives into a device's memory.
    pub(crate) fn watch(&self, device: &Device) {
        let mut watches = lock(&self.watches);
        let worker = device.worker();
        if watches.iter().any(|(known, _)| Arc::ptr_eq(known, worker)) {
            return;
        }
        let lanes = self.loops.all();
        let watch = worker
            .pinned()
            .on_free(Arc::new(move || lanes.resume_all()));
        watches.push((Arc::clone(worker), watch));
    }

    /// Has the monitor look after something.
    pub(crate) fn watch_over(&self, what: impl Watched + 'static) -> Result<(), NetError> {
        let hint = "raise the limits on processes";
        let watched = self.monitor.watch(Box::new(what));
        watched.map_err(|error| error::system("starting the monitor", &error, hint))
    }

    /// The door on an address, opened on first use.
    pub(crate) fn door(&self, shared: &ProcessState, address: IpAddr) -> Result<Door, NetError> {
        let mut doors = lock(&self.doors);
        if let Some(known) = doors.iter().find(|door| door.address() == address) {
            return Ok(known.door());
        }
        let listener = listener::bind(shared, address)?;
        let opened = LaneDoor::open(
            listener,
            self.secret,
            (
                &shared.config.handshake_key(&self.secret).0,
                shared.config.protection(),
            ),
            self.id,
            self.loops.all(),
            self.registry.clone(),
            shared.log.clone(),
        )
        .map_err(|error| {
            error::system(
                "starting the lane door",
                &error,
                "raise the limits on processes and open files",
            )
        })?;
        let door = opened.door();
        doors.push(opened);
        Ok(door)
    }

    /// The lanes to the process behind a door; `None` for one that could not be reached lately.
    pub(crate) fn lanes_to(
        &self,
        peer: Peer,
        process: u64,
    ) -> Result<Option<Arc<LaneSet>>, NetError> {
        let route = (process, peer.address, peer.local.ip());
        let now = Instant::now();
        let mut sets = lock(&self.sets);
        sets.retain(|_, set| {
            set.is_open()
                || set
                    .unreachable_since()
                    .is_some_and(|since| now.duration_since(since) < UNREACHABLE_TIME)
        });
        if let Some(known) = sets.get(&route) {
            return Ok(known.is_open().then(|| known.clone()));
        }
        let set = LaneSet::new(
            random()?,
            peer,
            self.loops
                .spread(self.lanes)
                .iter()
                .map(Loop::place)
                .collect(),
            &self.retentions,
            self.splice,
            self.monitor.handle(),
            self.log.clone(),
        );
        let tended = Tended(Arc::downgrade(&set));
        self.watch_over(tended)?;
        set.tell_status();
        sets.insert(route, set.clone());
        Ok(Some(set))
    }
}

/// Pairs of loops: a loop copies cold memory at some 3 to 4 GB/s.
fn threads_for(cores: usize) -> usize {
    (cores / 2).clamp(1, 12)
}

/// Lanes to one peer. Up to [`FEW_CORES`], which loops only take from NCCL's threads, there are
/// none, unless GPU memory needs them or somebody asked for loops; else at least two, so that a
/// lost packet does not stop everything.
pub(crate) fn lanes_for(config: &Config, cores: usize) -> usize {
    if let Some(lanes) = config.lanes {
        return lanes;
    }
    match (config.mode, config.threads) {
        (Mode::Host, None) if cores <= FEW_CORES => 0,
        (_, threads) => threads.unwrap_or_else(|| threads_for(cores)).max(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_and_lanes_grow_with_the_cores_up_to_a_limit() {
        let counted = [1, 2, 8, 16, 32, 256].map(threads_for);
        assert_eq!(counted, [1, 1, 4, 8, 12, 12]);
        let of_default = |cores| lanes_for(&Config::default(), cores);
        assert_eq!([5, 16, 256].map(of_default), [2, 8, 12]);
    }

    #[test]
    fn few_cores_have_no_lanes_unless_they_are_needed() {
        let default = Config::default;
        let cuda = Config {
            mode: Mode::Cuda,
            ..default()
        };
        let two = Config {
            lanes: Some(2),
            ..default()
        };
        let loops = Config {
            threads: Some(1),
            ..default()
        };
        for cores in 1..=4 {
            let lanes = [default(), cuda.clone(), two.clone(), loops.clone()]
                .map(|config| lanes_for(&config, cores));
            assert_eq!(lanes, [0, 2, 2, 2], "{cores} cores");
        }
    }
}
