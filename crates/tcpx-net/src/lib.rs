//! Networks of tcpx: the embedded TCP network and the ncclNet plugin host.
//!
//! The engine sees two traits. A [`Network`] turns an authenticated control connection into data
//! channels; a [`Channel`] moves chunks. What a receive yields is either bytes in place or a
//! scatter list over a bounce pool ([`Payload`]), so that networks which place bytes themselves and
//! networks which fill a pool look alike.

pub mod channel;
pub mod error;
pub mod lane_inbox;
pub mod network;

pub use channel::{
    Cancel, Capabilities, Channel, ChannelStats, Completion, MemoryKinds, Payload, Posted,
    Readiness, ReceiveChunk, SendChunk, Ticket,
};
pub use error::{ChannelError, ChunkPosition, IoError, NetworkError};
pub use lane_inbox::{AcceptedLane, LaneInbox};
pub use network::{Exchange, Network, Setup, Side};
