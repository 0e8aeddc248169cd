//! What a test tells a peer program on its standard input, and what that answers: one line of
//! JSON each. The key travels here too, never in arguments.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tcpx::{Auth, Deadlines, Network, NetworkError, Options, TcpNetwork};
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions};

use crate::accident::Accident;
use crate::child::LOOPBACK;
use crate::pair::new_key;
use crate::scenario::Scenario;
use crate::{double, plugin_file};

/// Which network carries the payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Carrier {
    /// The embedded one.
    Tcp,
    /// Our plugin file, serving host memory.
    PluginHost(PathBuf),
    /// The double of Google's plugin, with bounce pools of so many bytes.
    Double(usize),
}

impl Carrier {
    /// Our plugin file, built if need be, serving host memory.
    pub fn plugin_host() -> Self {
        Self::PluginHost(plugin_file::path().to_owned())
    }

    /// The double with its usual pool.
    pub fn double() -> Self {
        Self::Double(double::DEFAULT_POOL_BYTES)
    }

    /// Payload arrives as fragments in a device queue.
    pub fn scatters(&self) -> bool {
        matches!(self, Self::Double(_))
    }

    /// Variables that a process needs before it loads the network.
    pub fn environment(&self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Tcp | Self::Double(_) => &[],
            Self::PluginHost(_) => &[LOOPBACK],
        }
    }

    /// The network itself.
    ///
    /// # Errors
    /// A plugin does not load or start.
    pub fn network(&self) -> Result<Arc<dyn Network>, NetworkError> {
        let (path, memory) = match self {
            Self::Tcp => return Ok(Arc::new(TcpNetwork::default())),
            Self::PluginHost(path) => (path.clone(), PluginMemory::Host),
            Self::Double(pool_bytes) => {
                double::set_pool_bytes(*pool_bytes);
                (double::path().to_owned(), PluginMemory::StandIn)
            }
        };
        // The device queue exists from v7 on and means this only there.
        let abi = Some(nccl_net::AbiVersion::V7);
        let device = 0;
        let network = PluginNetwork::load(PluginOptions {
            path,
            abi,
            device,
            memory,
        })?;
        Ok(Arc::new(network))
    }
}

/// Everything a peer program has to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instructions {
    /// Where to connect to; `None`: listen.
    pub connect: Option<SocketAddr>,
    /// Both sides' key, as text.
    pub key: String,
    /// What carries the payload.
    pub carrier: Carrier,
    /// Data channels, or lanes.
    pub channels: u16,
    /// Bytes of a chunk; `None`: what the network likes.
    pub chunk_bytes: Option<u32>,
    /// Largest message that travels with its announcement.
    pub eager_limit: u32,
    /// Longest time without progress of a transfer.
    pub stall: Duration,
    /// Time between heartbeats.
    pub heartbeat: Duration,
    /// Silence after which a peer is dead.
    pub dead_after: Duration,
    /// What to do.
    pub scenario: Scenario,
    /// What happens to the program meanwhile.
    pub accident: Option<Accident>,
}

impl Instructions {
    /// A listening peer with defaults that fit tests that expect no trouble, and a fresh key.
    pub fn new(carrier: Carrier, scenario: Scenario) -> Self {
        Self {
            connect: None,
            key: new_key().to_text(),
            carrier,
            channels: 1,
            chunk_bytes: None,
            eager_limit: 16 << 10,
            stall: Duration::from_secs(30),
            heartbeat: Duration::from_secs(1),
            dead_after: Duration::from_secs(30),
            scenario,
            accident: None,
        }
    }

    /// The engine's options for them.
    ///
    /// # Errors
    /// The key is none, or the network does not start.
    pub fn options(&self) -> anyhow::Result<Options> {
        let auth = Auth::parse(&self.key)?;
        let mut options = Options::new(self.carrier.network()?, auth);
        options.channels = self.channels;
        options.chunk_bytes = self.chunk_bytes;
        options.eager_limit = self.eager_limit;
        options.deadlines = Deadlines {
            stall: self.stall,
            total: None,
        };
        options.heartbeat = self.heartbeat;
        options.dead_after = self.dead_after;
        Ok(options)
    }
}

/// What a peer program says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It listens there.
    Listening(SocketAddr),
    /// It has done what it could.
    Summary(Summary),
}

/// How it went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Why there was no connection.
    pub set_up: Option<String>,
    /// The path that the engine named.
    pub path: String,
    /// Transfers that ended well.
    pub succeeded: u64,
    /// Bytes that arrived here.
    pub received: u64,
    /// Requests of the network that carried what arrived here.
    pub chunks: u64,
    /// Fragments that the reports of receives counted.
    pub fragments: u64,
    /// Chunks that were announced as arrived in fragments.
    pub arrivals: u64,
    /// Lanes that died.
    pub lanes_lost: u64,
    /// Chunks that were sent again.
    pub chunks_resent: u64,
    /// Transfers that ended with an error.
    pub failures: Vec<Failure>,
    /// Memory that does not hold what it must.
    pub defects: Vec<String>,
    /// How the goodbye failed.
    pub close: Option<String>,
    /// When the first of them ended, in this process.
    #[serde(skip)]
    pub failed: Option<Instant>,
}

impl Summary {
    /// Everything went well.
    pub fn is_good(&self) -> bool {
        self.set_up.is_none()
            && self.failures.is_empty()
            && self.defects.is_empty()
            && self.close.is_none()
    }
}

/// A transfer that ended with an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// It was a send.
    pub send: bool,
    /// Number in the scenario.
    pub number: u64,
    /// Tag.
    pub tag: u64,
    /// Name of the error's variant.
    pub kind: String,
    /// The error, one line.
    pub error: String,
    /// Bytes that the handle counted as done.
    pub bytes_done: u64,
}
