//! What the receiver answers to our sends.

use super::action::{Action, OperationId};
use super::chunk_set::ChunkSet;
use super::config::{Agreed, CHUNK_GRAIN_BYTES};
use super::error::{Delivered, EndCause, SessionError};
use super::outgoing::{GrantedSend, Outgoing, SendStage};
use super::stream::Plan;
use super::{Session, unexpected, unknown};
use crate::frame::{Grant, Level, PlacedChunks, RefuseReason, TransferId};
use crate::numbered::Numbered;
use crate::plan::ChunkPlan;
use crate::time::Time;

impl Grant {
    /// How it cuts a transfer of so many bytes.
    pub(super) fn plan(
        self,
        frame: &'static str,
        transfer: TransferId,
        bytes: u64,
        agreed: &Agreed,
    ) -> Result<Plan, SessionError> {
        let (most, chunk_bytes) = (agreed.chunk_bytes, self.chunk_bytes);
        let are_agreed =
            chunk_bytes <= most && chunk_bytes > 0 && chunk_bytes.is_multiple_of(CHUNK_GRAIN_BYTES);
        let cut = ChunkPlan::new(bytes, chunk_bytes, self.taper).filter(|_| are_agreed);
        let cut = cut.ok_or_else(|| {
            let found = format!(
                "{self:?} cuts the {bytes} bytes of transfer {transfer}, of {most} at most"
            );
            unexpected(frame, "chunks as agreed, which make the transfer", found)
        })?;
        Ok(Plan::named(cut, self.window))
    }
}

impl Session {
    pub(super) fn granted(
        &mut self,
        now: Time,
        transfer: TransferId,
        grant: Grant,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "grant";
        let level = grant.level;
        let Some(agreed) = self.agreed else {
            return Err(unexpected(FRAME, "settings first", "none arrived"));
        };
        let send = live(&mut self.sends, FRAME, transfer)?;
        if !matches!(send.stage, SendStage::Waiting) {
            return Err(unexpected(
                FRAME,
                "a transfer that waits",
                format!("transfer {transfer} does not"),
            ));
        }
        let (bytes, asked) = (send.bytes, send.asked);
        if level < asked {
            return Err(unexpected(
                FRAME,
                "the level that was asked for",
                format!("{level:?} arrived for transfer {transfer}, not {asked:?}"),
            ));
        }
        let cut = grant.plan(FRAME, transfer, bytes, &agreed)?.cut();
        let place = self.send_stream.end();
        if self.config.addressed {
            self.send_windows.name(FRAME, grant.window)?;
        } else if grant.window != place {
            return Err(unexpected(
                FRAME,
                "its first chunk's number",
                format!(
                    "{} arrived for transfer {transfer}, not {place}",
                    grant.window
                ),
            ));
        }
        self.waits_no_more(transfer);
        let plan = self.send_plan(cut, grant.window);
        self.begin_granted(now, transfer, plan, level);
        Ok(())
    }

