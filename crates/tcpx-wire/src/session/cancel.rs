//! Ends other than success: local failures, deadlines, cancels of either side.

use super::Session;
use super::action::{Action, Completed, Memory, OperationId};
use super::clock::Expired;
use super::error::{ConnectionFailure, DataFailure, Delivered, EndCause, OperationError};
use super::incoming::{Incoming, ReceiveStage};
use super::outgoing::{Outgoing, SendProgress, SendStage};
use crate::frame::{CancelReason, Detail, Frame, Level, Role, TransferId};
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
    /// The peer refused the transfer meanwhile.
    pub(super) refused: bool,
    /// Waiting any longer is pointless.
    pub(super) gave_up: bool,
}

impl Cancelling {
    fn new(cause: EndCause, busy: bool) -> Self {
        Self {
            cause,
            quiet: !busy,
            peer_quiet: false,
            confirmed: false,
            refused: false,
            gave_up: false,
        }
    }
}

/// What the peer is told about the cause; nothing where it knows already or cannot be told.
fn for_peer(cause: &EndCause) -> Option<(CancelReason, Detail)> {
    let reason = match cause {
        EndCause::Cancelled => CancelReason::Requested,
        EndCause::Stalled(report) | EndCause::DeadlinePassed(report) => {
            return Some((CancelReason::DeadlineExpired, report.to_string().into()));
        }
        EndCause::Data {
            failure: DataFailure::Memory(_),
            ..
        } => CancelReason::MemoryFailed,
        EndCause::Data { .. } => CancelReason::ChannelFailed,
        EndCause::Closed => CancelReason::Shutdown,
        _ => return None,
    };
    Some((reason, cause.to_string().into()))
}

/// Quotes the peer in an error that this side found by itself.
fn quote(cause: &mut EndCause, detail: &Detail) {
    if let EndCause::Stalled(report) | EndCause::DeadlinePassed(report) = cause {
        report.peer = Some(detail.to_string());
    }
}

impl Session {
    pub(super) fn fail_operation(
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
        match operation.sent_transfer() {
            Some(transfer) => {
                let live = self.sends.get(&transfer);
                if live.is_some_and(|send| !send.completed && send.cancel.is_none()) {
                    self.begin_cancel_send(now, transfer, cause);
                }
            }
            None => {
                let live = self.receives.get(&operation);
                if live.is_some_and(|receive| !receive.completed && receive.cancel.is_none()) {
                    self.begin_cancel_receive(now, operation, cause);
                }
            }
        }
    }

