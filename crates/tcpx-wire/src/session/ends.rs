//! Ends of operations: success, failures here, deadlines, and cancels of either side, which are a
//! handshake: each side says that the operation ends, and that its data plane is quiet.

use super::Session;
use super::action::{Action, Completed, Memory, OperationId};
use super::config::Config;
use super::error::{
    ConnectionFailure, DataFailure, Delivered, EndCause, OperationError, SessionError,
};
use super::operation::{
    End, Expired, Operation, OperationClock, Origin, Progress, Stage, Stopping,
};
use super::stall::OperationKind;
use super::{LIVE, is_not};
use crate::frame::{CancelReason, Detail, Frame, Level, NumberUse, Role, TransferId};
use crate::time::Time;

/// What tells the peer that a transfer ends early here; nothing where it knows already or cannot be
/// told.
fn cancel_frame(transfer: TransferId, from: Role, cause: &EndCause) -> Option<Frame> {
    let reason = match cause {
        EndCause::Cancelled | EndCause::Revoked => CancelReason::Requested,
        EndCause::Stalled(_) | EndCause::DeadlinePassed(_) => CancelReason::DeadlineExpired,
        EndCause::Data {
            failure: DataFailure::Memory(_),
            ..
        } => CancelReason::MemoryFailed,
        EndCause::Data { .. } => CancelReason::ChannelFailed,
        EndCause::Closed => CancelReason::Shutdown,
        _ => return None,
    };
    let detail = match cause {
        EndCause::Stalled(report) | EndCause::DeadlinePassed(report) => report.to_string(),
        cause => cause.to_string(),
    };
    Some(Frame::Cancel {
        transfer,
        from,
        reason,
        detail: detail.into(),
    })
}

impl Config {
    /// How long an operation that ends early waits for the data plane and for the peer's part.
    fn answer_by(&self, now: Time, clock: &OperationClock, cause: &EndCause) -> Time {
        let soon = now + self.bounds.answer_timeout;
        if !matches!(cause, EndCause::ConnectionLost { .. }) {
            return soon;
        }
        // Channels close for all operations at once, which takes plugins a while.
        let late = now + self.cancel_timeout;
        let deadline = clock.ends_at().map(|end| end + self.bounds.answer_timeout);
        deadline.map_or(late, |deadline| late.min(deadline).max(soon))
    }
}

/// Ends other than success.
impl Session {
    /// Ends an operation early. It still ends with one [`Action::Complete`], successfully when the
    /// peer had already placed everything. An ended operation is left alone.
    pub fn cancel(&mut self, now: Time, operation: OperationId) {
        self.cancel_operation(now, operation, EndCause::Cancelled);
    }

    /// The data plane cannot finish an operation.
    pub fn data_failed(
        &mut self,
        now: Time,
        operation: OperationId,
        chunk: Option<u32>,
        failure: DataFailure,
    ) {
        self.cancel_operation(now, operation, EndCause::Data { chunk, failure });
    }

    /// Starts the early end of an operation, unless it ended or that is under way.
    pub(super) fn cancel_operation(&mut self, now: Time, operation: OperationId, cause: EndCause) {
        let it = self.operations.get(operation);
        if it.is_some_and(Operation::is_live) {
            self.begin_end(now, operation, cause);
        }
    }

    pub(super) fn begin_end(&mut self, now: Time, operation: OperationId, cause: EndCause) {
        let Some(it) = self.operations.get(operation) else {
            return;
        };
        let role = it.role();
        if role == Role::Receiver && !it.is_matched() {
            self.uncount_receive(operation);
            if let Some(arrival) = self.take_offered(operation) {
                // It meets the next receive.
                let met = self.meet(now, arrival, None);
                debug_assert!(met.is_ok());
            }
        }
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let is_busy = it.is_busy();
        let (was_withdrawn, is_matched) = (it.is_withdrawn(), it.is_matched());
        match &mut it.stage {
            Stage::Moving(moving) => {
                let first = moving.plan.first_sequence;
                self.streams[role as usize].drop_from(operation, first);
            }
            Stage::Posted(posted) => posted.closing = true,
            _ if role == Role::Receiver && !is_matched => {
                return self.end_with(operation, Err((cause, Delivered::None)));
            }
            _ => {}
        }
        if is_matched || role == Role::Sender {
            let told = it.wire.and_then(|wire| cancel_frame(wire, role, &cause));
            self.transmit.extend(told);
        }
        let (is_silent, is_reported) = (it.wire.is_none(), it.is_reported());
        let answer_by = self.config.answer_by(now, &it.clock, &cause);
        self.timers.arm(&mut it.clock, operation, answer_by);
        it.end = End::Stopping(Box::new(Stopping {
            cause,
            is_reported,
            is_quiet: false,
            is_peer_quiet: is_silent,
            since: now,
        }));
        if role == Role::Sender {
            // What it has asked before it found its window, the peer may count until it ends.
            let is_in_window = it.wire.is_some_and(|wire| wire.window().is_some());
            if is_silent && !self.ended() {
                self.has_left(operation, NumberUse::Ended);
            }
            if !is_in_window {
                self.waits_no_more(operation);
            }
        }
        if !is_busy {
            self.let_go(now, operation);
        } else {
            if role == Role::Sender || !was_withdrawn {
                self.actions.push_back(Action::StopData { operation });
            }
            self.pump(role);
        }
    }

