//! Networks of tcpx: the embedded TCP network, device-memory TCP and the ncclNet plugin host.
//!
//! The engine sees two traits. A [`Network`] turns an authenticated control connection into data
//! channels; a [`Channel`] moves chunks. What a receive yields is either bytes in place or a
//! scatter list over a bounce pool ([`Payload`]), so that networks which place bytes themselves and
//! networks which fill a pool look alike.

mod arrival;
pub mod auth;
pub mod channel;
pub mod congestion;
pub mod devmem;
pub mod dial;
pub mod error;
pub mod interfaces;
pub mod lane_inbox;
pub mod listener;
pub mod network;
pub mod plain;
pub mod plugin;
mod socket;
pub mod tcp;
mod zero_copy;

pub use auth::Auth;
pub use channel::{
    Cancel, Capabilities, Channel, ChannelStats, Completion, Direction, Foreseen, MemoryKinds,
    Payload, Posted, Readiness, ReceiveChunk, SendChunk, Ticket, Way,
};
pub use congestion::Congestion;
pub use dial::{DialOptions, Dialled, dial, dial_control_again};
pub use error::{ChannelError, ChunkPosition, IoError, NetworkError};
pub use lane_inbox::{AcceptedLane, LaneInbox};
pub use listener::{Accepted, DEFAULT_PORT, ListenOptions, Listener, ListenerNudge};
pub use network::{Exchange, Network, Setup, Side};
pub use plugin::{PluginMemory, PluginNetwork, PluginOptions};
pub use socket::every_address;
pub use tcp::{TcpCounters, TcpNetwork, TcpOptions, is_unanswered, tcp_counters};
