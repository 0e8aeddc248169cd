//! Where operations stand: stall reports, snapshots, what was delivered.

use super::Session;
use super::action::OperationId;
use super::cancel::Cancelling;
use super::error::Delivered;
use super::incoming::{GrantedReceive, Incoming, ReceiveStage};
use super::one_sided::Origin;
use super::outgoing::{GrantedSend, Outgoing, SendStage};
use super::stall::{OperationKind, OperationState, Owes, StallReport};
use super::stream::Plan;
use crate::frame::{Destination, Level};
use crate::time::Time;

/// The chunk that is waited for and who owes it.
type Culprit = (Option<u32>, Owes);

impl Outgoing {
    pub(super) fn delivered(&self) -> Delivered {
        let cancel = self.course.cancel.as_ref();
        let told = cancel.is_some_and(|cancel| cancel.peer_quiet);
        let refused = cancel.is_some_and(|cancel| cancel.refused);
        let (started, all, bytes) = match &self.stage {
            // An empty one may be complete at the peer.
            SendStage::Waiting => (
                self.bytes == 0 && self.transmitted && !told && !refused,
                false,
                0,
            ),
            SendStage::Queued => (false, false, 0),
            SendStage::Eager(eager) => (self.transmitted && !refused, eager.placed, 0),
            SendStage::Granted(granted) => (
                !granted.posted.is_empty(),
                granted.all_acked(),
                granted.acked_bytes,
            ),
        };
        match (started, all, told) {
            (_, true, _) => Delivered::All,
            (false, ..) => Delivered::None,
            (true, false, true) => Delivered::Partial { bytes },
            (true, false, false) => Delivered::Unknown,
        }
    }

    /// What it waits for before anything moves.
    fn awaits(&self) -> Owes {
        match self.to {
            Destination::Receive { .. } => Owes::PeerPostReceive,
            _ => Owes::PeerAnswer,
        }
    }

    fn kind(&self) -> OperationKind {
        match self.to {
            Destination::Receive { .. } => OperationKind::Send,
            Destination::Put { .. } => OperationKind::Put,
            Destination::Reply { .. } => OperationKind::PeerGet,
            Destination::Notification { .. } => OperationKind::Notification,
        }
    }

    fn culprit(&self) -> Culprit {
        match &self.stage {
            SendStage::Eager(_) | SendStage::Waiting if !self.transmitted => {
                (None, Owes::LocalControl)
            }
            SendStage::Queued | SendStage::Waiting => (None, self.awaits()),
            SendStage::Granted(_) if self.leaving => (None, Owes::LocalStop),
            SendStage::Eager(eager) if !eager.placed => (None, self.awaits()),
            SendStage::Eager(eager) => match eager.verdict {
                None if self.asked == Level::Verified => (None, Owes::PeerVerdict),
                _ => (None, Owes::Nobody),
            },
            SendStage::Granted(granted) => {
                let sent_is_enough = self.asked == Level::Sent && granted.level < Level::Verified;
                granted.culprit(sent_is_enough && !self.course.completed)
            }
        }
    }
}

impl GrantedSend {
    fn culprit(&self, until_sent: bool) -> Culprit {
        let done = if until_sent { &self.sent } else { &self.acked };
        if let Some(chunk) = first_below(done.first_missing(), &self.plan) {
            let owes = if !self.posted.contains(chunk) {
                Owes::EarlierTransfer
            } else if !self.sent.contains(chunk) {
                Owes::LocalNetworkSend
            } else {
                Owes::PeerAcknowledge
            };
            return (Some(chunk), owes);
        }
        if let Some(chunk) = first_below(self.sent.first_missing(), &self.plan) {
            (Some(chunk), Owes::LocalNetworkSend)
        } else if self.digesting {
            (None, Owes::LocalDigest)
        } else if self.level == Level::Verified && self.verdict.is_none() {
            (None, Owes::PeerVerdict)
        } else {
            (None, Owes::Nobody)
        }
    }
}

impl Incoming {
    pub(super) fn delivered(&self) -> Delivered {
        let Some(matched) = &self.matched else {
            return match self.touched {
                true => Delivered::Partial { bytes: 0 },
                false => Delivered::None,
            };
        };
        match &matched.stage {
            _ if matched.all_placed() => Delivered::All,
            ReceiveStage::Granted(granted) if !granted.is_begun() => Delivered::None,
            ReceiveStage::Granted(granted) => Delivered::Partial {
                bytes: granted.placed_bytes,
            },
            ReceiveStage::Eager { .. } => Delivered::Partial { bytes: 0 },
        }
    }

    fn kind(&self) -> OperationKind {
        match self.origin {
            Origin::Posted => OperationKind::Receive,
            Origin::Get { .. } => OperationKind::Get,
            Origin::Put { .. } => OperationKind::PeerPut,
            Origin::Notification => OperationKind::PeerNotification,
        }
    }

