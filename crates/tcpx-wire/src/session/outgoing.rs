//! Sends: announced or eager, granted, posted, acknowledged, compared.

use super::action::{Action, OperationId, SendRequest};
use super::cancel::Cancelling;
use super::chunk_set::ChunkSet;
use super::clock::OperationClock;
use super::config::MAX_TRANSFER_BYTES;
use super::error::{AckProblem, DataFailure, EndCause, RequestError, SessionError};
use super::stream::Plan;
use super::{Session, unexpected};
use crate::frame::{Frame, Level, PlacedChunks, RefuseReason, Tag, TransferId};
use crate::time::Time;

#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) tag: Tag,
    pub(super) bytes: u64,
    pub(super) asked: Level,
    pub(super) clock: OperationClock,
    /// Its first frame was taken for transmission.
    pub(super) transmitted: bool,
    /// It was reported complete; what is left is the peer's part.
    pub(super) completed: bool,
    pub(super) stage: SendStage,
    pub(super) cancel: Option<Cancelling>,
}

#[derive(Debug)]
pub(super) enum SendStage {
    Announced,
    Eager(EagerSend),
    Granted(GrantedSend),
}

#[derive(Debug)]
pub(super) struct EagerSend {
    /// CRC32C of the payload.
    pub(super) crc32c: u32,
    pub(super) placed: bool,
    /// CRC32C of the destination.
    pub(super) verdict: Option<u32>,
}

#[derive(Debug)]
pub(super) struct GrantedSend {
    pub(super) plan: Plan,
    pub(super) level: Level,
    pub(super) posted: ChunkSet,
    pub(super) sent: ChunkSet,
    pub(super) acked: ChunkSet,
    pub(super) acked_bytes: u64,
    /// CRC32C of the source.
    pub(super) digest: Option<u32>,
    /// The data plane computes a digest.
    pub(super) digesting: bool,
    /// CRC32C of the destination.
    pub(super) verdict: Option<u32>,
}

impl GrantedSend {
    pub(super) fn all_sent(&self) -> bool {
        self.sent.len() == self.plan.chunks
    }

    pub(super) fn all_acked(&self) -> bool {
        self.acked.len() == self.plan.chunks
    }
}

/// How far a send is.
#[derive(Debug, PartialEq)]
pub(super) enum SendProgress {
    Going,
    /// The operation ends; `last` when the peer owes nothing more.
    Done {
        level: Level,
        last: bool,
    },
    Corrupt {
        expected: u32,
        got: u32,
    },
}

impl Outgoing {
    /// The data plane may touch the source.
    pub(super) fn busy(&self) -> bool {
        match &self.stage {
            SendStage::Granted(granted) => {
                granted.digesting || granted.posted.len() != granted.sent.len()
            }
            SendStage::Announced | SendStage::Eager(_) => false,
        }
    }

    /// `released`: the data plane is known to be done with the source whatever it reported.
    pub(super) fn progress(&self, released: bool) -> SendProgress {
        match &self.stage {
            SendStage::Announced => SendProgress::Going,
            SendStage::Eager(eager) => self.eager_progress(eager),
            SendStage::Granted(granted) => {
                let acked = granted.all_acked();
                let level = match granted.level {
                    Level::Verified => Level::Verified,
                    _ => self.asked,
                };
                if !(granted.all_sent() || released && acked) || granted.digesting {
                    return SendProgress::Going;
                }
                match (level, granted.digest, granted.verdict) {
                    (Level::Verified, Some(expected), Some(got)) if acked => {
                        if expected == got {
                            SendProgress::Done { level, last: true }
                        } else {
                            SendProgress::Corrupt { expected, got }
                        }
                    }
                    (Level::Verified, ..) => SendProgress::Going,
                    (Level::Sent, ..) => SendProgress::Done { level, last: acked },
                    (Level::Placed, ..) if acked => SendProgress::Done { level, last: true },
                    (Level::Placed, ..) => SendProgress::Going,
                }
            }
        }
    }

    fn eager_progress(&self, eager: &EagerSend) -> SendProgress {
        let level = self.asked;
        match eager.verdict {
            Some(got) if got != eager.crc32c => SendProgress::Corrupt {
                expected: eager.crc32c,
                got,
            },
            Some(_) if eager.placed => SendProgress::Done { level, last: true },
            _ if eager.placed && level < Level::Verified => {
                SendProgress::Done { level, last: true }
            }
            _ if self.transmitted && level == Level::Sent => {
                SendProgress::Done { level, last: false }
            }
            _ => SendProgress::Going,
        }
    }
}

