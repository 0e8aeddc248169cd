//! The plugin as a host program sees it: devices, listening, connecting.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use nccl_net::constants::MAX_NET_BYTES;
use nccl_net::export::fork::PerProcess;
use nccl_net::export::{HostLogger, Log, NetError, NetPlugin, PeerHandle};
use nccl_net::{DeviceOffload, PointerSupport, Properties};
use tcpx_lanes::lock;

use crate::config::{Config, Mode};
use crate::connector::Connector;
use crate::error;
use crate::handle::{Door, Handle};
use crate::interfaces::{self, Interface};
use crate::lanes::lane_set::Peer;
use crate::lanes::runtime::{self, Runtime};
use crate::lanes::send_path::Route;
use crate::listener::ListenComm;
use crate::memory::Memory;
use crate::receive::RecvComm;
use crate::send::SendComm;
use crate::{environment, tuner};

/// Comms that a device may have; connections are all that limits them.
const MAX_COMMS: i32 = 65_536;

/// Devices that one interface stands for. NCCL gives a pair of processes two channels, and one for
/// each further device whose speed the GPU's bus can still take; in all no more than 16, which
/// keeps its search for rings short.
const fn rails_for(interfaces: usize) -> usize {
    match interfaces {
        0..=2 => 8,
        3..=4 => 4,
        5..=8 => 2,
        _ => 1,
    }
}

/// The plugin. NCCL chooses it by the name `TCPX`.
#[derive(Debug)]
pub struct TcpxPlugin {
    shared: Arc<ProcessState>,
}

/// What every comm of the process refers to.
#[derive(Debug)]
pub(crate) struct ProcessState {
    pub(crate) config: Config,
    pub(crate) log: Arc<Log>,
    interfaces: Vec<Interface>,
    rails: usize,
    /// To each peer process.
    pub(crate) lanes: usize,
    /// Sends of all comms that are under way.
    pub(crate) sends: AtomicUsize,
    /// The comm that sent last.
    pub(crate) last_sender: AtomicU64,
    numbers: AtomicU64,
    /// Lives as long as a comm uses it.
    runtime: PerProcess<Mutex<Weak<Runtime>>>,
}

impl ProcessState {
    /// Whether large messages take lanes.
    pub(crate) fn takes_lanes(&self) -> bool {
        self.lanes > 0
    }

    /// What all comms of the process share.
    pub(crate) fn runtime(&self) -> Result<Arc<Runtime>, NetError> {
        // A fork's child gets one of its own: the threads of this one are in the other process.
        let mut runtime = lock(self.runtime.get());
        if let Some(running) = runtime.upgrade() {
            return Ok(running);
        }
        let started = Arc::new(Runtime::start(self)?);
        *runtime = Arc::downgrade(&started);
        Ok(started)
    }

    /// The lanes to the process behind a door; `None` where there are none.
    pub(crate) fn lanes_to(&self, peer: Peer, door: &Door) -> Result<Option<Route>, NetError> {
        if !self.takes_lanes() || !door.lanes {
            return Ok(None);
        }
        let runtime = self.runtime()?;
        let set = runtime.lanes_to(peer, door.process)?;
        Ok(set.map(|set| Route {
            set,
            _runtime: runtime,
        }))
    }

    /// A number that names a comm or listener in this process's log lines.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn interface(&self, device: usize) -> Result<&Interface, NetError> {
        self.interfaces
            .get(device % self.interfaces.len().max(1))
            .filter(|_| device < self.devices())
            .ok_or_else(|| {
                NetError::invalid_argument(format!(
                    "device {device} does not exist, there are {}; ask devices() for the number",
                    self.devices()
                ))
            })
    }

    /// Each interface stands for several devices: the first of every interface, then the second.
    fn devices(&self) -> usize {
        self.interfaces.len() * self.rails
    }
}

/// Fills a buffer from the system's cryptographic random source.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], NetError> {
    let hint = "the system's random source must work";
    tcpx_lanes::hello::entropy().map_err(|error| error::system("getting random bytes", error, hint))
}

impl TcpxPlugin {
    /// Starts the plugin with given settings.
    pub fn with_config(config: Config, logger: HostLogger) -> Result<Self, NetError> {
        let log = Arc::new(Log::new(logger, Self::NAME));
        let all = interfaces::list(config.family)?;
        if let Some(told) = interfaces::unmet(&config.interfaces, &all) {
            log.warn(&told);
        }
        let (interfaces, why) = interfaces::choose(&config.interfaces, config.family, all)?;
        let rails = config.rails.unwrap_or_else(|| rails_for(interfaces.len()));
        let names: Vec<&str> = interfaces.iter().map(|i| i.name.as_str()).collect();
        log.info(&format!(
            "{}, interfaces {} ({why}), {rails} devices each, {}",
            crate::build_id(),
            names.join(", "),
            match config.mode {
                Mode::Host => "host memory",
                Mode::Cuda => "host and CUDA memory",
            }
        ));
        let cores = tcpx_memory::awake::cores();
        let lanes = runtime::lanes_for(&config, cores);
        if config.mode == Mode::Host && lanes == 0 {
            log.info(&format!(
                "all messages stay in NCCL's thread: no lanes, on {cores} cores"
            ));
        }
        Ok(Self {
            shared: Arc::new(ProcessState {
                lanes,
                config,
                log,
                interfaces,
                rails,
                sends: AtomicUsize::new(0),
                last_sender: AtomicU64::new(u64::MAX),
                numbers: AtomicU64::new(0),
                runtime: PerProcess::new(),
            }),
        })
    }
}