    /// The data plane has let go of an operation that ends early: gives back what it holds, and
    /// tells the peer.
    fn let_go(&mut self, now: Time, operation: OperationId) {
        let ended = self.ended();
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        let (role, wire) = (it.role(), it.wire);
        let whole_eager = it.moving().is_none() && it.progress(true) != Progress::Going;
        if let Some(stopping) = it.stopping() {
            stopping.is_quiet = true;
        }
        self.release(operation);
        if let Some(transfer) = wire.filter(|_| !ended) {
            if role == Role::Receiver {
                self.flush_acks_of(operation);
                if whole_eager {
                    self.transmit.push_back(Frame::EagerDone { transfer });
                }
            }
            let from = role;
            self.transmit.push_back(Frame::Cancelled { transfer, from });
        }
        self.settle(now, operation);
    }

    /// Answer to [`Action::StopData`] and [`Action::Withdraw`]: nothing points at the operation's
    /// memory any more.
    pub fn data_quiet(&mut self, now: Time, operation: OperationId) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        if it.is_withdrawn() {
            return match it.role() {
                Role::Sender => self.window_left(operation),
                Role::Receiver => self.window_closed(now, operation),
            };
        }
        if it.is_stopping() && !it.is_quiet() {
            self.let_go(now, operation);
        }
    }

    /// The peer, in this part of a transfer, ends it.
    pub(super) fn cancelled_by_peer(
        &mut self,
        now: Time,
        transfer: TransferId,
        from: Role,
        reason: CancelReason,
        detail: &Detail,
    ) -> Result<(), SessionError> {
        self.check_known("cancel", transfer, from)?;
        let cause = EndCause::PeerCancelled {
            from,
            reason,
            detail: detail.to_string(),
        };
        let role = from.other();
        if from == Role::Sender {
            let waiting = self.matching.remove_arrival(transfer);
            if let Some(arrival) = waiting.or_else(|| self.take_arrival(transfer)) {
                self.drop_arrival(&arrival);
            }
        }
        if let Some(operation) = self.operations.named(role, transfer)
            && let Some(arrival) = self.take_offered(operation)
        {
            // Both end, once the data plane has let go of the window that the receive had.
            self.drop_arrival(&arrival);
            self.cancel_operation(now, operation, cause.clone());
        }
        let found = self.operations.find(role, transfer);
        let is_posted = |it: &Operation| matches!(it.stage, Stage::Posted(_));
        let Some((operation, it)) =
            found.filter(|(_, it)| is_posted(it) || it.wire == Some(transfer))
        else {
            // It never started here, it ended here before, or it began anew.
            let from = role;
            self.transmit.push_back(Frame::Cancelled { transfer, from });
            return Ok(());
        };
        if let Some(stopping) = it.stopping() {
            if let EndCause::Stalled(report) | EndCause::DeadlinePassed(report) =
                &mut stopping.cause
            {
                report.peer = Some(detail.to_string());
            }
            return Ok(());
        }
        it.wire = Some(transfer);
        self.begin_end(now, operation, cause);
        Ok(())
    }

    /// The peer's data plane is quiet for a transfer that is cancelled.
    pub(super) fn peer_quiet(
        &mut self,
        now: Time,
        transfer: TransferId,
        from: Role,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "cancelled";
        self.check_known(FRAME, transfer, from)?;
        let role = from.other();
        let found = self.operations.find(role, transfer);
        let is_posted = |it: &Operation| matches!(it.stage, Stage::Posted(_));
        // Else it ended here before the cancel came, or began anew meanwhile.
        let Some((operation, it)) =
            found.filter(|(_, it)| is_posted(it) || it.wire == Some(transfer))
        else {
            return Ok(());
        };
        let Some(stopping) = it.stopping().filter(|stopping| !stopping.is_peer_quiet) else {
            let expected = "a transfer that is being cancelled, once";
            return Err(is_not(FRAME, expected, transfer));
        };
        stopping.is_peer_quiet = true;
        self.settle(now, operation);
        Ok(())
    }

    /// `from` is the peer's part in the transfer.
    fn check_known(
        &self,
        frame: &'static str,
        transfer: TransferId,
        from: Role,
    ) -> Result<(), SessionError> {
        let known = match (from, transfer.window()) {
            (Role::Sender, None) => transfer.0 < self.next_arrival,
            (Role::Receiver, None) => transfer.0 < self.operations.begun(Role::Sender),
            (Role::Sender, Some(window)) => window < self.posting.next_window,
            (Role::Receiver, Some(window)) => self.send_windows.has_named(window),
        };
        match known {
            true => Ok(()),
            false => Err(is_not(frame, LIVE, transfer)),
        }
    }

    /// Gives back what the data plane held of an operation.
    pub(super) fn release(&mut self, operation: OperationId) {
        let role = operation.role();
        let mut credit = 0;
        if let Some(it) = self.operations.get_mut(operation) {
            it.digests.computing = false;
            match &mut it.stage {
                Stage::Moving(moving) => {
                    for index in moving.held() {
                        self.streams[role as usize].release(&moving.plan.chunk(index));
                    }
                    self.streams[role as usize].leave(operation);
                }
                Stage::Eager { credit: held, .. } => credit = std::mem::take(held),
                _ => {}
            }
        }
        self.return_credit(credit);
        self.pump(role);
    }

    /// The network need not keep what was sent of this transfer. The peer takes none of it any
    /// more: until then it may count what arrives, which must be what was sent.
    pub(super) fn drop_sent(&mut self, operation: OperationId) {
        if self.config.hold_until_placed
            && let Some(it) = self.operations.get(operation)
            && let Some(moving) = it.moving()
        {
            for index in moving.passed.difference(&moving.placed) {
                let chunk = moving.plan.chunk(index);
                self.actions.push_back(Action::ChunkDropped { chunk });
            }
        }
    }
}