impl Session {
    pub(super) fn start_send(
        &mut self,
        now: Time,
        request: SendRequest,
    ) -> Result<OperationId, RequestError> {
        self.check_room(self.sends.len())?;
        let SendRequest {
            tag,
            bytes,
            level,
            deadlines,
            eager,
        } = request;
        if bytes > MAX_TRANSFER_BYTES {
            return Err(RequestError::TooLong { bytes });
        }
        if let Some(payload) = &eager
            && payload.len() as u64 != bytes
        {
            return Err(RequestError::EagerLength {
                bytes,
                payload: payload.len(),
            });
        }
        let transfer = TransferId(self.next_send);
        self.next_send += 1;
        let stage = match eager.filter(|_| self.eager_allowed(bytes)) {
            Some(payload) => {
                self.eager_used += bytes;
                let crc32c = super::crc32c(&payload);
                self.transmit.push_back(Frame::Eager {
                    transfer,
                    tag,
                    level,
                    payload,
                });
                SendStage::Eager(EagerSend {
                    crc32c,
                    placed: false,
                    verdict: None,
                })
            }
            None => {
                self.transmit.push_back(Frame::Announce {
                    transfer,
                    tag,
                    bytes,
                    level,
                });
                SendStage::Announced
            }
        };
        let operation = OperationId::send(transfer);
        let mut clock = OperationClock::new(deadlines.unwrap_or(self.config.deadlines), now);
        let due = clock.due();
        self.timers.arm(&mut clock, operation, due);
        self.sends.insert(
            transfer,
            Outgoing {
                tag,
                bytes,
                asked: level,
                clock,
                transmitted: false,
                completed: false,
                stage,
                cancel: None,
            },
        );
        Ok(operation)
    }

    /// A send's first frame leaves.
    pub(super) fn send_transmitted(&mut self, now: Time, transfer: TransferId) {
        if let Some(send) = self.sends.get_mut(&transfer) {
            send.transmitted = true;
            send.clock.progressed(now);
            self.settle_send(now, transfer);
        }
    }

