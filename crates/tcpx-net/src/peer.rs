//! Who is at the other end of a connection.

use std::fmt;
use std::net::SocketAddr;

use tcpx_wire::KeyName;

/// Who is at the other end: an address, and at a server whose keys have names the name of the client's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// The name of the key with which it proved itself.
    pub key: Option<KeyName>,
}

impl Peer {
    /// One that has proved itself with the key of this name.
    pub fn new(address: SocketAddr, key: Option<KeyName>) -> Self {
        Self { address, key }
    }
}

impl<A: Into<SocketAddr>> From<A> for Peer {
    fn from(address: A) -> Self {
        Self::new(address.into(), None)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.key {
            None => self.address.fmt(f),
            Some(key) => write!(f, "{} (key {key})", self.address),
        }
    }
}
