//! What the application asks for and what the session asks its caller to do.

use std::sync::Arc;

use super::config::Deadlines;
use super::error::{ConnectionFailure, OperationError};
use crate::frame::{Destination, Eager, Extent, Level, Role, Settings, Tag, TransferId};
use crate::pieces::PieceList;
use crate::plan::ChunkPlan;

/// Names one send or receive of this side; never reused within a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId(pub(super) u64);

impl OperationId {
    pub(super) fn new(role: Role, number: u64) -> Self {
        Self(number << 1 | role as u64)
    }

    /// This side's part in it.
    pub(super) fn role(self) -> Role {
        match self.0 & 1 {
            0 => Role::Sender,
            _ => Role::Receiver,
        }
    }

    /// What this side calls the transfer of a send.
    pub(super) fn transfer(self) -> TransferId {
        TransferId(self.0 >> 1)
    }

    /// The transfer of a send; `None` for a receive, whose transfer is known once it is matched.
    pub fn sent_transfer(self) -> Option<TransferId> {
        (self.0 & 1 == 0).then_some(TransferId(self.0 >> 1))
    }
}

/// A send.
#[derive(Clone, Debug)]
pub struct SendRequest {
    /// Where it goes; see [`Destination::next_receive`] for a send.
    pub to: Destination,
    /// Length in bytes, at most [`MAX_TRANSFER_BYTES`](super::MAX_TRANSFER_BYTES).
    pub bytes: u64,
    /// When it counts as complete. Where the receiver asks for [`Level::Verified`] the send takes
    /// part and ends verified too, whatever is asked here.
    pub level: Level,
    /// Its own deadlines; `None` takes those of the [`Config`](super::Config).
    pub deadlines: Option<Deadlines>,
    /// The payload, where the caller can read it and
    /// [`Session::eager_allowed`](super::Session::eager_allowed) says yes.
    pub eager: Option<Eager>,
    /// Bytes of its chunks, where the data plane says them to the peer's in front of each. `None`:
    /// as the receiver says, whose data plane takes no others.
    pub chunk_bytes: Option<u32>,
}

/// What an operation of the peer covers in windows of this side, which allow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Covered {
    /// One piece.
    Range {
        /// Its window.
        window: u64,
        /// Where it begins there.
        offset: u64,
    },
    /// These.
    Pieces(Arc<PieceList>),
}

impl Covered {
    /// Whether some of it lies in this window.
    pub fn names(&self, of: u64) -> bool {
        match self {
            Self::Range { window, .. } => *window == of,
            Self::Pieces(list) => list.names(of),
        }
    }

    /// How many pieces of lists it has.
    pub(super) fn pieces(&self) -> u32 {
        match self {
            Self::Range { .. } => 0,
            Self::Pieces(list) => list.pieces(),
        }
    }
}

/// A get: a part of windows of the peer is sent to here.
#[derive(Clone, Copy, Debug)]
pub struct GetRequest {
    /// What is read.
    pub from: Extent,
    /// Its length in bytes, which the destination can hold.
    pub bytes: u64,
    /// As for a receive.
    pub level: Level,
    /// Its own deadlines; `None` takes those of the [`Config`](super::Config).
    pub deadlines: Option<Deadlines>,
}

/// A receive.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest {
    /// Matches the oldest arrival of this tag.
    pub tag: Tag,
    /// Bytes the destination can hold.
    pub capacity: u64,
    /// [`Level::Verified`] compares keyed tags; the others complete when every byte is placed.
    pub level: Level,
    /// Its own deadlines; `None` takes those of the [`Config`](super::Config).
    pub deadlines: Option<Deadlines>,
    /// GPU work of the caller comes before the first byte may be written:
    /// [`fence_reached`](super::Session::fence_reached) says when that is done. Until then an
    /// addressed network is given no window, for what the work waits for may have to come first.
    pub fenced: bool,
}

/// One piece of a transfer on one data channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Counts the chunks of its transfer from 0.
    pub index: u32,
    /// Where it starts in the transfer, in bytes.
    pub offset: u64,
    /// Its length in bytes; at least 1.
    pub length: u32,
    /// Its place in the direction's stream of chunks. Cancelled transfers leave gaps, and not the
    /// same ones on both sides: on a channel, data that comes before the next posted receive in
    /// sequence belongs to a dropped transfer.
    pub sequence: u64,
    /// The data channel that carries it, counted from 0.
    pub channel: u16,
}

/// How a successful operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Bytes transferred; a receive may hold more.
    pub bytes: u64,
    /// The level that was reached.
    pub level: Level,
}

/// Whether an ended operation's memory is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Nothing of the data plane points at it any more.
    Released,
    /// The data plane did not confirm in time that it stopped; the memory must stay alive until it
    /// does ([`data_quiet`](super::Session::data_quiet)), or where the network cannot cancel until
    /// its channels are closed: then the connection fails as well.
    Held,
}