    pub(super) fn granted(
        &mut self,
        now: Time,
        transfer: TransferId,
        chunk_bytes: u32,
        first_sequence: u64,
        level: Level,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "grant";
        let Some(agreed) = self.agreed else {
            return Err(unexpected(FRAME, "settings first", "none arrived"));
        };
        let send = live(&mut self.sends, FRAME, transfer)?;
        if !matches!(send.stage, SendStage::Announced) {
            return Err(unexpected(
                FRAME,
                "an announced transfer that was not granted yet",
                format!("transfer {} was granted or is eager", transfer.0),
            ));
        }
        let check = |field, expected: u64, arrived: u64| {
            if expected == arrived {
                return Ok(());
            }
            Err(SessionError::Field {
                frame: FRAME,
                transfer,
                field,
                expected,
                arrived,
            })
        };
        check("chunk_bytes", agreed.chunk_bytes.into(), chunk_bytes.into())?;
        check("first_sequence", self.send_stream.end(), first_sequence)?;
        if level < send.asked {
            check("level", send.asked as u64, level as u64)?;
        }
        let plan = Plan::new(send.bytes, chunk_bytes, first_sequence, agreed.channels);
        let operation = OperationId::send(transfer);
        self.send_stream.append(operation, plan.chunks);
        let cancelled = send.cancel.is_some();
        send.stage = SendStage::Granted(GrantedSend {
            plan,
            level,
            posted: ChunkSet::default(),
            sent: ChunkSet::default(),
            acked: ChunkSet::default(),
            acked_bytes: 0,
            digest: None,
            digesting: level == Level::Verified && !cancelled,
            verdict: None,
        });
        send.clock.progressed(now);
        if !cancelled {
            self.actions.push_back(super::incoming::matched(
                operation,
                transfer,
                plan.bytes,
                first_sequence,
                plan.chunks,
            ));
        }
        if cancelled {
            self.send_stream.drop_from(first_sequence);
        } else if level == Level::Verified {
            self.actions.push_back(Action::ComputeDigest {
                operation,
                bytes: plan.bytes,
            });
        }
        self.pump_sends();
        self.settle_send(now, transfer);
        Ok(())
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
            SendStage::Announced => true,
            SendStage::Eager(eager) => !eager.placed && eager.verdict.is_none(),
            SendStage::Granted(_) => false,
        };
        if !legal {
            return Err(unexpected(
                FRAME,
                "a transfer that was not granted or placed",
                format!("transfer {} was", transfer.0),
            ));
        }
        let cause = match reason {
            RefuseReason::TooLarge { capacity } if capacity >= send.bytes => {
                return Err(SessionError::Field {
                    frame: FRAME,
                    transfer,
                    field: "a capacity below",
                    expected: send.bytes,
                    arrived: capacity,
                });
            }
            RefuseReason::TooLarge { capacity } => EndCause::TooLarge {
                bytes: send.bytes,
                capacity,
            },
            reason => EndCause::Refused { reason },
        };
        if let Some(cancel) = &mut send.cancel {
            // The cancel crossed the refusal; its answer is still to come.
            cancel.refused = true;
            self.settle_send(now, transfer);
        } else {
            self.end_send(transfer, cause, super::Delivered::None);
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
                    format!("transfer {} is none or was placed", transfer.0),
                ));
            }
        }
        send.clock.progressed(now);
        self.settle_send(now, transfer);
        Ok(())
    }

    pub(super) fn acknowledged(
        &mut self,
        now: Time,
        transfer: TransferId,
        chunks: &PlacedChunks,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "placed";
        let send = live(&mut self.sends, FRAME, transfer)?;
        let SendStage::Granted(granted) = &mut send.stage else {
            return Err(unexpected(
                FRAME,
                "a granted transfer",
                format!("transfer {} is not", transfer.0),
            ));
        };
        let quiet = send.cancel.as_ref().is_some_and(|cancel| cancel.quiet);
        for index in chunks.iter() {
            let problem = if index >= granted.plan.chunks {
                AckProblem::OutOfRange
            } else if !granted.posted.contains(index) {
                AckProblem::NotSent
            } else if !granted.acked.insert(index) {
                AckProblem::Repeated
            } else {
                let chunk = granted.plan.chunk(index);
                granted.acked_bytes += u64::from(chunk.length);
                if self.config.report_acknowledged {
                    let operation = OperationId::send(transfer);
                    self.actions
                        .push_back(Action::ChunkAcknowledged { operation, chunk });
                }
                if self.config.hold_until_placed && granted.sent.contains(index) && !quiet {
                    self.send_stream.release(chunk.channel);
                }
                continue;
            };
            return Err(SessionError::Acknowledgement {
                transfer,
                chunk: index,
                chunks: granted.plan.chunks,
                problem,
            });
        }
        send.clock.progressed(now);
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
                format!("transfer {} is not", transfer.0),
            ));
        };
        if matches != (crc32c == expected) {
            return Err(SessionError::Field {
                frame: FRAME,
                transfer,
                field: "matches to follow from checksum",
                expected: expected.into(),
                arrived: crc32c.into(),
            });
        }
        if matches && matches!(send.stage, SendStage::Eager(_)) && asked < Level::Verified {
            return Err(unexpected(
                FRAME,
                "a transfer to be verified",
                format!("transfer {} is eager and not", transfer.0),
            ));
        }
        match &mut send.stage {
            SendStage::Eager(eager) => eager.verdict = Some(crc32c),
            SendStage::Granted(granted) => granted.verdict = Some(crc32c),
            SendStage::Announced => {}
        }
        send.clock.progressed(now);
        self.settle_send(now, transfer);
        Ok(())
    }

    pub(super) fn send_chunk_sent(&mut self, now: Time, transfer: TransferId, index: u32) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        if send.cancel.as_ref().is_some_and(|cancel| cancel.quiet) {
            return;
        }
        let problem = match &mut send.stage {
            SendStage::Granted(granted) if granted.posted.contains(index) => {
                if granted.sent.insert(index) {
                    let held = self.config.hold_until_placed && !granted.acked.contains(index);
                    let channel = granted.plan.chunk(index).channel;
                    send.clock.progressed(now);
                    if !held {
                        self.send_stream.release(channel);
                        self.pump_send_channel(channel);
                    }
                    self.settle_send(now, transfer);
                    return;
                }
                "was reported sent twice"
            }
            _ => "was reported sent, but never posted",
        };
        let failure = DataFailure::Misreport(format!("chunk {index} {problem}"));
        self.fail_operation(now, OperationId::send(transfer), Some(index), failure);
    }

    pub(super) fn send_digest(&mut self, now: Time, transfer: TransferId, crc32c: u32) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let SendStage::Granted(granted) = &mut send.stage else {
            return;
        };
        if !std::mem::take(&mut granted.digesting) {
            return;
        }
        send.clock.progressed(now);
        // A transfer that is being cancelled is never compared.
        if send.cancel.is_none() {
            granted.digest = Some(crc32c);
            self.transmit.push_back(Frame::Digest { transfer, crc32c });
        }
        self.settle_send(now, transfer);
    }

    /// Posts what the windows allow.
    pub(super) fn pump_sends(&mut self) {
        while self.may_post()
            && let Some(slot) = self.send_stream.next()
        {
            self.post_send(slot.owner, slot.index);
        }
    }

    pub(super) fn pump_send_channel(&mut self, channel: u16) {
        while self.may_post()
            && let Some(slot) = self.send_stream.next_on(channel)
        {
            self.post_send(slot.owner, slot.index);
        }
    }

    fn post_send(&mut self, operation: OperationId, index: u32) {
        let Some(transfer) = operation.sent_transfer() else {
            return;
        };
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let SendStage::Granted(granted) = &mut send.stage else {
            return;
        };
        granted.posted.insert(index);
        self.actions.push_back(Action::PostSend {
            operation,
            chunk: granted.plan.chunk(index),
            transfer,
            tag: send.tag,
        });
    }
}

/// The send a frame of its receiver names.
pub(super) fn live<'a>(
    sends: &'a mut std::collections::BTreeMap<TransferId, Outgoing>,
    frame: &'static str,
    transfer: TransferId,
) -> Result<&'a mut Outgoing, SessionError> {
    sends
        .get_mut(&transfer)
        .ok_or(SessionError::UnknownTransfer { frame, transfer })
}
