//! What follows from an operation's state: its end, its deadline, its removal.

use super::Session;
use super::action::{Action, Completed, Memory, OperationId};
use super::clock::{Course, Expired};
use super::error::{ConnectionFailure, Delivered, EndCause, OperationError};
use super::incoming::{Incoming, ReceiveStage};
use super::one_sided::Origin;
use super::outgoing::{Outgoing, SendProgress, SendStage};
use crate::frame::{Frame, Level, Role, TransferId};
use crate::numbered::{Numbered, take_out};
use crate::time::Time;

impl Session {
    pub(super) fn settle_send(&mut self, now: Time, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let is_answered = send.covered.is_some() && send.is_answered();
        if send.course.cancel.is_some() {
            self.settle_cancelled_send(now, transfer);
        } else {
            self.settle_live_send(transfer);
        }
        if is_answered {
            self.peer_is_done(transfer);
        }
    }

    fn settle_live_send(&mut self, transfer: TransferId) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        match send.progress(false) {
            SendProgress::Going => {}
            SendProgress::Done { level, last } => {
                let bytes = send.bytes;
                self.complete(
                    OperationId::send(transfer),
                    Ok(Completed { bytes, level }),
                    Memory::Released,
                );
                if last {
                    self.remove_send(transfer);
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
        self.drop_chunks(transfer);
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let progress = send.progress(true);
        let delivered = send.delivered();
        let Some(cancel) = &mut send.course.cancel else {
            return;
        };
        if !cancel.quiet {
            return;
        }
        if !cancel.confirmed && !ended {
            cancel.confirmed = true;
            let (transfer, from) = (send.wire, Role::Sender);
            self.transmit.push_back(Frame::Cancelled { transfer, from });
        }
        let granted = matches!(send.stage, SendStage::Granted(_));
        let told = cancel.peer_quiet || cancel.refused || cancel.gave_up || ended;
        // Without a grant nothing was sent; yet an empty transfer may be complete at the peer.
        let ungranted =
            matches!(send.stage, SendStage::Queued | SendStage::Waiting) && send.bytes > 0;
        let settled = told || ungranted;
        let over = (cancel.confirmed && cancel.peer_quiet) || ended;
        let cause = cancel.cause.clone();
        let (bytes, completed) = (send.bytes, send.course.completed);
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
            self.complete(OperationId::send(transfer), outcome, Memory::Released);
        }
        if over {
            self.remove_send(transfer);
        }
        let whole = matches!(progress, SendProgress::Done { last: true, .. });
        if granted && settled && !whole && !self.config.cancellable {
            self.fail(now, ConnectionFailure::ChannelStateLost { transfer });
        }
    }

    pub(super) fn settle_cancelled_receive(&mut self, now: Time, operation: OperationId) {
        let ended = self.ended();
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let delivered = receive.delivered();
        let Some(cancel) = &mut receive.course.cancel else {
            return;
        };
        if !cancel.quiet {
            return;
        }
        let Some(matched) = &receive.matched else {
            // Its window is closed, and no send had come to it.
            let name = receive.posted.as_ref().and_then(|posted| posted.ended_as);
            let told = name.filter(|_| !cancel.confirmed && !ended);
            cancel.confirmed = true;
            let over = cancel.peer_quiet || ended;
            let cause = cancel.cause.clone();
            if let Some(transfer) = told {
                let from = Role::Receiver;
                self.transmit.push_back(Frame::Cancelled { transfer, from });
            }
            let error = OperationError { cause, delivered };
            self.complete(operation, Err(error), Memory::Released);
            if over {
                self.forget_receive(operation);
            }
            return;
        };
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
        self.complete(operation, outcome, Memory::Released);
        if over {
            self.forget_receive(operation);
        }
        if granted && !whole && !self.config.cancellable {
            self.fail(now, ConnectionFailure::ChannelStateLost { transfer });
        }
    }

    /// The course of one of this side's operations. Its other parts stay free.
    pub(super) fn course<'a>(
        sends: &'a mut Numbered<TransferId, Outgoing>,
        receives: &'a mut Numbered<OperationId, Incoming>,
        operation: OperationId,
    ) -> Option<&'a mut Course> {
        match operation.sent_transfer() {
            Some(transfer) => sends.get_mut(&transfer).map(|send| &mut send.course),
            None => receives
                .get_mut(&operation)
                .map(|receive| &mut receive.course),
        }
    }

    pub(super) fn settle(&mut self, now: Time, operation: OperationId) {
        match operation.sent_transfer() {
            Some(transfer) => self.settle_send(now, transfer),
            None => self.settle_receive(now, operation),
        }
    }

    pub(super) fn forget(&mut self, operation: OperationId) {
        match operation.sent_transfer() {
            Some(transfer) => self.remove_send(transfer),
            None => self.forget_receive(operation),
        }
    }

    /// An operation that has yet to begin stands still only once what it waits behind does: when that last moved.
    pub(super) fn queue_moved(&self, operation: OperationId) -> Option<Time> {
        let Some(transfer) = operation.sent_transfer() else {
            let receive = self.receives.get(&operation)?;
            let room = match receive.matched.as_ref().map(|matched| &matched.stage) {
                None if self.one_sided.queued_gets.contains(&operation) => {
                    self.one_sided.credit_came
                }
                Some(ReceiveStage::Granted(granted)) if granted.arrived.is_empty() => Time(0),
                _ => return None,
            };
            return Some(room.max(self.receive_stream.moved));
        };
        let send = self.sends.get(&transfer)?;
        let room = match &send.stage {
            SendStage::Queued if send.to.tag().is_some() => self.send_windows.room_came,
            SendStage::Queued => self.one_sided.credit_came,
            SendStage::Granted(granted) if granted.sent.is_empty() && granted.acked.is_empty() => {
                Time(0)
            }
            _ => return None,
        };
        Some(room.max(self.send_stream.moved))
    }

    /// A wake-up of an operation is due.
    pub(super) fn expire(&mut self, now: Time, operation: OperationId) {
        let moved = self.queue_moved(operation).unwrap_or(Time(0));
        let course = Self::course(&mut self.sends, &mut self.receives, operation);
        let Some(Course { clock, cancel, .. }) = course else {
            return;
        };
        clock.progressed(moved);
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
            return self.settle(now, operation);
        }
        let waited = now.saturating_since(cancel.since);
        let cause = cancel.cause.clone();
        let delivered = match operation.sent_transfer() {
            Some(transfer) => self.sends.get(&transfer).map(Outgoing::delivered),
            // Lanes may still be writing.
            None => (self.receives.get(&operation).map(Incoming::delivered))
                .filter(|delivered| *delivered != Delivered::None),
        };
        let delivered = delivered.unwrap_or(Delivered::Unknown);
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

    pub(super) fn end_send(&mut self, transfer: TransferId, cause: EndCause, delivered: Delivered) {
        let error = OperationError { cause, delivered };
        self.complete(OperationId::send(transfer), Err(error), Memory::Released);
        self.remove_send(transfer);
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
        self.complete(operation, outcome, Memory::Released);
        self.forget_receive(operation);
    }

    fn complete(
        &mut self,
        operation: OperationId,
        outcome: Result<Completed, OperationError>,
        memory: Memory,
    ) {
        let course = Self::course(&mut self.sends, &mut self.receives, operation);
        let Some(course) = course.filter(|course| !course.completed) else {
            return;
        };
        course.completed = true;
        self.timers.disarm(&mut course.clock, operation);
        let placed = outcome.is_ok();
        self.actions.push_back(Action::Complete {
            operation,
            outcome,
            memory,
        });
        if let Some(transfer) = operation.sent_transfer() {
            let send = self.sends.get(&transfer);
            if send.is_some_and(|send| send.covered.is_some()) {
                self.reply_ended(transfer);
            }
        } else if let Some(receive) = self.receives.get(&operation)
            && let Origin::Put {
                group: Some(group), ..
            } = receive.origin
        {
            self.put_ended(group, placed);
        }
    }

    pub(super) fn forget_receive(&mut self, operation: OperationId) {
        self.forget_window(operation);
        self.take_offered(operation);
        let Some(receive) = take_out(&mut self.receives, &operation) else {
            return;
        };
        self.one_sided_over(operation, &receive.origin);
        if let Some(matched) = receive.matched
            && self.by_transfer.get(&matched.transfer) == Some(&operation)
        {
            self.by_transfer.remove(&matched.transfer);
        }
    }
}
