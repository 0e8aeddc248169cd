//! Transfers that the peer offers, and the receives they are matched to.

use super::action::{Action, OperationId};
use super::chunk_set::ChunkSet;
use super::config::MAX_TRANSFER_BYTES;
use super::error::{EndCause, SessionError};
use super::incoming::{GrantedReceive, Matched, ReceiveStage};
use super::matching::{Announced, Arrival};
use super::stream::Plan;
use super::{Session, unexpected};
use crate::frame::{Destination, Frame, Level, Limits, RefuseReason, TransferId};
use crate::time::Time;

impl Session {
    pub(super) fn arrived(
        &mut self,
        now: Time,
        frame: &'static str,
        mut arrival: Arrival,
        to: Destination,
    ) -> Result<(), SessionError> {
        let transfer = arrival.transfer;
        arrival.pieces = self.piece_lists.pieces_kept(to);
        self.check_name(frame, transfer, arrival.eager.is_some(), to)?;
        let limit = match &arrival.eager {
            Some(_) => self.config.ours.eager_limit.into(),
            None => MAX_TRANSFER_BYTES,
        };
        if arrival.bytes > limit {
            let found = format!("transfer {transfer} has {} of {limit}", arrival.bytes);
            return Err(unexpected(frame, "no more bytes than agreed", found));
        }
        if arrival.eager.is_some() {
            let credit = u64::from(self.config.ours.eager_credit);
            let used = self.eager_held + arrival.credit();
            if used > credit {
                let found = format!("transfer {transfer} makes it {used} bytes of {credit}");
                return Err(unexpected(
                    frame,
                    "no more credit used than there is",
                    found,
                ));
            }
            self.eager_held = used;
        }
        match to {
            Destination::Receive { .. } => self.arrived_of_tag(now, frame, arrival),
            // What answers a get of this side is under way, and a close finishes that.
            Destination::Put { .. } | Destination::Notification { .. } if self.closing() => {
                self.refuse(arrival, RefuseReason::Shutdown);
                Ok(())
            }
            Destination::Put { to, notified } => self.put_arrived(arrival, to, notified),
            Destination::Reply { request } => self.replied(now, frame, request, arrival),
            Destination::Notification { first, count } => {
                self.notification_arrived(frame, arrival, first, count)
            }
        }
    }

    /// Names of transfers increase, but for those of sends that ask late, or anew.
    fn check_name(
        &mut self,
        frame: &'static str,
        transfer: TransferId,
        is_eager: bool,
        to: Destination,
    ) -> Result<(), SessionError> {
        let expected = TransferId(self.next_arrival);
        // Puts and notifications may have waited for room, and bring their payload then.
        let is_late = transfer < expected;
        let is_known = || {
            self.by_transfer.contains_key(&transfer)
                || self.matching.has_arrival(transfer)
                || self.one_sided.has_arrival(transfer)
        };
        if is_late && (is_eager && to.tag().is_some() || is_known()) || transfer.window().is_some()
        {
            let found = format!("{transfer} arrived, not {expected}");
            return Err(unexpected(frame, "transfers that count up", found));
        }
        self.next_arrival = self.next_arrival.max(transfer.0 + 1);
        Ok(())
    }

    /// A transfer of the peer meets the receive of its number, or waits for it.
    fn arrived_of_tag(
        &mut self,
        now: Time,
        frame: &'static str,
        arrival: Arrival,
    ) -> Result<(), SessionError> {
        let (tag, number) = (arrival.tag, arrival.number);
        let limits = self.config.ours.limits;
        let is_asking = arrival.eager.is_none();
        let counts = self.matching.receives_of(tag);
        if is_asking {
            counts.vain = 0;
        }
        if number == counts.next {
            counts.next += 1;
            self.matching.is_sent(tag);
            self.matching.check_tags(&limits)?;
            return self.meet(now, arrival, Some(&limits));
        }
        match counts.announced.get_mut(&number) {
            // It asked before it knew of the window, and its bytes were faster.
            None if number < counts.next && is_asking && self.config.addressed => return Ok(()),
            None | Some(Announced::Ended(Some(_))) => {
                self.matching.tidy(tag);
                return Err(repeated(frame, &arrival));
            }
            Some(Announced::Ended(None)) => {
                self.matching.end_announced(tag, number, Some(arrival));
            }
            Some(Announced::Receive(operation)) => {
                let operation = *operation;
                if let Some(receive) = self.receives.get_mut(&operation) {
                    match &receive.posted {
                        Some(posted) if posted.asked_by.is_some() => {
                            return Err(repeated(frame, &arrival));
                        }
                        Some(_) => self.finds_window(operation, arrival),
                        None => {
                            receive.number = None;
                            self.matching.take_announced(tag, number);
                            self.match_up(now, operation, arrival);
                        }
                    }
                }
            }
        }
        self.matching.is_sent(tag);
        self.matching.check_tags(&limits)?;
        self.post_candidates();
        Ok(())
    }

