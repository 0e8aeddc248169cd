//! Why a handshake failed.

use thiserror::Error;

use super::Mismatch;

/// A handshake that did not come about; close the connection.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The peer speaks another protocol.
    #[error(
        "the peer is not tcpx: expected its greeting, \"{first_bytes}\" arrived; check address and port"
    )]
    NotTcpx {
        /// The first bytes, up to 8, what is no ASCII escaped.
        first_bytes: String,
    },
    /// No version of the protocol is spoken by both sides.
    #[error("{0}")]
    Version(Box<Mismatch>),
    /// The protocols or the release that the server's beginning names are not those that it sealed.
    #[error(
        "somebody on the way has changed which protocols the server names; connect again, and over another way if that goes on"
    )]
    Changed,
    /// The server has a key, the client has none.
    #[error(
        "the server has a key, the client has none; give the client the key (TCPX_KEY or a key file)"
    )]
    KeyRequired,
    /// The client has a key, the server has none.
    #[error(
        "the client has a key, and what answered says that it has none, as anybody on the way can; start the server with the key"
    )]
    KeyNotExpected,
    /// Both sides have a key, but the peer did not prove that it has ours.
    #[error(
        "the peer's key is another one; copy the key that the server printed to the client again"
    )]
    WrongKey,
    /// Both sides have a key, and the client went away when it had seen the server's proof.
    #[error(
        "the client left when it had seen this side's proof; if it says that its key is another one, copy the key that this server printed to it again"
    )]
    LeftAtProof,
    /// The client's first message has come before.
    #[error("what it said came before on another connection: somebody on the way has recorded it")]
    Replayed,
    /// The server takes no new session.
    #[error(
        "the server is busy with as many sessions as it takes, or its one-time key has been used already; try again later, or start it again for a new key"
    )]
    Busy,
    /// The server does not know the session of a lane.
    #[error("the server does not know this lane's session; it ended or restarted, connect again")]
    UnknownSession,
    /// The lane is not one of its session's.
    #[error("expected a lane below {lanes} of at most 1024, lane {lane} arrived; connect again")]
    LaneOutOfRange {
        /// The lane.
        lane: u16,
        /// Lanes of the session.
        lanes: u16,
    },
    /// The peer's proof for a lane does not fit the session.
    #[error("the peer's proof for lane {lane} does not fit the session; connect again")]
    LaneProof {
        /// The lane.
        lane: u16,
    },
    /// A field holds a value that it cannot have.
    #[error(
        "{message}: expected {field} {expected}, {arrived} arrived; install the same release on both sides"
    )]
    Value {
        /// Name of the message.
        message: &'static str,
        /// Name of the field.
        field: &'static str,
        /// The legal values.
        expected: &'static str,
        /// What arrived.
        arrived: u64,
    },
    /// The connection ended inside the handshake.
    #[error(
        "the peer closed the connection where its {message} was due ({arrived} of {expected} bytes arrived); the reason is in its log"
    )]
    Truncated {
        /// Name of the message.
        message: &'static str,
        /// Its bytes.
        expected: usize,
        /// Bytes that arrived.
        arrived: usize,
    },
    /// The handshake had already ended.
    #[error("the handshake of this connection has already ended; open a new connection")]
    Ended,
}

impl HandshakeError {
    pub(super) fn value(
        message: &'static str,
        field: &'static str,
        expected: &'static str,
        arrived: impl Into<u64>,
    ) -> Self {
        Self::Value {
            message,
            field,
            expected,
            arrived: arrived.into(),
        }
    }
}

/// A server's answer to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    Version = 1,
    KeyRequired = 2,
    KeyNotExpected = 3,
    Busy = 4,
    UnknownSession = 5,
    LaneOutOfRange = 6,
    WrongKey = 7,
}

impl Status {
    pub(super) fn parse(message: &'static str, arrived: u8) -> Result<Self, HandshakeError> {
        Ok(match arrived {
            0 => Self::Ok,
            1 => Self::Version,
            2 => Self::KeyRequired,
            3 => Self::KeyNotExpected,
            4 => Self::Busy,
            5 => Self::UnknownSession,
            6 => Self::LaneOutOfRange,
            7 => Self::WrongKey,
            _ => return Err(HandshakeError::value(message, "status", "0 to 7", arrived)),
        })
    }
}