#[cfg(any(test, fuzzing))]
impl TcpxPlugin {
    pub(crate) fn shared(&self) -> Arc<ProcessState> {
        Arc::clone(&self.shared)
    }
}

impl NetPlugin for TcpxPlugin {
    const NAME: &'static CStr = c"TCPX";

    type Memory = Memory;
    type Listen = ListenComm;
    type Connect = Connector;
    type Send = SendComm;
    type Recv = RecvComm;

    fn init(logger: HostLogger) -> Result<Self, NetError> {
        let plugin = Self::with_config(Config::from_environment()?, logger)?;
        let log = &plugin.shared.log;
        let lookup = |name: &str| std::env::var_os(name);
        let takes_cuda = plugin.shared.config.mode == Mode::Cuda;
        environment::choose(log, &environment::ALWAYS, lookup);
        if takes_cuda {
            environment::choose(log, &environment::WITH_CUDA_POINTERS, lookup);
            if lookup("CUDA_MODULE_LOADING").is_none_or(|value| value != "EAGER") {
                log.warn(
                    "CUDA pointers without CUDA_MODULE_LOADING=EAGER: the first launch of a kernel while a collective \
                     runs can stop both for ever; set it before the program starts, or unset TCPX_NET_DEVICE",
                );
            }
        }
        tuner::enable(takes_cuda);
        Ok(plugin)
    }

    fn devices(&self) -> Result<usize, NetError> {
        Ok(self.shared.devices())
    }

    fn properties(&self, device: usize) -> Result<Properties, NetError> {
        let interface = self.shared.interface(device)?;
        let pointer_support = match self.shared.config.mode {
            Mode::Host => PointerSupport::HOST,
            Mode::Cuda => PointerSupport::HOST_AND_CUDA,
        };
        let rails = self.shared.rails;
        let name = match device / self.shared.interfaces.len() {
            0 => interface.name.clone(),
            rail => format!("{}-{}", interface.name, rail + 1),
        };
        Ok(Properties {
            name,
            pci_path: interface.pci_path(),
            guid: device as u64,
            pointer_support,
            // Together they have the speed of the interface; at most 16, so it stays positive.
            speed_mbps: (interface.speed_mbps() / rails as i32).max(1),
            max_comms: MAX_COMMS,
            max_recvs: 1,
            offload: DeviceOffload::None,
            max_p2p_bytes: Some(MAX_NET_BYTES),
            max_coll_bytes: Some(MAX_NET_BYTES),
            // No rail and no plane are known of a TCP interface.
            ..Properties::default()
        })
    }

    fn listen(&self, device: usize) -> Result<(PeerHandle, ListenComm), NetError> {
        let interface = self.shared.interface(device)?;
        ListenComm::bind(&self.shared, interface)
    }

    fn connect(&self, device: usize, handle: &PeerHandle) -> Result<Connector, NetError> {
        let interface = self.shared.interface(device)?;
        let handle = Handle::decode(handle)?;
        let config = &self.shared.config;
        let (key, check) = config.handshake_key(&handle.secret);
        if check != handle.check {
            let other = Config {
                encrypts: !config.encrypts,
                ..config.clone()
            };
            let why = match other.handshake_key(&handle.secret).1 == handle.check {
                true => {
                    "only one of this rank and the listening one encrypts; give all ranks TCPX_ENCRYPT=1, or none"
                }
                false => {
                    "TCPX_KEY of the listening rank is another one than here, or only one of them has it; give all \
                     ranks the same"
                }
            };
            return Err(NetError::invalid_argument(why));
        }
        let key = (key.client_key(), config.protection());
        Ok(Connector::new(&self.shared, interface, &handle, key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The handle of a rank with this key that encrypts or not, and how another one connects to it.
    fn meets(listens: (u8, bool), connects: (u8, bool)) -> Result<(), String> {
        let plugin = |(key, encrypts): (u8, bool)| {
            let config = Config {
                interfaces: "lo".to_owned(),
                key: (key > 0).then(|| tcpx_wire::Key::generate(&mut |bytes| bytes.fill(key))),
                encrypts,
                ..Config::default()
            };
            TcpxPlugin::with_config(config, HostLogger::default()).unwrap()
        };
        let (handle, _listen) = plugin(listens).listen(0).unwrap();
        let connected = plugin(connects).connect(0, &handle);
        connected.map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn ranks_that_differ_in_key_do_not_connect_and_say_why() {
        for same in [(0, false), (1, false), (1, true)] {
            assert_eq!(meets(same, same), Ok(()));
        }
        for (one, other, why) in [
            ((1, true), (1, false), "TCPX_ENCRYPT"),
            ((1, true), (2, true), "TCPX_KEY"),
            ((1, false), (0, false), "TCPX_KEY"),
            ((1, true), (0, false), "TCPX_KEY"),
        ] {
            for (one, other) in [(one, other), (other, one)] {
                let error = meets(one, other).unwrap_err();
                assert!(error.contains(why), "{error}");
            }
        }
    }
}
