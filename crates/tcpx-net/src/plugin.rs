//! The plugin network: any ncclNet plugin file as a network of the engine.
//!
//! A channel is one send comm and one receive comm. The plugin is only called from the thread that
//! owns the channel; completions are found by polling. With a device-unpack plugin, payload for
//! device memory arrives as fragments in the plugin's bounce pool, which the plugin lists in its
//! device queue.

mod channel;
mod offload;
mod registrations;

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_net::{AbiVersion, Accepting, Connecting, Handle128, LoadOptions, Plugin, Properties};
use tcpx_memory::{ContextGuard, CudaError, Gpu};

use crate::channel::Channel;
use crate::error::NetworkError;
use crate::network::{Exchange, Network, Setup};

use channel::PluginChannel;
pub use offload::Offload;

/// Pause between polls of a connect or accept that is not up yet.
const SETUP_PAUSE: Duration = Duration::from_millis(1);
/// Bytes of the handle that a plugin's listen fills.
const HANDLE_BYTES: usize = 128;
/// Most channels of one connection.
const MAX_CHANNELS: u16 = 64;

/// Which memory the plugin is given.
#[derive(Clone, Debug, Default)]
pub enum PluginMemory {
    /// Host memory, received in place.
    #[default]
    Host,
    /// Host memory that stands in for device memory, on machines without a GPU: it is registered
    /// as device memory, and the plugin's device pointers are host pointers. Only for plugins that
    /// were told so.
    StandIn,
    /// Memory of this GPU; host memory is received in place.
    Gpu(Gpu),
}

impl PluginMemory {
    /// Makes the GPU's context current for calls in which a plugin looks for it: NCCL does so, and
    /// plugins count on it.
    fn enter(&self) -> Result<Option<ContextGuard>, CudaError> {
        match self {
            Self::Gpu(gpu) => gpu.enter().map(Some),
            Self::Host | Self::StandIn => Ok(None),
        }
    }
}

/// Which plugin to load and how to use it.
#[derive(Clone, Debug)]
pub struct PluginOptions {
    /// The plugin's file.
    pub path: PathBuf,
    /// Table version; `None` takes the newest one there is.
    pub abi: Option<AbiVersion>,
    /// Device (NIC) number in the plugin.
    pub device: usize,
    /// The memory it is given.
    pub memory: PluginMemory,
}

/// A loaded and started plugin.
#[derive(Debug)]
pub struct PluginNetwork {
    plugin: Plugin,
    device: usize,
    properties: Properties,
    memory: PluginMemory,
    /// Plugins need not allow set-up calls from several threads at once.
    setup: Mutex<()>,
}

