//! The channel: what every network offers the engine for moving chunks.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

pub use tcpx_lanes::dial::Way;
use tcpx_lanes::event_loop::Loop;
use tcpx_memory::{BouncePool, Fence, MemoryKind, ReadUntilWritten, RegionSlice};
use tcpx_status::LaneReport;
use tcpx_wire::frame::Exposure;
use tcpx_wire::{ChunkPlan, Place, ScatterList};

use crate::error::ChannelError;
pub use crate::tcp::{Exposed, PeerRead};

/// One chunk to send.
#[derive(Debug)]
pub struct SendChunk {
    /// The engine's name for this request; comes back in its [`Completion`].
    pub token: u64,
    /// Place among the chunks to the peer. On an ordered network the peer counts the same way.
    pub sequence: u64,
    /// The transfer that this chunk belongs to.
    pub transfer: u64,
    /// Offset of the chunk in its transfer, in bytes.
    pub offset: u64,
    /// Counts the chunks of its transfer from 0.
    pub index: u32,
    /// Length of the transfer in bytes.
    pub total: u64,
    /// The window of the peer that an addressed network writes it into.
    pub window: u64,
    /// The transfer's tag; networks that carry tags pass it on, others log it.
    pub tag: u64,
    /// The bytes. The channel keeps this reference until it reports the request's end.
    pub source: RegionSlice,
    /// What the read of `source` must wait for on the GPU.
    pub fence: Option<Fence>,
}

/// Memory that is open to the chunks of one transfer, which name it.
#[derive(Debug)]
pub struct ReceiveWindow {
    /// The engine's name for this request; comes back in its [`Completion`]s.
    pub token: u64,
    /// What the chunks call it; names increase.
    pub window: u64,
    /// How a transfer that fills it is cut; [`ChunkPlan::for_total`] says it of a shorter one.
    pub cut: ChunkPlan,
    /// Where the bytes go; exactly as long as a transfer that fills it.
    pub destination: RegionSlice,
    /// What the write to `destination` must wait for on the GPU.
    pub fence: Option<Fence>,
}

/// One chunk to receive on an ordered network.
#[derive(Debug)]
pub struct ReceiveChunk {
    /// The engine's name for this request; comes back in its [`Completion`].
    pub token: u64,
    /// Place in the direction's stream of chunks; both sides count the same way.
    pub sequence: u64,
    /// The transfer that this chunk belongs to.
    pub transfer: u64,
    /// Offset of the chunk in its transfer, in bytes.
    pub offset: u64,
    /// The transfer's tag; networks that carry tags pass it on, others log it.
    pub tag: u64,
    /// Where the bytes go; exactly as long as the chunk.
    pub destination: RegionSlice,
    /// What the write to `destination` must wait for on the GPU.
    pub fence: Option<Fence>,
}

/// Names the pool space of one scattered receive until [`Channel::consume`] gives it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Where the bytes of a finished receive are.
#[derive(Debug)]
pub enum Payload {
    /// All bytes are at the destination; GPU copies have completed.
    InPlace {
        /// Bytes received.
        bytes: u64,
    },
    /// The bytes lie in a bounce pool and must be unpacked, then consumed.
    Scattered {
        /// The pool that the list's source offsets count in.
        pool: Arc<BouncePool>,
        /// The fragments; their total equals `bytes`, and the list is empty only for 0 bytes.
        list: ScatterList,
        /// Bytes of this list; with those of the request's [`Completion::Part`]s, all that was
        /// received.
        bytes: u64,
        /// Give this to [`Channel::consume`] once the bytes have been unpacked.
        ticket: Ticket,
    },
}

