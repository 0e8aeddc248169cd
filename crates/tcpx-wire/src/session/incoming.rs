//! Receives: matched, granted or copied, posted, placed, compared.

use super::action::{Action, OperationId, ReceiveRequest};
use super::chunk_set::ChunkSet;
use super::clock::{Course, OperationClock};
use super::config::Deadlines;
use super::error::{DataFailure, EndCause, RequestError, SessionError};
use super::matching::Arrival;
use super::one_sided::Origin;
use super::posted::Posted;
use super::stream::Plan;
use super::{Session, unexpected, unknown};
use crate::frame::{Frame, Level, Tag, TransferId};
use crate::time::Time;

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) origin: Origin,
    pub(super) tag: Tag,
    /// Its number among the receives of its tag, while it is announced to the peer and waits.
    pub(super) number: Option<u64>,
    pub(super) capacity: u64,
    pub(super) asked: Level,
    pub(super) course: Course,
    /// GPU work of the caller comes first.
    pub(super) fenced: bool,
    /// Something came to its window, perhaps not a whole chunk.
    pub(super) touched: bool,
    /// Its window, while no send has come to it.
    pub(super) posted: Option<Posted>,
    /// The transfer that it takes once its window is closed, or its fence reached.
    pub(super) offered: Option<Arrival>,
    pub(super) matched: Option<Matched>,
}

impl Incoming {
    fn new(origin: Origin, capacity: u64, asked: Level, course: Course) -> Self {
        Self {
            origin,
            tag: Tag(0),
            number: None,
            capacity,
            asked,
            course,
            fenced: false,
            touched: false,
            posted: None,
            offered: None,
            matched: None,
        }
    }

    /// The data plane has yet to let go of its window before it goes on.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.posted.as_ref().is_some_and(|posted| posted.closing)
    }

    /// It waits for its transfer, and for nothing else.
    pub(super) fn waits(&self) -> bool {
        self.origin == Origin::Posted
            && self.posted.is_none()
            && self.offered.is_none()
            && self.matched.is_none()
            && self.course.cancel.is_none()
            && !self.course.completed
    }
}

#[derive(Debug)]
pub(super) struct Matched {
    pub(super) transfer: TransferId,
    pub(super) bytes: u64,
    /// The level both sides reach.
    pub(super) level: Level,
    pub(super) stage: ReceiveStage,
    /// The data plane computes a digest.
    pub(super) digesting: bool,
    /// CRC32C of the destination.
    pub(super) digest: Option<u32>,
    /// CRC32C of the source.
    pub(super) expected: Option<u32>,
}

#[derive(Debug)]
pub(super) enum ReceiveStage {
    Eager {
        /// The sender waits for a verdict.
        verdict_wanted: bool,
        copied: bool,
        /// Bytes of the sender's credit that its payload occupies.
        credit: u64,
    },
    /// In a box, as for sends.
    Granted(Box<GrantedReceive>),
}

#[derive(Debug)]
pub(super) struct GrantedReceive {
    pub(super) plan: Plan,
    /// The data plane has it as a window: every chunk may come at any time.
    pub(super) is_window: bool,
    pub(super) posted: ChunkSet,
    pub(super) arrived: ChunkSet,
    pub(super) placed: ChunkSet,
    pub(super) placed_bytes: u64,
    /// Placed and not acknowledged.
    pub(super) unacked: Vec<u32>,
}

impl Matched {
    pub(super) fn all_placed(&self) -> bool {
        match &self.stage {
            ReceiveStage::Eager { copied, .. } => *copied,
            ReceiveStage::Granted(granted) => granted.placed.len() == granted.plan.chunks,
        }
    }

    /// The data plane may touch the destination.
    pub(super) fn busy(&self) -> bool {
        self.digesting
            || match &self.stage {
                ReceiveStage::Eager { copied, .. } => !copied,
                ReceiveStage::Granted(granted) => granted.busy(),
            }
    }
}

impl GrantedReceive {
    fn busy(&self) -> bool {
        let posted = match self.is_window {
            true => self.plan.chunks,
            false => self.posted.len(),
        };
        posted != self.placed.len()
    }

    /// The data plane has a place for the chunk.
    pub(super) fn is_posted(&self, index: u32) -> bool {
        self.is_window && index < self.plan.chunks || self.posted.contains(index)
    }

