//! Errors of sockets, of handshakes on them, and of interfaces. They name what was tried, and end
//! with what to do.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tcpx_wire::handshake::HandshakeError;

/// An I/O error that can be cloned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoError {
    /// Its class.
    pub kind: io::ErrorKind,
    /// The system's words.
    pub text: String,
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for IoError {}

impl From<io::Error> for IoError {
    fn from(error: io::Error) -> Self {
        Self {
            kind: error.kind(),
            text: error.to_string(),
        }
    }
}

/// Why a connection, a socket or an interface cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// Nothing listens there.
    #[error(
        "{peer} refused the connection: nothing listens on that port; start the server first or check the port"
    )]
    Refused {
        /// The address dialled.
        peer: SocketAddr,
    },
    /// No route to the peer.
    #[error("{peer} is unreachable: {cause}; check the address, the route and the interface")]
    Unreachable {
        /// The address dialled.
        peer: SocketAddr,
        /// The system's reason.
        cause: IoError,
    },
    /// The peer did not answer the connection request.
    #[error(
        "{peer} did not answer within {waited:.1?}: the host is down, or a firewall drops packets to this port; allow the port on the peer"
    )]
    ConnectTimedOut {
        /// The address dialled.
        peer: SocketAddr,
        /// How long we waited.
        waited: Duration,
    },
    /// The peer closed the connection before it had said a word.
    #[error(
        "{peer} closed the connection without an answer; it may have more connections than it takes: look at its log and try again, or check that tcpx listens there"
    )]
    CutOff {
        /// The address dialled.
        peer: SocketAddr,
    },
    /// The connection came about, and no handshake in time.
    #[error(
        "the handshake with {peer} did not finish in time; check that the peer is alive and not overloaded, or raise the connect timeout"
    )]
    Unanswered {
        /// The address dialled.
        peer: SocketAddr,
    },
    /// No handshake came about: the keys or versions differ, the one-time key is spent, it is not
    /// tcpx.
    #[error("handshake with {peer} failed: {error}")]
    Handshake {
        /// The other end.
        peer: SocketAddr,
        /// In which way.
        error: HandshakeError,
    },
    /// A system call failed.
    #[error("{operation} ({address}) failed: {cause}{hint}")]
    Io {
        /// What we tried.
        operation: &'static str,
        /// On what.
        address: String,
        /// The system's reason.
        cause: IoError,
        /// What to do: empty, or starting with `; `.
        hint: &'static str,
    },
    /// The congestion control that was asked for cannot be had.
    #[error("congestion control `{name}` cannot be used: {cause}; {remedy}")]
    Congestion {
        /// Its name.
        name: String,
        /// The system's reason.
        cause: IoError,
        /// What there is, and what to do.
        remedy: String,
    },
    /// The user's choice of interfaces leaves none.
    #[error(
        "no interface that `{filter}` allows is up and has an address that peers can reach; this host has {found}: correct the choice"
    )]
    NoInterface {
        /// What was asked for.
        filter: String,
        /// The interfaces there are.
        found: String,
    },
}

impl SocketError {
    /// Whether nobody answered at an address, where another address of the same peer may do better.
    pub const fn is_silence(&self) -> bool {
        !matches!(self, Self::CutOff { .. } | Self::Handshake { .. })
    }

    /// The peer says so: its process is gone, crowded, or not the one that is looked for. Silence
    /// says nothing.
    pub const fn is_answer(&self) -> bool {
        matches!(self, Self::Refused { .. }) || !self.is_silence()
    }

    /// The peer hung up before the handshake was over, as one does that has more connections than
    /// it takes.
    pub const fn is_hang_up(&self) -> bool {
        matches!(
            self,
            Self::CutOff { .. }
                | Self::Handshake {
                    error: HandshakeError::Truncated { .. },
                    ..
                }
        )
    }

    /// No way led there, at least for now.
    pub const fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. } | Self::ConnectTimedOut { .. }
        )
    }
}
