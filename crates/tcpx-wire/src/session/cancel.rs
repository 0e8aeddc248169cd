//! Ends other than success: local failures, deadlines, cancels of either side.

use super::Session;
use super::action::{Action, OperationId};
use super::clock::Course;
use super::config::Config;
use super::error::{DataFailure, Delivered, EndCause};
use super::incoming::{Incoming, ReceiveStage};
use super::matching::Arrival;
use super::outgoing::SendStage;
use crate::frame::{CancelReason, Detail, Frame, NumberUse, Role, TransferId};
use crate::time::Time;

/// An operation that ends early.
#[derive(Debug)]
pub(super) struct Cancelling {
    pub(super) cause: EndCause,
    /// This side's data plane let go of the memory.
    pub(super) quiet: bool,
    /// The peer told that its data plane is quiet.
    pub(super) peer_quiet: bool,
    /// The peer was told that ours is.
    pub(super) confirmed: bool,
    /// The network was told that nobody waits for the chunks any more.
    pub(super) dropped: bool,
    /// The peer refused the transfer meanwhile.
    pub(super) refused: bool,
    /// Waiting any longer is pointless.
    pub(super) gave_up: bool,
    pub(super) since: Time,
    /// How long the peer's part is waited for.
    pub(super) answer_by: Time,
}

impl Cancelling {
    pub(super) fn new(now: Time, cause: EndCause, busy: bool, answer_by: Time) -> Self {
        Self {
            cause,
            quiet: !busy,
            peer_quiet: false,
            confirmed: false,
            dropped: false,
            refused: false,
            gave_up: false,
            since: now,
            answer_by,
        }
    }
}

/// Whether this side's program or its deadline ends the operation: it has waited for long enough.
fn is_ours(cause: &EndCause) -> bool {
    matches!(
        cause,
        EndCause::Cancelled
            | EndCause::Revoked
            | EndCause::Closed
            | EndCause::Stalled(_)
            | EndCause::DeadlinePassed(_)
    )
}

/// What tells the peer that a transfer ends early here; nothing where it knows already or cannot be told.
fn cancel_frame(transfer: TransferId, from: Role, cause: &EndCause) -> Option<Frame> {
    let mut detail = None;
    let reason = match cause {
        EndCause::Cancelled | EndCause::Revoked => CancelReason::Requested,
        EndCause::Stalled(report) | EndCause::DeadlinePassed(report) => {
            detail = Some(report.to_string());
            CancelReason::DeadlineExpired
        }
        EndCause::Data {
            failure: DataFailure::Memory(_),
            ..
        } => CancelReason::MemoryFailed,
        EndCause::Data { .. } => CancelReason::ChannelFailed,
        EndCause::Closed => CancelReason::Shutdown,
        _ => return None,
    };
    Some(Frame::Cancel {
        transfer,
        from,
        reason,
        detail: detail.unwrap_or_else(|| cause.to_string()).into(),
    })
}

/// The peer, in this part of the transfer, ends it.
fn by_peer(from: Role, reason: CancelReason, detail: &str) -> EndCause {
    let detail = detail.to_owned();
    EndCause::PeerCancelled {
        from,
        reason,
        detail,
    }
}

/// Quotes the peer in an error that this side found by itself.
fn quote(cause: &mut EndCause, detail: &Detail) {
    if let EndCause::Stalled(report) | EndCause::DeadlinePassed(report) = cause {
        report.peer = Some(detail.to_string());
    }
}

impl Config {
    /// How long an operation that ends early waits for the peer's part.
    fn answer_by(&self, now: Time, course: &Course, cause: &EndCause) -> Time {
        let soon = now + self.answer_timeout;
        if is_ours(cause) {
            return soon;
        }
        let latest = course.clock.ends_at().map(|end| end + self.answer_timeout);
        let late = now + self.cancel_timeout;
        latest.map_or(late, |latest| late.min(latest).max(soon))
    }

    /// How long a `busy` data plane has to let go of such an operation's memory. It does so at once, unless something
    /// [holds it up](Session::data_held) or this process hardly runs.
    fn stopped_by(&self, now: Time, busy: bool, answer_by: Time) -> Time {
        match busy {
            true => answer_by.max(now + self.cancel_timeout),
            false => answer_by,
        }
    }
}

