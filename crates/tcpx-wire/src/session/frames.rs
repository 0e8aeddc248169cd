//! Frames in and out.

use super::Session;
use super::action::Action;
use super::config::Agreed;
use super::error::{ConnectionFailure, EndCause, SessionError};
use super::matching::Arrival;
use super::{unexpected, unknown};
use crate::frame::{Frame, GoodbyeReason, Limits, Role, Settings, TransferId};
use crate::time::Time;

/// Frames that may wait while the peer still sends, beside those that the limits of both sides allow.
const LEAST_BACKLOG: u64 = 1 << 16;
/// Frames that wait of an operation, at most: it is asked for or answered, cancelled and let go.
const FRAMES_EACH: u64 = 4;

/// Credit is given back once it is more than this part of the whole.
const CREDIT_PARTS: u64 = 8;

impl Session {
    /// Takes a frame of the peer.
    ///
    /// # Errors
    /// When the peer broke the protocol; the caller then calls [`Session::fail`].
    pub fn frame(&mut self, now: Time, frame: Frame) -> Result<(), SessionError> {
        if self.ended() {
            return Ok(());
        }
        self.liveness.heard(now);
        if self.transmit.len() as u64 > LEAST_BACKLOG {
            self.check_backlog()?;
        }
        if self.agreed.is_none() && !matches!(frame, Frame::Settings(_) | Frame::Goodbye { .. }) {
            return Err(unexpected("first frame", "settings", "another one arrived"));
        }
        match frame {
            Frame::Settings(theirs) => return self.take_settings(now, theirs),
            Frame::Setup { payload } => self.actions.push_back(Action::Setup(payload)),
            Frame::Ready => {
                if std::mem::replace(&mut self.peer_ready, true) {
                    return Err(unexpected("ready", "it once", "it arrived again"));
                }
                self.actions.push_back(Action::PeerReady);
                self.pump_sends();
                self.pump_receives();
                self.post_candidates();
            }
            Frame::Waiting {
                transfer,
                level,
                bytes,
                to,
            } => {
                let arrival = Arrival::new(transfer, level, bytes, to);
                return self.arrived(now, "waiting", arrival, to);
            }
            Frame::Eager {
                transfer,
                level,
                to,
                payload,
            } => {
                let mut arrival = Arrival::new(transfer, level, payload.len() as u64, to);
                arrival.eager = Some(payload);
                return self.arrived(now, "eager", arrival, to);
            }
            Frame::Get {
                request,
                from,
                bytes,
                level,
            } => return self.asked_for(request, from, bytes, level),
            Frame::Pieces { list, last, part } => {
                let limits = &self.config.ours.limits;
                return self.piece_lists.take_part(limits, list, last, &part);
            }
            Frame::DropPieces { list } => return self.piece_lists.take_drop(list),
            Frame::RefuseGet { request, reason } => return self.get_refused(request, reason),
            Frame::Grant { transfer, grant } => return self.granted(now, transfer, grant),
            Frame::Posted {
                tag,
                number,
                capacity,
                grant,
            } => return self.posted(now, tag, number, capacity, grant),
            Frame::Unpost { tag, number } => return self.unposted(now, tag, number),
            Frame::Unposted { tag, number, used } => {
                return self.unpost_answered(now, tag, number, used);
            }
            Frame::Forget { tag, number } => self.forget_asked(tag, number),
            Frame::Forgotten { tag, forgotten } => {
                return self.forget_answered(tag, forgotten);
            }
            Frame::Refuse { transfer, reason } => return self.refused(now, transfer, reason),
            Frame::EagerDone { transfer } => return self.eager_done(now, transfer),
            Frame::EagerCredit { bytes } => {
                let (used, arrived) = (self.eager_used, u64::from(bytes));
                self.eager_used = used.checked_sub(arrived).ok_or_else(|| {
                    let found = format!("{arrived} bytes of {used} came back");
                    unexpected("eager credit", "no more than is in use", found)
                })?;
            }
            Frame::Placed { transfer, chunks } => return self.acknowledged(now, transfer, chunks),
            Frame::Digest { transfer, crc32c } => {
                return self.peer_digest(now, transfer, crc32c);
            }
            Frame::Verdict {
                transfer,
                crc32c,
                matches,
            } => return self.verdict(now, transfer, crc32c, matches),
            Frame::Cancel {
                transfer,
                from,
                reason,
                detail,
            } => {
                self.check_known("cancel", transfer, from)?;
                match from {
                    Role::Sender => self.cancelled_by_sender(now, transfer, reason, &detail),
                    Role::Receiver => self.cancelled_by_receiver(now, transfer, reason, &detail),
                }
            }
            Frame::Cancelled { transfer, from } => return self.peer_quiet(now, transfer, from),
            Frame::Heartbeat { counter } => {
                let expected = self.liveness.expected_beat;
                if counter != expected {
                    let found = format!("{counter} arrived, not {expected}");
                    return Err(unexpected(
                        "heartbeat",
                        "numbers that count up by one",
                        found,
                    ));
                }
                self.liveness.expected_beat += 1;
            }
            Frame::Goodbye { reason, detail } => {
                self.transmit.push_back(Frame::GoodbyeAck);
                let detail = detail.to_string();
                let failure = (reason == GoodbyeReason::Error).then(|| {
                    let detail = detail.clone();
                    ConnectionFailure::PeerFailed { detail }
                });
                self.end_all(now, &EndCause::PeerClosed { reason, detail }, failure);
            }
            Frame::Redial { lane } => self.actions.push_back(Action::Redial { lane }),
            // The stream's; a caller that does not resume has no use for it.
            Frame::Received { .. } => {}
            Frame::GoodbyeAck => {
                if !self.goodbye_sent() {
                    return Err(unexpected(
                        "goodbye ack",
                        "a goodbye before it",
                        "none was sent",
                    ));
                }
                self.end_all(now, &EndCause::Closed, None);
            }
        }
        Ok(())
    }