/// What follows from an operation's state.
impl Session {
    pub(super) fn settle(&mut self, now: Time, operation: OperationId) {
        let Some(it) = self.operations.get(operation) else {
            return;
        };
        // The last frame about an answer to the peer, which it counts no longer then.
        let is_answered = matches!(it.origin, Origin::PeerGet { .. }) && it.is_answered();
        match (it.is_stopping(), it.role()) {
            (true, _) => self.settle_stopping(now, operation, false),
            (false, Role::Sender) => self.settle_send(operation, it.progress(false), it.bytes),
            (false, Role::Receiver) => self.settle_receive(operation),
        }
        if is_answered {
            self.uncount(operation);
        }
    }

    fn settle_send(&mut self, operation: OperationId, progress: Progress, bytes: u64) {
        match progress {
            Progress::Going => {}
            Progress::Done { level, last } => {
                let completed = Completed { bytes, level };
                self.complete(operation, Ok(completed), Memory::Released);
                if last {
                    self.forget(operation);
                }
            }
            Progress::Corrupt { expected, got } => {
                let cause = EndCause::Corrupt { expected, got };
                self.end_with(operation, Err((cause, Delivered::All)));
            }
        }
    }

    /// Does what follows once everything is placed.
    fn settle_receive(&mut self, operation: OperationId) {
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        if it.is_read() && it.all_placed() {
            let (bytes, level) = (it.bytes, Level::Placed);
            return self.end_with(operation, Ok(Completed { bytes, level }));
        }
        let Some(transfer) = it.wire.filter(|_| it.all_placed()) else {
            return;
        };
        let eager = match it.stage {
            Stage::Eager { verdict_wanted, .. } => Some(verdict_wanted),
            _ => None,
        };
        let done = Frame::EagerDone { transfer };
        let bytes = it.bytes;
        if it.level < Level::Verified {
            match (eager, &it.origin) {
                (None, _) => {}
                (Some(_), Origin::Get { .. }) => self.transmit.push_unawaited(done),
                (Some(_), _) => self.transmit.push_back(done),
            }
            let level = Level::Placed;
            return self.end_with(operation, Ok(Completed { bytes, level }));
        }
        match (it.digests.ours, it.digests.theirs) {
            (None, _) if !it.digests.computing => {
                it.digests.computing = true;
                self.actions
                    .push_back(Action::ComputeDigest { operation, bytes });
                self.flush_acks_of(operation);
            }
            (Some(got), Some(expected)) => {
                let matches = got == expected;
                self.flush_acks_of(operation);
                if eager.is_some() && matches {
                    self.transmit.push_back(done);
                }
                if eager.is_none_or(|wanted| wanted || !matches) {
                    self.transmit.push_back(Frame::Verdict {
                        transfer,
                        tag: got,
                        matches,
                    });
                }
                let corrupt = (EndCause::Corrupt { expected, got }, Delivered::All);
                let level = Level::Verified;
                let outcome = match matches {
                    true => Ok(Completed { bytes, level }),
                    false => Err(corrupt),
                };
                self.end_with(operation, outcome);
            }
            _ => {}
        }
    }

