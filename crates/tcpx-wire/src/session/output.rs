//! What comes out: actions, frames, times, and where operations stand.

use std::collections::VecDeque;
use std::time::Duration;

use super::Session;
use super::action::{Action, OperationId};
use super::config::Config;
use super::error::{ConnectionFailure, EndCause};
use super::operation::{End, Stage};
use super::stall::{OperationState, Owes, StallReport};
use crate::frame::{Destination, Frame, GoodbyeReason, PlacedChunks, Role};
use crate::time::Time;

/// What a caller can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// Nothing but what cannot wait.
    Urgent,
    /// Frames, at this time.
    Frames(Time),
    /// Actions.
    Actions,
}

/// What comes out of a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// To be done.
    Action(Action),
    /// For the peer.
    Frame(Frame),
}

impl Session {
    /// The next thing that comes out, of what the caller can take now. Before anything else,
    /// whatever it can take: windows to open, of which a frame behind tells the peer, and eager
    /// messages to deliver, ahead of sends that have ended.
    pub fn poll(&mut self, takes: Takes) -> Option<Output> {
        if let Some(urgent) = self.urgent.pop_front() {
            return Some(Output::Action(urgent));
        }
        match takes {
            Takes::Urgent => None,
            Takes::Frames(now) => self.poll_transmit(now).map(Output::Frame),
            Takes::Actions => {
                if self.actions.is_empty() {
                    self.report_closed();
                }
                self.actions.pop_front().map(Output::Action)
            }
        }
    }

    /// Whether something is left to do.
    pub fn has_actions(&self) -> bool {
        !(self.urgent.is_empty() && self.actions.is_empty())
    }

    /// When [`Session::handle_timeout`] is due, at the latest. May come earlier than needed.
    pub fn next_timeout(&self) -> Option<Time> {
        let at = |due: Option<Time>| due.unwrap_or(Time::MAX);
        let mut due = at(self.timers.first());
        if !self.ended() {
            due = due.min(at(self.acks.due)).min(at(self.close_due()));
            due = due.min(self.liveness.next_due());
        }
        (due < Time::MAX).then_some(due)
    }

    /// Does what time brings: deadlines, delayed acknowledgements, heartbeats.
    pub fn handle_timeout(&mut self, now: Time) {
        if !self.ended() {
            self.check_liveness(now);
        }
        while let Some(operation) = self.timers.take_due(now) {
            self.expire(now, operation);
        }
        if self.ended() {
            return;
        }
        if self.check_close(now) {
            return;
        }
        if self.acks.ready(now) {
            self.flush_acks();
        }
    }

    /// Apart from `poll`, which looks for actions more often than anything else, and would save
    /// every register for this.
    #[inline(never)]
    fn poll_transmit(&mut self, now: Time) -> Option<Frame> {
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
        let mut frame = self.transmit.pop_front()?;
        self.liveness.transmitted(now);
        let asks = match &mut frame {
            Frame::Waiting {
                transfer,
                to: Destination::Put { left, .. },
                ..
            }
            | Frame::Eager {
                transfer,
                to: Destination::Put { left, .. },
                ..
            }
            | Frame::Exposed {
                transfer,
                to: Destination::Put { left, .. },
                ..
            } => self
                .operations
                .named(Role::Sender, *transfer)
                .zip(Some(left)),
            Frame::Get { request, left, .. } => {
                (self.one_sided.gets.get(request).copied()).zip(Some(left))
            }
            _ => None,
        };
        if let Some((operation, left)) = asks
            && let Some(it) = self.operations.get(operation)
        {
            *left = it.clock.left(now);
        }
        if let Frame::Waiting { transfer, .. }
        | Frame::Eager { transfer, .. }
        | Frame::Exposed { transfer, .. } = &frame
        {
            let operation = OperationId::new(Role::Sender, transfer.0);
            if let Some(it) = self.operations.get_mut(operation) {
                it.is_begun = true;
                it.clock.progressed(now);
                self.settle(now, operation);
            }
        }
        Some(frame)
    }
}

