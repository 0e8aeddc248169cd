//! The state machine of one connection: matching, grants, windows, acknowledgements, deadlines.
//!
//! A [`Session`] sees no socket and no clock. Its caller feeds it requests, the peer's frames, the
//! data plane's reports and the time, then takes out frames ([`Session::poll_transmit`]) and
//! actions ([`Session::poll_action`]) until both are empty, and calls again at
//! [`Session::next_timeout`]. Any call may produce both, `poll_transmit` included.
//!
//! Each side sends and receives. Send number n of a tag meets receive number n; both sides count. On an
//! addressed network a receive is posted: its window is open, and the send of its number writes there
//! at once. A send that knows no window waits, and is granted one as soon as its receive is there. On an
//! ordered network every send is granted; the chunks of granted transfers form one stream per direction in grant
//! order, and both sides post them to the data channels in that order. Chunks that are placed at
//! their destination are acknowledged. Small transfers travel whole in a frame (eager) within the
//! receiver's credit.
//!
//! Besides, each side may write into windows of the other and read from them (one-sided transfers).
//!
//! Every operation ends with exactly one [`Action::Complete`], and not before the data plane lets
//! go of its memory, except where [`Memory::Held`] says otherwise.

mod acks;
mod action;
mod cancel;
mod chunk_set;
mod clock;
mod config;
mod credit;
mod ending;
mod error;
mod frames;
mod incoming;
mod liveness;
mod matching;
mod offers;
mod one_sided;
mod outgoing;
mod piece_lists;
mod posted;
mod posting;
mod replies;
mod send_windows;
mod settle;
mod stall;
mod standing;
mod stream;
#[cfg(test)]
mod tests;
mod waiting;

pub use action::{
    Action, Chunk, Completed, Covered, GetRequest, Memory, OperationId, ReceiveRequest, SendRequest,
};
pub use config::{
    Agreed, CHUNK_GRAIN_BYTES, Config, Deadlines, MAX_NOTIFICATION_BYTES, MAX_TRANSFER_BYTES,
};
pub use error::{
    ConnectionFailure, DataFailure, Delivered, EndCause, OperationError, RequestError, SessionError,
};
pub use stall::{OperationKind, OperationState, Owes, StallReport};
pub use waiting::Waiting;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use acks::Acks;
use clock::Timers;
use credit::UnderWay;
use ending::Ending;
use incoming::Incoming;
use liveness::Liveness;
use matching::Matching;
use one_sided::OneSided;
use outgoing::Outgoing;
use piece_lists::PieceLists;
use posted::Posting;
use send_windows::SendWindows;
use stream::ChunkStream;
use waiting::Outbox;