    /// A transfer of the peer meets the first receive that has no number, or waits for one.
    pub(super) fn meet(
        &mut self,
        now: Time,
        arrival: Arrival,
        limits: Option<&Limits>,
    ) -> Result<(), SessionError> {
        if self.closing() {
            self.refuse(arrival, RefuseReason::Shutdown);
            return Ok(());
        }
        let counts = self.matching.receives_of(arrival.tag);
        if counts.is_in_order(arrival.number)
            && let Some(operation) = counts.queue.pop_front()
        {
            self.match_up(now, operation, arrival);
            return Ok(());
        }
        self.matching.add_arrival(arrival, limits)
    }

    pub(super) fn refuse(&mut self, arrival: Arrival, reason: RefuseReason) {
        if arrival.eager.is_some() {
            self.return_credit(arrival.credit());
        }
        self.transmit.push_back(Frame::Refuse {
            transfer: arrival.transfer,
            reason,
        });
    }

    /// Eager payload left this side's buffer.
    pub(super) fn return_credit(&mut self, bytes: u64) {
        self.eager_held = self.eager_held.saturating_sub(bytes);
        self.credit_owed += bytes;
    }

    /// A transfer meets its receive, which no window is open of.
    pub(super) fn match_up(&mut self, now: Time, operation: OperationId, arrival: Arrival) {
        let (Some(receive), Some(agreed)) = (self.receives.get_mut(&operation), self.agreed) else {
            return;
        };
        let credit = arrival.credit();
        let Arrival {
            transfer,
            bytes,
            level: sender_asked,
            ..
        } = arrival;
        if bytes > receive.capacity {
            // A peer that lies has written to it before.
            let (capacity, delivered) = (receive.capacity, receive.delivered());
            self.refuse(arrival, RefuseReason::TooLarge { capacity });
            let cause = EndCause::TooLarge { bytes, capacity };
            self.end_receive(operation, Err((cause, delivered)));
            return;
        }
        receive.course.clock.progressed(now);
        if receive.fenced && arrival.eager.is_none() && self.config.addressed {
            return self.offer(operation, arrival);
        }
        let level = receive.asked.max(sender_asked);
        let tag = receive.tag;
        match arrival.eager {
            Some(payload) => {
                let expected = (level == Level::Verified).then(|| payload.crc32c());
                self.by_transfer.insert(transfer, operation);
                self.urgent.extend([
                    matched(operation, transfer, bytes, 0, 0),
                    Action::DeliverEager {
                        operation,
                        payload: payload.into_bytes(),
                    },
                ]);
                receive.matched = Some(Matched {
                    transfer,
                    bytes,
                    level,
                    stage: ReceiveStage::Eager {
                        verdict_wanted: sender_asked == Level::Verified,
                        copied: false,
                        credit,
                    },
                    digesting: false,
                    digest: None,
                    expected,
                });
            }
            None => {
                let pieces = receive.origin.pieces();
                let alone = self.is_alone();
                let cut = self.config.cut(bytes, pieces, agreed.chunk_bytes, alone);
                let plan = if self.config.addressed {
                    let window = self.posting.name_window();
                    if bytes > 0 {
                        self.open_window(operation, window, cut, tag);
                    }
                    Plan::named(cut, window)
                } else {
                    let first = self.receive_stream.end();
                    self.receive_stream.append(operation, cut.count());
                    Plan::new(cut, first, agreed.channels, first)
                };
                self.by_transfer.insert(transfer, operation);
                self.begin_matched(operation, transfer, plan, level, None);
                let grant = plan.grant(level);
                self.transmit.push_back(Frame::Grant { transfer, grant });
            }
        }
        self.pump_receives();
        self.settle_receive(now, operation);
    }

    /// The chunks of a transfer are to come for this receive.
    pub(super) fn begin_matched(
        &mut self,
        operation: OperationId,
        transfer: TransferId,
        plan: Plan,
        level: Level,
        expected: Option<u32>,
    ) {
        let bytes = plan.bytes();
        self.actions.push_back(matched(
            operation,
            transfer,
            bytes,
            plan.first_sequence,
            plan.chunks,
        ));
        let granted = GrantedReceive {
            plan,
            is_window: self.config.addressed,
            posted: ChunkSet::default(),
            arrived: ChunkSet::default(),
            placed: ChunkSet::default(),
            placed_bytes: 0,
            unacked: Vec::new(),
        };
        if let Some(receive) = self.receives.get_mut(&operation) {
            receive.matched = Some(Matched {
                transfer,
                bytes,
                level,
                stage: ReceiveStage::Granted(Box::new(granted)),
                digesting: false,
                digest: None,
                expected,
            });
        }
    }
}

fn repeated(frame: &'static str, arrival: &Arrival) -> SessionError {
    let found = format!("{} arrived of tag {}", arrival.number, arrival.tag.0);
    unexpected(frame, "a number that no send of its tag had before", found)
}

pub(super) fn matched(
    operation: OperationId,
    transfer: TransferId,
    bytes: u64,
    first_sequence: u64,
    chunks: u32,
) -> Action {
    Action::Matched {
        operation,
        transfer,
        bytes,
        first_sequence,
        chunks,
    }
}