impl Session {
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
        let course = Self::course(&mut self.sends, &mut self.receives, operation);
        if course.is_some_and(|course| course.is_live()) {
            self.begin_cancel(now, operation, cause);
        }
    }

    pub(super) fn begin_cancel(&mut self, now: Time, operation: OperationId, cause: EndCause) {
        match operation.sent_transfer() {
            Some(transfer) => self.begin_cancel_send(now, transfer, cause),
            None => self.begin_cancel_receive(now, operation, cause),
        }
    }

    fn begin_cancel_send(&mut self, now: Time, transfer: TransferId, cause: EndCause) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let operation = OperationId::send(transfer);
        let busy = send.busy();
        if let SendStage::Granted(granted) = &send.stage {
            self.send_stream
                .drop_from(operation, granted.plan.first_sequence);
        }
        // Nobody else has heard of it, or hears of it any more.
        let is_silent = send.leaving || matches!(send.stage, SendStage::Queued);
        // What it has asked before it found its window, the peer may count until it ends.
        let in_window = send.wire.window().is_some();
        if !is_silent {
            self.transmit
                .extend(cancel_frame(send.wire, Role::Sender, &cause));
        }
        let answer_by = self.config.answer_by(now, &send.course, &cause);
        let mut cancel = Cancelling::new(now, cause, busy, answer_by);
        cancel.peer_quiet = is_silent;
        cancel.confirmed = is_silent;
        send.course.cancel = Some(cancel);
        let stopped_by = self.config.stopped_by(now, busy, answer_by);
        self.timers
            .arm(&mut send.course.clock, operation, stopped_by);
        if is_silent && !self.ended() {
            self.has_left(transfer, NumberUse::Ended);
        }
        if !in_window {
            self.waits_no_more(transfer);
        }
        if busy {
            self.actions.push_back(Action::StopData { operation });
            self.pump_sends();
        } else {
            self.release_send(transfer);
        }
        self.settle_send(now, transfer);
    }

    fn begin_cancel_receive(&mut self, now: Time, operation: OperationId, cause: EndCause) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let Some(matched) = &receive.matched else {
            return self.cancel_waiting(now, operation, cause);
        };
        let busy = matched.busy();
        if let ReceiveStage::Granted(granted) = &matched.stage {
            self.receive_stream
                .drop_from(operation, granted.plan.first_sequence);
        }
        self.transmit
            .extend(cancel_frame(matched.transfer, Role::Receiver, &cause));
        let answer_by = self.config.answer_by(now, &receive.course, &cause);
        receive.course.cancel = Some(Cancelling::new(now, cause, busy, answer_by));
        let stopped_by = self.config.stopped_by(now, busy, answer_by);
        self.timers
            .arm(&mut receive.course.clock, operation, stopped_by);
        if busy {
            self.actions.push_back(Action::StopData { operation });
            self.pump_receives();
        } else {
            self.release_receive(operation);
        }
        self.settle_receive(now, operation);
    }

    /// Ends a receive that has no transfer, once the data plane has let go of its window.
    fn cancel_waiting(&mut self, now: Time, operation: OperationId, cause: EndCause) {
        self.uncount_receive(operation);
        if let Some(arrival) = self.take_offered(operation) {
            // It meets the next receive.
            let met = self.meet(now, arrival, None);
            debug_assert!(met.is_ok());
        }
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let was_closing = receive.is_withdrawn();
        let Some(posted) = &mut receive.posted else {
            return self.end_receive(operation, Err((cause, Delivered::None)));
        };
        posted.closing = true;
        let is_mutual = posted.ended_as.is_some();
        let answer_by = self.config.answer_by(now, &receive.course, &cause);
        let mut cancel = Cancelling::new(now, cause, true, answer_by);
        cancel.peer_quiet = !is_mutual;
        cancel.confirmed = !is_mutual;
        receive.course.cancel = Some(cancel);
        let until = self.config.stopped_by(now, true, answer_by);
        self.timers.arm(&mut receive.course.clock, operation, until);
        if !was_closing {
            self.actions.push_back(Action::StopData { operation });
        }
    }

    /// A frame `Cancel` of the sender for one of our receives.
    pub(super) fn cancelled_by_sender(
        &mut self,
        now: Time,
        transfer: TransferId,
        reason: CancelReason,
        detail: &Detail,
    ) {
        if let Some(arrival) = self.matching.remove_arrival(transfer) {
            self.drop_arrival(&arrival);
        } else if let Some(arrival) = self.take_arrival(transfer) {
            self.drop_arrival(&arrival);
        }
        let found = self.by_transfer.get(&transfer).copied();
        if let Some(operation) = found
            && let Some(arrival) = self.take_offered(operation)
        {
            // Both end, once the data plane has let go of the window that the receive had.
            self.drop_arrival(&arrival);
            let cause = by_peer(Role::Sender, reason, detail);
            self.cancel_operation(now, operation, cause);
        }
        let found = self.by_transfer.get(&transfer).copied();
        let Some((operation, receive)) =
            found.and_then(|operation| Some((operation, self.receives.get_mut(&operation)?)))
        else {
            // It never started here, or it ended here before.
            let from = Role::Receiver;
            self.transmit.push_back(Frame::Cancelled { transfer, from });
            return;
        };
        match &mut receive.course.cancel {
            Some(cancel) => quote(&mut cancel.cause, detail),
            None => {
                if let Some(posted) = &mut receive.posted {
                    posted.ended_as = Some(transfer);
                }
                let cause = by_peer(Role::Sender, reason, detail);
                self.begin_cancel(now, operation, cause);
            }
        }
    }

    pub(super) fn drop_arrival(&mut self, arrival: &Arrival) {
        if arrival.eager.is_some() {
            self.return_credit(arrival.credit());
        }
    }

    /// A frame `Cancel` of the receiver for one of our sends.
    pub(super) fn cancelled_by_receiver(
        &mut self,
        now: Time,
        transfer: TransferId,
        reason: CancelReason,
        detail: &Detail,
    ) {
        let wire = transfer;
        let transfer = self.sent_as(transfer);
        let send = self.sends.get_mut(&transfer);
        if send.is_none_or(|send| send.wire != wire) {
            let from = Role::Sender;
            let transfer = wire;
            self.transmit.push_back(Frame::Cancelled { transfer, from });
            return;
        };
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        match &mut send.course.cancel {
            Some(cancel) => quote(&mut cancel.cause, detail),
            None => {
                let cause = by_peer(Role::Receiver, reason, detail);
                self.begin_cancel_send(now, transfer, cause);
            }
        }
    }

    /// Answer to [`Action::StopData`] and [`Action::Withdraw`]: nothing points at the operation's memory any more.
    pub fn data_quiet(&mut self, now: Time, operation: OperationId) {
        match operation.sent_transfer() {
            Some(transfer) => {
                let send = self.sends.get(&transfer);
                if send.is_some_and(|send| send.leaving && send.course.cancel.is_none()) {
                    return self.window_left(transfer);
                }
            }
            None => {
                let is_withdrawn =
                    |one: &Incoming| one.is_withdrawn() && one.course.cancel.is_none();
                if self.receives.get(&operation).is_some_and(is_withdrawn) {
                    return self.window_closed(now, operation);
                }
            }
        }
        let course = Self::course(&mut self.sends, &mut self.receives, operation);
        let Some(course) = course else {
            return;
        };
        let Some(cancel) = course.cancel.as_mut().filter(|cancel| !cancel.quiet) else {
            return;
        };
        cancel.quiet = true;
        if !course.completed {
            let answer_by = cancel.answer_by;
            self.timers.arm(&mut course.clock, operation, answer_by);
        }
        match operation.sent_transfer() {
            Some(transfer) => self.release_send(transfer),
            None => self.release_receive(operation),
        }
        self.settle(now, operation);
    }

    /// Beside an answer to [`Action::StopData`] that is still to come: what points at the operation's memory cannot be
    /// hurried, as a copy that runs on a GPU behind other work, or a call into foreign code. Such an operation ends
    /// without it, in time, with [`Memory::Held`](super::Memory::Held).
    pub fn data_held(&mut self, operation: OperationId) {
        let course = Self::course(&mut self.sends, &mut self.receives, operation);
        if let Some(course) = course.filter(|course| !course.completed)
            && let Some(cancel) = course.cancel.as_ref().filter(|cancel| !cancel.quiet)
        {
            let answer_by = cancel.answer_by;
            self.timers.arm(&mut course.clock, operation, answer_by);
        }
    }

    /// Gives back what a quiet send holds.
    pub(super) fn release_send(&mut self, transfer: TransferId) {
        if let Some(send) = self.sends.get_mut(&transfer)
            && let SendStage::Granted(granted) = &mut send.stage
        {
            granted.digesting = false;
            let unsent = granted.posted.difference(&granted.sent);
            let unplaced = granted.sent.difference(&granted.acked);
            for index in unsent.chain(unplaced) {
                self.send_stream.release(&granted.plan.chunk(index));
            }
        }
        self.pump_sends();
    }

    /// Gives up the chunks that the network still keeps for sending again, once the peer takes none of
    /// them any more. Not before: until then it may count what arrives, which must be what was sent.
    pub(super) fn drop_chunks(&mut self, transfer: TransferId) {
        if self.config.hold_until_placed
            && let Some(send) = self.sends.get_mut(&transfer)
            && let Some(cancel) = &mut send.course.cancel
            && cancel.quiet
            && cancel.peer_quiet
            && !std::mem::replace(&mut cancel.dropped, true)
            && let SendStage::Granted(granted) = &send.stage
        {
            for index in granted.sent.difference(&granted.acked) {
                let chunk = granted.plan.chunk(index);
                self.actions.push_back(Action::ChunkDropped { chunk });
            }
        }
    }

    /// Gives back what a quiet receive holds.
    pub(super) fn release_receive(&mut self, operation: OperationId) {
        if let Some(receive) = self.receives.get_mut(&operation)
            && let Some(matched) = &mut receive.matched
        {
            matched.digesting = false;
            match &mut matched.stage {
                ReceiveStage::Granted(granted) => {
                    for index in granted.posted.difference(&granted.placed) {
                        self.receive_stream.release(&granted.plan.chunk(index));
                    }
                }
                ReceiveStage::Eager { credit, .. } => {
                    let credit = std::mem::take(credit);
                    self.return_credit(credit);
                }
            }
        }
        self.pump_receives();
    }
}