use crate::frame::{Frame, Limits, MAX_SETUP_BYTES, TransferId};
use crate::numbered::Numbered;
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

    sends: Numbered<TransferId, Outgoing>,
    next_send: u64,
    send_stream: ChunkStream,
    /// Bytes of the peer's eager credit in use.
    eager_used: u64,

    receives: Numbered<OperationId, Incoming>,
    /// Receives by the transfer they matched.
    by_transfer: BTreeMap<TransferId, OperationId>,
    next_receive: u64,
    next_arrival: u64,
    receive_stream: ChunkStream,
    matching: Matching,
    one_sided: OneSided,
    /// One-sided operations of this side that the peer counts, and of the peer that this side does.
    asked: UnderWay,
    taken: UnderWay,
    piece_lists: PieceLists,
    /// Windows of this side's receives, and of the peer's.
    posting: Posting,
    send_windows: SendWindows,
    /// See [`Self::poll_urgent`].
    urgent: VecDeque<Action>,
    acks: Acks,
    /// Eager bytes of the peer that this side holds.
    eager_held: u64,
    /// Eager bytes that left this side's buffer and were not yet given back.
    credit_owed: u64,
    /// See [`Self::set_continues`].
    continues: bool,
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
            transmit: Outbox::new(Frame::Settings(config.ours.clone()), config.addressed),
            actions: VecDeque::new(),
            sends: Numbered::default(),
            next_send: 0,
            send_stream: ChunkStream::default(),
            eager_used: 0,
            receives: Numbered::default(),
            by_transfer: BTreeMap::new(),
            next_receive: 0,
            next_arrival: 0,
            receive_stream: ChunkStream::default(),
            matching: Matching::default(),
            one_sided: OneSided::default(),
            asked: UnderWay::default(),
            taken: UnderWay::default(),
            piece_lists: PieceLists::default(),
            posting: Posting::default(),
            send_windows: SendWindows::default(),
            urgent: VecDeque::new(),
            acks: Acks::default(),
            eager_held: 0,
            credit_owed: 0,
            continues: false,
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

    /// Sends a set-up advertisement of the network.
    ///
    /// # Errors
    /// When the payload is longer than [`MAX_SETUP_BYTES`], or the
    /// session ended.
    pub fn setup(&mut self, payload: Vec<u8>) -> Result<(), RequestError> {
        if self.closing() {
            return Err(RequestError::Closed);
        }
        if payload.len() > MAX_SETUP_BYTES {
            return Err(RequestError::SetupLength {
                bytes: payload.len(),
                most: MAX_SETUP_BYTES,
            });
        }
        self.transmit.push_back(Frame::Setup { payload });
        Ok(())
    }

    /// The data channels of this side are up. Chunks are posted once both sides said so.
    pub fn ready(&mut self) {
        if !self.ended() && !std::mem::replace(&mut self.local_ready, true) {
            self.transmit.push_back(Frame::Ready);
            self.pump_sends();
            self.pump_receives();
            self.post_candidates();
        }
    }

    /// Whether a payload of this length may travel eagerly now: beside other sends one of half the limit at most.
    pub fn eager_allowed(&self, bytes: u64) -> bool {
        self.has_credit(bytes, 0)
    }

    /// The same, of a payload for so many pieces of a list.
    fn has_credit(&self, bytes: u64, pieces: u32) -> bool {
        self.agreed.is_some_and(|agreed| {
            let free = u64::from(agreed.eager_credit).saturating_sub(self.eager_used);
            let limit = match self.sends.is_empty() {
                true => agreed.eager_limit,
                false => agreed.eager_beside(),
            };
            limit > 0 && bytes <= limit.into() && config::eager_cost(bytes, pieces) <= free
        })
    }

    /// Ends an operation early. It still ends with one [`Action::Complete`], successfully when the
    /// peer had already placed everything. An ended operation is left alone.
    pub fn cancel(&mut self, now: Time, operation: OperationId) {
        self.cancel_operation(now, operation, EndCause::Cancelled);
    }

    /// The source of a posted chunk may be reused.
    pub fn chunk_sent(&mut self, now: Time, operation: OperationId, index: u32) {
        if let Some(transfer) = operation.sent_transfer() {
            self.send_chunk_sent(now, transfer, index);
        }
    }

    /// Chunks have come to the window of a receive, be it in part. Before [`data_quiet`](Self::data_quiet), so that its
    /// end does not say that nothing was written.
    pub fn window_touched(&mut self, operation: OperationId) {
        if let Some(receive) = self.receives.get_mut(&operation) {
            receive.touched = true;
        }
    }

    /// Answer to [`Action::ComputeDigest`].
    pub fn digest(&mut self, now: Time, operation: OperationId, crc32c: u32) {
        match operation.sent_transfer() {
            Some(transfer) => self.send_digest(now, transfer, crc32c),
            None => self.receive_digest(now, operation, crc32c),
        }
    }

    /// What is to be done before anything else: windows to open, before any frame leaves, and eager messages to
    /// deliver, ahead of sends that have ended.
    pub fn poll_urgent(&mut self) -> Option<Action> {
        self.urgent.pop_front()
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        if let Some(urgent) = self.urgent.pop_front() {
            return Some(urgent);
        }
        if self.actions.is_empty() {
            self.report_closed();
        }
        self.actions.pop_front()
    }

    /// Whether something is left to do.
    pub fn has_actions(&self) -> bool {
        !(self.urgent.is_empty() && self.actions.is_empty())
    }

    /// When [`Session::handle_timeout`] is due, at the latest. May come earlier than needed.
    pub fn next_timeout(&self) -> Option<Time> {
        let at = |due: Option<Time>| due.unwrap_or(Time::MAX);
        let mut due = at(self.timers.first());
        if !self.ended() {
            due = due.min(at(self.acks.due)).min(at(self.close_due()));
            due = due.min(self.liveness.next_due());
        }
        (due < Time::MAX).then_some(due)
    }

    /// Does what time brings: deadlines, delayed acknowledgements, heartbeats.
    pub fn handle_timeout(&mut self, now: Time) {
        if !self.ended() {
            self.check_liveness(now);
        }
        while let Some(operation) = self.timers.take_due(now) {
            self.expire(now, operation);
        }
        if self.ended() {
            return;
        }
        if self.check_close(now) {
            return;
        }
        if self.acks.ready(now) {
            self.flush_acks();
        }
    }

    /// Whether chunks may go to the data channels.
    fn may_post(&self) -> bool {
        self.local_ready && self.peer_ready && !self.ended()
    }

    /// Whether so many sends, puts and notifications, and receives and gets, may start now.
    ///
    /// # Errors
    /// The first bound that does not allow it.
    pub fn check_rooms(&self, sends: usize, receives: usize) -> Result<(), RequestError> {
        for (more, outstanding) in [(sends, self.own_sends()), (receives, self.own_receives())] {
            if more > 0 {
                self.check_room(outstanding.saturating_add(more - 1))?;
            }
        }
        Ok(())
    }

    /// Whether what starts now belongs to something that runs, which a close waits for.
    pub fn set_continues(&mut self, continues: bool) {
        self.continues = continues;
    }

    /// Without answers to gets of the peer.
    fn own_sends(&self) -> usize {
        self.sends.len() - self.one_sided.replies()
    }

    /// Without what the peer began.
    fn own_receives(&self) -> usize {
        self.receives.len() - self.one_sided.peers()
    }

    fn check_room(&self, outstanding: usize) -> Result<(), RequestError> {
        if self.closing() && (!self.continues || self.ended() || self.goodbye_sent()) {
            return Err(RequestError::Closed);
        }
        let limit = self.config.max_operations;
        if outstanding >= limit {
            return Err(RequestError::Full { limit });
        }
        Ok(())
    }
}

/// A frame for a transfer that does not exist.
fn unknown(frame: &'static str, transfer: TransferId) -> SessionError {
    unexpected(frame, "a live transfer", format!("{transfer} is not"))
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