    /// Whether the peer reads what it asks for: no more answers wait than operations may be under way.
    fn check_backlog(&self) -> Result<(), SessionError> {
        let theirs = self.agreed.map(|agreed| agreed.limits);
        let limits = [Some(self.config.ours.limits), theirs];
        let operations: u64 = limits.iter().flatten().map(Limits::operations).sum();
        let limit = LEAST_BACKLOG + FRAMES_EACH * operations;
        if self.transmit.len() as u64 <= limit {
            return Ok(());
        }
        let what = "answers waiting that it does not read";
        Err(SessionError::TooMany { what, limit })
    }

    fn take_settings(&mut self, now: Time, theirs: Settings) -> Result<(), SessionError> {
        if self.agreed.is_some() {
            return Err(unexpected("settings", "them once", "they arrived again"));
        }
        let agreed = Agreed::new(&self.config.ours, &theirs)?;
        self.send_stream
            .configure(agreed.channels, agreed.send_window);
        self.receive_stream
            .configure(agreed.channels, agreed.receive_window);
        self.liveness.configure(now, agreed.heartbeat);
        self.agreed = Some(agreed);
        self.actions
            .push_back(Action::PeerSettings(Box::new(theirs)));
        self.ask_queued();
        self.begin_unroomed();
        self.ask_unasked();
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
            (Role::Receiver, None) => transfer.0 < self.next_send,
            (Role::Sender, Some(window)) => self.posting.has_named(window),
            (Role::Receiver, Some(window)) => self.send_windows.has_named(window),
        };
        if known {
            return Ok(());
        }
        Err(unknown(frame, transfer))
    }

    fn peer_quiet(
        &mut self,
        now: Time,
        transfer: TransferId,
        from: Role,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "cancelled";
        self.check_known(FRAME, transfer, from)?;
        let cancel = match from {
            Role::Receiver => match self.sends.get_mut(&self.sent_as(transfer)) {
                // It began anew meanwhile.
                Some(send) if send.wire == transfer => send.course.cancel.as_mut(),
                _ => return Ok(()),
            },
            Role::Sender => {
                let operation = self.by_transfer.get(&transfer);
                match operation.and_then(|operation| self.receives.get_mut(operation)) {
                    Some(receive) => receive.course.cancel.as_mut(),
                    // It ended here before the cancel came.
                    None => return Ok(()),
                }
            }
        };
        let Some(cancel) = cancel.filter(|cancel| !cancel.peer_quiet) else {
            return Err(unexpected(
                FRAME,
                "a transfer that is being cancelled, once",
                format!("transfer {transfer} is not"),
            ));
        };
        cancel.peer_quiet = true;
        match from {
            Role::Receiver => self.settle_send(now, self.sent_as(transfer)),
            Role::Sender => {
                if let Some(operation) = self.by_transfer.get(&transfer).copied() {
                    self.settle_receive(now, operation);
                }
            }
        }
        Ok(())
    }

    /// Whether credit goes back: not for every payload, and in time for the longest.
    fn credit_is_due(&self) -> bool {
        let ours = &self.config.ours;
        let (owed, credit) = (self.credit_owed, u64::from(ours.eager_credit));
        owed > credit / CREDIT_PARTS || owed > credit.saturating_sub(ours.eager_limit.into())
    }

    /// The next frame for the peer.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Frame> {
        if !self.ended() {
            if self.acks.ready(now) {
                self.flush_acks();
            }
            self.advance_close();
            if self.transmit.len() == 0 && self.credit_is_due() {
                let bytes = u32::try_from(self.credit_owed).unwrap_or(u32::MAX);
                self.credit_owed -= u64::from(bytes);
                self.transmit.push_back(Frame::EagerCredit { bytes });
            }
        }
        let frame = self.transmit.pop_front()?;
        self.liveness.transmitted(now);
        if let Frame::Waiting { transfer, .. } | Frame::Eager { transfer, .. } = &frame {
            self.send_transmitted(now, *transfer);
        }
        Some(frame)
    }
}
