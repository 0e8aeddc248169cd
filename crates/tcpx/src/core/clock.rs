//! The time of a connection, and of its turns.

use std::time::{Duration, Instant};

use tcpx_wire::Time;

use crate::options::Bounds;
use crate::wait::micros_since;

/// Looked at once for what is done together, as a look costs more than most steps.
pub(crate) struct Clock {
    pub(crate) origin: Instant,
    /// When it was last looked at, and the same in session time.
    ticked: Instant,
    now: Time,
    bounds: Bounds,
    /// When the turn that runs has taken its time, and its steps since the last look.
    until: Instant,
    steps: u32,
    pub(crate) due: Option<Time>,
    /// The last turn used up its share.
    pub(super) more: bool,
}

impl Clock {
    pub(crate) fn new(bounds: Bounds) -> Self {
        let origin = Instant::now();
        Self {
            origin,
            ticked: origin,
            now: Time(0),
            bounds,
            until: origin,
            steps: 0,
            due: None,
            more: false,
        }
    }

    /// Session time, microseconds since the connection's start, as of the last [`Self::tick`].
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// The same as the system counts.
    pub(crate) fn ticked(&self) -> Instant {
        self.ticked
    }

    pub(crate) fn tick(&mut self) {
        self.set(Instant::now());
    }

    pub(super) fn set(&mut self, ticked: Instant) {
        self.ticked = ticked;
        self.now = self.time_of(ticked);
    }

    /// The same moment in session time.
    pub(crate) fn time_of(&self, at: Instant) -> Time {
        Time(micros_since(self.origin, at))
    }

    /// The same moment as the system counts.
    pub(crate) fn instant_of(&self, at: Time) -> Instant {
        self.origin + Duration::from_micros(at.0)
    }

    pub(super) fn begin_turn(&mut self) {
        self.until = self.ticked + self.bounds.turn;
    }

    /// Looks at the clock: whether the turn has taken its time.
    pub(super) fn is_over(&mut self) -> bool {
        self.tick();
        self.until <= self.ticked
    }

    /// The same after a step, which may have been a long one, where a look is due; that one leaves
    /// the time as it is.
    pub(super) fn is_spent(&mut self, was_long: bool) -> bool {
        let most = self.bounds.steps;
        self.steps += if was_long { most } else { 1 };
        if self.steps < most {
            return false;
        }
        self.steps = 0;
        self.until <= Instant::now()
    }
}
