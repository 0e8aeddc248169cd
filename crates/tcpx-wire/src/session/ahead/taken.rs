//! The sender's part in grants ahead: which transfers take them.

use std::collections::VecDeque;

use super::{MOST, fits_level};
use crate::frame::{Frame, Grant, Level, Tag, TransferId};
use crate::session::action::OperationId;
use crate::session::config::MAX_TRANSFER_BYTES;
use crate::session::error::SessionError;
use crate::session::outgoing::SendStage;
use crate::session::stream::Plan;
use crate::session::{Session, unexpected};
use crate::time::Time;

/// Grants ahead of our transfers.
#[derive(Debug, Default)]
pub(in crate::session) struct TakenAhead {
    epoch: u32,
    /// In the order of our transfers, of which the first is the next that is to start.
    waiting: VecDeque<AheadGrant>,
}

#[derive(Clone, Copy, Debug)]
struct AheadGrant {
    tag: Tag,
    bytes: u64,
    level: Level,
    plan: Plan,
}

impl AheadGrant {
    fn fits(&self, tag: Tag, bytes: u64, level: Level) -> bool {
        (self.tag, self.bytes) == (tag, bytes) && fits_level(level, self.level)
    }
}

impl TakenAhead {
    pub(in crate::session) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether this epoch has begun; they wrap.
    fn has_begun(&self, epoch: u32) -> bool {
        self.epoch.wrapping_sub(epoch) <= u32::MAX / 2
    }
}

#[cfg(test)]
impl TakenAhead {
    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }
}

impl Session {
    pub(in crate::session) fn granted_ahead(
        &mut self,
        now: Time,
        transfer: TransferId,
        (epoch, tag, bytes): (u32, Tag, u64),
        grant: Grant,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "grant-ahead";
        let Some(agreed) = self.agreed.filter(|_| self.config.grants_ahead) else {
            return Err(unexpected(
                FRAME,
                "both sides to have said that they know such",
                "this one has not",
            ));
        };
        if bytes == 0 || bytes > MAX_TRANSFER_BYTES {
            return Err(SessionError::Field {
                frame: FRAME,
                transfer,
                field: "at most bytes, and one at least",
                expected: MAX_TRANSFER_BYTES,
                arrived: bytes,
            });
        }
        let taken = &self.taken_ahead;
        let waiting = taken.waiting.iter();
        let reserved: u64 = waiting.map(|grant| u64::from(grant.plan.chunks)).sum();
        let expected = self.send_stream.end().saturating_add(reserved);
        let level = grant.level;
        let plan = grant.plan(FRAME, transfer, bytes, &agreed, expected)?;
        let given = AheadGrant {
            tag,
            bytes,
            level,
            plan,
        };
        let ours = taken.epoch;
        if epoch != ours {
            if !taken.has_begun(epoch) {
                return Err(unexpected(
                    FRAME,
                    "an epoch that has begun",
                    format!("it is {ours}, and {epoch} arrived"),
                ));
            }
            if !taken.waiting.is_empty() {
                return Err(unexpected(
                    FRAME,
                    "epochs in their order",
                    format!("{epoch} arrived behind {ours}"),
                ));
            }
            // The guess before it was wrong.
            self.pass_over(transfer, &given);
            return Ok(());
        }
        let next = self.next_send.saturating_add(taken.waiting.len() as u64);
        if transfer.0 == next && taken.waiting.len() < MOST {
            self.taken_ahead.waiting.push_back(given);
            return Ok(());
        }
        if transfer.0 >= self.next_send || !taken.waiting.is_empty() {
            return Err(SessionError::TransferOrder {
                frame: FRAME,
                expected: TransferId(next),
                arrived: transfer,
            });
        }
        let Some(send) = self.sends.get(&transfer) else {
            return Err(SessionError::UnknownTransfer {
                frame: FRAME,
                transfer,
            });
        };
        match send.stage {
            SendStage::Granted(_) => {
                return Err(unexpected(
                    FRAME,
                    "a transfer that was not granted yet",
                    format!("transfer {} was", transfer.0),
                ));
            }
            SendStage::Announced if given.fits(send.tag, send.bytes, send.asked) => {
                self.begin_granted(now, transfer, plan, level);
            }
            SendStage::Announced | SendStage::Eager(_) => {
                // The peer sees it when it hears of the transfer.
                self.taken_ahead.epoch = self.taken_ahead.epoch.wrapping_add(1);
                self.pass_over(transfer, &given);
            }
        }
        Ok(())
    }

    /// The chunks of a grant that nothing is sent to are left out.
    fn pass_over(&mut self, transfer: TransferId, grant: &AheadGrant) {
        let owner = OperationId::send(transfer);
        self.send_stream.append(owner, grant.plan.chunks);
        self.send_stream.drop_from(owner, grant.plan.first_sequence);
    }

    /// The grant for a transfer that starts, if it was guessed, which one of an `other` kind never is; else those that are left are declined.
    pub(in crate::session) fn take_ahead(
        &mut self,
        tag: Tag,
        bytes: u64,
        level: Level,
        other: bool,
    ) -> Option<(Plan, Level)> {
        let first = self.taken_ahead.waiting.front()?;
        if !other && first.fits(tag, bytes, level) {
            let grant = self.taken_ahead.waiting.pop_front()?;
            return Some((grant.plan, grant.level));
        }
        self.decline();
        None
    }

    fn decline(&mut self) {
        let (epoch, next) = (self.taken_ahead.epoch, TransferId(self.next_send));
        self.taken_ahead.epoch = epoch.wrapping_add(1);
        self.transmit.push_back(Frame::Decline { epoch, next });
        let waiting = std::mem::take(&mut self.taken_ahead.waiting);
        for (transfer, grant) in (next.0..).zip(&waiting) {
            self.pass_over(TransferId(transfer), grant);
        }
    }

    pub(in crate::session) fn recalled(&mut self, epoch: u32) -> Result<(), SessionError> {
        let ours = self.taken_ahead.epoch;
        if !self.config.grants_ahead || !self.taken_ahead.has_begun(epoch) {
            return Err(unexpected(
                "recall",
                "an epoch of grants ahead that has begun",
                format!("it is {ours}, and {epoch} arrived"),
            ));
        }
        // Those of an earlier one have come to nothing before.
        if epoch == ours {
            self.decline();
        }
        Ok(())
    }
}