    /// The peer has a destination for a send.
    pub(super) fn begin_granted(
        &mut self,
        now: Time,
        transfer: TransferId,
        plan: Plan,
        level: Level,
    ) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let first_sequence = plan.first_sequence;
        let operation = OperationId::send(transfer);
        self.send_stream.append(operation, plan.chunks);
        let cancelled = send.course.cancel.is_some();
        send.stage = SendStage::Granted(Box::new(GrantedSend {
            plan,
            level,
            posted: ChunkSet::default(),
            sent: ChunkSet::default(),
            acked: ChunkSet::default(),
            acked_bytes: 0,
            digest: None,
            digesting: level == Level::Verified && !cancelled,
            verdict: None,
        }));
        send.course.clock.progressed(now);
        if !cancelled {
            self.actions.push_back(super::offers::matched(
                operation,
                transfer,
                plan.bytes(),
                first_sequence,
                plan.chunks,
            ));
        }
        if cancelled {
            self.send_stream.drop_from(operation, first_sequence);
        } else if level == Level::Verified {
            self.actions.push_back(Action::ComputeDigest {
                operation,
                bytes: plan.bytes(),
            });
        }
        self.pump_sends();
        self.settle_send(now, transfer);
    }

    pub(super) fn refused(
        &mut self,
        now: Time,
        transfer: TransferId,
        reason: RefuseReason,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "refuse";
        let send = live(&mut self.sends, FRAME, transfer)?;
        let legal = match &send.stage {
            SendStage::Waiting => true,
            SendStage::Eager(eager) => !eager.placed && eager.verdict.is_none(),
            SendStage::Queued | SendStage::Granted(_) => false,
        };
        if !legal {
            return Err(unexpected(
                FRAME,
                "a transfer that was not granted or placed",
                format!("transfer {transfer} was"),
            ));
        }
        let cause = match reason {
            RefuseReason::TooLarge { capacity } if capacity >= send.bytes => {
                return Err(unexpected(
                    FRAME,
                    "a capacity below its length",
                    format!("{capacity} holds the {} of transfer {transfer}", send.bytes),
                ));
            }
            RefuseReason::TooLarge { capacity } => EndCause::TooLarge {
                bytes: send.bytes,
                capacity,
            },
            reason => EndCause::Refused { reason },
        };
        self.peer_is_done(transfer);
        let Some(send) = self.sends.get_mut(&transfer) else {
            return Ok(());
        };
        if let Some(cancel) = &mut send.course.cancel {
            // The cancel crossed the refusal; its answer is still to come.
            cancel.refused = true;
            self.settle_send(now, transfer);
        } else {
            self.end_send(transfer, cause, Delivered::None);
        }
        Ok(())
    }

    pub(super) fn eager_done(
        &mut self,
        now: Time,
        transfer: TransferId,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "eager done";
        let send = live(&mut self.sends, FRAME, transfer)?;
        match &mut send.stage {
            SendStage::Eager(eager) if send.transmitted && !eager.placed => eager.placed = true,
            _ => {
                return Err(unexpected(
                    FRAME,
                    "an eager transfer, once",
                    format!("transfer {transfer} is none or was placed"),
                ));
            }
        }
        send.course.clock.progressed(now);
        self.settle_send(now, transfer);
        Ok(())
    }

    pub(super) fn acknowledged(
        &mut self,
        now: Time,
        transfer: TransferId,
        chunks: PlacedChunks,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "placed";
        let transfer = self.sent_as(transfer);
        let send = live(&mut self.sends, FRAME, transfer)?;
        let SendStage::Granted(granted) = &mut send.stage else {
            return Err(unexpected(
                FRAME,
                "a granted transfer",
                format!("transfer {transfer} is not"),
            ));
        };
        let quiet = send.course.is_quiet();
        let was_got = granted.all_acked();
        for index in chunks.iter() {
            let problem = if !granted.posted.contains(index) {
                "was never sent"
            } else if !granted.acked.insert(index) {
                "was acknowledged before"
            } else {
                let chunk = granted.plan.chunk(index);
                granted.acked_bytes += u64::from(chunk.length);
                let operation = OperationId::send(transfer);
                self.actions
                    .push_back(Action::ChunkAcknowledged { operation, chunk });
                if self.config.hold_until_placed && granted.sent.contains(index) && !quiet {
                    self.send_stream.release(&chunk);
                }
                continue;
            };
            let chunks = granted.plan.chunks;
            return Err(unexpected(
                FRAME,
                "each chunk once, which was sent",
                format!("chunk {index} of {chunks} of transfer {transfer} {problem}"),
            ));
        }
        send.course.clock.progressed(now);
        let is_got = !was_got && send.is_acked();
        let is_held = send.covered.is_some() && !send.course.completed;
        self.send_stream.moved = now;
        if is_got && is_held {
            self.reply_acked(transfer);
        }
        if self.config.hold_until_placed {
            self.pump_sends();
        }
        self.settle_send(now, transfer);
        Ok(())
    }

    pub(super) fn verdict(
        &mut self,
        now: Time,
        transfer: TransferId,
        crc32c: u32,
        matches: bool,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "verdict";
        let transfer = self.sent_as(transfer);
        let send = live(&mut self.sends, FRAME, transfer)?;
        let asked = send.asked;
        let (slot, expected) = match &mut send.stage {
            SendStage::Eager(eager) if send.transmitted => (&mut eager.verdict, Some(eager.crc32c)),
            SendStage::Granted(granted) if granted.all_acked() => {
                (&mut granted.verdict, granted.digest)
            }
            _ => (&mut None, None),
        };
        let Some(expected) = expected.filter(|_| slot.is_none()) else {
            return Err(unexpected(
                FRAME,
                "a placed transfer whose checksum was sent, once",
                format!("transfer {transfer} is not"),
            ));
        };
        if matches != (crc32c == expected) {
            return Err(unexpected(
                FRAME,
                "an outcome that follows from the checksum",
                format!("{crc32c:#010x} arrived for transfer {transfer}, not {expected:#010x}"),
            ));
        }
        if matches && matches!(send.stage, SendStage::Eager(_)) && asked < Level::Verified {
            return Err(unexpected(
                FRAME,
                "a transfer to be verified",
                format!("transfer {transfer} is eager and not"),
            ));
        }
        match &mut send.stage {
            SendStage::Eager(eager) => eager.verdict = Some(crc32c),
            SendStage::Granted(granted) => granted.verdict = Some(crc32c),
            SendStage::Queued | SendStage::Waiting => {}
        }
        send.course.clock.progressed(now);
        self.settle_send(now, transfer);
        Ok(())
    }
}

/// The send a frame of its receiver names, by this side's name.
fn live<'a>(
    sends: &'a mut Numbered<TransferId, Outgoing>,
    frame: &'static str,
    transfer: TransferId,
) -> Result<&'a mut Outgoing, SessionError> {
    let send = sends.get_mut(&transfer);
    send.ok_or_else(|| unknown(frame, transfer))
}
