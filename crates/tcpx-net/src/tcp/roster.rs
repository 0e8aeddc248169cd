//! Which lanes a channel has, and whom it can wake: each number is a place that one stream fills at
//! a time. It holds no memory and no slot, so callbacks of the pinned pool may keep it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tcpx_lanes::health::STALL_BEHIND;
use tcpx_lanes::idle::LaneSet;
use tcpx_lanes::redial;
use tcpx_lanes::waker::Waker;

use super::shared::{LaneSocket, lock};
use crate::channel::Direction;

/// A peer that ended its lanes in order may be about to say goodbye; one whose lanes died may have
/// dialled by then.
const PARTING: Duration = Duration::from_millis(300);

#[derive(Debug, Default)]
struct LanePlace {
    /// The stream, while the lane lives.
    socket: Option<Arc<LaneSocket>>,
    /// Halves of the stream that a loop still holds.
    halves: u8,
    /// It has had a stream.
    opened: bool,
    /// When its last stream died, or one was wanted for the first time.
    lost: Option<Instant>,
    /// That was not the peer's orderly end of it.
    broke: bool,
    /// When the peer was last asked for another one.
    asked: Option<Instant>,
}

impl LanePlace {
    /// Whether a new stream can take it.
    fn is_vacant(&self) -> bool {
        self.halves == 0 && self.socket.is_none()
    }
}

/// The places of a channel's lanes.
#[derive(Debug)]
pub(super) struct Roster {
    /// Readable while the owner has something to poll.
    pub(super) signal: Waker,
    places: Box<[Mutex<LanePlace>]>,
    live: AtomicUsize,
    /// Some places have had no stream, and none is wanted there.
    unopened: AtomicBool,
    /// Halves of all streams that a loop still holds.
    halves: AtomicUsize,
    /// Lanes that wait for a pinned slot to receive into.
    pub(super) unplaced: LaneSet,
    /// Lanes that the owner is to ask the peer for.
    missing: AtomicU64,
}

impl Roster {
    pub(super) fn new(lanes: u16) -> rustix::io::Result<Self> {
        Ok(Self {
            signal: Waker::new()?,
            places: (0..lanes).map(|_| Mutex::default()).collect(),
            live: AtomicUsize::new(0),
            unopened: AtomicBool::new(true),
            halves: AtomicUsize::new(0),
            unplaced: LaneSet::new(),
            missing: AtomicU64::new(0),
        })
    }

    pub(super) fn lanes(&self) -> u16 {
        u16::try_from(self.places.len()).unwrap_or(u16::MAX)
    }

