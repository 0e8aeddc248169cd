//! Errors of networks and channels. They name what was expected and what arrived, and end with
//! what to do.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

pub use tcpx_lanes::{IoError, SocketError};

/// Where in the stream of chunks something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkPosition {
    /// The chunk's sequence number.
    pub sequence: u64,
    /// Its transfer.
    pub transfer: u64,
    /// Its offset in the transfer, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Bytes of it that were moved.
    pub done: u64,
}

impl fmt::Display for ChunkPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sequence,
            transfer,
            offset,
            length,
            done,
        } = self;
        write!(
            f,
            "chunk {sequence} of transfer {transfer} at offset {offset} ({done} of {length} bytes done)"
        )
    }
}

/// Why a channel or one of its requests failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The request was cancelled.
    #[error("the request was cancelled before it finished")]
    Cancelled,
    /// The channel was closed on this side.
    #[error("{channel} was closed on this side; open a new connection to go on")]
    Closed {
        /// Which channel.
        channel: String,
    },
    /// The peer closed its end.
    #[error(
        "{channel}: the peer closed its end while {outstanding} requests were outstanding; look at the peer's log for why"
    )]
    PeerClosed {
        /// Which channel.
        channel: String,
        /// Requests in flight here.
        outstanding: usize,
    },
    /// A lane failed in the middle of its work.
    #[error("{channel}: lane {lane} to {peer} was lost while {operation}{}: {cause}; check the link and the peer's log, then connect again", at(.position))]
    LaneLost {
        /// Which channel.
        channel: String,
        /// Which lane.
        lane: u16,
        /// The lane's remote address.
        peer: SocketAddr,
        /// `sending` or `receiving`.
        operation: &'static str,
        /// The chunk in the lane's hands.
        position: Option<Box<ChunkPosition>>,
        /// The system's reason.
        cause: IoError,
    },
    /// Every lane died.
    #[error("no lane is left of {lanes}; the last one: {last}")]
    NoLaneLeft {
        /// How many there were.
        lanes: u16,
        /// How the last one was lost.
        last: Box<Self>,
    },
    /// The peer broke the protocol.
    #[error("{channel}: lane {lane}: expected {expected}, {arrived} arrived{}; both ends must run the same version of tcpx, so update the older one", at(.position))]
    Protocol {
        /// Which channel.
        channel: String,
        /// Which lane or request slot.
        lane: u16,
        /// What the protocol wants here.
        expected: String,
        /// What came.
        arrived: String,
        /// The chunk concerned.
        position: Option<Box<ChunkPosition>>,
    },
    /// A request that this channel cannot carry.
    #[error("{channel} cannot take this request: {reason}")]
    BadRequest {
        /// Which channel.
        channel: String,
        /// Expected and arrived, and what to do.
        reason: String,
    },
    /// A copy between host and GPU memory failed.
    #[error("{channel}: {operation} failed: {cause}")]
    Memory {
        /// Which channel.
        channel: String,
        /// What was being copied.
        operation: &'static str,
        /// The memory layer's words.
        cause: String,
    },
    /// A channel of a network of another crate cannot go on.
    #[error(
        "{channel}: {operation} failed: {cause}; check the link and the peer's log, then connect again"
    )]
    Failed {
        /// Which channel.
        channel: String,
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        cause: String,
    },
    /// A network plugin failed.
    #[error("{channel}: plugin call {call} failed: {cause}")]
    Plugin {
        /// Which channel.
        channel: String,
        /// The plugin's function.
        call: &'static str,
        /// What it returned, what that means, and what to do.
        cause: String,
    },
}

fn at(position: &Option<Box<ChunkPosition>>) -> String {
    position
        .as_ref()
        .map(|position| format!(" {position}"))
        .unwrap_or_default()
}