/// News of a channel, most of them the end of one request. Each accepted request ends exactly once,
/// except one whose [`Channel::cancel`] answered [`Cancel::Done`].
#[derive(Debug)]
pub enum Completion {
    /// The source may be reused. Where the network may have to send the chunk again and reads the
    /// source itself, that is after [`Channel::placed`]; else it says nothing about the peer.
    Sent {
        /// The request.
        token: u64,
    },
    /// Some bytes of a receive lie in a pool, and the rest follows. Unpack and consume them without
    /// waiting for it: the pool may have no room for more, or the rest lies in another pool. The
    /// request is still in flight; it ends as [`Payload::Scattered`] or fails.
    Part {
        /// The request.
        token: u64,
        /// The pool that the list's source offsets count in.
        pool: Arc<BouncePool>,
        /// The fragments; their destination offsets count in the whole chunk.
        list: ScatterList,
        /// Give this to [`Channel::consume`] once the bytes have been unpacked.
        ticket: Ticket,
    },
    /// From now on the channel's bytes take another path than [`Channel::describe`] said at first.
    /// Nothing was lost; a person should know once.
    PathChanged {
        /// The path, as [`Channel::describe`] says it now.
        path: String,
        /// Why, and what to do.
        why: String,
    },
    /// The chunk has arrived.
    Received {
        /// The request.
        token: u64,
        /// Where they are.
        payload: Payload,
    },
    /// A transfer has come to a window: the header of one of its chunks is there, and the payload
    /// follows. Said before anything else of the transfer, though nobody is woken for it: who waits
    /// has something to do when bytes are there.
    Begun {
        /// The window's request.
        token: u64,
        /// How it is cut.
        cut: ChunkPlan,
    },
    /// A chunk of a window's transfer is at its destination.
    Placed {
        /// The window's request.
        token: u64,
        /// Counts the chunks of the transfer from 0.
        index: u32,
        /// Offset of the chunk in its transfer, in bytes.
        offset: u64,
        /// Its length in bytes.
        bytes: u32,
    },
    /// A chunk of a window's transfer came, and could not be placed. The window is still open.
    NotPlaced {
        /// The window's request.
        token: u64,
        /// Counts the chunks of the transfer from 0.
        index: u32,
        /// Why.
        error: ChannelError,
    },
    /// A window is closed, after its last chunk or by [`Channel::cancel`]. Nothing points at its
    /// memory any more.
    Closed {
        /// The window's request.
        token: u64,
        /// Chunks have come to it, be it in part: its memory may have been written.
        touched: bool,
    },
    /// A lane is missing that only the peer can dial: it is to be asked. Said again while it is
    /// missing.
    LaneMissing {
        /// The lane.
        lane: u16,
    },
    /// The request will not finish. Nothing points at its memory any more.
    Failed {
        /// The request.
        token: u64,
        /// Why.
        error: ChannelError,
    },
}

impl Completion {
    /// Whether it is the end of this request.
    pub fn ends(&self, request: u64) -> bool {
        match self {
            Self::Sent { token } | Self::Received { token, .. } | Self::Failed { token, .. } => {
                *token == request
            }
            Self::Closed { token, .. } => *token == request,
            Self::Part { .. }
            | Self::PathChanged { .. }
            | Self::LaneMissing { .. }
            | Self::Begun { .. }
            | Self::Placed { .. }
            | Self::NotPlaced { .. } => false,
        }
    }
}

/// The answer to a post.
#[derive(Debug)]
#[must_use = "a chunk that came back was not posted"]
pub enum PostAnswer<T> {
    /// The channel took the chunk.
    Accepted,
    /// The window is full; here is the chunk. Post it again after the next completion.
    Full(T),
}

/// How to learn that [`Channel::poll`] has something to say.
#[derive(Debug)]
pub enum Readiness<'a> {
    /// Readable while completions wait; `poll` clears it.
    Fd(BorrowedFd<'a>),
    /// There is no descriptor; poll while requests are in flight.
    PollOnly,
}

/// A call that closes a part of a channel and has not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingClose {
    /// The plugin's function.
    pub call: &'static str,
    /// When it was called.
    pub since: Instant,
}

/// The answer to [`Channel::cancel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancel {
    /// The request is gone, nothing points at its memory, and no completion follows.
    /// Also the answer for a token that is not in flight.
    Done,
    /// A completion follows: [`ChannelError::Cancelled`], or the normal one if that was faster.
    Pending,
    /// This network cannot take the request back; close the channel to get its memory back.
    Unsupported,
}

/// Counters since the channel was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Payload bytes handed to the network; not those of gets that a peer on the same host makes by
    /// itself.
    pub bytes_sent: u64,
    /// Payload bytes taken from the network.
    pub bytes_received: u64,
    /// Chunks sent to their last byte.
    pub chunks_sent: u64,
    /// Chunks received to their last byte.
    pub chunks_received: u64,
    /// Bytes of cancelled or repeated chunks that were read and dropped.
    pub bytes_discarded: u64,
    /// Received bytes that a network card left in a bounce pool; the rest passed through the CPU.
    pub bytes_in_pool: u64,
    /// Payload bytes that were sent by references to their pages, without a copy.
    pub bytes_spliced: u64,
    /// Lanes that died; 0 for networks without lanes.
    pub lanes_lost: u64,
    /// Lanes that came back.
    pub lanes_restored: u64,
    /// Chunks sent again because the lane that had them died.
    pub chunks_resent: u64,
    /// Lanes that ended because something had changed what the peer sealed.
    pub lanes_forged: u64,
    /// TCP streams that are open now; 0 for networks whose streams are out of sight.
    pub streams: u64,
    /// Payload bytes of TCP that the kernel sent on the channel's open streams, sent again or not;
    /// chunk headers count. 0 for networks whose streams are out of sight.
    pub tcp_bytes_sent: u64,
    /// Payload bytes of TCP that the kernel received on the channel's open streams.
    pub tcp_bytes_received: u64,
    /// The same as of the connection's control stream, which small messages travel on; 0 for a
    /// channel alone.
    pub control_bytes_sent: u64,
    /// The same, received.
    pub control_bytes_received: u64,
}

