//! What waits for transmission, and whether it bears waiting.

use std::collections::VecDeque;

use super::Session;
use super::outgoing::Outgoing;
use crate::frame::Frame;

/// Sends under way above which each end is told at once.
const MANY: usize = 64;

/// Frames that wait for [`Session::poll_transmit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// There are others than those counted here, or the session closes: nothing should be held back.
    pub urgent: bool,
    /// Acknowledgements, and credit for eager payload.
    pub acknowledgements: usize,
    /// Those of them that no program of the peer waits for, as far as is known: of what a get has brought.
    pub unawaited: usize,
    /// Receives that are posted to the peer.
    pub posted: usize,
    /// Posted receives that no send has come to, those included that wait here.
    pub open: usize,
    /// Eager payloads.
    pub eager: usize,
    /// Their bytes.
    pub eager_bytes: u64,
}

/// Frames in their order, counted as they come and go: their caller asks with each step what waits.
#[derive(Debug)]
pub(super) struct Outbox {
    frames: VecDeque<Frame>,
    counted: Waiting,
    /// Frames of which none bears waiting.
    others: usize,
    /// Placed chunks are acknowledged together with the next receives.
    addressed: bool,
}

impl Outbox {
    pub(super) fn new(first: Frame, addressed: bool) -> Self {
        let mut outbox = Self {
            frames: VecDeque::new(),
            counted: Waiting::default(),
            others: 0,
            addressed,
        };
        outbox.push_back(first);
        outbox
    }

    pub(super) fn push_back(&mut self, frame: Frame) {
        let (counter, bytes) = self.counters(&frame);
        *counter.0 += 1;
        *counter.1 += bytes;
        self.frames.push_back(frame);
    }

    /// An acknowledgement that no program of the peer waits for.
    pub(super) fn push_unawaited(&mut self, acknowledgement: Frame) {
        self.push_back(acknowledgement);
        self.counted.unawaited += 1;
    }

    pub(super) fn extend(&mut self, frame: Option<Frame>) {
        frame.into_iter().for_each(|frame| self.push_back(frame));
    }

    pub(super) fn pop_front(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        let (counter, bytes) = self.counters(&frame);
        *counter.0 -= 1;
        *counter.1 -= bytes;
        let counted = &mut self.counted;
        counted.unawaited = counted.unawaited.min(counted.acknowledgements);
        Some(frame)
    }

    /// The counts that a frame belongs to, and its bytes if it is an eager payload.
    fn counters(&mut self, frame: &Frame) -> ((&mut usize, &mut u64), u64) {
        let counted = &mut self.counted;
        let mut bytes = 0;
        let number = match frame {
            Frame::EagerDone { .. } | Frame::EagerCredit { .. } => &mut counted.acknowledgements,
            Frame::Placed { .. } if self.addressed => &mut counted.acknowledgements,
            Frame::Posted { .. } => &mut counted.posted,
            Frame::Eager { payload, .. } => {
                bytes = payload.len() as u64;
                &mut counted.eager
            }
            _ => &mut self.others,
        };
        ((number, &mut counted.eager_bytes), bytes)
    }

    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn clear(&mut self) {
        while self.pop_front().is_some() {}
    }
}

impl Session {
    /// What waits for transmission. A caller may leave acknowledgements, posted receives and eager payloads where
    /// they are for a moment, so that several leave together; nothing else.
    pub fn waiting(&self) -> Waiting {
        Waiting {
            urgent: self.transmit.others > 0 || self.acks.due.is_some() || self.closing(),
            open: self.posting.open,
            ..self.transmit.counted
        }
    }

    /// Whether more than the peer's acknowledgement is waited for: to hear at once that chunks were sent.
    pub fn waits_for_sent(&self) -> bool {
        let many = self.sends.len() > MANY;
        let held = self.config.hold_until_placed;
        let any = || self.sends.values().any(Outgoing::waits_for_sent);
        many || !held || self.ended() || !self.send_stream.is_idle() && any()
    }

    /// Sends that the peer has not acknowledged, those included that wait for transmission.
    pub fn sends_under_way(&self) -> usize {
        self.sends.len()
    }
}
