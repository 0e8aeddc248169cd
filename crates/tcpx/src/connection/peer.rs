//! Who a connection leads to.

use std::net::SocketAddr;

use tcpx_net::Peer;
use tcpx_wire::KeyName;

/// Who is at the other end, and what both sides agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Address of the control connection.
    pub address: SocketAddr,
    /// At a server whose keys have names ([`KeyRing`](crate::KeyRing)): that of the key with which the client proved itself.
    pub key: Option<KeyName>,
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

impl PeerInfo {
    /// As errors name it.
    pub(super) fn name(&self) -> Peer {
        Peer::new(self.address, self.key)
    }
}