/// Which way chunks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the peer.
    Out,
    /// From the peer.
    In,
}

/// A path for chunks between two processes.
///
/// One thread owns a channel. No method blocks, except that [`poll`](Self::poll) of a poll-only
/// network may spend the time of one call into its plugin.
pub trait Channel: Send + Debug {
    /// Queues a chunk for sending. Post in sequence order.
    ///
    /// # Errors
    /// The channel is broken or closed, or the chunk is none that it can take. It is not in flight
    /// then.
    fn post_send(&mut self, chunk: SendChunk) -> Result<PostAnswer<SendChunk>, ChannelError>;

    /// Opens a window, on a network that [is addressed](crate::Features::is_addressed). It ends
    /// with [`Completion::Closed`], and is none of [`in_flight`](Self::in_flight) before
    /// [`Completion::Begun`].
    ///
    /// # Errors
    /// The channel is broken or closed, its memory is none that it can reach, or the network is not
    /// addressed. The window is not open then.
    fn open_window(&mut self, window: ReceiveWindow) -> Result<(), ChannelError> {
        Err(ChannelError::BadRequest {
            channel: self.describe(),
            reason: format!(
                "window {} was opened on a network that is ordered; post receives",
                window.window
            ),
        })
    }

    /// Queues a destination for the chunk of this sequence, on an ordered network. Post in sequence
    /// order.
    ///
    /// # Errors
    /// The channel is broken or closed, or the chunk is none that it can take. It is not in flight
    /// then.
    fn post_receive(
        &mut self,
        chunk: ReceiveChunk,
    ) -> Result<PostAnswer<ReceiveChunk>, ChannelError>;

    /// Appends the requests that have ended since the last call.
    ///
    /// # Errors
    /// The channel is broken. Completions found before are in `out` all the same; the rest of the
    /// requests stay in flight until [`close`](Self::close), after which `poll` returns `Ok` again
    /// and reports them failed.
    fn poll(&mut self, out: &mut Vec<Completion>) -> Result<(), ChannelError>;

    /// Gives the pool space of a scattered receive back. On an ordered network
    /// tickets must come back in the order in which they were handed out. A ticket that comes back
    /// as [`PostAnswer::Full`] cannot be taken now and is offered again.
    ///
    /// # Errors
    /// The ticket is unknown or out of order, or the network refused it.
    fn consume(&mut self, ticket: Ticket) -> Result<PostAnswer<Ticket>, ChannelError>;

    /// Takes the list of a scattered receive back, so that a later one needs no new memory.
    /// Optional for both sides.
    fn recycle(&mut self, _list: ScatterList) {}

    /// Takes a request back.
    fn cancel(&mut self, token: u64) -> Cancel;

    /// Says that the peer has placed the chunk of this sequence: it will not have to be sent again.
    /// A network that can send again keeps each chunk until then, and with it its place among those
    /// in flight. Sequences that it does not keep are no error; networks that keep nothing ignore
    /// it.
    ///
    /// # Errors
    /// [`ChannelError::Protocol`] when no byte of the chunk was sent yet: the peer cannot have it.
    fn placed(&mut self, sequence: u64) -> Result<(), ChannelError> {
        self.forget(sequence);
        Ok(())
    }

    /// Says that nobody waits for the chunk of this sequence any more. As [`placed`](Self::placed),
    /// but the chunk need not have been sent, and is not if that has not begun.
    fn forget(&mut self, _sequence: u64) {}

    /// Says that the peer's process was heard on the control connection; `rested`: after a silence
    /// that one at work does not keep. A network may take what does not move meanwhile for broken.
    fn peer_active(&mut self, _rested: bool) {}

    /// The peer lacks this lane and asks for it: one that can be dialled is dialled, unless that
    /// was just done.
    fn redial(&mut self, _lane: u16) {}

    /// How to wait for completions.
    fn readiness(&self) -> Readiness<'_>;

    /// Says whether the owner polls without waiting on [`readiness`](Self::readiness)'s descriptor,
    /// which need not become readable then. What was not polled makes it readable when the owner
    /// stops.
    fn set_looked_for(&mut self, _looked_for: bool) {}