    /// The data plane has a place for some chunk, or had.
    pub(super) fn is_begun(&self) -> bool {
        self.is_window || !self.posted.is_empty()
    }
}

impl Session {
    /// Starts a receive.
    ///
    /// # Errors
    /// When the bounds of the session do not allow it, or it closes. Nothing was started then.
    pub fn receive(
        &mut self,
        now: Time,
        request: ReceiveRequest,
    ) -> Result<OperationId, RequestError> {
        self.check_room(self.own_receives())?;
        let ReceiveRequest {
            tag,
            capacity,
            level,
            deadlines,
            fenced,
        } = request;
        let operation = self.insert_receive(now, Origin::Posted, capacity, level, deadlines);
        if let Some(receive) = self.receives.get_mut(&operation) {
            (receive.tag, receive.fenced) = (tag, fenced);
        }
        match self.matching.first_arrival(tag) {
            Some(arrival) => self.match_up(now, operation, arrival),
            None => {
                let counts = self.matching.receives_of(tag);
                counts.queue.push_back(operation);
                self.post_receive_soon(operation);
            }
        }
        Ok(operation)
    }

    /// An operation that takes bytes of the peer.
    pub(super) fn insert_receive(
        &mut self,
        now: Time,
        origin: Origin,
        capacity: u64,
        level: Level,
        deadlines: Option<Deadlines>,
    ) -> OperationId {
        let operation = OperationId::receive(self.next_receive);
        self.next_receive += 1;
        let deadlines = deadlines.unwrap_or(self.config.deadlines);
        let course = self.timers.begin(now, operation, deadlines);
        let level = level.max(Level::Placed);
        let receive = Incoming::new(origin, capacity, level, course);
        self.receives.insert(operation, receive);
        operation
    }

    /// A posted chunk arrived with this many bytes, in place or in the bounce pool.
    pub fn chunk_arrived(&mut self, now: Time, operation: OperationId, index: u32, bytes: u64) {
        let Some((receive, granted)) = self.granted_receive(operation) else {
            return;
        };
        let problem = if !granted.is_posted(index) {
            format!("chunk {index} arrived, but was never posted")
        } else {
            let length = u64::from(granted.plan.chunk(index).length);
            if bytes != length {
                format!("chunk {index}: expected {length} bytes, {bytes} arrived")
            } else if !granted.arrived.insert(index) {
                format!("chunk {index} arrived twice")
            } else {
                receive.progressed(now);
                self.receive_stream.moved = now;
                return;
            }
        };
        self.data_failed(now, operation, Some(index), DataFailure::Misreport(problem));
    }

    /// An arrived chunk is at its destination, and its place in the bounce pool was given back.
    pub fn chunk_placed(&mut self, now: Time, operation: OperationId, index: u32) {
        let Some((clock, granted)) = self.granted_receive(operation) else {
            return;
        };
        let problem = if !granted.arrived.contains(index) {
            "was placed, but never arrived"
        } else if !granted.placed.insert(index) {
            "was placed twice"
        } else {
            clock.progressed(now);
            let chunk = granted.plan.chunk(index);
            granted.placed_bytes += u64::from(chunk.length);
            granted.unacked.push(index);
            let first = granted.unacked.len() == 1;
            self.acks.placed(now, operation, first, &self.config);
            self.receive_stream.release(&chunk);
            self.pump_receives();
            self.settle_receive(now, operation);
            return;
        };
        let failure = DataFailure::Misreport(format!("chunk {index} {problem}"));
        self.data_failed(now, operation, Some(index), failure);
    }

    /// A receive whose chunks the data plane may report on.
    fn granted_receive(
        &mut self,
        operation: OperationId,
    ) -> Option<(&mut OperationClock, &mut GrantedReceive)> {
        let receive = self.receives.get_mut(&operation)?;
        if receive.course.is_quiet() {
            return None;
        }
        let matched = receive.matched.as_mut()?;
        match &mut matched.stage {
            ReceiveStage::Granted(granted) => Some((&mut receive.course.clock, granted)),
            ReceiveStage::Eager { .. } => None,
        }
    }

