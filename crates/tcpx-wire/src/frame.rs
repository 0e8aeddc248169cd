//! Control frames: all that two sessions exchange besides payload.
//!
//! All integers are little endian. A frame is a 16-byte header (magic, kind, flags, body length,
//! sequence, CRC32C) and a body of at most [`MAX_BODY_BYTES`].

mod decoder;
mod encode;
mod error;
mod field;
mod payload;
mod settings;

use crate::pieces::MAX_PART_BYTES;
use crate::plan::Taper;
use crate::window::Place;

use field::{Body, Field};

pub use decoder::FrameDecoder;
pub use encode::{encode, encode_head};
pub use error::FrameError;
pub use payload::{Detail, Eager, Exposure, Payload, PlacedChunks};
#[cfg(test)]
pub(crate) use settings::drawn_limits;
pub use settings::{InvalidSettings, Limits, Settings};

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 16;
/// Most bytes of a frame's body.
pub const MAX_BODY_BYTES: usize = MAX_EAGER_BYTES + 64;
/// Most bytes of the payload of [`Frame::Setup`].
pub const MAX_SETUP_BYTES: usize = 32 * 1024;
/// Most bytes of the payload of [`Frame::Eager`].
pub const MAX_EAGER_BYTES: usize = 128 * 1024;

/// Kind of [`Frame::Pieces`].
const PIECES: u8 = 26;
/// Kind of [`Frame::Eager`].
const EAGER: u8 = 7;
/// Payload of at least so many bytes that travels eagerly is not sealed where payload is not
/// encrypted: below, sealing costs less than a call more.
pub const LEAST_PLAIN_BYTES: usize = 4096;

/// First two bytes of a frame, as an integer ("XT" on the wire).
const MAGIC: u16 = 0x5458;

/// How a receiver takes a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Length in bytes of every chunk but the last and those of the taper; at least 1.
    pub chunk_bytes: u32,
    /// On an addressed network the window that the chunks name. On an ordered one the chunk
    /// sequence number (per direction) of the transfer's chunk 0.
    pub window: u64,
    /// The agreed completion level.
    pub level: Level,
    /// Shorter chunks at the end.
    pub taper: Option<Taper>,
}

