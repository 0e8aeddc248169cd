//! Where an operation stands and who must act next.

use std::fmt;
use std::time::Duration;

use super::action::OperationId;
use crate::frame::{Role, Tag, TransferId};

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owes {
    /// The peer has not told its settings, or not brought up its data channels.
    PeerSetup,
    /// This side has not brought up its data channels.
    LocalSetup,
    /// The control connection of this side does not take the transfer's first frame.
    LocalControl,
    /// The peer has not posted a matching receive, or not taken an eager payload to it.
    PeerPostReceive,
    /// The peer has not sent anything that this receive matches.
    PeerSendMatching,
    /// The peer has not taken a put or a notification, or not answered a get.
    PeerAnswer,
    /// The peer has not sent the chunk.
    PeerSend,
    /// This side's network has not sent the chunk.
    LocalNetworkSend,
    /// The chunk was sent; the peer has not acknowledged that it is placed.
    PeerAcknowledge,
    /// The chunk arrived and was neither unpacked nor consumed by this side.
    LocalUnpack,
    /// The chunk waits for a place in its channel, which earlier transfers occupy.
    EarlierTransfer,
    /// This side has not computed the checksum of its memory.
    LocalDigest,
    /// The peer has not told the checksum of the source.
    PeerDigest,
    /// The peer has not told whether the checksums match.
    PeerVerdict,
    /// GPU work of this program comes before the receive.
    LocalFence,
    /// This side's data plane has not stopped a cancelled operation.
    LocalStop,
    /// The peer has not confirmed that a cancelled operation stopped.
    PeerStop,
    /// Nobody: the operation is complete.
    Nobody,
}

impl fmt::Display for Owes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PeerSetup => "the peer must finish its set-up next",
            Self::LocalSetup => "this side must open its data channels next",
            Self::LocalControl => "this side must send the transfer's first frame next",
            Self::PeerPostReceive => "the peer must post a matching receive next",
            Self::PeerSendMatching => "the peer must start a matching send next",
            Self::PeerAnswer => "the peer must answer next",
            Self::PeerSend => "the peer must send the chunk next",
            Self::LocalNetworkSend => "this side's network must send the chunk next",
            Self::PeerAcknowledge => "the peer must acknowledge the sent chunk next",
            Self::LocalUnpack => "this side must unpack and consume the arrived chunk next",
            Self::EarlierTransfer => "an earlier transfer on the channel must end next",
            Self::LocalDigest => "this side must compute the checksum of its memory next",
            Self::PeerDigest => "the peer must send the checksum of the source next",
            Self::PeerVerdict => "the peer must compare the checksums next",
            Self::LocalFence => "the GPU work before the receive must end next",
            Self::LocalStop => "this side must stop its access to the memory next",
            Self::PeerStop => "the peer must confirm next that it stopped",
            Self::Nobody => "nothing is left to do",
        })
    }
}

/// What sort of operation it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperationKind {
    /// A send to a receive of its tag.
    Send,
    /// A posted receive.
    Receive,
    /// A put into a window of the peer.
    Put,
    /// A get from a window of the peer.
    Get,
    /// A notification to the peer.
    Notification,
    /// A put of the peer into a window of this side.
    PeerPut,
    /// The answer to a get of the peer from a window of this side.
    PeerGet,
    /// A notification of the peer.
    PeerNotification,
}

impl OperationKind {
    /// Whether the peer began it.
    pub const fn is_peers(self) -> bool {
        matches!(self, Self::PeerPut | Self::PeerGet | Self::PeerNotification)
    }

    /// This side's part in it.
    pub const fn role(self) -> Role {
        match self {
            Self::Receive | Self::Get | Self::PeerPut | Self::PeerNotification => Role::Receiver,
            Self::Send | Self::Put | Self::Notification | Self::PeerGet => Role::Sender,
        }
    }

    /// Whether a tag belongs to it.
    pub const fn has_tag(self) -> bool {
        matches!(self, Self::Send | Self::Receive)
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Put => "put",
            Self::Get => "get",
            Self::Notification => "notification",
            Self::PeerPut => "the peer's put",
            Self::PeerGet => "the peer's get",
            Self::PeerNotification => "the peer's notification",
        })
    }
}

/// Where an operation stands. Its display is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StallReport {
    /// What it is.
    pub kind: OperationKind,
    /// The tag, where it has one.
    pub tag: Tag,
    /// The transfer, once it is known.
    pub transfer: Option<TransferId>,
    /// The chunk that is waited for.
    pub chunk: Option<u32>,
    /// The data channel of that chunk.
    pub channel: Option<u16>,
    /// Where that chunk starts in the transfer, in bytes.
    pub offset: u64,
    /// Bytes that need nothing more: placed, at a sender placed and acknowledged.
    pub bytes_done: u64,
    /// Length of the transfer; the capacity of a receive that is not matched.
    pub bytes_total: u64,
    /// Time since the last progress.
    pub waited: Duration,
    /// Whose turn it is.
    pub owes: Owes,
    /// What the peer said about its own side, when it cancelled too.
    pub peer: Option<String>,
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if self.kind.has_tag() {
            write!(f, " tag {}", self.tag.0)?;
        }
        match self.transfer {
            Some(transfer) => write!(f, " transfer {transfer}")?,
            None if self.kind.has_tag() => f.write_str(" (not matched)")?,
            None => {}
        }
        if let Some(chunk) = self.chunk {
            write!(f, " chunk {chunk}")?;
        }
        if let Some(channel) = self.channel {
            write!(f, " channel {channel}")?;
        }
        write!(
            f,
            " offset {}: {} of {} bytes done, no progress for {:.3} s; {}",
            self.offset,
            self.bytes_done,
            self.bytes_total,
            self.waited.as_secs_f64(),
            self.owes
        )?;
        match &self.peer {
            Some(peer) => write!(f, " (the peer says: {peer})"),
            None => Ok(()),
        }
    }
}

/// One operation in [`Session::snapshot`](super::Session::snapshot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationState {
    /// The operation.
    pub operation: OperationId,
    /// It was reported complete; only the peer's part is outstanding.
    pub completed: bool,
    /// It is being cancelled.
    pub cancelling: bool,
    /// Where it stands.
    pub standing: StallReport,
}
