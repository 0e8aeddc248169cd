//! Errors of the engine: one line that names the peer, the operation and who owes the next step,
//! and ends with what to do.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tcpx_memory::MemoryError;
use tcpx_net::{ChannelError, IoError, NetworkError, SocketError};
use tcpx_wire::session::{
    ConnectionFailure, Delivered, EndCause, OperationError, OperationKind, RequestError,
    SessionError,
};

use crate::control::ControlEnd;

/// Why something did not succeed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Connecting, accepting or setting up data channels failed.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The peer's address leads nowhere.
    #[error("the peer's address: {cause}; give HOST:PORT with the address or name of a host")]
    Unresolved {
        /// The system's reason.
        cause: IoError,
    },
    /// Memory could not be had, reached or lent.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// An operation failed; [`Error::kind`] says in which way.
    #[error("peer {peer} ({path}): {operation}: {error}")]
    Operation {
        /// The peer.
        peer: SocketAddr,
        /// The data path.
        path: String,
        /// Which one.
        operation: OperationName,
        /// What happened, and what the destination holds.
        error: Box<OperationError>,
    },
    /// An operation ended, but its memory may still be touched: by a copy that waits for work of
    /// the GPU, or by a plugin. It stays allocated and in use until that has ended, at the latest
    /// when the connection's channels are closed.
    #[error("{error} (its memory is still held, until a copy or the network lets go of it)")]
    MemoryHeld {
        /// How the operation ended.
        error: Box<Self>,
    },
    /// The connection was lost.
    #[error("connection to {peer} lost: {failure}")]
    ConnectionLost {
        /// The peer.
        peer: SocketAddr,
        /// Why.
        failure: Box<ConnectionFailure>,
    },
    /// A data channel broke.
    #[error("connection to {peer} lost: channel {channel}: {error}")]
    ChannelLost {
        /// The peer.
        peer: SocketAddr,
        /// Which channel.
        channel: usize,
        /// Why.
        error: Box<ChannelError>,
    },
    /// The connection was closed; open a new one.
    #[error("the connection to {peer} is closed; open a new one")]
    Closed {
        /// The peer.
        peer: SocketAddr,
    },
    /// The session refused a request; nothing was started.
    #[error("peer {peer}: {error}")]
    Request {
        /// The peer.
        peer: SocketAddr,
        /// Why.
        error: RequestError,
    },
    /// What a fork's child inherited belongs to its parent; the child has not touched it.
    #[error(
        "the {what} belongs to the process that opened it; open one in this process, or use it before the fork"
    )]
    OtherProcess {
        /// What was used.
        what: &'static str,
    },
    /// Something did not end in time.
    #[error(
        "{what} with {peer} did not end within {limit:.1?}; look at the peer's side or allow more time"
    )]
    TimedOut {
        /// The peer.
        peer: SocketAddr,
        /// What was waited for.
        what: &'static str,
        /// How long.
        limit: Duration,
    },
    /// A call into the network has not come back, so no deadline of the engine can fire.
    #[error(
        "peer {peer}: the engine has been inside one call of the network for {stuck:.1?}; the network's library hangs: end the process, and report this to the library's maker"
    )]
    EngineStuck {
        /// The peer.
        peer: SocketAddr,
        /// For how long.
        stuck: Duration,
    },
    /// A plugin has not come back from closing a channel; nothing waits for it any more.
    #[error(
        "peer {peer}: channel {channel}: {call} of the plugin has not returned for {stuck:.1?}, and keeps its thread and the memory of requests that were in flight; look at the plugin's log and at the peer's side, whose close it may wait for"
    )]
    CloseStuck {
        /// The peer.
        peer: SocketAddr,
        /// Which channel.
        channel: usize,
        /// The plugin's function.
        call: &'static str,
        /// For how long.
        stuck: Duration,
    },
    /// The engine, or the network that it drives, panicked.
    #[error(
        "peer {peer}: a defect of tcpx ended the connection: {cause}; connect afresh, and report this with the log"
    )]
    Defect {
        /// The peer.
        peer: SocketAddr,
        /// The panic's words.
        cause: String,
    },
    /// A setting cannot work.
    #[error("{what}: expected {expected}, {arrived} was given")]
    Setting {
        /// Which one.
        what: &'static str,
        /// What would work.
        expected: String,
        /// What was given.
        arrived: String,
    },
    /// The operating system refused something the engine needs.
    #[error("{what}: {cause}; check the limits on open files and threads")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        cause: IoError,
    },
}