/// Describes every frame once: number and name of its kind, then its fields in their order on the
/// wire.
macro_rules! frames {
    ($(
        $(#[$doc:meta])*
        $kind:literal $name:literal $variant:ident
        $({ $( $(#[$field_doc:meta])* $field:ident: $type:ty, )+ })?
        $(( $inner:ident: $inner_type:ty ))?,
    )+) => {
        /// One control frame.
        ///
        /// The enum is complete: a kind that is not listed is an error at the receiver.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Frame {
            $(
                $(#[$doc])*
                $variant $({ $( $(#[$field_doc])* $field: $type, )+ })? $(( $inner_type ))?,
            )+
        }

        impl Frame {
            /// Number of the kind on the wire, from 1.
            fn kind(&self) -> u8 {
                match self {
                    $( Self::$variant { .. } => $kind, )+
                }
            }

            /// Appends the body.
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(
                        Self::$variant $({ $( $field, )+ })? $(( $inner ))? => {
                            $( $( $field.put(out); )+ )?
                            $( $inner.put(out); )?
                        }
                    )+
                }
            }

            /// Reads a body of this kind up to its last field.
            fn take(kind: u8, body: &mut Body<'_>) -> Result<Self, FrameError> {
                Ok(match kind {
                    $(
                        $kind => Self::$variant
                            $({ $( $field: <$type as Field>::take(body, stringify!($field))?, )+ })?
                            $(( <$inner_type as Field>::take(body, stringify!($inner))? ))?,
                    )+
                    arrived => return Err(FrameError::kind(arrived)),
                })
            }
        }

        /// Name of a kind's number; `None` when no such kind exists.
        fn kind_name(kind: u8) -> Option<&'static str> {
            match kind {
                $( $kind => Some($name), )+
                _ => None,
            }
        }
    };
}

frames! {
    /// First frame of each side after the handshake.
    1 "settings" Settings(settings: Box<Settings>),
    /// Set-up advertisement of the network in use; opaque to the protocol.
    2 "setup" Setup {
        /// At most [`MAX_SETUP_BYTES`].
        payload: Vec<u8>,
    },
    /// The data channels of this side are up.
    3 "ready" Ready,
    /// Sender to receiver: a transfer waits for its receive, and its sender knows no window for it.
    4 "waiting" Waiting {
        /// The sender's name for the transfer.
        transfer: TransferId,
        /// The completion level the sender asks for.
        level: Level,
        /// Length of the transfer in bytes.
        bytes: u64,
        /// Where it goes.
        to: Destination,
    },
    /// Receiver to sender, on an addressed network: receive `number` of the tag is there, and its
    /// window is open. The send of that number may write into it at once.
    19 "posted" Posted {
        /// The tag.
        tag: Tag,
        /// The receive's number among those of its tag.
        number: u64,
        /// Bytes that the window holds.
        capacity: u64,
        /// How a transfer of just so many bytes is taken; a shorter one has chunks of the same
        /// length and no taper.
        grant: Grant,
    },
    /// Receiver to sender: this receive, which was posted or is before one that was, has ended.
    /// Nothing was taken for it.
    20 "unpost" Unpost {
        /// The tag.
        tag: Tag,
        /// The receive's number.
        number: u64,
    },
    /// Answer to [`Frame::Unpost`], once nothing is written to its window any more.
    21 "unposted" Unposted {
        /// The tag.
        tag: Tag,
        /// The receive's number.
        number: u64,
        /// What becomes of it.
        used: NumberUse,
    },
    /// Sender to receiver: the count of this tag, which is idle here, may be forgotten.
    24 "forget" Forget {
        /// The tag.
        tag: Tag,
        /// The number of the next send.
        number: u64,
    },
    /// Answer to [`Frame::Forget`].
    25 "forgotten" Forgotten {
        /// The tag.
        tag: Tag,
        /// The count begins at 0 again on both sides; else receives wait, and it goes on.
        forgotten: bool,
    },
    /// Initiator to owner of windows: send this of them.
    22 "get" Get {
        /// The initiator's name for the request, counted from 0.
        request: u64,
        /// What is asked for.
        from: Extent,
        /// Its length in bytes.
        bytes: u64,
        /// The completion level that the initiator asks for.
        level: Level,
        /// How long it may take.
        left: TimeLeft,
    },
    /// Initiator to owner of windows: the next part of a list of pieces. Operations name the list
    /// once all parts of it have come.
    26 "pieces" Pieces {
        /// The initiator's name for the list, counted from 0.
        list: u64,
        /// It is the last one.
        last: bool,
        /// At most [`MAX_PART_BYTES`].
        part: Vec<u8>,
    },
    /// Initiator to owner of windows: no operation names this list any more.
    27 "drop-pieces" DropPieces {
        /// The list.
        list: u64,
    },
    /// Owner of a window to initiator: the piece is not sent.
    23 "refuse-get" RefuseGet {
        /// The request.
        request: u64,
        /// Why.
        reason: RefuseReason,
    },
    /// Receiver to sender: the transfer has a destination, send it.
    5 "grant" Grant {
        /// The transfer.
        transfer: TransferId,
        /// How it is taken.
        grant: Grant,
    },
    /// Receiver to sender: the transfer will not be received.
    6 "refuse" Refuse {
        /// The transfer.
        transfer: TransferId,
        /// Why.
        reason: RefuseReason,
    },
    /// A small transfer, whole.
    7 "eager" Eager {
        /// The sender's name for the transfer.
        transfer: TransferId,
        /// The completion level the sender asks for.
        level: Level,
        /// Where it goes.
        to: Destination,
        /// At most [`MAX_EAGER_BYTES`].
        payload: Payload,
    },
    /// The same, where the receiver reads the payload in the memory of the sender's process.
    29 "exposed" Exposed {
        /// The sender's name for the transfer.
        transfer: TransferId,
        /// The completion level the sender asks for.
        level: Level,
        /// Where it goes.
        to: Destination,
        /// Where it lies.
        at: Exposure,
    },
    /// Receiver to sender: the eager payload is at its destination.
    8 "eager-done" EagerDone {
        /// The transfer.
        transfer: TransferId,
    },
    /// Receiver to sender: eager payload left the receiver's buffer.
    9 "eager-credit" EagerCredit {
        /// Bytes given back.
        bytes: u32,
    },
    /// Receiver to sender: chunks were unpacked at their destination.
    10 "placed" Placed {
        /// The transfer.
        transfer: TransferId,
        /// Which chunks.
        chunks: PlacedChunks,
    },
    /// Sender to receiver, level verified: tag of the source.
    11 "digest" Digest {
        /// The transfer.
        transfer: TransferId,
        /// Of all its bytes, under a key that the two ends of the connection alone know.
        tag: u128,
    },
    /// Receiver to sender, level verified: the comparison's outcome.
    12 "verdict" Verdict {
        /// The transfer.
        transfer: TransferId,
        /// The same of the destination; of eager payload its CRC32C.
        tag: u128,
        /// Source and destination agree.
        matches: bool,
    },
    /// The transfer ends early.
    13 "cancel" Cancel {
        /// The transfer.
        transfer: TransferId,
        /// The part that the side which sends this frame plays in the transfer.
        from: Role,
        /// Why.
        reason: CancelReason,
        /// The same for a person, with who owed the next step.
        detail: Detail,
    },
    /// Answer to [`Frame::Cancel`]: this side's data plane is quiet for the transfer.
    14 "cancelled" Cancelled {
        /// The transfer.
        transfer: TransferId,
        /// The part that the side which sends this frame plays in the transfer.
        from: Role,
    },
    /// Proof of life.
    15 "heartbeat" Heartbeat {
        /// Counts this side's heartbeats from 0.
        counter: u64,
    },
    /// This side sends no new transfer and will close.
    16 "goodbye" Goodbye {
        /// Why.
        reason: GoodbyeReason,
        /// The same for a person.
        detail: Detail,
    },
    /// Answer to [`Frame::Goodbye`]: nothing further follows from this side.
    17 "goodbye-ack" GoodbyeAck,
    /// This side lacks a lane of the embedded network, and cannot dial it: whoever can does.
    28 "redial" Redial {
        /// The lane.
        lane: u16,
    },
    /// Frames of the other direction have arrived: they need not be kept for another connection.
    /// Between sides that both can resume; it concerns the stream and not the session.
    18 "received" Received {
        /// Their bytes, from the first frame of the session on.
        read: u64,
    },
}

impl From<Settings> for Frame {
    fn from(settings: Settings) -> Self {
        Self::Settings(settings.into())
    }
}

impl Frame {
    /// Name of the kind, for logs and errors.
    pub fn name(&self) -> &'static str {
        kind_name(self.kind()).unwrap_or("unknown")
    }
}

/// Most bytes of what ends a frame of this kind and goes on to its end.
fn most_payload(kind: u8) -> usize {
    match kind {
        EAGER => MAX_EAGER_BYTES,
        PIECES => MAX_PART_BYTES,
        _ => MAX_SETUP_BYTES,
    }
}

/// Where a transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// To the receive of its number: a send.
    Receive {
        /// What the receive must match.
        tag: Tag,
        /// Its number among the sends of its tag, from 0.
        number: u64,
    },
    /// Into windows of the receiver: a put.
    Put {
        /// Where there.
        to: Extent,
        /// Whether a notification follows that is delivered behind it.
        notified: Notified,
        /// How long it may take. A session says that itself.
        left: TimeLeft,
    },
    /// To whoever asked for it: the answer to [`Frame::Get`].
    Reply {
        /// The request.
        request: u64,
    },
    /// To the program, as bytes of a message.
    Notification {
        /// The first of the puts that come before it.
        first: TransferId,
        /// How many of them there are, with consecutive numbers: as many have come since that one,
        /// or it fails.
        count: u32,
    },
}

impl Destination {
    /// To the next receive of this tag: a session counts the sends.
    pub const fn next_receive(tag: Tag) -> Self {
        Self::Receive { tag, number: 0 }
    }

    /// The tag of a send; the others have none.
    pub(crate) fn tag(self) -> Option<Tag> {
        match self {
            Self::Receive { tag, .. } => Some(tag),
            _ => None,
        }
    }
}

/// How long an operation may take from the frame on that asks for it, in milliseconds: its owner
/// ends it by itself then, though who asked stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLeft {
    /// Without any progress; [`u32::MAX`]: for ever.
    pub stall_ms: u32,
    /// In all; [`u32::MAX`]: for ever.
    pub total_ms: u32,
}

impl TimeLeft {
    /// For ever.
    pub const ANY: Self = Self {
        stall_ms: u32::MAX,
        total_ms: u32::MAX,
    };
}

/// What becomes of the number of a receive that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum NumberUse {
    /// No send has it or will.
    Skipped = 0,
    /// A send has it, and came or comes before this frame: another receive takes it.
    Used = 1,
    /// A send had it, which has ended at its sender.
    Ended = 2,
    /// As [`NumberUse::Skipped`], and none of the tag has been used: both sides count from 0 again.
    Forgotten = 3,
}

/// Whether a notification follows a put. Puts before a notification follow each other; a session
/// that is given one of them says itself which is the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Notified {
    /// None does.
    #[default]
    No = 0,
    /// It is the first put that one follows.
    First = 1,
    /// It is a further one, of the same notification as the put before it that one follows.
    Next = 2,
}

/// What of a peer's windows an operation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One piece, from here on.
    Place(Place),
    /// All pieces of a list, one behind the other.
    Pieces(u64),
}

