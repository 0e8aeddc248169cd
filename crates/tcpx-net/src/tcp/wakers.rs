//! Whom a channel can wake: its owner and the halves of its lanes. It holds no memory and no slot,
//! so callbacks of the pinned pool may keep it.

use std::sync::Mutex;

use tcpx_lanes::event_loop::Remote;
use tcpx_lanes::idle::LaneSet;
use tcpx_lanes::waker::Waker;

use super::shared::lock;
use crate::channel::Direction;

/// How to reach the halves of a lane.
#[derive(Debug, Clone)]
pub(super) struct LaneRemotes {
    pub(super) transmit: Remote,
    pub(super) receive: Remote,
}

#[derive(Debug)]
pub(super) struct Wakers {
    /// Readable while the owner has something to poll.
    pub(super) signal: Waker,
    /// By lane; a lane that is gone has none.
    lanes: Box<[Mutex<Option<LaneRemotes>>]>,
    /// Lanes that wait for a pinned slot to receive into.
    pub(super) unplaced: LaneSet,
}

impl Wakers {
    pub(super) fn new(lanes: u16) -> rustix::io::Result<Self> {
        Ok(Self {
            signal: Waker::new()?,
            lanes: (0..lanes).map(|_| Mutex::new(None)).collect(),
            unplaced: LaneSet::new(),
        })
    }

    /// Before the lane starts.
    pub(super) fn set(&self, lane: u16, remotes: LaneRemotes) {
        if let Some(place) = self.lanes.get(usize::from(lane)) {
            *lock(place) = Some(remotes);
        }
    }

    /// The lane ends: nobody reaches it any more but through what is returned.
    pub(super) fn take(&self, lane: u16) -> Option<LaneRemotes> {
        lock(self.lanes.get(usize::from(lane))?).take()
    }

    /// Gives a turn to a lane's sending half; false when the lane is gone.
    pub(super) fn wake_sender(&self, lane: u16) -> bool {
        let Some(place) = self.lanes.get(usize::from(lane)) else {
            return false;
        };
        let remotes = lock(place);
        if let Some(remotes) = &*remotes {
            remotes.transmit.resume();
        }
        remotes.is_some()
    }

    /// Wakes the halves of the first lanes, which take what comes next.
    pub(super) fn rouse(&self, lanes: usize, direction: Direction) {
        for place in self.lanes.iter().take(lanes) {
            if let Some(remotes) = &*lock(place) {
                match direction {
                    Direction::Out => remotes.transmit.resume(),
                    Direction::In => remotes.receive.resume(),
                }
            }
        }
    }

    /// Gives a turn to the sending half of some lane.
    pub(super) fn wake_any_sender(&self) {
        let lanes = u16::try_from(self.lanes.len()).unwrap_or(u16::MAX);
        (0..lanes).any(|lane| self.wake_sender(lane));
    }

    /// Gives a turn to the receiving half of each lane in the mask.
    pub(super) fn wake_receivers(&self, mut mask: u64) {
        while mask != 0 {
            let lane = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            if let Some(place) = self.lanes.get(lane)
                && let Some(remotes) = &*lock(place)
            {
                remotes.receive.resume();
            }
        }
    }

    /// A pinned slot may be free: whoever waits for one tries again. One lane's sending half looks
    /// after the sends that wait.
    pub(super) fn slot_free(&self) {
        self.wake_receivers(self.unplaced.take_all());
        self.wake_any_sender();
    }
}
