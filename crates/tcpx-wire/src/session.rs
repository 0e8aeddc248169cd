//! The state machine of one connection: matching, grants, windows, acknowledgements, deadlines.
//!
//! A [`Session`] sees no socket and no clock. Its caller feeds it requests, the peer's frames, the
//! data plane's reports and the time, then takes out frames and actions ([`Session::poll`]) until
//! there is none, and calls again at [`Session::next_timeout`]. Any call may produce both, `poll`
//! included.
//!
//! Each side sends and receives. Send number n of a tag meets receive number n; both sides count.
//! On an addressed network a receive is posted: its window is open, and the send of its number
//! writes there at once. A send that knows no window waits, and is granted one as soon as its
//! receive is there. On an ordered network every send is granted; the chunks of granted transfers
//! form one stream per direction in grant order, and both sides post them to the data channels in
//! that order. Chunks that are placed at their destination are acknowledged. Small transfers travel
//! whole in a frame (eager) within the receiver's credit.
//!
//! Besides, each side may write into windows of the other and read from them (one-sided transfers).
//!
//! Every operation ends with exactly one [`Action::Complete`], and not before the data plane lets
//! go of its memory, except where [`Memory::Held`] says otherwise.

mod action;
mod chunk_set;
mod config;
mod ends;
mod error;
mod frames;
mod limits;
mod matching;
mod one_sided;
mod operation;
mod output;
mod piece_lists;
mod reports;
mod requests;
mod stall;
mod stream;
#[cfg(test)]
mod tests;

pub use action::{
    Action, Chunk, Completed, Covered, GetRequest, Memory, OperationId, ReceiveRequest, SendRequest,
};
pub use config::{
    Agreed, CHUNK_GRAIN_BYTES, Config, Deadlines, MAX_EXPOSED_BYTES, MAX_NOTIFICATION_BYTES,
    MAX_TRANSFER_BYTES, SessionBounds,
};
pub use error::{
    ConnectionFailure, DataFailure, Delivered, EndCause, OperationError, RequestError, SessionError,
};
pub use output::{Output, Takes, Waiting};
pub use stall::{OperationKind, OperationState, Owes, StallReport};

use std::collections::VecDeque;
use std::time::Duration;

use limits::{Posting, SendWindows, UnderWay};
use matching::Matching;
use one_sided::OneSided;
use operation::{Table, Timers};
use output::{Acks, Ending, Liveness, Outbox};
use piece_lists::PieceLists;
use stream::ChunkStream;

use crate::frame::{Frame, Limits, TransferId};
use crate::time::Time;

/// One side of a connection after the handshake.
#[derive(Debug)]
pub struct Session {
    config: Config,
    agreed: Option<Agreed>,
    local_ready: bool,
    peer_ready: bool,
    ending: Ending,
    liveness: Liveness,
    timers: Timers,
    transmit: Outbox,
    actions: VecDeque<Action>,

    operations: Table,
    /// Chunks from here and to here, by this side's part.
    streams: [ChunkStream; 2],
    /// One behind the highest name of a transfer of the peer.
    next_arrival: u64,
    matching: Matching,
    one_sided: OneSided,
    /// Operations of this side that the peer counts, and of the peer that this side does.
    asked: UnderWay,
    taken: UnderWay,
    piece_lists: PieceLists,
    /// Windows of this side's receives, and of the peer's.
    posting: Posting,
    send_windows: SendWindows,
    /// What comes out before anything else.
    urgent: VecDeque<Action>,
    acks: Acks,
    /// Bytes of the peer's eager credit in use.
    eager_used: u64,
    /// Eager bytes of the peer that this side holds.
    eager_held: u64,
    /// Eager bytes that left this side's buffer and were not yet given back.
    credit_owed: u64,
}

impl Session {
    /// A session whose first frame, the settings, waits for transmission.
    ///
    /// # Errors
    /// When a setting is out of bounds.
    pub fn new(config: Config, now: Time) -> Result<Self, SessionError> {
        Agreed::new(&config.ours, &config.ours)?;
        let interval = Duration::from_millis(config.ours.heartbeat_ms.into());
        let dead_after = Duration::from_millis(config.ours.dead_after_ms.into());
        Ok(Self {
            agreed: None,
            local_ready: false,
            peer_ready: false,
            ending: Ending::Open,
            liveness: Liveness::new(now, interval, dead_after),
            timers: Timers::default(),
            transmit: Outbox::new(Frame::from(config.ours.clone()), config.addressed),
            actions: VecDeque::new(),
            operations: Table::default(),
            streams: [(); 2].map(|()| ChunkStream::new(config.addressed, config.bounds.turn_bytes)),
            next_arrival: 0,
            matching: Matching::default(),
            one_sided: OneSided::default(),
            asked: UnderWay::default(),
            taken: UnderWay::default(),
            piece_lists: PieceLists::default(),
            posting: Posting::default(),
            send_windows: SendWindows::default(),
            urgent: VecDeque::new(),
            acks: Acks::default(),
            eager_used: 0,
            eager_held: 0,
            credit_owed: 0,
            config,
        })
    }

    /// What both sides agreed on; `None` before [`Action::PeerSettings`].
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Those of operations that bring none of their own.
    pub fn deadlines(&self) -> Deadlines {
        self.config.deadlines
    }

    /// What this side takes of the peer at a time.
    pub fn limits(&self) -> &Limits {
        &self.config.ours.limits
    }

    /// Whether chunks may go to the data channels.
    fn may_post(&self) -> bool {
        self.local_ready && self.peer_ready && !self.ended()
    }
}

/// What a frame can be about.
const LIVE: &str = "a live transfer";

/// A frame about a transfer that it cannot be about.
fn is_not(frame: &'static str, expected: &'static str, transfer: TransferId) -> SessionError {
    unexpected(frame, expected, format!("transfer {transfer} is not"))
}

fn unexpected(
    frame: &'static str,
    expected: &'static str,
    found: impl Into<String>,
) -> SessionError {
    SessionError::Unexpected {
        frame,
        expected,
        found: found.into(),
    }
}