/// Why a connection or its channels could not be set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// A connection, a socket or an interface cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// None of a peer's addresses led to it.
    #[error("{}", each(.errors))]
    NoAddress {
        /// What happened at each.
        errors: Vec<SocketError>,
    },
    /// A step of the set-up did not end in time.
    #[error(
        "{operation} with {peer} did not finish in time; check that the peer is alive and not overloaded, or raise the connect timeout"
    )]
    TimedOut {
        /// Whom we waited for.
        peer: SocketAddr,
        /// What we waited for.
        operation: &'static str,
    },
    /// This side is to serve, and has a client's key.
    #[error(
        "cannot listen on {address} with a client's key, with which nobody can serve; give the server its own key \
         file (`tcpx key FILE` makes one)"
    )]
    ClientKey {
        /// Where it was to listen.
        address: SocketAddr,
    },
    /// The peers' set-up messages do not fit together.
    #[error(
        "setting up {network} with {peer}: expected {expected}, {arrived} arrived; both ends must use the same network and version"
    )]
    Mismatch {
        /// The network.
        network: String,
        /// The other end.
        peer: SocketAddr,
        /// What we can work with.
        expected: String,
        /// What the peer sent.
        arrived: String,
    },
    /// The control connection failed during the set-up.
    #[error("the control connection failed during the set-up: {reason}")]
    Control {
        /// What happened.
        reason: String,
    },
    /// The peer ended the set-up and said why.
    #[error("{peer} rejected the connection and says: {reason}")]
    GivenUp {
        /// The other end.
        peer: SocketAddr,
        /// Its words, without control characters: what it found, and as a rule what to do.
        reason: String,
    },
    /// Nobody connected.
    #[error(
        "no client connected to {address} within {waited:.1?}; start one with this address and key, and check that a firewall lets the port through"
    )]
    AcceptTimedOut {
        /// Where we listen.
        address: SocketAddr,
        /// How long we waited.
        waited: Duration,
    },
    /// No lane can be opened over the interfaces that the user allows.
    #[error(
        "no lane to {peer} can be opened over the interfaces that `{filter}` allows: {found}; name interfaces whose networks both hosts share, or none"
    )]
    NoWay {
        /// The peer.
        peer: SocketAddr,
        /// What was asked for.
        filter: String,
        /// What was found instead.
        found: String,
    },
    /// One side encrypts payload and the other does not.
    #[error(
        "{} encrypts payload and {} does not; give both sides --encrypt (or TCPX_ENCRYPT=1), or neither (`tcpx send`, `receive` and `transfer` encrypt unless both sides are given --plain)",
        if *.ours { "this side".to_owned() } else { .peer.to_string() },
        if *.ours { .peer.to_string() } else { "this side".to_owned() }
    )]
    EncryptionDiffers {
        /// The other end.
        peer: SocketAddr,
        /// This side does.
        ours: bool,
    },
    /// Payload is to be encrypted on a network that cannot do that.
    #[error(
        "{network} cannot encrypt payload, which goes past this program; use the network tcp, or an encrypted one below it, and leave --encrypt (TCPX_ENCRYPT) out"
    )]
    CannotEncrypt {
        /// The network.
        network: String,
    },
    /// Payload is to be encrypted between peers that prove nothing to each other.
    #[error(
        "payload cannot be encrypted without a key: nobody would know for whom; use a key on both sides, or leave --encrypt (TCPX_ENCRYPT) out"
    )]
    EncryptionNeedsKey,
    /// The listener was closed on this side.
    #[error("the listener on {address} is closed")]
    ListenerClosed {
        /// Its address.
        address: SocketAddr,
    },
    /// A network plugin could not be used.
    #[error("{network}: {call} failed: {cause}")]
    Plugin {
        /// The network.
        network: String,
        /// The plugin's function.
        call: &'static str,
        /// What it returned, what that means, and what to do.
        cause: String,
    },
    /// A call of a plugin did not come back.
    #[error(
        "{network}: {call} has not returned for {waited:.1?}, and keeps the thread that made it; look at the plugin's log, and use another build of it if it waits for nothing that can come"
    )]
    PluginStuck {
        /// The network.
        network: String,
        /// What was being done; the plugin's function, or `loading` for the file's constructors.
        call: &'static str,
        /// How long we waited.
        waited: Duration,
    },
    /// Memory for the network could not be had.
    #[error("{network}: {cause}")]
    Memory {
        /// The network.
        network: String,
        /// The memory layer's words.
        cause: String,
    },
    /// A network of another crate cannot be set up.
    #[error("{cause}")]
    Other {
        /// Its words.
        cause: String,
    },
}

impl NetworkError {
    /// Whether nobody answered at an address, where another address of the same peer may do better.
    pub const fn is_silence(&self) -> bool {
        match self.socket() {
            Some(error) => error.is_silence(),
            None => matches!(self, Self::TimedOut { .. }),
        }
    }

    /// The error of the connection or socket that this is about; of several the last.
    pub const fn socket(&self) -> Option<&SocketError> {
        match self {
            Self::Socket(error) => Some(error),
            Self::NoAddress { errors } => errors.as_slice().last(),
            _ => None,
        }
    }
}

/// What happened at each, and behind that what to do about the last.
fn each(errors: &[SocketError]) -> String {
    let mut text = String::new();
    for error in errors {
        text.truncate(text.rfind("; ").unwrap_or(text.len()));
        if !text.is_empty() {
            text.push_str(", and ");
        }
        text.push_str(&error.to_string());
    }
    text
}
