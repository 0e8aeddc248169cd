//! Deadlines of operations.

use std::collections::BTreeSet;

use super::action::OperationId;
use super::cancel::Cancelling;
use super::config::Deadlines;
use crate::time::Time;

/// The times of one operation.
#[derive(Clone, Debug)]
pub(super) struct OperationClock {
    deadlines: Deadlines,
    created: Time,
    progress: Time,
    armed: Option<Time>,
}

/// How far an operation is with its end.
#[derive(Debug)]
pub(super) struct Course {
    pub(super) clock: OperationClock,
    /// It was reported complete; what is left is the peer's part.
    pub(super) completed: bool,
    pub(super) cancel: Option<Cancelling>,
}

impl Course {
    /// It ends early, and the data plane has let go of its memory.
    pub(super) fn is_quiet(&self) -> bool {
        self.cancel.as_ref().is_some_and(|cancel| cancel.quiet)
    }

    /// It runs, and nothing ends it early.
    pub(super) fn is_live(&self) -> bool {
        !self.completed && self.cancel.is_none()
    }
}

/// Which deadline passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expired {
    Stall,
    Total,
}

impl OperationClock {
    fn new(deadlines: Deadlines, now: Time) -> Self {
        Self {
            deadlines,
            created: now,
            progress: now,
            armed: None,
        }
    }

    pub(super) fn progressed(&mut self, now: Time) {
        self.progress = self.progress.max(now);
    }

    pub(super) fn waited(&self, now: Time) -> std::time::Duration {
        now.saturating_since(self.progress)
    }

    /// When the first deadline passes if nothing happens.
    pub(super) fn due(&self) -> Time {
        let stall = self.progress + self.deadlines.stall;
        self.ends_at().map_or(stall, |end| stall.min(end))
    }

    /// When the total deadline passes.
    pub(super) fn ends_at(&self) -> Option<Time> {
        let total = self.deadlines.total?;
        Some(self.created + total)
    }

    pub(super) fn expired(&self, now: Time) -> Option<Expired> {
        if self.ends_at().is_some_and(|end| end <= now) {
            Some(Expired::Total)
        } else if self.progress + self.deadlines.stall <= now {
            Some(Expired::Stall)
        } else {
            None
        }
    }
}

/// One wake-up per operation, never later than its deadline. Progress moves deadlines without
/// touching this; a wake-up that turns out early is set again.
#[derive(Debug, Default)]
pub(super) struct Timers(BTreeSet<(Time, OperationId)>);

impl Timers {
    /// The course of an operation that begins.
    pub(super) fn begin(
        &mut self,
        now: Time,
        operation: OperationId,
        deadlines: Deadlines,
    ) -> Course {
        let mut clock = OperationClock::new(deadlines, now);
        let due = clock.due();
        self.arm(&mut clock, operation, due);
        Course {
            clock,
            completed: false,
            cancel: None,
        }
    }

    pub(super) fn arm(&mut self, clock: &mut OperationClock, operation: OperationId, at: Time) {
        self.disarm(clock, operation);
        clock.armed = Some(at);
        self.0.insert((at, operation));
    }

    pub(super) fn disarm(&mut self, clock: &mut OperationClock, operation: OperationId) {
        if let Some(at) = clock.armed.take() {
            self.0.remove(&(at, operation));
        }
    }

    pub(super) fn first(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Takes an operation whose wake-up is due out of the list.
    pub(super) fn take_due(&mut self, now: Time) -> Option<OperationId> {
        let first = self.0.first().copied().filter(|(at, _)| *at <= now)?;
        self.0.remove(&first);
        Some(first.1)
    }
}