/// Names a transfer of one direction. Its sender counts its transfers from 0; one that goes to a
/// posted window is named by that window instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

impl TransferId {
    const WINDOW: u64 = 1 << 63;

    /// The transfer that goes to this posted window.
    pub const fn to_window(window: u64) -> Self {
        Self(window | Self::WINDOW)
    }

    /// The posted window that names it.
    pub const fn window(self) -> Option<u64> {
        if self.0 & Self::WINDOW == 0 {
            return None;
        }
        Some(self.0 & !Self::WINDOW)
    }
}

impl std::fmt::Display for TransferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.window() {
            Some(window) => write!(f, "to window {window}"),
            None => write!(f, "{}", self.0),
        }
    }
}

/// What a receive matches on; first in, first out among equal tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// When a transfer counts as complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Level {
    /// The source may be reused.
    Sent = 0,
    /// Every byte is at its destination, and the sender knows.
    #[default]
    Placed = 1,
    /// Keyed tags of source and destination were compared.
    Verified = 2,
}

/// A side's part in one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Role {
    /// Owns the source.
    Sender = 0,
    /// Owns the destination.
    Receiver = 1,
}

impl Role {
    /// The other side's.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Sender => Self::Receiver,
            Self::Receiver => Self::Sender,
        }
    }
}

