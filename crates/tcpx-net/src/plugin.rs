//! The plugin network: any ncclNet plugin file as a network of the engine.
//!
//! A channel is one send comm and one receive comm. The plugin is only called from the thread that
//! owns the channel, but for closes, which have a thread of the connection's own; completions are
//! found by polling. With a device-unpack plugin, payload for device memory arrives as fragments in
//! the plugin's bounce pool, which the plugin lists in its device queue.

mod channel;
mod closer;
mod offload;
mod registrations;
mod set_up;
mod start;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nccl_net::{AbiVersion, Handle128, Properties};
use tcpx_memory::{CudaError, Gpu, InContext};

use crate::channel::Channel;
use crate::error::NetworkError;
use crate::network::{Exchange, Features, Network, Setup};

pub use closer::{Closer, Closing, LONG_CLOSE};
pub use offload::Offload;
use set_up::{Limits, Started};
pub use start::{is_linker_stuck, leave_process};

/// Bytes of the handle that a plugin's listen fills.
const HANDLE_BYTES: usize = 128;
/// What a start may take: Google's makes a context on every GPU and waits for its buffer daemon.
const START_TIME: Duration = Duration::from_secs(60);
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
    fn enter(&self) -> Result<Option<InContext>, CudaError> {
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
    started: Arc<Started>,
}

impl PluginNetwork {
    /// Loads and starts a plugin, within a minute. Environment variables that it reads must be set
    /// before.
    ///
    /// # Errors
    /// As for [`Self::load_within`].
    pub fn load(options: PluginOptions) -> Result<Self, NetworkError> {
        Self::load_within(options, START_TIME)
    }

    /// Loads and starts a plugin on a thread made for that, since all of it is foreign code: the
    /// file's constructors, `init`, `devices`, `getProperties`.
    ///
    /// # Errors
    /// The file cannot be loaded, has no usable table, does not start, or lacks the device; or one
    /// of these does not come back within `limit`. Its thread stays then, and what it may still
    /// bring up is closed. After a constructor that hangs see [`is_linker_stuck`].
    pub fn load_within(options: PluginOptions, limit: Duration) -> Result<Self, NetworkError> {
        Ok(Self {
            started: Arc::new(start::start(options, limit)?),
        })
    }

    /// What the plugin says about the device in use.
    pub fn properties(&self) -> &Properties {
        &self.started.properties
    }

    /// Version of the table in use.
    pub fn version(&self) -> AbiVersion {
        self.started.plugin.version()
    }

    /// Name in the plugin's table.
    pub fn plugin_name(&self) -> &str {
        self.started.plugin.name()
    }
}

impl PluginNetwork {
    /// The peer's handles. Both sides use the lesser number of channels.
    fn handles(
        &self,
        theirs: &[u8],
        count: usize,
        peer: SocketAddr,
    ) -> Result<Vec<Handle128>, NetworkError> {
        let (handles, rest) = theirs.as_chunks::<HANDLE_BYTES>();
        if handles.is_empty() || !rest.is_empty() {
            return Err(NetworkError::Mismatch {
                network: self.started.name(),
                peer,
                expected: format!("{count} handles of {HANDLE_BYTES} bytes"),
                arrived: format!("{} handles and {} bytes", handles.len(), rest.len()),
            });
        }
        Ok(handles.iter().take(count).copied().map(Handle128).collect())
    }
}

impl Network for PluginNetwork {
    fn features(&self, asked: u16) -> Features {
        Features {
            name: self.started.name(),
            channels: asked.clamp(1, MAX_CHANNELS),
            chunk_bytes: 512 * 1024,
            pieces: 1,
            taper: None,
            windows: (12, 16),
            is_addressed: false,
            works_in_poll: false,
        }
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let count = usize::from(setup.channels.clamp(1, MAX_CHANNELS));
        let limits = Limits::of(setup);
        let (handles, accepting) = limits.bound(&self.started, "listen", move |started| {
            started.listen(count)
        })?;
        let theirs = exchange.exchange(&handles, &mut ());
        let theirs = theirs.and_then(|theirs| self.handles(&theirs, count, setup.peer));
        let theirs = match theirs {
            Ok(theirs) => theirs,
            Err(error) => {
                // What listens is closed with it, which may hang too; the first error is the news.
                let close = move |_: &Arc<Started>| {
                    drop(accepting);
                    Ok(())
                };
                let _ = limits.bound(&self.started, "closeListen", close);
                return Err(error);
            }
        };
        limits.bound(&self.started, "connect or accept", move |started| {
            started.bring_up(&theirs, accepting, limits)
        })
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
