//! What both sides hold after the handshake.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::{Zeroize, ZeroizeOnDrop};

#[cfg(test)]
use super::Build;
use super::error::Status;
use super::message::{CONFIRM_BYTES, WELCOME_BYTES};
use super::{HandshakeError, Message, Version};
use crate::record::Records;

/// A session and the control connection on which it came about.
#[derive(Debug)]
pub struct Established {
    /// The session.
    pub session: Session,
    /// Seals and opens what follows on this connection.
    pub records: Records,
}

impl Established {
    /// The client's last message: it proves that the client knows the secrets.
    pub(super) fn confirm(&mut self) -> Message {
        self.record::<CONFIRM_BYTES>(&[])
    }

    /// The server takes the session: its last message.
    pub fn welcome(&mut self) -> Message {
        self.record::<WELCOME_BYTES>(&[Status::Ok as u8])
    }

    /// The server takes no session any more: its last message.
    pub fn turn_away(&mut self) -> Message {
        self.record::<WELCOME_BYTES>(&[Status::Busy as u8])
    }

    /// Reads what the server's first record seals.
    ///
    /// # Errors
    /// [`HandshakeError::Busy`] when another client was faster, or it is no welcome.
    pub fn read_welcome(opened: &[u8]) -> Result<(), HandshakeError> {
        let [status] = *opened else {
            return Err(HandshakeError::Truncated {
                message: "welcome",
                expected: 1,
                arrived: opened.len(),
            });
        };
        match Status::parse("welcome", status)? {
            Status::Ok => Ok(()),
            Status::Busy => Err(HandshakeError::Busy),
            _ => Err(HandshakeError::value("welcome", "status", "0 or 4", status)),
        }
    }

    fn record<const BYTES: usize>(&mut self, plain: &[u8]) -> Message {
        Message::from(&self.records.seal_array::<BYTES>(plain))
    }
}

/// An agreed session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Names the session; not secret.
    pub id: SessionId,
    /// Proves membership of the session.
    pub key: SessionKey,
    /// Both sides proved that they hold the shared key; `false` when neither uses one.
    pub authenticated: bool,
    /// The version of the protocol that both sides speak on all of its connections.
    pub protocol: Version,
}

/// Names a session on the server that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; Self::BYTES]);

impl SessionId {
    /// Bytes of an id.
    pub const BYTES: usize = 16;
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The secret of one session: random bytes that the server sent sealed. `Debug` hides it, and it is
/// wiped from memory when it is dropped.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct SessionKey(pub(super) [u8; Self::BYTES]);

secret!(SessionKey, 0);

impl SessionKey {
    /// Bytes of a session key.
    pub const BYTES: usize = 32;

    /// What the two ends of the session alone know by this name; whoever sees it learns nothing of
    /// the key.
    pub fn shared_value(&self, name: &[u8]) -> [u8; 32] {
        crate::derive::authenticate(&self.0, name)
    }
}

/// A session for tests of what follows a handshake.
#[cfg(test)]
pub(crate) fn test_session(id: SessionId) -> Session {
    Session {
        id,
        key: SessionKey([5; SessionKey::BYTES]),
        authenticated: true,
        protocol: Build::OURS.highest,
    }
}