    /// `late`: waiting any longer for the peer's part is pointless. Apart from what most operations
    /// come to.
    #[inline(never)]
    fn settle_stopping(&mut self, now: Time, operation: OperationId, late: bool) {
        let ended = self.ended();
        let Some(it) = self.operations.get(operation) else {
            return;
        };
        let (role, progress, delivered) = (it.role(), it.progress(true), it.delivered());
        let End::Stopping(stopping) = &it.end else {
            return;
        };
        if !stopping.is_quiet {
            return;
        }
        // Without a grant nothing was sent; yet an empty transfer may be complete at the peer.
        let is_unsent = match it.stage {
            Stage::Queued => true,
            Stage::Asked => it.bytes > 0,
            _ => false,
        };
        let is_peer_quiet = stopping.is_peer_quiet;
        let is_over = is_peer_quiet || ended;
        let is_settled = is_over || late || is_unsent || role == Role::Receiver;
        let is_moving = it.moving().is_some();
        let transfer = it.wire;
        if is_settled && !stopping.is_reported {
            let bytes = it.bytes;
            let outcome = match &progress {
                Progress::Done { level, .. } => Ok(Completed {
                    bytes,
                    level: *level,
                }),
                Progress::Going => Err(stopping.cause.clone()),
                Progress::Corrupt { expected, got } => Err(EndCause::Corrupt {
                    expected: *expected,
                    got: *got,
                }),
            };
            let outcome = outcome.map_err(|cause| OperationError { cause, delivered });
            self.complete(operation, outcome, Memory::Released);
        }
        if is_over {
            if is_peer_quiet && role == Role::Sender {
                self.drop_sent(operation);
            }
            self.forget(operation);
        }
        let is_whole = matches!(progress, Progress::Done { last: true, .. });
        if is_moving && is_settled && !is_whole && !self.config.cancellable {
            let transfer = transfer.unwrap_or(TransferId(0));
            self.fail(now, ConnectionFailure::ChannelStateLost { transfer });
        }
    }

    /// An operation stalls only once what it waits behind does: when that last moved.
    pub(super) fn queue_moved(&self, operation: OperationId) -> Option<Time> {
        let it = self.operations.get(operation)?;
        let stream = &self.streams[operation.role() as usize];
        let room = match (&it.stage, &it.origin) {
            (Stage::Queued, Origin::Send) => self.send_windows.room_came,
            (Stage::Queued, Origin::Receive { .. }) => return None,
            (Stage::Queued, _) => self.one_sided.credit_came,
            // Chunks that were sent may wait in buffers on the way, behind those of others. In
            // which order those come that are still at the peer, its clock alone knows.
            (Stage::Moving(moving), _) if !moving.is_leaving && !moving.all_placed() => {
                return Some(stream.moved_before(operation));
            }
            _ => return None,
        };
        Some(room.max(stream.moved()))
    }

