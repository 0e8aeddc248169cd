//! Sends: announced or eager, granted, posted, acknowledged, compared.

use super::Session;
use super::action::{Covered, OperationId, SendRequest};
use super::chunk_set::ChunkSet;
use super::clock::Course;
use super::config::{Deadlines, MAX_TRANSFER_BYTES, eager_cost};
use super::credit::Kind;
use super::error::{DataFailure, RequestError};
use super::stream::Plan;
use crate::frame::{Destination, Frame, Level, Payload, Tag, TransferId};
use crate::time::Time;

#[derive(Debug)]
pub(super) struct Outgoing {
    /// Where it goes; a send gets its number later.
    pub(super) to: Destination,
    /// The answer to a get: what of this side's windows it is read from.
    pub(super) covered: Option<Covered>,
    /// Pieces of the peer's that it covers.
    pub(super) pieces: u32,
    /// The peer counts it so, or where it is the answer to a get, this side does.
    pub(super) counted: Option<Kind>,
    /// 0 unless it is a send.
    pub(super) tag: Tag,
    /// Its number among the sends of its tag, while it waits for a receive, or is in the window of one: it may be another
    /// one's afterwards.
    pub(super) number: Option<u64>,
    /// What both sides call it in frames.
    pub(super) wire: TransferId,
    pub(super) bytes: u64,
    pub(super) asked: Level,
    pub(super) course: Course,
    /// Its first frame was taken for transmission.
    pub(super) transmitted: bool,
    /// It has asked for a receive, which it does once.
    pub(super) asking: bool,
    /// Its window was closed, and the data plane has yet to let go of it.
    pub(super) leaving: bool,
    pub(super) stage: SendStage,
}