/// Frames that wait for transmission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// There are others than those counted here, or the session closes: nothing should be held
    /// back.
    pub urgent: bool,
    /// Acknowledgements, and credit for eager payload.
    pub acknowledgements: usize,
    /// Those of them that no program of the peer waits for, as far as is known: of what a get has
    /// brought.
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
            Frame::Exposed { at, .. } => {
                bytes = at.bytes.into();
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
    /// What waits for transmission. A caller may leave acknowledgements, posted receives and eager
    /// payloads where they are for a moment, so that several leave together; nothing else.
    pub fn waiting(&self) -> Waiting {
        Waiting {
            urgent: self.transmit.others > 0 || self.acks.due.is_some() || self.closing(),
            open: self.posting.open,
            ..self.transmit.counted
        }
    }

    /// Sends that the peer has not acknowledged, those included that wait for transmission.
    pub fn sends_under_way(&self) -> usize {
        self.operations.len(Role::Sender)
    }
}

/// Which receives owe acknowledgements, and by when.
#[derive(Debug, Default)]
pub(super) struct Acks {
    /// Each once, the longest in debt first. Keeps its room: there is one for nearly every chunk.
    dirty: VecDeque<OperationId>,
    pending: u32,
    pub(super) due: Option<Time>,
    ready: bool,
}

impl Acks {
    /// A chunk was placed; `first` when the operation owed no acknowledgement before.
    pub(super) fn placed(
        &mut self,
        now: Time,
        operation: OperationId,
        first: bool,
        config: &Config,
    ) {
        if first {
            self.dirty.push_back(operation);
        }
        self.pending += 1;
        self.due.get_or_insert(now + config.ack_delay);
        self.ready |= self.pending >= config.ack_batch;
    }

    pub(super) fn ready(&self, now: Time) -> bool {
        self.ready || self.due.is_some_and(|due| due <= now)
    }

    fn paid(&mut self, operation: OperationId, chunks: usize) {
        let Some(at) = self.dirty.iter().position(|owing| *owing == operation) else {
            return;
        };
        self.dirty.remove(at);
        self.pending = self
            .pending
            .saturating_sub(u32::try_from(chunks).unwrap_or(u32::MAX));
        if self.dirty.is_empty() {
            self.forget();
        }
    }

    fn forget(&mut self) {
        self.dirty.clear();
        (self.pending, self.due, self.ready) = (0, None, false);
    }
}

impl Session {
    /// Turns every pending acknowledgement into frames.
    pub(super) fn flush_acks(&mut self) {
        while let Some(operation) = self.acks.dirty.front().copied() {
            self.flush_acks_of(operation);
        }
    }

    pub(super) fn flush_acks_of(&mut self, operation: OperationId) {
        let mut chunks = Vec::new();
        if let Some(it) = self.operations.get_mut(operation)
            && let Some(transfer) = it.wire
            && let Stage::Moving(moving) = &mut it.stage
        {
            std::mem::swap(&mut chunks, &mut moving.unacked);
            chunks.sort_unstable();
            for chunks in placed(&chunks) {
                self.transmit.push_back(Frame::Placed { transfer, chunks });
            }
            let paid = chunks.len();
            // The buffer is used again.
            chunks.clear();
            std::mem::swap(&mut chunks, &mut moving.unacked);
            self.acks.paid(operation, paid);
        } else {
            self.acks.paid(operation, 0);
        }
    }
}

/// What reports ascending chunks.
fn placed(chunks: &[u32]) -> impl Iterator<Item = PlacedChunks> {
    let mut rest = chunks;
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let end = rest.partition_point(|chunk| chunk - first < PlacedChunks::SPAN);
        let (run, tail) = rest.split_at(end);
        rest = tail;
        let bits = run
            .iter()
            .fold(0, |bits, chunk| bits | 1 << (chunk - first));
        Some(PlacedChunks { first, bits })
    })
}

#[derive(Debug)]
pub(super) struct Liveness {
    interval: Duration,
    dead_after: Duration,
    heard: Time,
    /// When silence from here has lasted long enough.
    beat_due: Time,
    next_beat: u64,
    pub(super) expected_beat: u64,
}

impl Liveness {
    pub(super) fn new(now: Time, interval: Duration, dead_after: Duration) -> Self {
        Self {
            interval,
            dead_after,
            heard: now,
            beat_due: now + interval,
            next_beat: 0,
            expected_beat: 0,
        }
    }

