//! What the engine's thread is told to wait for.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use std::time::Instant;

use rustix::event::epoll::EventFlags;
use tcpx_lanes::lock;
use tcpx_wire::Time;

use super::shared::{Locked, Shared};
use crate::core::Core;
use crate::drive::PROGRESS_LEASE;
use crate::driver::{MUTED, READ, READ_WRITE, Turn};
use crate::wait::micros_since;

/// What the driver is told to look for on the control socket.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Watching {
    /// For these events; [`MUTED`] while a thread of the program looks by itself.
    For(EventFlags),
    /// Until another connection takes its place.
    Away,
    Nothing,
}

impl Shared {
    /// Leaves to the engine's thread what a turn on another thread left over.
    pub(crate) fn finish_turn(&self, mut core: Locked<'_>, turn: Turn) {
        self.watch_control(&mut core);
        self.set_due(core.clock.due);
        let due = core.clock.due;
        let due = due.map(|due| self.due_for_engine(core.clock.instant_of(due)));
        self.wake_sleeper(&core);
        self.see_to_lanes(&core);
        drop(core);
        let left_over = (turn.poll || turn.more) && !self.progress_owner.is_manual();
        if left_over || turn.finished {
            self.driver.wake(self.id);
        } else if let Some(due) = due {
            self.driver.wake_by(self.id, due);
        }
    }

    /// When the engine's thread sees to what is due: a thread that looks after the connection does
    /// it in time.
    pub(super) fn due_for_engine(&self, due: Instant) -> Instant {
        match self.progress_owner.is_attended() {
            true => due + PROGRESS_LEASE,
            false => due,
        }
    }

    pub(super) fn set_due(&self, due: Option<Time>) {
        let due = due.map_or(u64::MAX, |due| due.0);
        self.due.store(due, Ordering::SeqCst);
    }

    /// Microseconds of the connection.
    pub(crate) fn since_origin(&self, at: Instant) -> u64 {
        micros_since(self.origin, at)
    }

    /// Watches the control socket for what is wanted of it.
    pub(crate) fn watch_control(&self, core: &mut Core) {
        let replaced = core.control_was_replaced();
        let wanted = if core.ending.control_done() {
            Watching::Nothing
        } else if core.control.is_away() {
            Watching::Away
        } else if self.progress_owner.is_attended() {
            Watching::For(MUTED)
        } else if core.control.wants_write() {
            Watching::For(READ_WRITE)
        } else {
            Watching::For(READ)
        };
        let mut watching = lock(&self.watching);
        if replaced {
            // The old descriptor went with its connection; the new one is not watched yet.
            *watching = Watching::Away;
            self.progress_owner.control_replaced();
        }
        if *watching == wanted || *watching == Watching::Nothing {
            return;
        }
        let fd = core.control.as_fd();
        let Watching::For(events) = wanted else {
            self.driver.unwatch(fd);
            *watching = wanted;
            return;
        };
        let done = match *watching {
            Watching::Away => self.driver.watch(self.id, fd, events),
            _ => self.driver.rewatch(self.id, fd, events),
        };
        if done.is_ok() {
            *watching = wanted;
        }
    }
}
