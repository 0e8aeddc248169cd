//! Who a connection leads to.

use std::net::SocketAddr;

/// Who is at the other end, and what both sides agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Address of the control connection.
    pub address: SocketAddr,
    /// Name of the network.
    pub network: String,
    /// Data channels.
    pub channels: u16,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
    /// The memory that the peer moves, in its words.
    pub memory: String,
    /// The peer's software.
    pub software: String,
}