    /// A wake-up of an operation is due.
    pub(super) fn expire(&mut self, now: Time, operation: OperationId) {
        let moved = self.queue_moved(operation).unwrap_or(Time(0));
        let Some(it) = self.operations.get_mut(operation) else {
            return;
        };
        it.clock.progressed(moved);
        let expired = it.clock.expired(now);
        if it.is_live() && expired.is_none() {
            let due = it.clock.due();
            return self.timers.arm(&mut it.clock, operation, due);
        }
        self.timers.disarm(&mut it.clock, operation);
        let delivered = it.delivered();
        let Some(stopping) = it.stopping() else {
            let Some(report) = self.standing(now, operation).map(Box::new) else {
                return;
            };
            let cause = match expired {
                Some(Expired::Total) => EndCause::DeadlinePassed(report),
                _ => EndCause::Stalled(report),
            };
            return self.cancel_operation(now, operation, cause);
        };
        if stopping.is_quiet {
            return self.settle_stopping(now, operation, true);
        }
        let waited = now.saturating_since(stopping.since);
        let cause = stopping.cause.clone();
        let delivered = match (operation.role(), delivered) {
            // Lanes may still be writing.
            (Role::Receiver, Delivered::None) => Delivered::Unknown,
            (_, delivered) => delivered,
        };
        let error = OperationError { cause, delivered };
        self.complete(operation, Err(error), Memory::Held);
        if self.ended() {
            self.forget(operation);
        } else if !self.config.cancellable {
            // Its channels are closed, and do not end.
            self.forget(operation);
            self.fail(now, ConnectionFailure::DataPlaneStuck { waited });
        }
    }

    /// An operation ends, of which the peer says nothing more.
    pub(super) fn end_with(
        &mut self,
        operation: OperationId,
        outcome: Result<Completed, (EndCause, Delivered)>,
    ) {
        if operation.role() == Role::Receiver {
            self.flush_acks_of(operation);
        }
        let outcome = outcome.map_err(|(cause, delivered)| OperationError { cause, delivered });
        self.complete(operation, outcome, Memory::Released);
        self.forget(operation);
    }

    fn complete(
        &mut self,
        operation: OperationId,
        outcome: Result<Completed, OperationError>,
        memory: Memory,
    ) {
        let it = self.operations.get_mut(operation);
        let Some(it) = it.filter(|it| !it.is_reported()) else {
            return;
        };
        match &mut it.end {
            End::Stopping(stopping) => stopping.is_reported = true,
            end => *end = End::Over,
        }
        self.timers.disarm(&mut it.clock, operation);
        let placed = outcome.is_ok();
        let group = match it.origin {
            Origin::PeerPut { group, .. } => group,
            _ => None,
        };
        let (is_reply, bytes) = (matches!(it.origin, Origin::PeerGet { .. }), it.bytes);
        let is_lost = !placed && matches!(it.origin, Origin::PeerNotification { .. });
        self.actions.push_back(Action::Complete {
            operation,
            outcome,
            memory,
        });
        if is_lost {
            self.notifications_collected(1, bytes);
        } else if is_reply {
            self.reply_ended(operation);
        } else if let Some(group) = group {
            self.put_ended(group, placed);
        }
    }

    /// Nothing of an operation is left to do. A get that its owner has not answered stays: both
    /// count it until then.
    pub(super) fn forget(&mut self, operation: OperationId) {
        let it = self.operations.get(operation);
        if let Some(Origin::Get {
            request: Some(request),
            ..
        }) = it.map(|it| &it.origin)
            && self.one_sided.gets.contains_key(request)
        {
            return;
        }
        let Some(it) = self.operations.take_out(operation) else {
            return;
        };
        let kind = it.origin.kind();
        if it.moving().is_some_and(|moving| !moving.all_placed()) {
            self.streams[kind.role() as usize].leave(operation);
        }
        if it.wants_receive() {
            self.leave_tag(operation, it.tag, it.number);
        }
        if kind.role() == Role::Receiver {
            self.leave_posting(operation, &it.stage);
        }
        if let Some(arrival) = &it.offered {
            self.operations.unname(operation, arrival.transfer);
        }
        if let Some(wire) = it.wire {
            self.operations.unname(operation, wire);
        }
        if it.is_counted {
            self.uncounted(kind, it.pieces);
        }
        if kind == OperationKind::Send {
            self.tag_rests(it.tag);
        }
        self.dequeue(operation, &it);
    }

    /// The last frame about an operation was sent, or has come: it counts no longer.
    pub(super) fn uncount(&mut self, operation: OperationId) {
        if let Some(it) = self.operations.get_mut(operation)
            && std::mem::take(&mut it.is_counted)
        {
            let (kind, pieces) = (it.origin.kind(), it.pieces);
            self.uncounted(kind, pieces);
        }
    }

    fn uncounted(&mut self, kind: OperationKind, pieces: u32) {
        match kind {
            _ if kind.is_peers() => self.taken.end(kind, pieces),
            OperationKind::Send => {
                self.asked.end(kind, pieces);
                self.ask_unasked();
            }
            _ => {
                self.asked.end(kind, pieces);
                self.ask_queued();
            }
        }
    }
}