    pub(super) fn live(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    /// Whether no loop holds a half of a lane.
    pub(super) fn is_empty(&self) -> bool {
        self.halves.load(Ordering::Acquire) == 0
    }

    fn place<R>(&self, lane: u16, act: impl FnOnce(&mut LanePlace) -> R) -> Option<R> {
        let place = self.places.get(usize::from(lane))?;
        Some(act(&mut lock(place)))
    }

    /// Fills a place, and says whether another stream had it before; not while both halves of that
    /// are not gone yet.
    pub(super) fn join(&self, socket: &Arc<LaneSocket>) -> Option<bool> {
        self.place(socket.lane, |place| {
            place.is_vacant().then(|| {
                place.socket = Some(Arc::clone(socket));
                place.halves = 2;
                self.halves.fetch_add(2, Ordering::AcqRel);
                (place.lost, place.asked) = (None, None);
                self.live.fetch_add(1, Ordering::AcqRel);
                std::mem::replace(&mut place.opened, true)
            })
        })?
    }

    /// Wants streams for the places that have had none yet; whether there are such.
    pub(super) fn want_unopened(&self) -> bool {
        // As a rule this was asked before.
        if !self.unopened.load(Ordering::Relaxed) || !self.unopened.swap(false, Ordering::AcqRel) {
            return false;
        }
        let now = Instant::now();
        let want = |lane| {
            self.place(lane, |place| {
                let is_new = !place.opened && place.lost.is_none();
                if is_new {
                    (place.lost, place.broke) = (Some(now), true);
                    // As if it had been asked for long ago: the peer does not know that it is
                    // wanted.
                    place.asked = now.checked_sub(STALL_BEHIND);
                }
                is_new
            })
        };
        let new = (0..self.lanes()).filter(|lane| want(*lane) == Some(true));
        new.count() > 0
    }

    /// Ends a lane, once: its stream and how many lanes are left. `only`: no other stream than
    /// this; `broke`: it was not the peer that ended it in order.
    pub(super) fn remove_lane(
        &self,
        lane: u16,
        only: Option<&Arc<LaneSocket>>,
        broke: bool,
    ) -> Option<(Arc<LaneSocket>, usize)> {
        let same = |held: &Arc<LaneSocket>| only.is_none_or(|only| Arc::ptr_eq(held, only));
        self.place(lane, |place| {
            let socket = place.socket.take_if(|held| same(held))?;
            place.lost = Some(Instant::now());
            place.broke = broke;
            let left = self.live.fetch_sub(1, Ordering::AcqRel) - 1;
            Some((socket, left))
        })?
    }

    /// A loop has let go of a half; whether the lane's place is vacant with that.
    pub(super) fn half_gone(&self, lane: u16) -> bool {
        let vacant = self.place(lane, |place| {
            place.halves -= 1;
            place.is_vacant()
        });
        self.halves.fetch_sub(1, Ordering::AcqRel);
        vacant.unwrap_or(false)
    }

    /// The lane's stream, if it lives.
    pub(super) fn socket(&self, lane: u16) -> Option<Arc<LaneSocket>> {
        self.place(lane, |place| place.socket.clone())?
    }

    /// The streams of the lanes that live.
    pub(super) fn sockets(&self) -> impl Iterator<Item = Arc<LaneSocket>> {
        (0..self.lanes()).filter_map(|lane| self.socket(lane))
    }

    /// How a place stands for whoever dials.
    pub(super) fn stands(&self, lane: u16, now: Instant) -> redial::DialState {
        let stands = self.place(lane, |place| match (&place.socket, place.lost) {
            (Some(_), _) => redial::DialState::Filled,
            (None, None) => redial::DialState::Unwanted,
            _ if place.halves > 0 => redial::DialState::Leaving,
            (None, Some(lost)) if !place.broke && now < lost + PARTING => {
                redial::DialState::Unwanted
            }
            _ => redial::DialState::Vacant,
        });
        stands.unwrap_or(redial::DialState::Unwanted)
    }

    /// Whether a place lacks a stream that is wanted.
    pub(super) fn has_lost(&self) -> bool {
        let is_lost = |place: &mut LanePlace| place.lost.is_some();
        (0..self.lanes()).any(|lane| self.place(lane, is_lost).unwrap_or(false))
    }

    /// Has the owner ask the peer for the lanes without a stream, but for these, that it had time
    /// to dial by itself, or since it was asked.
    pub(super) fn ask_for_lost(&self, now: Instant, coming: u64) {
        let is_due = |place: &mut LanePlace| {
            let lost = place.lost.filter(|_| place.socket.is_none());
            let due = lost.map(|lost| {
                place
                    .asked
                    .map_or(lost + PARTING, |asked| asked + STALL_BEHIND)
            });
            let is_due = due.is_some_and(|due| now >= due);
            if is_due {
                place.asked = Some(now);
            }
            is_due
        };
        let lanes = (0..self.lanes()).filter(|lane| coming & 1 << lane == 0);
        let due = lanes.filter(|lane| self.place(*lane, is_due).unwrap_or(false));
        let due = due.fold(0, |due, lane| due | 1 << lane);
        if due != 0 {
            self.missing.fetch_or(due, Ordering::AcqRel);
            self.signal.wake();
        }
    }

    /// The lanes that the owner is to ask for, once.
    pub(super) fn take_missing(&self) -> impl Iterator<Item = u16> {
        let missing = match self.missing.load(Ordering::Acquire) {
            0 => 0,
            _ => self.missing.swap(0, Ordering::AcqRel),
        };
        (0..self.lanes()).filter(move |lane| missing & 1 << lane != 0)
    }

    /// Does something to the stream of a lane; false when the lane is gone.
    fn reach(&self, lane: u16, act: impl FnOnce(&LaneSocket)) -> bool {
        let reached = self.place(lane, |place| place.socket.as_deref().map(act));
        reached.flatten().is_some()
    }

    /// Gives a turn to a lane's sending half; false when the lane is gone.
    pub(super) fn wake_sender(&self, lane: u16) -> bool {
        self.reach(lane, |socket| socket.transmit.resume())
    }

    /// Wakes the halves of the first lanes, which take what comes next.
    pub(super) fn prewake(&self, lanes: usize, direction: Direction) {
        for lane in (0..self.lanes()).take(lanes) {
            self.reach(lane, |socket| match direction {
                Direction::Out => socket.transmit.resume(),
                Direction::In => socket.receive.resume(),
            });
        }
    }

    /// Gives a turn to the sending half of some lane.
    pub(super) fn wake_any_sender(&self) {
        (0..self.lanes()).any(|lane| self.wake_sender(lane));
    }

    /// Gives a turn to the receiving half of each lane in the mask.
    pub(super) fn wake_receivers(&self, mask: u64) {
        for lane in (0..self.lanes()).filter(|lane| mask & 1 << lane != 0) {
            self.reach(lane, |socket| socket.receive.resume());
        }
    }

    /// A pinned slot may be free: whoever waits for one tries again. One lane's sending half looks
    /// after the sends that wait.
    pub(super) fn slot_free(&self) {
        self.wake_receivers(self.unplaced.take_all());
        self.wake_any_sender();
    }
}