    fn culprit(&self) -> Culprit {
        if self.is_withdrawn() {
            return (None, Owes::LocalStop);
        }
        if self.fenced && self.offered.is_some() {
            return (None, Owes::LocalFence);
        }
        let Some(matched) = &self.matched else {
            return match self.origin {
                Origin::Posted => (None, Owes::PeerSendMatching),
                _ => (None, Owes::PeerAnswer),
            };
        };
        match &matched.stage {
            ReceiveStage::Eager { copied: false, .. } => (None, Owes::LocalUnpack),
            ReceiveStage::Granted(granted) if !matched.all_placed() => granted.culprit(),
            _ if matched.digesting => (None, Owes::LocalDigest),
            _ if matched.level == Level::Verified && matched.expected.is_none() => {
                (None, Owes::PeerDigest)
            }
            _ => (None, Owes::Nobody),
        }
    }
}

impl GrantedReceive {
    /// An arrived chunk that is not placed blocks the others, whichever was sent first.
    fn culprit(&self) -> Culprit {
        if let Some(chunk) = self.arrived.difference(&self.placed).next() {
            return (Some(chunk), Owes::LocalUnpack);
        }
        match first_below(self.placed.first_missing(), &self.plan) {
            Some(chunk) if self.is_posted(chunk) => (Some(chunk), Owes::PeerSend),
            Some(chunk) => (Some(chunk), Owes::EarlierTransfer),
            None => (None, Owes::Nobody),
        }
    }
}

fn first_below(missing: u64, plan: &Plan) -> Option<u32> {
    u32::try_from(missing)
        .ok()
        .filter(|chunk| *chunk < plan.chunks)
}

impl Session {
    pub(super) fn standing(&self, now: Time, operation: OperationId) -> Option<StallReport> {
        match operation.sent_transfer() {
            Some(transfer) => {
                let send = self.sends.get(&transfer)?;
                let (plan, bytes_done) = match &send.stage {
                    SendStage::Queued | SendStage::Waiting => (None, 0),
                    SendStage::Eager(eager) => (None, if eager.placed { send.bytes } else { 0 }),
                    SendStage::Granted(granted) => (Some(&granted.plan), granted.acked_bytes),
                };
                let culprit = self.blame(send.culprit(), send.course.cancel.as_ref());
                let waited = send.course.clock.waited(now);
                let report = report(send.kind(), culprit, plan, waited);
                Some(StallReport {
                    tag: send.tag,
                    transfer: Some(transfer),
                    bytes_done,
                    bytes_total: send.bytes,
                    ..report
                })
            }
            None => {
                let receive = self.receives.get(&operation)?;
                let (plan, bytes_done) = match receive.matched.as_ref().map(|m| (m, &m.stage)) {
                    Some((matched, ReceiveStage::Eager { copied: true, .. })) => {
                        (None, matched.bytes)
                    }
                    Some((_, ReceiveStage::Granted(granted))) => {
                        (Some(&granted.plan), granted.placed_bytes)
                    }
                    _ => (None, 0),
                };
                let culprit = self.blame(receive.culprit(), receive.course.cancel.as_ref());
                let waited = receive.course.clock.waited(now);
                let report = report(receive.kind(), culprit, plan, waited);
                let matched = receive.matched.as_ref();
                Some(StallReport {
                    tag: receive.tag,
                    transfer: matched.map(|matched| matched.transfer),
                    bytes_done,
                    bytes_total: matched.map_or(receive.capacity, |matched| matched.bytes),
                    ..report
                })
            }
        }
    }

    /// Puts set-up and cancelling before what the transfer itself waits for.
    fn blame(&self, (chunk, owes): Culprit, cancel: Option<&Cancelling>) -> Culprit {
        match cancel {
            Some(cancel) if !cancel.quiet => return (chunk, Owes::LocalStop),
            Some(_) => return (chunk, Owes::PeerStop),
            None => {}
        }
        match owes {
            Owes::PeerPostReceive | Owes::PeerSendMatching | Owes::PeerAnswer
                if self.agreed.is_none() =>
            {
                (chunk, Owes::PeerSetup)
            }
            Owes::EarlierTransfer if !self.local_ready => (chunk, Owes::LocalSetup),
            Owes::EarlierTransfer if !self.peer_ready => (chunk, Owes::PeerSetup),
            owes => (chunk, owes),
        }
    }

    /// Every live operation and where it stands, in the order of their names.
    pub fn snapshot(&self, now: Time) -> Vec<OperationState> {
        let sends = self.sends.iter();
        let sends = sends.map(|(transfer, send)| (OperationId::send(*transfer), &send.course));
        let receives = self.receives.iter();
        let receives = receives.map(|(operation, receive)| (*operation, &receive.course));
        let mut states: Vec<_> = sends
            .chain(receives)
            .filter_map(|(operation, course)| {
                Some(OperationState {
                    operation,
                    completed: course.completed,
                    cancelling: course.cancel.is_some(),
                    standing: self.standing(now, operation)?,
                })
            })
            .collect();
        states.sort_unstable_by_key(|state| state.operation);
        states
    }
}

/// A report without what only the operation knows.
fn report(
    kind: OperationKind,
    (chunk, owes): Culprit,
    plan: Option<&Plan>,
    waited: std::time::Duration,
) -> StallReport {
    let at = chunk.zip(plan).map(|(chunk, plan)| plan.chunk(chunk));
    StallReport {
        kind,
        tag: crate::frame::Tag(0),
        transfer: None,
        chunk,
        channel: at.map(|at| at.channel),
        offset: at.map_or(0, |at| at.offset),
        bytes_done: 0,
        bytes_total: 0,
        waited,
        owes,
        peer: None,
    }
}
