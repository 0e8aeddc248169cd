//! The embedded network: chunks over plain TCP.
//!
//! One channel is several TCP streams, its *lanes*, to the peer's one listening port. A chunk
//! travels whole on one lane, behind a 48-byte header that names its window. Any writable lane
//! takes the next chunk, so a slow lane does not hold up a message. A receiver finds the window by
//! its name and reads the payload straight into its destination. GPU memory is staged through
//! pinned slots that the copy worker fills and empties.
//!
//! A few event-loop threads per process drive all lanes of all channels; see [`Channel`] for what
//! the owner of a channel sees.
//!
//! [`Channel`]: crate::Channel

mod advert;
mod agree;
mod dials;
#[doc(hidden)]
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod lane_rates;
mod lanes;
mod local;
mod loss;
mod open;
mod pairs;
mod permits;
mod receive_lane;
mod receive_table;
mod repair;
mod roster;
mod shared;
mod staging;
mod tcp_channel;
mod transmit_lane;
mod transmit_table;
mod watch;

use tcpx_lanes::sealing::Protection;
use tcpx_lanes::send_lane::TURN_BYTES;
use tcpx_lanes::socket::congestion_control;
use tcpx_wire::Taper;

use crate::channel::Channel;
use crate::error::NetworkError;
use crate::network::{Exchange, Features, Network, Setup, Side};
use local::{Door, LocalPath};
pub use local::{Exposed, Local, LocalSizes, ParseLocalError, PeerRead};
use shared::{MAX_LANES, Parts};
use staging::Staging;

/// The name of the embedded network.
pub const NAME: &str = "tcp";

/// Default chunk size in bytes: one wire call, and one pinned slot.
pub const CHUNK_BYTES: u32 = 1 << 20;

/// Default window in chunks, per direction.
pub const WINDOW: u16 = 64;

/// Lengths of the chunks at the end of a large transfer below the full one, one chunk of each for
/// each lane.
const TAPER_HALVINGS: u8 = 2;

/// Settings of the embedded network.
#[derive(Debug, Clone)]
pub struct TcpOptions {
    /// Lanes per channel when the user asks for none in particular; 0: one per event loop, and
    /// enough for every pair of cards. The smaller of both peers' numbers counts.
    pub lanes: u16,
    /// Event-loop threads of this process, where its first connection asks; 0: one for every two
    /// cores, at least two where there are two, at most twelve.
    pub loops: u16,
    /// Most chunks in flight per direction; at least 1.
    pub window: u16,
    /// Interfaces that lanes may use, in the notation of `NCCL_SOCKET_IFNAME`
    /// ([`InterfaceFilter`]); `None`, or a text that names nothing: chosen automatically
    /// ([`choose`]).
    ///
    /// [`InterfaceFilter`]: crate::interfaces::InterfaceFilter
    /// [`choose`]: crate::interfaces::choose
    pub interfaces: Option<String>,
    /// Stages host memory through slots too, as if it were a GPU's. Slower; it runs the staged
    /// path where there is no GPU.
    pub stage_host: bool,
    /// Bytes that a lane's socket buffers hold in each direction; 0: automatic. That is 512 KiB
    /// inside one host, where more would let a few lanes take all chunks, and else as the kernel
    /// chooses.
    pub socket_buffer: u32,
    /// To whom slots are sent by references to their pages, so that the sender copies nothing.
    /// Where the system refuses it, slots are copied.
    pub lend: Lend,
    /// Whether payload in host memory is read where it lies by a peer on the same host; as
    /// `TCPX_LOCAL` says by default.
    pub local: Local,
    /// For tests.
    #[doc(hidden)]
    pub local_sizes: LocalSizes,
    /// Bytes that a lane moves before the others of its event loop get their turn; at least 1. For
    /// tests.
    #[doc(hidden)]
    pub turn_bytes: usize,
}

/// Who may read slots of pinned memory where they lie.
///
/// A slot serves one connection after the other. A peer of another host has its own copy once its
/// system has acknowledged the bytes. A peer of this host reads the pages themselves, whenever it
/// likes, so that it could see what later connections send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lend {
    /// Nobody: slots are copied.
    Never,
    /// Peers that are reached by a physical card.
    OtherHosts,
    /// Everybody: for measurements within one host, whose peers trust each other.
    Always,
}

