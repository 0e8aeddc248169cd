//! Whom a channel can wake: its owner and the halves of its lanes. It holds no memory and no slot,
//! so callbacks of the pinned pool may keep it.

use std::sync::OnceLock;

use super::event_loop::Remote;
use super::idle::LaneSet;
use super::signal::Signal;

/// How to reach the halves of a lane.
#[derive(Debug)]
pub(super) struct LaneRemotes {
    pub(super) transmit: Remote,
    pub(super) receive: Remote,
}

#[derive(Debug)]
pub(super) struct Wakers {
    /// Readable while the owner has something to poll.
    pub(super) signal: Signal,
    /// Set once, before any lane starts.
    pub(super) lanes: OnceLock<Box<[LaneRemotes]>>,
    /// Lanes that wait for a pinned slot to receive into.
    pub(super) unplaced: LaneSet,
}

impl Wakers {
    pub(super) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            signal: Signal::new()?,
            lanes: OnceLock::new(),
            unplaced: LaneSet::new(),
        })
    }

    pub(super) fn remotes(&self, lane: u16) -> Option<&LaneRemotes> {
        self.lanes.get()?.get(usize::from(lane))
    }

    pub(super) fn wake_sender(&self, lane: u16) {
        if let Some(remotes) = self.remotes(lane) {
            remotes.transmit.resume();
        }
    }

    /// Gives a turn to the receiving half of each lane in the mask.
    pub(super) fn wake_receivers(&self, mut mask: u64) {
        while mask != 0 {
            let lane = mask.trailing_zeros();
            mask &= mask - 1;
            if let Some(remotes) = u16::try_from(lane).ok().and_then(|lane| self.remotes(lane)) {
                remotes.receive.resume();
            }
        }
    }

    /// A pinned slot may be free: whoever waits for one tries again. The first lane's sending half
    /// looks after the sends that wait.
    pub(super) fn slot_free(&self) {
        self.wake_receivers(self.unplaced.take_all());
        self.wake_sender(0);
    }
}