/// What the caller has to do. Taken from [`Session::poll`](super::Session::poll) in
/// order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// The peer's settings; [`Session::agreed`](super::Session::agreed) answers from now on.
    PeerSettings(Box<Settings>),
    /// A set-up advertisement of the peer's network, opaque.
    Setup(Vec<u8>),
    /// The peer's data channels are up.
    PeerReady,
    /// What will be moved is known: the receive was matched, or the send has a window or a grant.
    /// It comes before anything else about the transfer's data, but for [`Action::OpenWindow`].
    Matched {
        /// The operation.
        operation: OperationId,
        /// Its transfer.
        transfer: TransferId,
        /// Length of the transfer in bytes.
        bytes: u64,
        /// Place of its first chunk in the direction's stream; 0 for an eager transfer.
        first_sequence: u64,
        /// Number of its chunks; 0 for an eager transfer.
        chunks: u32,
    },
    /// On an addressed network: open the memory of a receive to chunks that name this window. Do it
    /// before the next frame leaves: the peer writes as soon as it hears of the window. Answer
    /// [`window_begins`](super::Session::window_begins),
    /// [`chunk_arrived`](super::Session::chunk_arrived) and
    /// [`chunk_placed`](super::Session::chunk_placed) for each chunk. After the last one the window
    /// is closed.
    OpenWindow {
        /// The receive.
        operation: OperationId,
        /// The window's name; names increase.
        window: u64,
        /// How a transfer that fills the window is cut; [`ChunkPlan::for_total`] says it of a
        /// shorter one.
        cut: ChunkPlan,
        /// The receive's tag, for the log.
        tag: Tag,
    },
    /// The peer puts into a window: answer [`accept`](super::Session::accept) once the memory is at
    /// the operation's disposal, or [`refuse_arrival`](super::Session::refuse_arrival).
    PutArrives {
        /// The transfer.
        transfer: TransferId,
        /// Where it goes.
        covered: Covered,
        /// Its length in bytes.
        bytes: u64,
    },
    /// The peer notifies the program, and every put before it is placed: answer as for a put. Where
    /// the program has not [collected](super::Session::notifications_collected) as many as there is
    /// room for, this waits, and costs the peer's eager credit.
    NotificationArrives {
        /// The transfer.
        transfer: TransferId,
        /// Its length in bytes.
        bytes: u64,
        /// [`Action::DeliverEager`] brings all of it; else it comes in chunks.
        eager: bool,
    },
    /// The peer asks for a piece of a window: answer with a [`send`](super::Session::send) to
    /// [`Destination::Reply`], or [`refuse_get`](super::Session::refuse_get).
    GetArrives {
        /// The peer's number of the request.
        request: u64,
        /// What it asks for.
        covered: Covered,
        /// Its length in bytes.
        bytes: u64,
        /// The completion level that the peer asks for.
        level: Level,
    },
    /// Give the chunk to its channel; answer
    /// [`chunk_sent`](super::Session::chunk_sent) when the source may be reused.
    ///
    /// Per channel these come in sequence order. Chunks of transfers that were cancelled first
    /// are left out.
    PostSend {
        /// The send.
        operation: OperationId,
        /// What to send.
        chunk: Chunk,
        /// Its transfer.
        transfer: TransferId,
        /// The window that an addressed network writes it into.
        window: u64,
        /// Length of the whole transfer in bytes.
        total: u64,
        /// Its tag, for the log.
        tag: Tag,
    },
    /// Post the chunk's destination on its channel; answer
    /// [`chunk_arrived`](super::Session::chunk_arrived), then
    /// [`chunk_placed`](super::Session::chunk_placed). Ordered like `PostSend`.
    PostReceive {
        /// The receive.
        operation: OperationId,
        /// What will arrive.
        chunk: Chunk,
        /// Its transfer.
        transfer: TransferId,
        /// Its tag, for the log.
        tag: Tag,
    },
    /// The peer placed a chunk of a send.
    ChunkAcknowledged {
        /// The send.
        operation: OperationId,
        /// The chunk.
        chunk: Chunk,
    },
    /// A chunk of a send was sent, and whether the peer has placed it will not be heard any more:
    /// no network need keep it, see
    /// [`Config::hold_until_placed`](super::Config::hold_until_placed).
    ChunkDropped {
        /// The chunk.
        chunk: Chunk,
    },
    /// Copy the payload to the start of the receive's destination, ahead of ends that were reached
    /// before; answer [`eager_copied`](super::Session::eager_copied). Of one that its sender
    /// exposes no more the end comes by itself.
    DeliverEager {
        /// The receive.
        operation: OperationId,
        /// At most the receive's capacity.
        payload: Eager,
    },
    /// Compute CRC32C and keyed tag of the first `bytes` bytes of the operation's memory; answer
    /// [`digest`](super::Session::digest). For a send it may be asked while chunks are in flight.
    ComputeDigest {
        /// The operation.
        operation: OperationId,
        /// Length in bytes; may be 0.
        bytes: u64,
    },
    /// Stop every access to the operation's memory; answer
    /// [`data_quiet`](super::Session::data_quiet) when none is left.
    StopData {
        /// The operation.
        operation: OperationId,
    },
    /// As [`Action::StopData`] for an operation that goes on: a posted receive whose window is
    /// closed before its transfer came, or the send that was on its way to such a window. After
    /// [`data_quiet`](super::Session::data_quiet) it begins anew.
    Withdraw {
        /// The operation.
        operation: OperationId,
    },
    /// The peer lacks a lane: dial it, if this side can.
    Redial {
        /// The lane, of the peer's choice.
        lane: u16,
    },
    /// The operation ended; exactly one per operation.
    Complete {
        /// The operation.
        operation: OperationId,
        /// How.
        outcome: Result<Completed, OperationError>,
        /// Whether its memory is free.
        memory: Memory,
    },
    /// The session ended, every operation before it. Transmit what frames it still has as far as
    /// possible, then close.
    Closed {
        /// Why, unless one of the sides closed it in order.
        failure: Option<ConnectionFailure>,
    },
}
