//! What the program asks for.

use std::time::Duration;

use super::Session;
use super::action::{GetRequest, OperationId, ReceiveRequest, SendRequest};
use super::config::{Deadlines, MAX_TRANSFER_BYTES, eager_cost};
use super::error::{ConnectionFailure, EndCause, RequestError};
use super::one_sided::Allowed;
use super::operation::{Digests, End, Operation, Origin, Stage};
use super::output::Ending;
use crate::frame::{
    Destination, Eager, Frame, GoodbyeReason, Level, MAX_SETUP_BYTES, RefuseReason, Role, Tag,
    TransferId,
};
use crate::time::Time;
use crate::window::{Place, Rights, WindowSecret};

impl Session {
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
            self.begin_moving();
        }
    }

    /// Starts a send. An eager payload for which there is no room any more is dropped, and the send
    /// is announced instead.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn send(&mut self, now: Time, request: SendRequest) -> Result<OperationId, RequestError> {
        match request.to {
            // What earlier operations lead to is bounded by them, and a close finishes it.
            Destination::Reply { .. } | Destination::Notification { .. } => {
                if self.ended() || self.goodbye_sent() {
                    return Err(RequestError::Closed);
                }
            }
            _ => self.check_room(Role::Sender, 0)?,
        }
        let SendRequest {
            to,
            bytes,
            level,
            deadlines,
            eager,
            chunk_bytes,
        } = request;
        if bytes > MAX_TRANSFER_BYTES {
            return Err(RequestError::TooLong { bytes });
        }
        if let Some(eager) = &eager
            && eager.bytes() != bytes
        {
            return Err(RequestError::EagerLength {
                bytes,
                payload: eager.bytes(),
            });
        }
        // Those of lists that the operation and its payload count for.
        let (mut pieces, mut carried) = (0, 0);
        let (mut since, mut usual) = (now, self.config.deadlines);
        let origin = match to {
            Destination::Receive { .. } => Origin::Send,
            Destination::Put { to, notified, .. } => {
                carried = self.piece_lists.queue(to, bytes)?;
                pieces = carried;
                Origin::Put { to, notified }
            }
            Destination::Notification { first, count } => Origin::Notification { first, count },
            Destination::Reply { request } => {
                let asked = self.one_sided.peer_gets.remove(&request);
                let (covered, allowed) = asked.ok_or(RequestError::NotAsked { request })?;
                (since, usual) = (allowed.since, allowed.deadlines);
                pieces = covered.pieces();
                Origin::PeerGet { request, covered }
            }
        };
        let is_exposed = matches!(eager, Some(Eager::Exposed(_)));
        let is_bare = is_exposed || self.is_bare(bytes);
        let mut eager = eager.filter(|eager| {
            let goes = match level {
                // The source is the program's again while nobody has read it.
                Level::Sent => !is_exposed,
                Level::Placed => true,
                Level::Verified => !is_bare,
            };
            goes && self.has_credit(eager, carried)
        });
        let tag = to.tag().unwrap_or(Tag(0));
        let mut number = None;
        if eager.is_some() && matches!(origin, Origin::Send) {
            number = self.number_eager(tag, is_bare);
            eager = eager.filter(|_| number.is_some());
        }
        if let Some(eager) = &eager {
            self.eager_used += eager_cost(eager.kept(), carried);
        }
        let kind = origin.kind();
        let deadlines = deadlines.unwrap_or(usual);
        let (operation, it) = self.begin(since, Role::Sender, origin, bytes, level, deadlines);
        it.clock.progressed(now);
        (it.tag, it.pieces) = (tag, pieces);
        it.chunk_bytes = chunk_bytes;
        it.is_counted = kind.is_peers();
        if !kind.has_tag() && !kind.is_peers() {
            self.start_one_sided(operation, eager);
        } else if let Some(eager) = eager {
            let transfer = operation.transfer();
            (it.stage, it.wire) = (Stage::SENT, Some(transfer));
            it.digests.ours = eager.crc32c();
            let to = it.origin.destination(tag, number);
            self.transmit.push_back(eager.frame(transfer, level, to));
        } else if kind.has_tag() {
            self.number_send(operation);
        } else {
            self.ask_peer(operation);
        }
        Ok(operation)
    }

    /// Starts a receive.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn receive(
        &mut self,
        now: Time,
        request: ReceiveRequest,
    ) -> Result<OperationId, RequestError> {
        self.check_room(Role::Receiver, 0)?;
        let ReceiveRequest {
            tag,
            capacity,
            level,
            deadlines,
            fenced,
        } = request;
        let deadlines = deadlines.unwrap_or(self.config.deadlines);
        let origin = Origin::Receive { fenced };
        let (operation, it) = self.begin(now, Role::Receiver, origin, capacity, level, deadlines);
        it.tag = tag;
        match self.matching.pair(tag, Some(operation)) {
            Some((operation, arrival)) => self.match_up(now, operation, arrival),
            None => self.post_receive_soon(operation, capacity, level),
        }
        Ok(operation)
    }

    /// Starts a get: asks for a piece of a window of the peer.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn get(&mut self, now: Time, request: GetRequest) -> Result<OperationId, RequestError> {
        let (operation, _) = self.begin_get(now, request)?;
        self.start_one_sided(operation, None);
        Ok(operation)
    }

    /// Starts a get that this side makes by itself, up to level placed, as the peer exposes what it
    /// is about: answer [`eager_copied`](Self::eager_copied) or [`ask_owner`](Self::ask_owner). The
    /// peer hears nothing of it.
    ///
    /// # Errors
    /// As of [`Self::get`].
    pub fn read(&mut self, now: Time, request: GetRequest) -> Result<OperationId, RequestError> {
        let (operation, it) = self.begin_get(now, request)?;
        it.stage = Stage::SENT;
        Ok(operation)
    }

    /// What was to be [read](Self::read) is not exposed any more: the peer is asked for it.
    pub fn ask_owner(&mut self, now: Time, operation: OperationId) {
        if let Some(it) = self.operations.get_mut(operation)
            && it.is_live()
            && it.is_read()
        {
            it.stage = Stage::Queued;
            it.clock.progressed(now);
            self.start_one_sided(operation, None);
        }
    }

    fn begin_get(
        &mut self,
        now: Time,
        request: GetRequest,
    ) -> Result<(OperationId, &mut Operation), RequestError> {
        self.check_room(Role::Receiver, 0)?;
        let GetRequest {
            from,
            bytes,
            level,
            deadlines,
        } = request;
        if bytes > MAX_TRANSFER_BYTES {
            return Err(RequestError::TooLong { bytes });
        }
        let pieces = self.piece_lists.queue(from, bytes)?;
        let origin = Origin::Get {
            from,
            request: None,
        };
        let deadlines = deadlines.unwrap_or(self.config.deadlines);
        let (operation, it) = self.begin(now, Role::Receiver, origin, bytes, level, deadlines);
        it.pieces = pieces;
        Ok((operation, it))
    }

    /// The start of a window of this side, and its secret.
    pub fn window(&self, window: u64) -> Option<Place> {
        self.one_sided.window(window)
    }

    /// Enters an operation of either side into the table.
    pub(super) fn begin(
        &mut self,
        now: Time,
        role: Role,
        origin: Origin,
        bytes: u64,
        level: Level,
        deadlines: Deadlines,
    ) -> (OperationId, &mut Operation) {
        let operation = self.operations.next_id(role);
        let asked = match role {
            Role::Sender => level,
            Role::Receiver => level.max(Level::Placed),
        };
        let it = Operation {
            origin,
            tag: Tag(0),
            number: None,
            wire: None,
            bytes,
            pieces: 0,
            chunk_bytes: None,
            is_counted: false,
            asked,
            level: asked,
            is_begun: false,
            has_asked: false,
            offered: None,
            digests: Digests::default(),
            clock: self.timers.begin(now, operation, deadlines),
            stage: Stage::Queued,
            end: End::Open,
        };
        (operation, self.operations.insert(operation, it))
    }

    /// Opens a window of so many bytes to the peer; its number.
    pub fn expose(&mut self, secret: WindowSecret, bytes: u64, rights: Rights) -> u64 {
        self.one_sided.expose(secret, bytes, rights)
    }

    /// Closes a window: the peer starts nothing there any more. What is under way ends early where
    /// the network can cancel, else by itself; every operation ends as ever.
    pub fn revoke(&mut self, now: Time, window: u64) {
        let Some((unaccepted, unanswered)) = self.one_sided.revoke(window) else {
            return;
        };
        for transfer in unaccepted {
            self.refuse_arrival(transfer, RefuseReason::UnknownWindow);
        }
        for request in unanswered {
            self.refuse_get(request, RefuseReason::UnknownWindow);
        }
        if !self.config.cancellable {
            return;
        }
        let is_there = |it: &Operation| {
            let covered = it.origin.covered();
            covered.is_some_and(|covered| covered.names(window))
        };
        let running = self.operations.iter().filter(|(_, it)| is_there(it));
        let running: Vec<_> = running.map(|(operation, _)| operation).collect();
        for operation in running {
            self.cancel_operation(now, operation, EndCause::Revoked);
        }
    }

    /// Takes a put or a notification of the peer, whose memory is there now. `None` when it ended
    /// meanwhile.
    pub fn accept(&mut self, now: Time, transfer: TransferId) -> Option<OperationId> {
        let (arrival, origin, allowed) = self.one_sided.arrivals.remove(&transfer)?;
        let (bytes, pieces) = (arrival.bytes, origin.covered().map_or(0, |of| of.pieces()));
        let (role, level) = (Role::Receiver, Level::Placed);
        let Allowed { since, deadlines } = allowed;
        let (operation, it) = self.begin(since, role, origin, bytes, level, deadlines);
        (it.pieces, it.is_counted) = (pieces, true);
        self.match_up(now, operation, arrival);
        Some(operation)
    }

    /// Whether a put or a notification of the peer is yet to be accepted.
    pub fn waits(&self, transfer: TransferId) -> bool {
        self.one_sided.arrivals.contains_key(&transfer)
    }

    /// Refuses a put or a notification of the peer that was not accepted.
    pub fn refuse_arrival(&mut self, transfer: TransferId, reason: RefuseReason) {
        if let Some(arrival) = self.take_arrival(transfer) {
            self.refuse(arrival, reason);
        }
    }

    /// Refuses a get of the peer that was not answered.
    pub fn refuse_get(&mut self, request: u64, reason: RefuseReason) {
        if let Some((covered, _)) = self.one_sided.peer_gets.remove(&request) {
            let kind = super::OperationKind::PeerGet;
            self.taken.end(kind, covered.pieces());
            self.transmit
                .push_back(Frame::RefuseGet { request, reason });
        }
    }

    /// Says something to the peer now, a heartbeat ahead of its time if there is nothing else: what
    /// the peer's system makes of it tells whether the way to it still works.
    pub fn probe(&mut self, now: Time) {
        if !self.ended() {
            self.beat(now);
        }
    }

    /// Asks the peer to dial a lane that this side lacks and cannot dial.
    pub fn ask_for_lane(&mut self, lane: u16) {
        if !self.ended() {
            self.transmit.push_back(Frame::Redial { lane });
        }
    }

    /// Closes in order: receives that match nothing end, transfers under way are finished and
    /// acknowledged, then the peer is told. [`Action::Closed`](super::Action::Closed) follows;
    /// after `limit` it ends what is left. Where it closes already, it takes the longer time of
    /// both.
    pub fn close(&mut self, now: Time, limit: Duration) {
        match &mut self.ending {
            Ending::Open => {}
            Ending::Closing { until, .. } => {
                *until = (now + limit).max(*until);
                return;
            }
            Ending::Ended { .. } => return,
        }
        self.ending = Ending::Closing {
            since: now,
            until: now + limit,
            goodbye_sent: false,
        };
        for arrival in self.matching.take_arrivals() {
            self.refuse(arrival, RefuseReason::Shutdown);
        }
        let (unaccepted, unanswered) = self.one_sided.unanswered();
        for transfer in unaccepted {
            self.refuse_arrival(transfer, RefuseReason::Shutdown);
        }
        for request in unanswered {
            self.refuse_get(request, RefuseReason::Shutdown);
        }
        let waits =
            |it: &Operation| matches!(it.origin, Origin::Receive { .. }) && !it.is_matched();
        let waiting = self.operations.half(Role::Receiver).iter();
        let waiting = waiting.filter(|(_, it)| waits(it));
        let mut waiting: Vec<_> = waiting.map(|(operation, _)| *operation).collect();
        waiting.sort_unstable();
        for operation in waiting {
            self.cancel_operation(now, operation, EndCause::Closed);
        }
    }

    /// The connection is lost. Operations whose memory the data plane may still touch get
    /// [`Action::StopData`](super::Action::StopData) and end with [`Session::data_quiet`] (after
    /// [`Config::cancel_timeout`](super::Config::cancel_timeout) at the latest, then with
    /// [`Memory::Held`](super::Memory::Held)); all others end at once.
    /// [`Action::Closed`](super::Action::Closed) is the last action.
    pub fn fail(&mut self, now: Time, failure: ConnectionFailure) {
        if self.ended() {
            return;
        }
        match &failure {
            ConnectionFailure::Control { .. } => self.transmit.clear(),
            _ if self.goodbye_sent() => {}
            failure => {
                let reason = match failure {
                    ConnectionFailure::CloseTimedOut { .. } => GoodbyeReason::Shutdown,
                    _ => GoodbyeReason::Error,
                };
                let detail = failure.to_string().into();
                self.transmit.push_back(Frame::Goodbye { reason, detail });
            }
        }
        let cause = EndCause::ConnectionLost {
            failure: failure.clone(),
            standing: None,
        };
        self.end_all(now, &cause, Some(failure));
    }
}
