//! The embedded network: chunks over plain TCP.
//!
//! One channel is several TCP streams, its *lanes*, to the peer's one listening port. A chunk
//! travels whole on one lane, behind a 40-byte header that names it. Any writable lane takes the
//! next chunk, so a slow lane does not hold up a message. A receiver finds the posted receive by
//! the header's sequence number and reads the payload straight into its destination. GPU memory is
//! staged through pinned slots that the copy worker fills and empties.
//!
//! A few event-loop threads per process drive all lanes of all channels; see [`Channel`] for what
//! the owner of a channel sees.
//!
//! [`Channel`]: crate::Channel

mod discards;
mod event_loop;
mod idle;
mod io;
mod lanes;
mod permits;
mod receive_lane;
mod receive_table;
mod shared;
pub(crate) mod signal;
mod staging;
mod tcp_channel;
mod tcp_info;
mod transmit_lane;
mod transmit_table;
mod wakers;

use crate::channel::Channel;
use crate::error::NetworkError;
use crate::network::{Exchange, Network, Setup};
use shared::MAX_LANES;
use staging::Staging;

/// The name of the embedded network.
pub const NAME: &str = "tcp";

/// Default chunk size in bytes: one wire call, and one pinned slot.
pub const CHUNK_BYTES: u32 = 1 << 20;

/// Default window in chunks, per direction.
pub const WINDOW: u16 = 64;

/// Settings of the embedded network.
#[derive(Debug, Clone)]
pub struct TcpOptions {
    /// Lanes per channel when the user asks for none in particular; 0: one per event loop. The
    /// smaller of both peers' numbers counts.
    pub lanes: u16,
    /// Most chunks in flight per direction; at least 1.
    pub window: u16,
    /// Name of the network interface that lanes leave through; `None`: as the routes say.
    pub interface: Option<String>,
    /// Stages host memory through slots too, as if it were a GPU's. Slower; it runs the staged
    /// path where there is no GPU.
    pub stage_host: bool,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            lanes: 0,
            window: WINDOW,
            interface: None,
            stage_host: false,
        }
    }
}

/// The embedded network.
#[derive(Debug, Clone, Default)]
pub struct TcpNetwork {
    options: TcpOptions,
}

impl TcpNetwork {
    /// A network with these settings.
    pub fn new(options: TcpOptions) -> Self {
        Self { options }
    }

    /// How many lanes this side wants when the user asked for `asked` (0: automatic).
    fn lanes(&self, asked: u16) -> u16 {
        let automatic = || u16::try_from(event_loop::loops_per_direction()).unwrap_or(1);
        let wanted = [asked, self.options.lanes]
            .into_iter()
            .find(|lanes| *lanes > 0);
        wanted.unwrap_or_else(automatic).min(MAX_LANES)
    }
}

impl Network for TcpNetwork {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn channel_count(&self, _asked: u16) -> u16 {
        1
    }

    fn chunk_bytes(&self) -> u32 {
        CHUNK_BYTES
    }

    fn windows(&self) -> (u16, u16) {
        (self.options.window.max(1), self.options.window.max(1))
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let lanes = lanes::agree(self.lanes(setup.channels), setup, exchange)?;
        let streams = lanes::open(lanes, setup, self.options.interface.as_deref())?;
        let staging = Staging::new(setup.workers, self.options.stage_host, self.windows().0)?;
        let channel = lanes::start(streams, setup.peer, self.windows().0, staging)?;
        Ok(vec![Box::new(channel)])
    }
}
