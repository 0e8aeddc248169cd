//! Every way a request, an operation or a session goes wrong.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::config::MAX_TRANSFER_BYTES;
use super::stall::StallReport;
use crate::frame::{CancelReason, GoodbyeReason, InvalidSettings, RefuseReason, Role, TransferId};

/// A request that the session did not take.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// Too many operations.
    #[error(
        "{limit} operations are outstanding in this direction, the most allowed; wait for one to end"
    )]
    Full {
        /// The bound.
        limit: usize,
    },
    /// The transfer is longer than any plan.
    #[error(
        "a transfer is at most {MAX_TRANSFER_BYTES} bytes, {bytes} were asked for; send it in parts"
    )]
    TooLong {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The eager payload is not as long as the transfer.
    #[error(
        "the transfer is {bytes} bytes, its eager payload {payload}; pass the whole payload or none"
    )]
    EagerLength {
        /// Length of the transfer.
        bytes: u64,
        /// Length of the payload.
        payload: u64,
    },
    /// A set-up advertisement is too long.
    #[error("a set-up advertisement is at most {most} bytes, not {bytes}; split it into rounds")]
    SetupLength {
        /// Its length.
        bytes: usize,
        /// The bound.
        most: usize,
    },
    /// There is no get of the peer to answer.
    #[error("the peer does not wait for an answer to its get {request}; answer each get once")]
    NotAsked {
        /// The get's number.
        request: u64,
    },
    /// A list, with those that this program keeps, has more pieces than the peer keeps.
    #[error(
        "the peer keeps lists of {most} pieces at most; use fewer, or drop prepared batches first"
    )]
    TooManyPieces {
        /// The peer's limit.
        most: u32,
    },
    /// A list names more windows than the peer takes.
    #[error("the peer takes lists of {most} windows at most; put and get from fewer at a time")]
    TooManyWindows {
        /// The peer's limit.
        most: u32,
    },
    /// There is no such list of pieces, or the operation has not as many bytes.
    #[error("list {list} has not the {bytes} bytes of the operation; add a list that has")]
    NotListed {
        /// The list.
        list: u64,
        /// Bytes of the operation.
        bytes: u64,
    },
    /// The session closes or has ended.
    #[error("the connection is closing or closed; connect again")]
    Closed,
}

/// What the peer (or the configuration) did wrong. The session is unusable then: pass it on to
/// [`Session::fail`](super::Session::fail).
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SessionError {
    /// A setting is out of bounds.
    #[error(transparent)]
    Settings(#[from] InvalidSettings),
    /// The sides use different networks.
    #[error(
        "this side uses the network `{ours}`, the peer `{theirs}`; start both with the same one"
    )]
    NetworkMismatch {
        /// Ours.
        ours: String,
        /// The peer's.
        theirs: String,
    },
    /// A frame at a point where it means nothing, or that says what cannot be.
    #[error("{frame}: expected {expected}, but {found}; {REPORT}")]
    Unexpected {
        /// The frame that arrived.
        frame: &'static str,
        /// When it is legal.
        expected: &'static str,
        /// What is the case.
        found: String,
    },
    /// More than the peer may have.
    #[error("the peer has more than {limit} {what}; {REPORT}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
}

const REPORT: &str = "both sides must run compatible, unmodified software; report this";

/// How much of a failed operation's data reached the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivered {
    /// Not one byte of the destination was written.
    None,
    /// These many bytes are known to be placed; others may be written in part.
    Partial {
        /// Bytes placed.
        bytes: u64,
    },
    /// Every byte is placed; what failed came after.
    All,
    /// It cannot be known.
    Unknown,
}

impl fmt::Display for Delivered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("nothing was delivered"),
            Self::Partial { bytes } => {
                write!(f, "{bytes} bytes were delivered, others perhaps in part")
            }
            Self::All => f.write_str("everything was delivered"),
            Self::Unknown => f.write_str("it is unknown how much was delivered"),
        }
    }
}

/// An operation that did not succeed.
#[derive(Clone, Debug, Error, PartialEq)]
#[error("{delivered}: {cause}")]
pub struct OperationError {
    /// Why.
    #[source]
    pub cause: EndCause,
    /// What the destination holds.
    pub delivered: Delivered,
}

/// Why an operation ended without success.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum EndCause {
    /// The receive is smaller than the transfer; both sides end with this.
    #[error(
        "the send has {bytes} bytes, the receive room for {capacity}; post a receive that is large enough"
    )]
    TooLarge {
        /// Length of the transfer.
        bytes: u64,
        /// Bytes the receive holds.
        capacity: u64,
    },
    /// The receiver does not take the transfer.
    #[error("the peer refused the transfer: {}", refusal(*reason))]
    Refused {
        /// Its reason.
        reason: RefuseReason,
    },
    /// [`Session::cancel`](super::Session::cancel).
    #[error("cancelled by this program; start it again if the data is still wanted")]
    Cancelled,
    /// [`Session::revoke`](super::Session::revoke) of its window.
    #[error("its window was revoked")]
    Revoked,
    /// The peer ended it.
    #[error("the peer's {} ended it, {}: {detail}; look at the peer's side", role(*from), cancellation(*reason))]
    PeerCancelled {
        /// The peer's part.
        from: Role,
        /// Its reason.
        reason: CancelReason,
        /// What it said.
        detail: String,
    },
    /// No progress within [`Deadlines::stall`](super::Deadlines::stall).
    #[error("stalled: {0}; look at that side or allow more time")]
    Stalled(Box<StallReport>),
    /// Not done within [`Deadlines::total`](super::Deadlines::total).
    #[error("deadline passed: {0}; look at that side or allow more time")]
    DeadlinePassed(Box<StallReport>),
    /// The data plane failed.
    #[error("{}: {failure}; correct it and send again", chunk_name(*chunk))]
    Data {
        /// The chunk, where one is concerned.
        chunk: Option<u32>,
        /// What happened.
        failure: DataFailure,
    },
    /// Source and destination differ.
    #[error(
        "tag of the source {expected:#x}, of the destination {got:#x}; do not use the destination, send again, and check memory and network cards when it repeats"
    )]
    Corrupt {
        /// Keyed tag of the source, or CRC32C of a short message.
        expected: u128,
        /// The same of the destination.
        got: u128,
    },
    /// This side closed before the operation could start.
    #[error("the connection was closed by this program; keep it open until its operations ended")]
    Closed,
    /// The peer closed the connection.
    #[error("the peer closed the connection ({}): {detail}; connect again", goodbye(*reason))]
    PeerClosed {
        /// Its reason.
        reason: GoodbyeReason,
        /// What it said.
        detail: String,
    },
    /// The connection failed.
    #[error("the connection failed{}: {failure}", at(standing.as_deref()))]
    ConnectionLost {
        /// Why.
        failure: ConnectionFailure,
        /// Where the operation stood then.
        standing: Option<Box<StallReport>>,
    },
}

