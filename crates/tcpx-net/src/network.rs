//! The network: turns an authenticated control connection into data channels.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, poll};
use tcpx_lanes::congestion::Congestion;
use tcpx_lanes::socket::timespec;
use tcpx_memory::CopyWorker;
use tcpx_wire::Taper;
use tcpx_wire::handshake::Session;

use crate::channel::Channel;
use crate::error::NetworkError;
use crate::lane_inbox::LaneInbox;

/// Which end of the control connection this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The end that dialled.
    Client,
    /// The end that listens.
    Server,
}

/// What a network gets to know about the connection that it sets up channels for.
#[derive(Debug)]
pub struct Setup<'a> {
    /// Our end.
    pub side: Side,
    /// The authenticated session of the control connection.
    pub session: &'a Session,
    /// Our address on the control connection.
    pub local: SocketAddr,
    /// Client: the listening address that it dialled. Server: the client's address.
    pub peer: SocketAddr,
    /// Channels that the user asked for; 0 means automatic.
    pub channels: u16,
    /// When establishing must have ended.
    pub deadline: Instant,
    /// The copy workers of the GPUs whose memory will be moved; none for host memory alone.
    pub workers: &'a [Arc<CopyWorker>],
    /// Payload is encrypted, or there is no connection; only for a network that
    /// [is addressed](Features::is_addressed), with an authenticated session.
    pub encrypt: bool,
    /// Time without any lane after which the peer counts as gone.
    pub dead_after: Duration,
    /// Congestion control of the sockets that are opened.
    pub congestion: &'a Congestion,
    /// Server only: where the listener puts lanes that joined this session.
    pub lanes: Option<LaneInbox>,
    /// Server only: the address that the listener is bound to.
    pub listening: Option<SocketAddr>,
}

/// Rounds of opaque set-up messages over the control connection.
pub trait Exchange {
    /// One round: sends our payload, has `other` go on until the peer's has come, and returns that.
    /// One that cannot leaves `other` alone. Both sides must call it equally often.
    ///
    /// # Errors
    /// The control connection failed, the peer sent something else, or the set-up deadline passed.
    fn exchange(
        &mut self,
        payload: &[u8],
        other: &mut dyn Meanwhile,
    ) -> Result<Vec<u8>, NetworkError>;

    /// From here on nothing but the peer's own failure keeps this side from carrying chunks: it may
    /// be told, and wait no longer, while the rest is done. One that is not told waits for the end
    /// of [`Network::establish`].
    fn ready(&mut self) {}

    /// Between rounds: waits until one of the descriptors is ready, at most until `deadline`, and
    /// hears meanwhile whether the peer gives the set-up up; one that cannot hear waits all the
    /// same. May come back early.
    ///
    /// # Errors
    /// The peer gave up, or the control connection failed.
    fn wait(
        &mut self,
        mut descriptors: Vec<PollFd<'_>>,
        deadline: Instant,
    ) -> Result<(), NetworkError> {
        let left = deadline.saturating_duration_since(Instant::now());
        // Interrupted or in vain: the caller looks again.
        let _ = poll(&mut descriptors, Some(&timespec(left)));
        Ok(())
    }
}

/// What goes on while a round of set-up messages waits for the peer.
pub trait Meanwhile {
    /// What it waits for itself.
    fn awaits(&self) -> Vec<PollFd<'_>>;

    /// Goes on without waiting.
    fn advance(&mut self);
}

/// Nothing does.
impl Meanwhile for () {
    fn awaits(&self) -> Vec<PollFd<'_>> {
        Vec::new()
    }

    fn advance(&mut self) {}
}

/// What a network is, where the user asked for so many channels.
#[derive(Debug, Clone)]
pub struct Features {
    /// `tcp`, `devmem`, or `plugin:` and the plugin's own name. Both sides must agree.
    pub name: String,
    /// How many channels [`Network::establish`] will make. The embedded network makes one, with its
    /// lanes inside.
    pub channels: u16,
    /// Default chunk size in bytes.
    pub chunk_bytes: u32,
    /// How many chunks a transfer of medium size is best cut into, where the user chose no chunk
    /// size: so many that all lanes of the channels carry a part. 1 leaves every chunk at its full
    /// size.
    pub pieces: u32,
    /// Shorter chunks at the end of a large transfer, where the user chose no chunk size, so that
    /// the lanes of the channels are done with their last ones at about the same time. `None`: all
    /// have their full size.
    pub taper: Option<Taper>,
    /// Default windows per channel in chunks: (send, receive).
    pub windows: (u16, u16),
    /// Whether the network is addressed: chunks name the window that they are written into
    /// ([`Channel::open_window`]), and may be placed in any order. Then
    ///
    /// - one transfer can be dropped without losing the channel,
    /// - small messages may travel in a frame, past the channels,
    /// - payload can be encrypted,
    /// - [`Network::establish`] may begin before the peer's settings are known, which may still
    ///   name another network,
    /// - a control connection that breaks may be replaced by another one, as channels know by
    ///   themselves when the peer is gone ([`Channel::is_alive`]).
    ///
    /// Else the network is ordered: receives are posted, and match in the order in which both sides
    /// post; all payload travels over the channels, for which the user chose it.
    pub is_addressed: bool,
    /// Whether its channels do their work on the thread that polls them, so that each connection is
    /// to have a thread of its own.
    pub works_in_poll: bool,
}

/// A way of moving chunks between processes.
pub trait Network: Send + Sync + Debug {
    /// What it is when the user asked for `asked` channels (0: automatic).
    fn features(&self, asked: u16) -> Features;

    /// Sets up the channels. Blocks, at most until [`Setup::deadline`].
    ///
    /// # Errors
    /// The peers could not agree, a lane or a plugin call failed, or the deadline passed.
    fn establish(
        &self,
        setup: &Setup<'_>,
        exchange: &mut dyn Exchange,
    ) -> Result<Vec<Box<dyn Channel>>, NetworkError>;
}