    pub(super) fn begin_cancel_send(&mut self, now: Time, transfer: TransferId, cause: EndCause) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let operation = OperationId::send(transfer);
        let busy = send.busy();
        if let SendStage::Granted(granted) = &send.stage {
            self.send_stream.drop_from(granted.plan.first_sequence);
        }
        if let Some((reason, detail)) = for_peer(&cause) {
            let from = Role::Sender;
            self.transmit.push_back(Frame::Cancel {
                transfer,
                from,
                reason,
                detail,
            });
        }
        send.cancel = Some(Cancelling::new(cause, busy));
        self.timers
            .arm(&mut send.clock, operation, now + self.config.cancel_timeout);
        if busy {
            self.actions.push_back(Action::StopData { operation });
            self.pump_sends();
        } else {
            self.release_send(transfer);
        }
        self.settle_send(now, transfer);
    }

    pub(super) fn begin_cancel_receive(
        &mut self,
        now: Time,
        operation: OperationId,
        cause: EndCause,
    ) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let Some(matched) = &receive.matched else {
            self.matching.remove_receive(receive.tag, operation);
            return self.end_receive(operation, Err((cause, Delivered::None)));
        };
        let busy = matched.busy();
        if let ReceiveStage::Granted(granted) = &matched.stage {
            self.receive_stream.drop_from(granted.plan.first_sequence);
        }
        if let Some((reason, detail)) = for_peer(&cause) {
            let (transfer, from) = (matched.transfer, Role::Receiver);
            self.transmit.push_back(Frame::Cancel {
                transfer,
                from,
                reason,
                detail,
            });
        }
        receive.cancel = Some(Cancelling::new(cause, busy));
        self.timers.arm(
            &mut receive.clock,
            operation,
            now + self.config.cancel_timeout,
        );
        if busy {
            self.actions.push_back(Action::StopData { operation });
            self.pump_receives();
        } else {
            self.release_receive(operation);
        }
        self.settle_receive(now, operation);
    }

    /// A frame `Cancel` of the sender for one of our receives.
    pub(super) fn cancelled_by_sender(
        &mut self,
        now: Time,
        transfer: TransferId,
        reason: CancelReason,
        detail: &Detail,
    ) {
        if let Some(arrival) = self.matching.remove_arrival(transfer)
            && arrival.eager.is_some()
        {
            self.return_credit(arrival.bytes);
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
        match &mut receive.cancel {
            Some(cancel) => quote(&mut cancel.cause, detail),
            None => {
                let (from, detail) = (Role::Sender, detail.to_string());
                let cause = EndCause::PeerCancelled {
                    from,
                    reason,
                    detail,
                };
                self.begin_cancel_receive(now, operation, cause);
            }
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
        let Some(send) = self.sends.get_mut(&transfer) else {
            let from = Role::Sender;
            self.transmit.push_back(Frame::Cancelled { transfer, from });
            return;
        };
        match &mut send.cancel {
            Some(cancel) => quote(&mut cancel.cause, detail),
            None => {
                let (from, detail) = (Role::Receiver, detail.to_string());
                let cause = EndCause::PeerCancelled {
                    from,
                    reason,
                    detail,
                };
                self.begin_cancel_send(now, transfer, cause);
            }
        }
    }

    /// The data plane let go of an operation's memory.
    pub(super) fn quiet(&mut self, now: Time, operation: OperationId) {
        if let Some(transfer) = operation.sent_transfer() {
            let Some(send) = self.sends.get_mut(&transfer) else {
                return;
            };
            let waited_for = send.cancel.as_mut().filter(|cancel| !cancel.quiet);
            let Some(cancel) = waited_for else { return };
            cancel.quiet = true;
            self.release_send(transfer);
            self.settle_send(now, transfer);
        } else {
            let Some(receive) = self.receives.get_mut(&operation) else {
                return;
            };
            let waited_for = receive.cancel.as_mut().filter(|cancel| !cancel.quiet);
            let Some(cancel) = waited_for else { return };
            cancel.quiet = true;
            self.release_receive(operation);
            self.settle_receive(now, operation);
        }
    }

    /// Gives back what a quiet send holds.
    fn release_send(&mut self, transfer: TransferId) {
        if let Some(send) = self.sends.get_mut(&transfer)
            && let SendStage::Granted(granted) = &mut send.stage
        {
            granted.digesting = false;
            let held = self.config.hold_until_placed;
            let unsent = granted.posted.difference(&granted.sent);
            let unacked = granted.sent.difference(&granted.acked).filter(|_| held);
            for index in unsent.chain(unacked) {
                self.send_stream.release(granted.plan.chunk(index).channel);
            }
        }
        self.pump_sends();
    }

    /// Gives back what a quiet receive holds.
    fn release_receive(&mut self, operation: OperationId) {
        if let Some(receive) = self.receives.get_mut(&operation)
            && let Some(matched) = &mut receive.matched
        {
            matched.digesting = false;
            match &mut matched.stage {
                ReceiveStage::Granted(granted) => {
                    for index in granted.posted.difference(&granted.placed) {
                        let channel = granted.plan.chunk(index).channel;
                        self.receive_stream.release(channel);
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

    pub(super) fn settle_send(&mut self, now: Time, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        if send.cancel.is_some() {
            return self.settle_cancelled_send(now, transfer);
        }
        match send.progress(false) {
            SendProgress::Going => {}
            SendProgress::Done { level, last } => {
                let bytes = send.bytes;
                self.complete_send(transfer, Ok(Completed { bytes, level }), Memory::Released);
                if last {
                    self.sends.remove(&transfer);
                }
            }
            SendProgress::Corrupt { expected, got } => {
                self.end_send(
                    transfer,
                    EndCause::Corrupt { expected, got },
                    Delivered::All,
                );
            }
        }
    }

    fn settle_cancelled_send(&mut self, now: Time, transfer: TransferId) {
        let ended = self.ended();
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let progress = send.progress(true);
        let delivered = send.delivered();
        let Some(cancel) = &mut send.cancel else {
            return;
        };
        if !cancel.quiet {
            return;
        }
        if !cancel.confirmed && !ended {
            cancel.confirmed = true;
            let from = Role::Sender;
            self.transmit.push_back(Frame::Cancelled { transfer, from });
        }
        let granted = matches!(send.stage, SendStage::Granted(_));
        let told = cancel.peer_quiet || cancel.refused || cancel.gave_up || ended;
        // Without a grant nothing was sent; yet an empty transfer may be complete at the peer.
        let ungranted = matches!(send.stage, SendStage::Announced) && send.bytes > 0;
        let settled = told || ungranted;
        let over = (cancel.confirmed && cancel.peer_quiet) || ended;
        let cause = cancel.cause.clone();
        let (bytes, completed) = (send.bytes, send.completed);
        if settled && !completed {
            let outcome = match &progress {
                SendProgress::Done { level, .. } => Ok(Completed {
                    bytes,
                    level: *level,
                }),
                SendProgress::Corrupt { expected, got } => Err(OperationError {
                    cause: EndCause::Corrupt {
                        expected: *expected,
                        got: *got,
                    },
                    delivered,
                }),
                SendProgress::Going => Err(OperationError { cause, delivered }),
            };
            self.complete_send(transfer, outcome, Memory::Released);
        }
        if over {
            self.sends.remove(&transfer);
        }
        let whole = matches!(progress, SendProgress::Done { last: true, .. });
        if granted && settled && !whole && !self.config.cancellable {
            self.fail_with(now, ConnectionFailure::ChannelStateLost { transfer });
        }
    }

    pub(super) fn settle_cancelled_receive(&mut self, now: Time, operation: OperationId) {
        let ended = self.ended();
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let delivered = receive.delivered();
        let Some(cancel) = &mut receive.cancel else {
            return;
        };
        let Some(matched) = &receive.matched else {
            return;
        };
        if !cancel.quiet {
            return;
        }
        let whole = matched.all_placed() && matched.level < Level::Verified;
        let (transfer, bytes) = (matched.transfer, matched.bytes);
        let granted = matches!(matched.stage, ReceiveStage::Granted(_));
        let cause = cancel.cause.clone();
        let confirm = !cancel.confirmed && !ended;
        cancel.confirmed |= confirm;
        let over = (cancel.confirmed && cancel.peer_quiet) || ended;
        if confirm {
            self.flush_acks_of(operation);
            if whole && !granted {
                self.transmit.push_back(Frame::EagerDone { transfer });
            }
            let from = Role::Receiver;
            self.transmit.push_back(Frame::Cancelled { transfer, from });
        }
        let outcome = if whole {
            Ok(Completed {
                bytes,
                level: Level::Placed,
            })
        } else {
            Err(OperationError { cause, delivered })
        };
        self.complete_receive(operation, outcome, Memory::Released);
        if over {
            self.forget_receive(operation);
        }
        if granted && !whole && !self.config.cancellable {
            self.fail_with(now, ConnectionFailure::ChannelStateLost { transfer });
        }
    }

    /// A wake-up of an operation is due.
    pub(super) fn expire(&mut self, now: Time, operation: OperationId) {
        let state = match operation.sent_transfer() {
            Some(transfer) => self.sends.get_mut(&transfer).map(Outgoing::parts),
            None => self.receives.get_mut(&operation).map(Incoming::parts),
        };
        let Some((clock, cancel)) = state else { return };
        let Some(cancel) = cancel else {
            let Some(expired) = clock.expired(now) else {
                let due = clock.due();
                return self.timers.arm(clock, operation, due);
            };
            self.timers.disarm(clock, operation);
            let Some(report) = self.standing(now, operation).map(Box::new) else {
                return;
            };
            let cause = match expired {
                Expired::Stall => EndCause::Stalled(report),
                Expired::Total => EndCause::DeadlinePassed(report),
            };
            return self.cancel_operation(now, operation, cause);
        };
        self.timers.disarm(clock, operation);
        cancel.gave_up = true;
        if cancel.quiet {
            return match operation.sent_transfer() {
                Some(transfer) => self.settle_send(now, transfer),
                None => self.settle_receive(now, operation),
            };
        }
        let cause = cancel.cause.clone();
        if let Some(transfer) = operation.sent_transfer() {
            let delivered = self
                .sends
                .get(&transfer)
                .map_or(Delivered::Unknown, Outgoing::delivered);
            self.complete_send(
                transfer,
                Err(OperationError { cause, delivered }),
                Memory::Held,
            );
            self.sends.remove(&transfer);
        } else {
            let delivered = self
                .receives
                .get(&operation)
                .map_or(Delivered::Unknown, Incoming::delivered);
            self.complete_receive(
                operation,
                Err(OperationError { cause, delivered }),
                Memory::Held,
            );
            self.forget_receive(operation);
        }
        let waited = self.config.cancel_timeout;
        self.fail_with(now, ConnectionFailure::DataPlaneStuck { waited });
    }

    pub(super) fn end_send(&mut self, transfer: TransferId, cause: EndCause, delivered: Delivered) {
        let error = OperationError { cause, delivered };
        self.complete_send(transfer, Err(error), Memory::Released);
        self.sends.remove(&transfer);
    }

    pub(super) fn end_receive(
        &mut self,
        operation: OperationId,
        outcome: Result<Level, (EndCause, Delivered)>,
    ) {
        let matched = self
            .receives
            .get(&operation)
            .and_then(|receive| receive.matched.as_ref());
        let bytes = matched.map_or(0, |matched| matched.bytes);
        self.flush_acks_of(operation);
        let outcome = outcome
            .map(|level| Completed { bytes, level })
            .map_err(|(cause, delivered)| OperationError { cause, delivered });
        self.complete_receive(operation, outcome, Memory::Released);
        self.forget_receive(operation);
    }

    fn complete_send(
        &mut self,
        transfer: TransferId,
        outcome: Result<Completed, OperationError>,
        memory: Memory,
    ) {
        let operation = OperationId::send(transfer);
        if let Some(send) = self.sends.get_mut(&transfer)
            && !std::mem::replace(&mut send.completed, true)
        {
            self.timers.disarm(&mut send.clock, operation);
            self.actions.push_back(Action::Complete {
                operation,
                outcome,
                memory,
            });
        }
    }

    fn complete_receive(
        &mut self,
        operation: OperationId,
        outcome: Result<Completed, OperationError>,
        memory: Memory,
    ) {
        if let Some(receive) = self.receives.get_mut(&operation)
            && !std::mem::replace(&mut receive.completed, true)
        {
            self.timers.disarm(&mut receive.clock, operation);
            self.actions.push_back(Action::Complete {
                operation,
                outcome,
                memory,
            });
        }
    }

    pub(super) fn forget_receive(&mut self, operation: OperationId) {
        if let Some(receive) = self.receives.remove(&operation)
            && let Some(matched) = receive.matched
        {
            self.by_transfer.remove(&matched.transfer);
        }
    }
}