/// Why a receiver refuses an announced transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefuseReason {
    /// The matching receive is smaller than the transfer.
    TooLarge {
        /// Bytes the receive could hold.
        capacity: u64,
    },
    /// The matching receive was cancelled.
    Cancelled,
    /// The receiver shuts down.
    Shutdown,
    /// There is no such window, or its key is another one.
    UnknownWindow,
    /// The window's rights do not allow it.
    NotPermitted,
    /// The piece does not lie within the window.
    OutOfRange,
    /// The memory is in use, or cannot be had.
    MemoryFailed,
    /// A put that comes before the notification failed.
    PutFailed,
}

impl RefuseReason {
    /// Each at its number on the wire.
    const ALL: [Self; 8] = [
        Self::TooLarge { capacity: 0 },
        Self::Cancelled,
        Self::Shutdown,
        Self::UnknownWindow,
        Self::NotPermitted,
        Self::OutOfRange,
        Self::MemoryFailed,
        Self::PutFailed,
    ];
}

/// Why a transfer is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CancelReason {
    /// The program asked for it.
    Requested = 0,
    /// Its deadline passed.
    DeadlineExpired = 1,
    /// A data channel failed.
    ChannelFailed = 2,
    /// A copy to or from memory failed.
    MemoryFailed = 3,
    /// The side shuts down.
    Shutdown = 4,
}

/// Why a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GoodbyeReason {
    /// The program closed the connection.
    Normal = 0,
    /// The process shuts down.
    Shutdown = 1,
    /// The session failed; the detail says how.
    Error = 2,
}