impl From<tcpx_memory::CudaError> for Error {
    fn from(error: tcpx_memory::CudaError) -> Self {
        Self::Memory(error.into())
    }
}

/// Names an operation in a message: by its tag where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationName {
    /// What sort of operation it is.
    pub kind: OperationKind,
    /// What it matches on, if its kind does.
    pub tag: u64,
}

impl fmt::Display for OperationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind.has_tag() {
            true => write!(f, "tag {}", self.tag),
            false => self.kind.fmt(f),
        }
    }
}

/// What sort of error it is, for programs that decide by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No connection came about.
    Connect,
    /// A deadline has passed.
    TimedOut,
    /// The connection ended amid its work.
    ConnectionLost,
    /// One side closed the connection in order.
    Closed,
    /// This program cancelled the operation.
    Cancelled,
    /// The receive is smaller than the send; nothing was written.
    TooLarge,
    /// Source and destination differ.
    Corrupt,
    /// One operation failed, and the connection may live on.
    Operation,
    /// A setting cannot work.
    Setting,
    /// Memory is in use, cannot be reached or cannot be had.
    Memory,
    /// The operating system refused something.
    System,
    /// A defect of tcpx or of a plugin.
    Defect,
}

impl Error {
    /// What sort of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Network(NetworkError::AcceptTimedOut { .. }) => ErrorKind::TimedOut,
            Self::Network(_) | Self::Unresolved { .. } => ErrorKind::Connect,
            Self::Memory(_) => ErrorKind::Memory,
            Self::TimedOut { .. } => ErrorKind::TimedOut,
            Self::Operation { error, .. } => match error.cause {
                EndCause::Stalled(_) | EndCause::DeadlinePassed(_) => ErrorKind::TimedOut,
                EndCause::TooLarge { .. } if error.delivered == Delivered::None => {
                    ErrorKind::TooLarge
                }
                EndCause::Corrupt { .. } => ErrorKind::Corrupt,
                EndCause::Cancelled => ErrorKind::Cancelled,
                EndCause::ConnectionLost { .. } => ErrorKind::ConnectionLost,
                EndCause::Closed | EndCause::PeerClosed { .. } => ErrorKind::Closed,
                _ => ErrorKind::Operation,
            },
            Self::MemoryHeld { error } => error.kind(),
            Self::ConnectionLost { .. } | Self::ChannelLost { .. } => ErrorKind::ConnectionLost,
            Self::Closed { .. } | Self::OtherProcess { .. } => ErrorKind::Closed,
            Self::Request { .. } => ErrorKind::Operation,
            Self::EngineStuck { .. } | Self::CloseStuck { .. } | Self::Defect { .. } => {
                ErrorKind::Defect
            }
            Self::Setting { .. } => ErrorKind::Setting,
            Self::System { .. } => ErrorKind::System,
        }
    }

    /// Who is at the other end of the connection concerned, if there is one.
    pub fn peer(&self) -> Option<SocketAddr> {
        match self {
            Self::TimedOut { peer, .. }
            | Self::Operation { peer, .. }
            | Self::ConnectionLost { peer, .. }
            | Self::ChannelLost { peer, .. }
            | Self::Closed { peer }
            | Self::Request { peer, .. }
            | Self::EngineStuck { peer, .. }
            | Self::CloseStuck { peer, .. }
            | Self::Defect { peer, .. } => Some(*peer),
            Self::MemoryHeld { error } => error.peer(),
            Self::Network(_)
            | Self::Unresolved { .. }
            | Self::Memory(_)
            | Self::OtherProcess { .. }
            | Self::Setting { .. }
            | Self::System { .. } => None,
        }
    }

    /// The tag of the operation concerned, if there is one.
    pub fn tag(&self) -> Option<u64> {
        match self {
            Self::Operation { operation, .. } => operation.kind.has_tag().then_some(operation.tag),
            Self::MemoryHeld { error } => error.tag(),
            _ => None,
        }
    }

    /// What the destination holds of the operation concerned, if there is one.
    pub fn delivered(&self) -> Option<Delivered> {
        match self {
            Self::Operation { error, .. } => Some(error.delivered),
            Self::MemoryHeld { error } => error.delivered(),
            _ => None,
        }
    }

    /// The check of `tcpx doctor` that explains the error, such as `TCPX-D037`; `None` where there
    /// is none, and for errors of a plugin, whose text names it at its end.
    pub fn check(&self) -> Option<&'static str> {
        Some(match self {
            Self::EngineStuck { .. } | Self::CloseStuck { .. } => "TCPX-D034",
            Self::Operation { error, .. } => match error.cause {
                EndCause::Stalled(_) | EndCause::DeadlinePassed(_) => "TCPX-D034",
                EndCause::Corrupt { .. } => "TCPX-D035",
                _ => return None,
            },
            Self::ConnectionLost { .. } => "TCPX-D031",
            Self::ChannelLost { error, .. } => match **error {
                ChannelError::PeerClosed { .. } | ChannelError::LaneLost { .. } => "TCPX-D031",
                _ => return None,
            },
            Self::Network(error)
                if matches!(
                    error.socket(),
                    Some(
                        SocketError::Refused { .. }
                            | SocketError::Unreachable { .. }
                            | SocketError::ConnectTimedOut { .. }
                    )
                ) =>
            {
                "TCPX-D037"
            }
            Self::Network(NetworkError::TimedOut {
                operation: "connecting the plugin's comms",
                ..
            }) => "TCPX-D032",
            Self::Network(NetworkError::PluginStuck { call, .. }) => match *call {
                "loading" => "TCPX-D011",
                "listen" | "connect or accept" => "TCPX-D032",
                _ => "TCPX-D033",
            },
            Self::System { .. } => "TCPX-D003",
            Self::MemoryHeld { error } => return error.check(),
            _ => return None,
        })
    }

    pub(crate) fn system(what: &'static str, cause: io::Error) -> Self {
        Self::System {
            what,
            cause: cause.into(),
        }
    }

    pub(crate) fn unresolved(cause: io::Error) -> Self {
        Self::Unresolved {
            cause: cause.into(),
        }
    }

    pub(crate) fn lost(peer: SocketAddr, failure: ConnectionFailure) -> Self {
        Self::ConnectionLost {
            peer,
            failure: Box::new(failure),
        }
    }

    pub(crate) fn protocol(peer: SocketAddr, error: SessionError) -> Self {
        Self::lost(peer, ConnectionFailure::Protocol(error))
    }

    pub(crate) fn control(peer: SocketAddr, end: ControlEnd) -> Self {
        let frame = |error: &dyn fmt::Display| ConnectionFailure::Frame {
            cause: error.to_string(),
        };
        let failure = match end {
            ControlEnd::Eof => ConnectionFailure::Control {
                cause: "the peer closed it without a goodbye (its process ended?)".to_owned(),
            },
            ControlEnd::Io(error) => ConnectionFailure::Control {
                cause: error.to_string(),
            },
            ControlEnd::Welcome(error) => {
                return NetworkError::Socket(SocketError::Handshake { peer, error }).into();
            }
            ControlEnd::Record(error) => frame(&error),
            ControlEnd::Frame(error) => frame(&error),
            ControlEnd::Position(error) => frame(&error),
            ControlEnd::Over(detail) => ConnectionFailure::PeerFailed { detail },
        };
        Self::lost(peer, failure)
    }

    pub(crate) fn channel(peer: SocketAddr, channel: usize, error: ChannelError) -> Self {
        Self::ChannelLost {
            peer,
            channel,
            error: Box::new(error),
        }
    }

    pub(crate) fn operation(
        peer: SocketAddr,
        path: String,
        operation: OperationName,
        error: OperationError,
        held: bool,
    ) -> Self {
        let error = Self::Operation {
            peer,
            path,
            operation,
            error: Box::new(error),
        };
        if held {
            Self::MemoryHeld {
                error: Box::new(error),
            }
        } else {
            error
        }
    }

    /// The same for the session, so that operations end with the connection's reason.
    pub(crate) fn failure(&self) -> ConnectionFailure {
        match self {
            Self::ConnectionLost { failure, .. } => (**failure).clone(),
            other => ConnectionFailure::Channels {
                cause: other.to_string(),
            },
        }
    }
}
