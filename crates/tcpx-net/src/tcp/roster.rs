//! Which lanes a channel has: each number is a place that one stream fills at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::shared::{LaneSocket, lock};

#[derive(Debug, Default)]
struct Place {
    /// The stream, while the lane lives.
    socket: Option<Arc<LaneSocket>>,
    /// Halves of the stream that a loop still holds.
    halves: u8,
    /// When its last stream died.
    lost: Option<Instant>,
    /// That was not the peer's orderly end of it.
    broke: bool,
}

/// A lane without a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Missing {
    pub(super) lane: u16,
    pub(super) since: Instant,
    /// It was not the peer that ended it in order.
    pub(super) broke: bool,
    /// A new stream can take its place.
    pub(super) vacant: bool,
}

/// The places of a channel's lanes. Touched when lanes come and go, never for a chunk.
#[derive(Debug)]
pub(super) struct Roster {
    places: Box<[Mutex<Place>]>,
    live: AtomicUsize,
}

impl Roster {
    pub(super) fn new(lanes: u16) -> Self {
        Self {
            places: (0..lanes).map(|_| Mutex::default()).collect(),
            live: AtomicUsize::new(0),
        }
    }

    pub(super) fn lanes(&self) -> u16 {
        u16::try_from(self.places.len()).unwrap_or(u16::MAX)
    }

    pub(super) fn live(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    /// Fills a place; false while both halves of the stream before are not gone yet.
    pub(super) fn join(&self, socket: &Arc<LaneSocket>) -> bool {
        let Some(place) = self.places.get(usize::from(socket.lane)) else {
            return false;
        };
        let mut place = lock(place);
        if place.halves > 0 || place.socket.is_some() {
            return false;
        }
        place.socket = Some(Arc::clone(socket));
        place.halves = 2;
        place.lost = None;
        self.live.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// Whether a new stream can take the place.
    pub(super) fn is_vacant(&self, lane: u16) -> bool {
        self.places.get(usize::from(lane)).is_some_and(|place| {
            let place = lock(place);
            place.halves == 0 && place.socket.is_none()
        })
    }

    /// Ends a lane, once: its stream and how many lanes are left. `only`: no other stream than this; `broke`:
    /// it was not the peer that ended it in order.
    pub(super) fn leave(
        &self,
        lane: u16,
        only: Option<&Arc<LaneSocket>>,
        broke: bool,
    ) -> Option<(Arc<LaneSocket>, usize)> {
        let mut place = lock(self.places.get(usize::from(lane))?);
        let same = |held: &Arc<LaneSocket>| only.is_none_or(|only| Arc::ptr_eq(held, only));
        let socket = place.socket.take_if(|held| same(held))?;
        place.lost = Some(Instant::now());
        place.broke = broke;
        let left = self.live.fetch_sub(1, Ordering::AcqRel) - 1;
        Some((socket, left))
    }

    /// A loop has let go of a half; whether the lane's place is vacant with that.
    pub(super) fn half_gone(&self, lane: u16) -> bool {
        self.places.get(usize::from(lane)).is_some_and(|place| {
            let mut place = lock(place);
            place.halves = place.halves.saturating_sub(1);
            place.halves == 0 && place.socket.is_none()
        })
    }

    /// The lane's stream, if it lives.
    pub(super) fn socket(&self, lane: u16) -> Option<Arc<LaneSocket>> {
        lock(self.places.get(usize::from(lane))?).socket.clone()
    }

    /// Places without a stream.
    pub(super) fn lost(&self) -> Vec<Missing> {
        let missing = |(lane, place): (u16, &Mutex<Place>)| {
            let place = lock(place);
            let since = place.lost.filter(|_| place.socket.is_none())?;
            Some(Missing {
                lane,
                since,
                broke: place.broke,
                vacant: place.halves == 0,
            })
        };
        (0u16..).zip(&self.places).filter_map(missing).collect()
    }
}
