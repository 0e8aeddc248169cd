//! How two hosts find out that they speak the same protocol and share a key.
//!
//! One listening port serves both kinds of connection. The first bytes say which:
//!
//! - **control**: the pattern `NKpsk2` of the Noise protocol framework (`NN` without a key), then a
//!   record of the client that proves it, and a welcome. Both sides then hold a [`Session`], whose
//!   secret the server sent sealed.
//! - **lane**: random bytes of both sides, and proofs that derive from them and the secret of a
//!   session.
//!
//! Every message has a fixed size; nothing is allocated before a peer has proved itself. The
//! `receive` functions take bytes from the front of their input and never more than the handshake
//! needs: what is left in the input belongs to what follows (frames, or chunks).
//!
//! `docs/security.md` says what is protected from whom.

mod client;
mod error;
mod lane;
mod message;
mod noise;
mod server;
mod session;
mod version;

pub use client::ClientHandshake;
pub use error::HandshakeError;
pub use lane::{LaneAccepted, LaneClient, LaneRequest, LaneServer};
pub use message::Message;
pub(crate) use noise::public_key;
pub use server::{ServerHandshake, ServerStep};
#[cfg(test)]
pub(crate) use session::test_session;
pub use session::{Established, Session, SessionId, SessionKey};
pub use version::{Build, Mismatch, Version};

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

#[cfg(test)]
mod tests;
