//! Networks of tcpx: the embedded TCP network and the ncclNet plugin host.
//!
//! The engine sees two traits. A [`Network`] turns an authenticated control connection into data
//! channels; a [`Channel`] moves chunks. What a receive yields is either bytes in place or a
//! scatter list over a bounce pool ([`Payload`]), so that networks which place bytes themselves and
//! networks which fill a pool look alike.

pub mod auth;
pub mod channel;
pub mod dial;
pub mod error;
pub mod key_file;
pub mod lane_inbox;
pub mod listener;
pub mod network;
pub mod plugin;
pub mod tcp;

pub use auth::Auth;
pub use channel::{
    Cancel, Channel, ChannelStats, Completion, Direction, Exposed, Payload, PeerRead, PendingClose,
    PostAnswer, Readiness, ReceiveChunk, ReceiveWindow, SendChunk, Ticket, Way,
};
pub use dial::{
    ControlStream, DialOptions, Dialled, LaneDial, LaneLink, begin_control, dial, dial_first,
};
pub use error::{ChannelError, ChunkPosition, IoError, NetworkError, SocketError};
pub use key_file::KeyFileError;
pub use lane_inbox::{AcceptedLane, LaneInbox};
pub use listener::{Accepted, DEFAULT_PORT, ListenOptions, Listener, ListenerNudge, Refusals};
#[doc(hidden)]
pub use nccl_net::export::fork::PerProcess;
pub use network::{Exchange, Features, Meanwhile, Network, Setup, Side};
pub use plugin::{PluginMemory, PluginNetwork, PluginOptions};
#[doc(hidden)]
pub use tcp::LocalSizes;
pub use tcp::{Lend, Local, ParseLocalError, TcpNetwork, TcpOptions};
pub use tcpx_lanes::Congestion;
pub use tcpx_lanes::congestion;
pub use tcpx_lanes::interfaces;
pub use tcpx_lanes::protocols;
pub use tcpx_lanes::socket::every_address;
pub use tcpx_lanes::socket_calls::{Span, copy_spans};
pub use tcpx_lanes::tcp_info::{TcpCounters, is_unanswered, tcp_counters, transport};