impl PluginNetwork {
    /// Loads and starts a plugin. Environment variables that it reads must be set before.
    ///
    /// # Errors
    /// The file cannot be loaded, has no usable table, does not start, or lacks the device.
    pub fn load(options: PluginOptions) -> Result<Self, NetworkError> {
        let network = options.path.display().to_string();
        let failed = |call: &'static str| {
            let network = network.clone();
            move |cause: String| NetworkError::Plugin {
                network,
                call,
                cause,
            }
        };
        let plugin = Plugin::load(LoadOptions {
            path: options.path,
            abi: options.abi,
            observer: Some(std::sync::Arc::new(log_call)),
        })
        .map_err(|error| failed("loading")(error.to_string()))?;
        let _entered = options
            .memory
            .enter()
            .map_err(|error| failed("init")(error.to_string()))?;
        plugin
            .init()
            .map_err(|error| failed("init")(error.to_string()))?;
        let devices = plugin
            .devices()
            .map_err(|error| failed("devices")(error.to_string()))?;
        tracing::info!(plugin = plugin.name(), version = ?plugin.version(), devices, "plugin started");
        let properties = plugin
            .properties(options.device)
            .map_err(|error| failed("getProperties")(error.to_string()))?;
        if matches!(options.memory, PluginMemory::Gpu(_)) && !properties.pointer_support.cuda() {
            tracing::info!(plugin = plugin.name(), "the plugin takes host memory only");
        }
        Ok(Self {
            plugin,
            device: options.device,
            properties,
            memory: options.memory,
            setup: Mutex::new(()),
        })
    }

    /// What the plugin says about the device in use.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// Version of the table in use.
    pub fn version(&self) -> AbiVersion {
        self.plugin.version()
    }

    /// Name in the plugin's table.
    pub fn plugin_name(&self) -> &str {
        self.plugin.name()
    }

    /// One set-up call at a time, whichever connection it is for.
    fn calls(&self) -> MutexGuard<'_, ()> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, call: &'static str, cause: impl ToString) -> NetworkError {
        NetworkError::Plugin {
            network: self.name(),
            call,
            cause: cause.to_string(),
        }
    }

    /// Brings up one connection in each direction per channel.
    fn bring_up(
        &self,
        connecting: Vec<Connecting>,
        accepting: Vec<Accepting>,
        setup: &Setup<'_>,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let mut sends: Vec<_> = connecting.into_iter().map(|comm| (comm, None)).collect();
        let mut receives: Vec<_> = accepting.into_iter().map(|comm| (comm, None)).collect();
        loop {
            let calls = self.calls();
            // Every connect is polled before any accept: there are plugins whose accept blocks
            // until the peer has connected.
            for (comm, up) in sends.iter_mut().filter(|(_, up)| up.is_none()) {
                *up = comm.poll().map_err(|error| self.failed("connect", error))?;
            }
            for (comm, up) in receives.iter_mut().filter(|(_, up)| up.is_none()) {
                *up = comm.poll().map_err(|error| self.failed("accept", error))?;
            }
            drop(calls);
            let up = sends.iter().filter(|(_, up)| up.is_some()).count()
                + receives.iter().filter(|(_, up)| up.is_some()).count();
            if up == sends.len() + receives.len() {
                break;
            }
            if Instant::now() >= setup.deadline {
                return Err(NetworkError::TimedOut {
                    peer: setup.peer,
                    operation: "connecting the plugin's comms",
                });
            }
            std::thread::sleep(SETUP_PAUSE);
        }
        let sends = sends.into_iter().filter_map(|(_, up)| up);
        let receives = receives.into_iter().filter_map(|(_, up)| up);
        let mut channels: Vec<Box<dyn Channel>> = Vec::with_capacity(sends.size_hint().0);
        for (index, (send, receive)) in sends.zip(receives).enumerate() {
            let offload = Offload::of(&receive, &self.memory)
                .map_err(|cause| self.failed("accept (device handle)", cause))?;
            let name = format!("{} channel {index} to {}", self.name(), setup.peer);
            let memory = self.memory.clone();
            let cuda = self.properties.pointer_support.cuda();
            let channel = PluginChannel::new(name, send, receive, memory, cuda, offload);
            channels.push(Box::new(channel));
        }
        Ok(channels)
    }
}

impl Network for PluginNetwork {
    fn name(&self) -> String {
        format!("plugin:{}", self.plugin.name())
    }

    fn channel_count(&self, asked: u16) -> u16 {
        asked.clamp(1, MAX_CHANNELS)
    }

    fn chunk_bytes(&self) -> u32 {
        512 * 1024
    }

    fn windows(&self) -> (u16, u16) {
        (12, 16)
    }

    fn can_cancel(&self) -> bool {
        false
    }

    fn allows_eager(&self) -> bool {
        false
    }

    fn matches_by_sequence(&self) -> bool {
        false
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let _entered = self
            .memory
            .enter()
            .map_err(|error| self.failed("connect", error))?;
        let count = usize::from(self.channel_count(setup.channels));
        let mut handles = Vec::with_capacity(count * HANDLE_BYTES);
        let mut accepting = Vec::with_capacity(count);
        let calls = self.calls();
        for _ in 0..count {
            let (handle, listen) = self
                .plugin
                .listen(self.device)
                .map_err(|error| self.failed("listen", error))?;
            handles.extend_from_slice(&handle.0);
            accepting.push(listen.accept());
        }
        drop(calls);
        let theirs = exchange.exchange(&handles)?;
        let (theirs, rest) = theirs.as_chunks::<HANDLE_BYTES>();
        if theirs.is_empty() || !rest.is_empty() {
            return Err(NetworkError::Mismatch {
                network: self.name(),
                peer: setup.peer,
                expected: format!("{count} handles of {HANDLE_BYTES} bytes"),
                arrived: format!("{} handles and {} bytes", theirs.len(), rest.len()),
            });
        }
        // Both sides use the lesser number of channels; handles beyond it are closed unused.
        let count = count.min(theirs.len());
        accepting.truncate(count);
        let connecting = theirs[..count]
            .iter()
            .map(|handle| self.plugin.connect(self.device, Handle128(*handle)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| self.failed("connect", error))?;
        self.bring_up(connecting, accepting, setup)
    }
}

/// Logs every call that is worth it: failures always, the rest for a reader of debug logs.
fn log_call(report: &nccl_net::CallReport) {
    match report.rc {
        nccl_net::ResultCode::Success => {
            tracing::debug!(call = report.call, rc = 0, "plugin call");
        }
        rc => tracing::warn!(call = report.call, rc = ?rc, "plugin call failed"),
    }
}