    /// How long the chunks of a transfer from this memory are, if the peer reads it where it lies
    /// and takes them as they come; `None`: as the peer cuts it.
    fn chunk_bytes(&self, _source: &RegionSlice) -> Option<u32> {
        None
    }

    /// Where a payload lies, if the peer reads it there until the second is dropped: before the
    /// memory is anybody's again.
    fn expose(&self, _source: &RegionSlice) -> Option<(Exposure, Exposed)> {
        None
    }

    /// Where a payload of the peer's lies that goes to memory of this kind; `None` where the peer
    /// exposes it no more.
    ///
    /// # Errors
    /// It cannot be read.
    fn find_exposed(&self, _at: &Exposure, _to: MemoryKind) -> io::Result<Option<PeerRead>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The event loop of what goes one at a time, where it serves nothing but this channel and any
    /// thread may lead it.
    fn own_loop(&self) -> Option<Loop> {
        None
    }

    /// Exposes a window to a peer that has shown its secret and may get there, until the result is
    /// dropped or somebody writes to it: what the peer has not read whole by then, it asks for.
    fn expose_window(&self, _window: &Place, _memory: &RegionSlice) -> Option<ReadUntilWritten> {
        None
    }

    /// Where pieces of the peer's windows lie, if all of them are exposed and this side reads them
    /// to there.
    fn find_in_windows(
        &self,
        _pieces: &mut dyn Iterator<Item = (Place, u64)>,
        _into: &RegionSlice,
    ) -> Option<PeerRead> {
        None
    }

    /// Copies some of it, unless it lies in memory of a GPU and was copied. Once it is over,
    /// whether all was read while it was exposed.
    ///
    /// # Errors
    /// It cannot be read.
    fn read_on(&self, _read: &mut PeerRead, _into: &RegionSlice) -> io::Result<Option<bool>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Says that chunks of this many bytes in all, to the peer or from it, will be posted soon:
    /// threads that sleep may be woken for them now, while the peer still prepares.
    fn expect(&mut self, _bytes: u64, _direction: Direction) {}

    /// Requests accepted whose end has not been reported yet.
    fn in_flight(&self) -> usize;

    /// Starts closing. [`poll`](Self::poll) then reports every outstanding request failed.
    fn close(&mut self);

    /// True after [`close`](Self::close) once nothing is in flight and nothing touches memory.
    fn closed(&self) -> bool;

    /// What [`close`](Self::close) began and has not come back: foreign code, which may wait for
    /// the peer's close. [`poll`](Self::poll) takes note of its end, which nothing announces.
    fn pending_close(&self) -> Option<PendingClose> {
        None
    }

    /// A short name for error messages: `tcp, 4 lanes to 10.0.0.2:12345`.
    fn describe(&self) -> String;

    /// Whether the peer's process can still be there, as far as this channel's own connections
    /// tell.
    fn is_alive(&self) -> bool {
        true
    }

    /// Ways to the peer that worked for this channel, best first; this side opened them. A control
    /// connection that breaks may be opened anew over one of them.
    fn ways(&self) -> Vec<Way> {
        Vec::new()
    }

    /// The way that the bytes take, for a person; by default [`describe`](Self::describe).
    fn path(&self) -> String {
        self.describe()
    }

    /// The congestion control of its TCP sockets, as the kernel names it; `None` without such
    /// sockets.
    fn congestion_control(&self) -> Option<String> {
        None
    }

    /// Its open lanes, where it has some, as of channel 0.
    fn lanes(&self) -> Vec<LaneReport> {
        Vec::new()
    }

    /// Counters.
    fn stats(&self) -> ChannelStats;
}

impl std::ops::AddAssign for ChannelStats {
    fn add_assign(&mut self, other: Self) {
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
        self.chunks_sent += other.chunks_sent;
        self.chunks_received += other.chunks_received;
        self.bytes_discarded += other.bytes_discarded;
        self.bytes_in_pool += other.bytes_in_pool;
        self.bytes_spliced += other.bytes_spliced;
        self.lanes_lost += other.lanes_lost;
        self.lanes_restored += other.lanes_restored;
        self.lanes_forged += other.lanes_forged;
        self.chunks_resent += other.chunks_resent;
        self.streams += other.streams;
        self.tcp_bytes_sent += other.tcp_bytes_sent;
        self.tcp_bytes_received += other.tcp_bytes_received;
        self.control_bytes_sent += other.control_bytes_sent;
        self.control_bytes_received += other.control_bytes_received;
    }
}
