//! How two hosts find out that they speak the same protocol and share a key.
//!
//! One listening port serves both kinds of connection. The first bytes say which:
//!
//! - **control**: client hello, server hello with the server's proof, client proof, welcome. Both
//!   sides then hold a [`Session`].
//! - **lane**: lane hello, challenge, proof, accept, all under the key of a session.
//!
//! Every message has a fixed size; nothing is allocated before a peer has proved itself. The
//! `receive` functions take bytes from the front of their input and never more than the handshake
//! needs: what is left in the input belongs to what follows (frames, or chunks).
//!
//! Payload is not encrypted. `docs/wire-protocol.md` says what an attacker on the path can do.

mod client;
mod error;
mod lane;
mod mac;
mod message;
mod server;
mod session;

pub use client::ClientHandshake;
pub use error::{FirstBytes, HandshakeError};
pub use lane::{LaneAccepted, LaneClient, LaneRefusal, LaneRequest, LaneServer};
pub use message::Message;
pub use server::{ServerHandshake, ServerStep};
pub use session::{Session, SessionId, SessionKey};

/// What to do after bytes were received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step<T> {
    /// All input is used; wait for more.
    NeedMore,
    /// Send these bytes, then go on receiving.
    Send(Message),
    /// The handshake is over; input that is left belongs to what follows.
    Done(T),
}

/// Version of the protocol: equal major numbers can talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version {
    /// Changes when old and new cannot talk.
    pub major: u16,
    /// Changes when something was added that old versions can ignore.
    pub minor: u16,
}

impl Version {
    /// The version that this crate speaks.
    pub const OURS: Self = Self { major: 1, minor: 0 };
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Bytes of a nonce; each handshake needs one fresh from a cryptographic random source.
pub const NONCE_BYTES: usize = 32;

#[cfg(test)]
mod tests;