#[derive(Debug)]
pub(super) enum SendStage {
    /// Nothing was said of it.
    Queued,
    /// It asked for a receive.
    Waiting,
    Eager(EagerSend),
    /// In a box: without it small sends, which end soon, would be moved about with room for all this.
    Granted(Box<GrantedSend>),
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
            SendStage::Queued | SendStage::Waiting | SendStage::Eager(_) => false,
        }
    }

    /// The peer says nothing more of it, unless one of the sides ends it early.
    pub(super) fn is_answered(&self) -> bool {
        match &self.stage {
            SendStage::Queued | SendStage::Waiting => false,
            SendStage::Eager(eager) => match eager.verdict {
                Some(got) => eager.placed || got != eager.crc32c,
                None => eager.placed && self.asked < Level::Verified,
            },
            SendStage::Granted(granted) => {
                granted.all_acked()
                    && (granted.level < Level::Verified || granted.verdict.is_some())
            }
        }
    }

    /// The peer has all of its chunks.
    pub(super) fn is_acked(&self) -> bool {
        match &self.stage {
            SendStage::Granted(granted) => granted.all_acked(),
            SendStage::Queued | SendStage::Waiting | SendStage::Eager(_) => false,
        }
    }

    /// It needs to hear that its chunks were sent, and not only that they were placed.
    pub(super) fn waits_for_sent(&self) -> bool {
        let SendStage::Granted(granted) = &self.stage else {
            return false;
        };
        let until_sent = self.asked == Level::Sent && granted.level < Level::Verified;
        // It holds its place in the window until it was sent.
        let mut acked_first = granted.acked.difference(&granted.sent);
        self.course.cancel.is_some()
            || until_sent && !self.course.completed
            || acked_first.next().is_some()
    }

    /// `released`: the data plane is known to be done with the source whatever it reported.
    pub(super) fn progress(&self, released: bool) -> SendProgress {
        match &self.stage {
            SendStage::Queued | SendStage::Waiting => SendProgress::Going,
            SendStage::Granted(_) if self.leaving => SendProgress::Going,
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

/// Where a transfer goes, as the peer is told.
pub(super) fn numbered(to: Destination, number: Option<u64>) -> Destination {
    match (to, number) {
        (Destination::Receive { tag, .. }, Some(number)) => Destination::Receive { tag, number },
        (to, _) => to,
    }
}

impl Session {
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
            _ => self.check_room(self.own_sends())?,
        }
        let SendRequest {
            to,
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
        let pieces = match to {
            Destination::Put { to, .. } => self.piece_lists.queue(to, bytes)?,
            _ => 0,
        };
        let covered = match to {
            Destination::Reply { request } => Some(self.begin_reply(request)?),
            _ => None,
        };
        let mut eager = eager.filter(|_| self.has_credit(bytes, pieces));
        self.next_send += 1;
        let tag = to.tag();
        let mut number = None;
        if let Some(tag) = tag.filter(|_| eager.is_some()) {
            number = self.number_eager(tag);
            eager = eager.filter(|_| number.is_some());
        }
        let payload = eager.map(|payload| {
            self.eager_used += eager_cost(bytes, pieces);
            Payload::from(payload)
        });
        let is_queued = matches!(
            to,
            Destination::Put { .. } | Destination::Notification { .. }
        );
        let mut queued = None;
        let stage = match payload {
            payload if is_queued => {
                queued = payload;
                SendStage::Queued
            }
            Some(payload) => {
                let crc32c = payload.crc32c();
                self.transmit.push_back(Frame::Eager {
                    transfer,
                    level,
                    to: numbered(to, number),
                    payload,
                });
                SendStage::Eager(EagerSend {
                    crc32c,
                    placed: false,
                    verdict: None,
                })
            }
            None => SendStage::Queued,
        };
        let is_silent = matches!(stage, SendStage::Queued);
        let operation = OperationId::send(transfer);
        let usual = match covered {
            Some(_) => Deadlines::PEERS,
            None => self.config.deadlines,
        };
        let deadlines = deadlines.unwrap_or(usual);
        let course = self.timers.begin(now, operation, deadlines);
        self.sends.insert(
            transfer,
            Outgoing {
                to,
                counted: covered.is_some().then_some(Kind::Get),
                covered,
                pieces,
                tag: tag.unwrap_or(Tag(0)),
                number: None,
                wire: transfer,
                bytes,
                asked: level,
                course,
                transmitted: false,
                asking: false,
                leaving: false,
                stage,
            },
        );
        match tag {
            _ if is_queued => self.start_one_sided(transfer, queued),
            _ if !is_silent => {}
            Some(_) => self.number_send(transfer),
            None => self.ask(transfer),
        }
        Ok(operation)
    }

    /// A send's first frame leaves.
    pub(super) fn send_transmitted(&mut self, now: Time, transfer: TransferId) {
        if let Some(send) = self.sends.get_mut(&transfer) {
            send.transmitted = true;
            send.course.clock.progressed(now);
            self.settle_send(now, transfer);
        }
    }

    pub(super) fn send_chunk_sent(&mut self, now: Time, transfer: TransferId, index: u32) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        if send.course.is_quiet() {
            return;
        }
        let problem = match &mut send.stage {
            SendStage::Granted(granted) if granted.posted.contains(index) => {
                if granted.sent.insert(index) {
                    self.send_stream.moved = now;
                    let held = self.config.hold_until_placed && !granted.acked.contains(index);
                    let chunk = granted.plan.chunk(index);
                    send.course.clock.progressed(now);
                    if !held {
                        self.send_stream.release(&chunk);
                        self.pump_sends();
                    }
                    self.settle_send(now, transfer);
                    return;
                }
                "was reported sent twice"
            }
            _ => "was reported sent, but never posted",
        };
        let failure = DataFailure::Misreport(format!("chunk {index} {problem}"));
        self.data_failed(now, OperationId::send(transfer), Some(index), failure);
    }

    pub(super) fn send_digest(&mut self, now: Time, transfer: TransferId, crc32c: u32) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        let SendStage::Granted(granted) = &mut send.stage else {
            return;
        };
        if !std::mem::take(&mut granted.digesting) || send.leaving {
            return;
        }
        send.course.clock.progressed(now);
        // A transfer that is being cancelled is never compared.
        if send.course.cancel.is_none() {
            granted.digest = Some(crc32c);
            let transfer = send.wire;
            self.transmit.push_back(Frame::Digest { transfer, crc32c });
        }
        self.settle_send(now, transfer);
    }
}
