//! Transfers that the peer offers, and the receives they are matched to.

use super::Session;
use super::action::{Action, OperationId};
use super::ahead::Foresight;
use super::chunk_set::ChunkSet;
use super::config::{Agreed, MAX_TRANSFER_BYTES};
use super::error::{Delivered, EndCause, SessionError};
use super::incoming::{GrantedReceive, Matched, ReceiveStage};
use super::matching::Arrival;
use super::stream::Plan;
use crate::frame::{Frame, Level, RefuseReason, TransferId};
use crate::plan::ChunkPlan;
use crate::time::Time;

impl Session {
    pub(super) fn arrived(
        &mut self,
        now: Time,
        frame: &'static str,
        arrival: Arrival,
    ) -> Result<(), SessionError> {
        let transfer = arrival.transfer;
        let to = self.destination_of(frame, transfer)?;
        if self.comes_late(&arrival) {
            return Ok(());
        }
        if !self.may_announce(transfer) {
            return Err(SessionError::TransferOrder {
                frame,
                expected: TransferId(self.next_arrival),
                arrived: transfer,
            });
        }
        let limit = match &arrival.eager {
            Some(_) => self.config.ours.eager_limit.into(),
            None => MAX_TRANSFER_BYTES,
        };
        if arrival.bytes > limit {
            return Err(SessionError::Field {
                frame,
                transfer,
                field: "at most bytes",
                expected: limit,
                arrived: arrival.bytes,
            });
        }
        if arrival.eager.is_some() {
            let credit = self.config.ours.eager_credit.into();
            let used = self.eager_held + arrival.bytes;
            if used > credit {
                return Err(SessionError::EagerOverCredit {
                    transfer,
                    credit,
                    used,
                });
            }
            self.eager_held = used;
        }
        if self.was_granted_ahead(now, &arrival, to.is_some()) {
            self.grant_ahead();
            return Ok(());
        }
        self.next_arrival = self.next_arrival.saturating_add(1);
        if self.closing() {
            self.refuse(arrival, RefuseReason::Shutdown);
            return Ok(());
        }
        if let Some(to) = to {
            return self.arrived_at(now, frame, arrival, to);
        }
        let mut limit = self.config.max_operations;
        let receive = if self.given_ahead.holds_matching() {
            // Receives may wait for some of them.
            limit += self.receives.len();
            None
        } else {
            self.matching.take_receive(arrival.tag)
        };
        match receive {
            Some(operation) => {
                self.match_up(now, operation, arrival);
                self.grant_ahead();
            }
            None if self.matching.arrivals() >= limit => {
                return Err(SessionError::TooManyUnmatched { limit });
            }
            None => self.matching.add_arrival(arrival),
        }
        Ok(())
    }

    pub(super) fn refuse(&mut self, arrival: Arrival, reason: RefuseReason) {
        if arrival.eager.is_some() {
            self.return_credit(arrival.bytes);
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

    pub(super) fn match_up(&mut self, now: Time, operation: OperationId, arrival: Arrival) {
        self.learn_from(operation, &arrival);
        let (Some(receive), Some(agreed)) = (self.receives.get_mut(&operation), self.agreed) else {
            return;
        };
        let Arrival {
            transfer,
            bytes,
            level: sender_asked,
            ..
        } = arrival;
        if bytes > receive.capacity {
            let capacity = receive.capacity;
            self.refuse(arrival, RefuseReason::TooLarge { capacity });
            let cause = EndCause::TooLarge { bytes, capacity };
            self.end_receive(operation, Err((cause, Delivered::None)));
            return;
        }
        receive.clock.progressed(now);
        let level = receive.asked.max(sender_asked);
        match arrival.eager {
            Some(payload) => {
                let expected = (level == Level::Verified).then(|| payload.crc32c());
                self.by_transfer.insert(transfer, operation);
                self.actions
                    .push_back(matched(operation, transfer, bytes, 0, 0, false));
                self.actions.push_back(Action::DeliverEager {
                    operation,
                    payload: payload.into_bytes(),
                });
                receive.matched = Some(Matched {
                    transfer,
                    bytes,
                    level,
                    stage: ReceiveStage::Eager {
                        verdict_wanted: sender_asked == Level::Verified,
                        copied: false,
                        credit: bytes,
                    },
                    digesting: false,
                    digest: None,
                    expected,
                    foresight: Foresight::None,
                });
            }
            None => {
                let foresight = Foresight::None;
                let plan =
                    self.begin_receiving(operation, transfer, bytes, level, foresight, &agreed);
                let grant = plan.grant(level);
                self.transmit.push_back(Frame::Grant { transfer, grant });
            }
        }
        self.pump_receives();
        self.settle_receive(now, operation);
    }

    /// Cuts a transfer whose chunks are to come, and puts them behind those that come before.
    pub(super) fn begin_receiving(
        &mut self,
        operation: OperationId,
        transfer: TransferId,
        bytes: u64,
        level: Level,
        foresight: Foresight,
        agreed: &Agreed,
    ) -> Plan {
        let first_sequence = self.receive_stream.end();
        // Beside other transfers the lanes are busy anyway, and large chunks cost less. What is open may be long in
        // coming.
        let alone = match foresight {
            Foresight::Open => self.only_open(),
            _ => self.receive_stream.is_idle(),
        };
        let cut = match alone {
            true => self.config.cut(bytes, agreed.chunk_bytes),
            false => ChunkPlan::even(bytes, agreed.chunk_bytes),
        };
        let plan = Plan::new(cut, first_sequence, agreed.channels);
        self.by_transfer.insert(transfer, operation);
        self.receive_stream.append(operation, plan.chunks);
        self.actions.push_back(matched(
            operation,
            transfer,
            bytes,
            first_sequence,
            plan.chunks,
            foresight == Foresight::Open,
        ));
        let granted = GrantedReceive {
            plan,
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
                expected: None,
                foresight,
            });
        }
        plan
    }
}

pub(super) fn matched(
    operation: OperationId,
    transfer: TransferId,
    bytes: u64,
    first_sequence: u64,
    chunks: u32,
    ahead: bool,
) -> Action {
    Action::Matched {
        operation,
        transfer,
        bytes,
        first_sequence,
        chunks,
        ahead,
    }
}