    pub(super) fn configure(&mut self, now: Time, interval: Duration) {
        self.interval = interval;
        self.beat_due = self.beat_due.min(now + interval);
    }

    pub(super) fn heard(&mut self, now: Time) {
        self.heard = self.heard.max(now);
    }

    pub(super) fn transmitted(&mut self, now: Time) {
        self.beat_due = self.beat_due.max(now + self.interval);
    }

    pub(super) fn next_due(&self) -> Time {
        self.beat_due.min(self.heard + self.dead_after)
    }
}

impl Session {
    /// When the peer was last heard.
    pub fn heard(&self) -> Time {
        self.liveness.heard
    }

    /// Something of the peer has come, be it a part of a frame: it lives, though a frame takes its
    /// time.
    pub fn note_peer_alive(&mut self, now: Time) {
        self.liveness.heard(now);
    }

    pub(super) fn beat(&mut self, now: Time) {
        // A frame that waits is proof enough once it leaves.
        if self.transmit.len() == 0 {
            let counter = self.liveness.next_beat;
            self.liveness.next_beat += 1;
            self.transmit.push_back(Frame::Heartbeat { counter });
        }
        self.liveness.transmitted(now);
    }

    fn check_liveness(&mut self, now: Time) {
        let Liveness {
            heard,
            dead_after: limit,
            ..
        } = self.liveness;
        if heard + limit <= now {
            let silent = now.saturating_since(heard);
            return self.fail(now, ConnectionFailure::PeerDead { silent, limit });
        }
        if self.liveness.beat_due <= now {
            self.beat(now);
        }
    }
}

#[derive(Debug)]
pub(super) enum Ending {
    Open,
    /// Finishes what is under way.
    Closing {
        since: Time,
        until: Time,
        goodbye_sent: bool,
    },
    /// Nothing is sent or taken any more; operations may still wait for the data plane.
    Ended {
        failure: Option<ConnectionFailure>,
        reported: bool,
    },
}

impl Session {
    /// It closes, or has ended: the program starts nothing any more.
    pub fn closing(&self) -> bool {
        !matches!(self.ending, Ending::Open)
    }

    /// How the session ends is decided: [`Action::Closed`] follows once every operation ended. The
    /// peer may be gone by then.
    pub fn ended(&self) -> bool {
        matches!(self.ending, Ending::Ended { .. })
    }

    /// Says goodbye once nothing is under way.
    pub(super) fn advance_close(&mut self) {
        if let Ending::Closing { goodbye_sent, .. } = &mut self.ending
            && !*goodbye_sent
            && self.operations.is_empty()
        {
            *goodbye_sent = true;
            self.transmit.push_back(Frame::Goodbye {
                reason: GoodbyeReason::Normal,
                detail: "every operation ended".into(),
            });
        }
    }

    pub(super) fn goodbye_sent(&self) -> bool {
        matches!(
            self.ending,
            Ending::Closing {
                goodbye_sent: true,
                ..
            }
        )
    }

    /// Ends what is left once the time of a close is over; whether it did.
    pub(super) fn check_close(&mut self, now: Time) -> bool {
        let Ending::Closing { since, until, .. } = self.ending else {
            return false;
        };
        let is_over = until <= now;
        if is_over {
            let limit = until.saturating_since(since);
            self.fail(now, ConnectionFailure::CloseTimedOut { limit });
        }
        is_over
    }

    pub(super) fn close_due(&self) -> Option<Time> {
        match self.ending {
            Ending::Closing { until, .. } => Some(until),
            Ending::Open | Ending::Ended { .. } => None,
        }
    }

    pub(super) fn end_all(
        &mut self,
        now: Time,
        cause: &EndCause,
        failure: Option<ConnectionFailure>,
    ) {
        self.ending = Ending::Ended {
            failure,
            reported: false,
        };
        self.matching.clear();
        self.posting.candidates.clear();
        self.send_windows.unasked.clear();
        self.one_sided.clear();
        self.acks.forget();
        let all = self.operations.iter();
        let mut all: Vec<_> = all.map(|(operation, _)| operation).collect();
        all.sort_unstable();
        for operation in all {
            let cause = self.cause_of(now, operation, cause);
            let Some(it) = self.operations.get_mut(operation) else {
                continue;
            };
            if it.is_reported() {
                self.timers.disarm(&mut it.clock, operation);
                self.forget(operation);
            } else if it.is_stopping() {
                self.settle(now, operation);
            } else {
                self.begin_end(now, operation, cause);
            }
        }
    }