    /// Answer to [`Action::DeliverEager`].
    pub fn eager_copied(&mut self, now: Time, operation: OperationId) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let Some(matched) = &mut receive.matched else {
            return;
        };
        let ReceiveStage::Eager { copied, credit, .. } = &mut matched.stage else {
            return;
        };
        if std::mem::replace(copied, true) {
            return;
        }
        receive.course.clock.progressed(now);
        let credit = std::mem::take(credit);
        self.return_credit(credit);
        self.settle_receive(now, operation);
    }

    pub(super) fn receive_digest(&mut self, now: Time, operation: OperationId, crc32c: u32) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        let Some(matched) = &mut receive.matched else {
            return;
        };
        if std::mem::take(&mut matched.digesting) {
            matched.digest = Some(crc32c);
            receive.course.clock.progressed(now);
            self.settle_receive(now, operation);
        }
    }

    pub(super) fn peer_digest(
        &mut self,
        now: Time,
        transfer: TransferId,
        crc32c: u32,
    ) -> Result<(), SessionError> {
        const FRAME: &str = "digest";
        let unknown = || unknown(FRAME, transfer);
        let found = self.by_transfer.get(&transfer).copied();
        let is_closed = |window| self.posting.has_named(window);
        if found.is_none() && transfer.window().is_some_and(is_closed) {
            // Its window was closed before.
            return Ok(());
        }
        let operation = found.ok_or_else(unknown)?;
        let receive = self.receives.get_mut(&operation).ok_or_else(unknown)?;
        if let Some(posted) = &mut receive.posted {
            // Its first chunk is still to come.
            let is_first = posted.expected.replace(crc32c).is_none();
            if is_first && receive.asked == Level::Verified {
                self.matching.is_sent(receive.tag);
                return Ok(());
            }
        }
        let matched = receive.matched.as_mut().ok_or_else(unknown)?;
        let wanted = matched.level == Level::Verified
            && matched.expected.is_none()
            && matches!(matched.stage, ReceiveStage::Granted(_));
        if !wanted {
            return Err(unexpected(
                FRAME,
                "a granted transfer to be verified, once",
                format!("transfer {transfer} is not"),
            ));
        }
        matched.expected = Some(crc32c);
        receive.course.clock.progressed(now);
        self.settle_receive(now, operation);
        Ok(())
    }

    /// Does what follows once everything is placed.
    pub(super) fn settle_receive(&mut self, now: Time, operation: OperationId) {
        let Some(receive) = self.receives.get_mut(&operation) else {
            return;
        };
        if receive.course.cancel.is_some() {
            return self.settle_cancelled_receive(now, operation);
        }
        let Some(matched) = &mut receive.matched else {
            return;
        };
        if !matched.all_placed() {
            return;
        }
        let (transfer, bytes, level) = (matched.transfer, matched.bytes, matched.level);
        let eager = match matched.stage {
            ReceiveStage::Eager { verdict_wanted, .. } => Some(verdict_wanted),
            ReceiveStage::Granted(_) => None,
        };
        if level < Level::Verified {
            let done = Frame::EagerDone { transfer };
            match (eager, &receive.origin) {
                (None, _) => {}
                (Some(_), Origin::Get { .. }) => self.transmit.push_unawaited(done),
                (Some(_), _) => self.transmit.push_back(done),
            }
            return self.end_receive(operation, Ok(Level::Placed));
        }
        match (matched.digest, matched.expected) {
            (None, _) if !matched.digesting => {
                matched.digesting = true;
                self.actions
                    .push_back(Action::ComputeDigest { operation, bytes });
                self.flush_acks_of(operation);
            }
            (Some(got), Some(expected)) => {
                let matches = got == expected;
                self.flush_acks_of(operation);
                if eager.is_some() && matches {
                    self.transmit.push_back(Frame::EagerDone { transfer });
                }
                if eager.is_none_or(|wanted| wanted || !matches) {
                    self.transmit.push_back(Frame::Verdict {
                        transfer,
                        crc32c: got,
                        matches,
                    });
                }
                let outcome = if matches {
                    Ok(Level::Verified)
                } else {
                    Err((EndCause::Corrupt { expected, got }, super::Delivered::All))
                };
                self.end_receive(operation, outcome);
            }
            _ => {}
        }
    }
}