impl Lend {
    /// What `TCPX_LEND` says: `always` or `never`; anything else is other hosts.
    fn of_process() -> Self {
        match std::env::var("TCPX_LEND").as_deref() {
            Ok("always") => Self::Always,
            Ok("never") => Self::Never,
            _ => Self::OtherHosts,
        }
    }
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            lanes: 0,
            loops: 0,
            window: WINDOW,
            interfaces: None,
            stage_host: false,
            socket_buffer: 0,
            lend: Lend::of_process(),
            local: Local::of_process(),
            local_sizes: LocalSizes::default(),
            turn_bytes: TURN_BYTES,
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

    fn window(&self) -> u16 {
        self.options.window.max(1)
    }

    /// How many lanes this side wants when the user asked for `asked` (0: automatic), and whether
    /// anybody asked.
    fn lanes(&self, asked: u16) -> (u16, bool) {
        let loops = || lanes::count_loops(self.options.loops);
        let automatic = || u16::try_from(loops()).unwrap_or(1);
        let wanted = [asked, self.options.lanes]
            .into_iter()
            .find(|lanes| *lanes > 0);
        let lanes = wanted.unwrap_or_else(automatic).clamp(1, MAX_LANES);
        (lanes, wanted.is_some())
    }
}

impl Network for TcpNetwork {
    fn features(&self, asked: u16) -> Features {
        let (pieces, taper) = match self.lanes(asked).0 {
            1 => (1, None),
            // As on few cores, where each piece costs a wake-up: up to 1 MiB one lane is quicker.
            2 => (1, Taper::new(TAPER_HALVINGS, 2)),
            lanes => (2 * u32::from(lanes), Taper::new(TAPER_HALVINGS, lanes)),
        };
        Features {
            name: NAME.to_owned(),
            channels: 1,
            chunk_bytes: CHUNK_BYTES,
            pieces,
            taper,
            windows: (self.window(), self.window()),
            is_addressed: true,
            works_in_poll: false,
        }
    }

    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError> {
        let protection = match (setup.session.authenticated, setup.encrypt) {
            (false, true) => return Err(NetworkError::EncryptionNeedsKey),
            (false, false) => Protection::None,
            (true, false) => Protection::Headers,
            (true, true) => Protection::All,
        };
        let wanted = self.lanes(setup.channels);
        let door = Door::open(&self.options, setup);
        let interfaces = self.options.interfaces.as_deref();
        let wish = agree::wish(wanted, interfaces, door.is_ok(), setup)?;
        let mut early = open::early(&wish, setup);
        let agreed = agree::agree(wish, setup, &mut early, exchange)?;
        let lanes = agreed.lanes;
        let local = match door {
            Ok(door) if agreed.has_door => door.prove(setup, exchange)?,
            Ok(_) => LocalPath::none(Some("the peer has it switched off".to_owned())),
            Err(why_not) => LocalPath::none(why_not),
        };
        // A filter may still refuse what comes.
        if setup.side == Side::Server && agreed.cards.filter.is_none() {
            exchange.ready();
        }
        let (streams, repair, mut ways) = open::open(agreed, early, setup, exchange)?;
        if let Some(inbox) = &setup.lanes {
            inbox.agree(lanes);
        }
        let congestion = streams
            .first()
            .and_then(|joined| congestion_control(&joined.stream));
        tracing::info!(
            peer = %setup.peer,
            lanes,
            congestion_control = congestion,
            "lanes opened"
        );
        let loops = lanes::count_loops(self.options.loops);
        let plural = if loops == 1 { "" } else { "s" };
        ways.push_str(&format!(", {loops} event loop{plural}"));
        if let Some(congestion) = congestion {
            ways.push_str(&format!(", {congestion}"));
        }
        if setup.encrypt {
            ways.push_str(", payload encrypted");
        }
        let window = self.window();
        let parts = Parts {
            name: lanes::name(lanes, setup.peer),
            ways,
            lanes,
            window,
            lend: match lanes {
                0 | 1 => Lend::Never,
                _ => self.options.lend,
            },
            dead_after: setup.dead_after,
            protection,
            socket_buffer: self.options.socket_buffer,
            turn_bytes: self.options.turn_bytes,
            staging: Staging::new(setup.workers, self.options.stage_host, window)?,
            repair,
            local,
        };
        let channel = lanes::start(streams, setup.peer, parts, self.options.loops)?;
        Ok(vec![Box::new(channel)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_not_cut_for_the_second_of_two_lanes() {
        let pieces = |lanes| TcpNetwork::default().features(lanes).pieces;
        assert_eq!([1, 2, 8].map(pieces), [1, 1, 16]);
    }
}
