//! Turns that end before all is done, where a thread of the program takes another one anyway.

use super::Core;
use crate::driver::Turn;

impl Core {
    /// Whether the program can have at once what it waits for, before anything else is done: a thread of its
    /// own does the work, which sees to the rest when it has looked, and nothing else is under way.
    pub(super) fn leaves_early(&mut self) -> bool {
        let may = self.pace.is_driven() && self.ended.is_none() && !self.is_moving();
        if !may || std::mem::replace(&mut self.left_early, true) {
            return false;
        }
        let before = std::mem::take(&mut self.ended_some);
        // The answer to a message tells of it, and the program waits for the answer.
        self.perform_but_sent();
        if !self.ended_some {
            self.perform_actions();
        }
        // What was granted goes to its channel first.
        let leaves = self.ended_some && !self.session.ended() && !self.is_moving();
        self.ended_some |= before;
        self.left_early = leaves;
        leaves
    }

    /// The end of a turn that is left early. No descriptor tells of what was read and not taken.
    pub(super) fn leave(&mut self) -> Turn {
        let more = !self.control.is_drained();
        self.turn(true, more)
    }

    /// The thread that waits takes another turn anyway, and what it waits for may have come.
    pub(super) fn may_leave_it(&self) -> bool {
        self.pace.is_driven() && self.control.is_drained() && !self.is_moving()
    }
}
