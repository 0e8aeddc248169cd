//! Who may connect, and who has.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;

use tcpx_wire::KeyName;
use tcpx_wire::key::{AnyKey, ClientKey, Key, KeyError};

use crate::key_ring::{self, KeyRing, KeyRingError};

/// How peers prove that they may talk to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Auth {
    /// A server's key: with it this side can serve, and connect to any server that has the same.
    Key(Key),
    /// A server's key and the clients that it lets in, by name: with it this side can serve, and
    /// connect as the server.
    Ring(KeyRing),
    /// A client's key: with it this side can connect to the server that it is of.
    Client(ClientKey),
    /// Nobody proves anything; both sides must say so.
    Insecure,
}

impl Auth {
    /// Reads a key's text; its length says whose it is.
    ///
    /// # Errors
    /// When the text is not that of a generated key. Errors never hold a part of the text.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        Ok(match AnyKey::parse(text)? {
            AnyKey::Server(key) => Self::Key(key),
            AnyKey::Client(key) => Self::Client(key),
        })
    }

    /// Reads a key file, or the folder of a server's key ring as [`KeyRing::of_folder`] does.
    ///
    /// # Errors
    /// A file or the folder cannot be read, or holds no key.
    pub fn of_file(path: &Path) -> Result<Self, KeyRingError> {
        if path.is_dir() {
            return KeyRing::of_folder(path).map(Self::Ring);
        }
        Ok(match key_ring::read_key(path)? {
            AnyKey::Server(key) => Self::Key(key),
            AnyKey::Client(key) => Self::Client(key),
        })
    }

    /// What this side connects with.
    pub fn client_key(&self) -> Option<ClientKey> {
        match self {
            Self::Key(key) => Some(key.client_key()),
            Self::Ring(ring) => Some(ring.server().client_key()),
            Self::Client(key) => Some(key.clone()),
            Self::Insecure => None,
        }
    }
}

/// Who is at the other end: an address, and at a server whose keys have names the name of the
/// client's key.
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