/// What failed below an operation.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DataFailure {
    /// A data channel.
    #[error("data channel failed: {0}")]
    Channel(String),
    /// A copy to, from or within memory.
    #[error("memory failed: {0}")]
    Memory(String),
    /// The data plane reported what cannot be, so nothing it says about the operation holds.
    #[error("data plane misreported: {0}")]
    Misreport(String),
}

/// Why a session ended without being closed.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ConnectionFailure {
    /// The control connection broke.
    #[error("control connection: {cause}; check the network and the peer, then connect again")]
    Control {
        /// The socket's error, or that the peer ended the stream.
        cause: String,
    },
    /// The data channels broke.
    #[error("data channels: {cause}; check the network and the peer, then connect again")]
    Channels {
        /// What failed.
        cause: String,
    },
    /// The set-up failed on this side, or was refused here.
    #[error("{cause}")]
    SetUp {
        /// Why, and what to do.
        cause: String,
    },
    /// The peer broke the protocol.
    #[error("protocol: {0}")]
    Protocol(#[from] SessionError),
    /// The bytes of the peer are no frames.
    #[error("control stream: {cause}")]
    Frame {
        /// The decoder's error.
        cause: String,
    },
    /// The peer is silent.
    #[error("nothing arrived from the peer for {:.3} s, expected within {:.3} s; check that it runs and that the network reaches it", silent.as_secs_f64(), limit.as_secs_f64())]
    PeerDead {
        /// How long.
        silent: Duration,
        /// How long at most.
        limit: Duration,
    },
    /// An operation ended early on a network that cannot drop one transfer.
    #[error(
        "transfer {transfer} ended early on a network that cannot cancel, its channels are lost; connect again"
    )]
    ChannelStateLost {
        /// The transfer.
        transfer: TransferId,
    },
    /// The data plane did not stop an operation.
    #[error("the data plane did not let go of an operation's memory within {:.3} s; close its channels before the memory is freed", waited.as_secs_f64())]
    DataPlaneStuck {
        /// How long it had.
        waited: Duration,
    },
    /// Closing in order took too long.
    #[error("closing took longer than {:.3} s; wait for operations to end before closing", limit.as_secs_f64())]
    CloseTimedOut {
        /// How long it may take.
        limit: Duration,
    },
    /// The peer ended the session because of a failure.
    #[error("the peer gave up: {detail}; look at the peer's side")]
    PeerFailed {
        /// What it said.
        detail: String,
    },
}

fn at(standing: Option<&StallReport>) -> String {
    standing.map_or_else(String::new, |standing| format!(" at {standing}"))
}

fn refusal(reason: RefuseReason) -> &'static str {
    match reason {
        RefuseReason::TooLarge { .. } => "it is too large; post a receive that is large enough",
        RefuseReason::Cancelled => "its receive was cancelled; send again when it is ready",
        RefuseReason::Shutdown => "it shuts down; connect again",
        RefuseReason::UnknownWindow => {
            "its window does not exist, or was revoked; get a new key from the window's owner"
        }
        RefuseReason::NotPermitted => {
            "the window does not allow it; have it exposed with the rights that you need"
        }
        RefuseReason::OutOfRange => {
            "it does not lie within the window; check offset and length against the window's key"
        }
        RefuseReason::MemoryFailed => {
            "its memory is in use or cannot be reached; look at the peer's log"
        }
        RefuseReason::PutFailed => "a put before the notification failed; look at its error",
    }
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Sender => "send",
        Role::Receiver => "receive",
    }
}

fn cancellation(reason: CancelReason) -> &'static str {
    match reason {
        CancelReason::Requested => "cancelled by its program",
        CancelReason::DeadlineExpired => "its deadline passed",
        CancelReason::ChannelFailed => "a data channel failed",
        CancelReason::MemoryFailed => "its memory failed",
        CancelReason::Shutdown => "it shuts down",
    }
}

fn goodbye(reason: GoodbyeReason) -> &'static str {
    match reason {
        GoodbyeReason::Normal => "closed by its program",
        GoodbyeReason::Shutdown => "shutting down",
        GoodbyeReason::Error => "failed",
    }
}

fn chunk_name(chunk: Option<u32>) -> String {
    match chunk {
        Some(chunk) => format!("chunk {chunk}"),
        None => "operation".to_owned(),
    }
}