    /// `cause` for one operation: a lost connection says where that stood.
    fn cause_of(&self, now: Time, operation: OperationId, cause: &EndCause) -> EndCause {
        match cause {
            EndCause::ConnectionLost { failure, .. } => EndCause::ConnectionLost {
                failure: failure.clone(),
                standing: self.standing(now, operation).map(Box::new),
            },
            other => other.clone(),
        }
    }

    /// Reports the end once every operation ended.
    pub(super) fn report_closed(&mut self) {
        if let Ending::Ended { failure, reported } = &mut self.ending
            && !*reported
            && self.operations.is_empty()
        {
            *reported = true;
            let failure = failure.take();
            self.actions.push_back(Action::Closed { failure });
        }
    }
}

/// Where operations stand.
impl Session {
    pub(super) fn standing(&self, now: Time, operation: OperationId) -> Option<StallReport> {
        let it = self.operations.get(operation)?;
        let (chunk, owes) = it.culprit();
        // Set-up and cancelling come before what the transfer itself waits for.
        let owes = match (&it.end, owes) {
            (End::Stopping(stopping), _) if !stopping.is_quiet => Owes::LocalStop,
            (End::Stopping(_), _) => Owes::PeerStop,
            (_, Owes::PeerPostReceive | Owes::PeerSendMatching | Owes::PeerAnswer)
                if self.agreed.is_none() =>
            {
                Owes::PeerSetup
            }
            (_, Owes::EarlierTransfer) if !self.local_ready => Owes::LocalSetup,
            (_, Owes::EarlierTransfer) if !self.peer_ready => Owes::PeerSetup,
            (_, owes) => owes,
        };
        let mut standing = it.standing(now, (chunk, owes));
        standing.transfer = operation.sent_transfer().or(standing.transfer);
        Some(standing)
    }

    /// Every live operation and where it stands, in the order of their names.
    pub fn snapshot(&self, now: Time) -> Vec<OperationState> {
        let all = self.operations.iter();
        let mut states: Vec<_> = all
            .filter_map(|(operation, it)| {
                Some(OperationState {
                    operation,
                    completed: it.is_reported(),
                    cancelling: it.is_stopping(),
                    standing: self.standing(now, operation)?,
                })
            })
            .collect();
        states.sort_unstable_by_key(|state| state.operation);
        states
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::config;

    #[test]
    fn a_batchs_last_chunk_brings_acknowledgements() {
        let config = Config {
            ack_batch: 3,
            ..config()
        };
        let (now, owing) = (Time(0), OperationId::new(Role::Receiver, 0));
        let mut acks = Acks::default();
        for _ in 0..2 {
            acks.placed(now, owing, true, &config);
            acks.placed(now, owing, false, &config);
            assert!(!acks.ready(now));
            acks.placed(now, owing, false, &config);
            assert!(acks.ready(now));
            acks.paid(owing, 3);
            assert!(!acks.ready(now + config.ack_delay));
        }
    }

    #[test]
    fn what_one_operation_paid_leaves_the_others_batch() {
        let config = Config {
            ack_batch: 3,
            ..config()
        };
        let [paid, owing] = [0, 1].map(|number| OperationId::new(Role::Receiver, number));
        let now = Time(0);
        let mut acks = Acks::default();
        acks.placed(now, paid, true, &config);
        acks.placed(now, owing, true, &config);
        acks.paid(paid, 1);
        acks.placed(now, owing, false, &config);
        assert!(!acks.ready(now), "two chunks of three");
        acks.placed(now, owing, false, &config);
        assert!(acks.ready(now));
    }

    #[test]
    fn sets_span_at_most_one_frame() {
        let chunks = [0, 5, 63, 64, 127, 128, u32::MAX - 1, u32::MAX];
        let sets: Vec<PlacedChunks> = placed(&chunks).collect();
        let firsts: Vec<u32> = sets.iter().map(|set| set.first).collect();
        assert_eq!(firsts, [0, 64, 128, u32::MAX - 1]);
        let all = sets.iter().flat_map(|set| set.iter());
        assert!(all.eq(chunks));
    }
}
