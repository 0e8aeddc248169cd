//! Which lanes have nothing to do: a set that posters and lanes share without a lock.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// Most lanes of a lane group: each is a bit of a word.
pub const MAX_LANES: usize = 64;

/// A set of lane numbers below [`MAX_LANES`].
///
/// A lane that found the queue empty calls [`insert`](Self::insert) and looks at the queue **once
/// more** before it rests. A poster queues its work and then calls [`take`](Self::take). All
/// operations are sequentially consistent, so one of the two sees the other: work is never left
/// behind with every lane at rest.
#[derive(Debug)]
pub struct LaneSet(AtomicU64);

impl Default for LaneSet {
    fn default() -> Self {
        Self::new()
    }
}

impl LaneSet {
    /// An empty set.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds a lane.
    pub fn insert(&self, lane: u16) {
        self.0.fetch_or(1 << lane, Ordering::SeqCst);
    }

    /// Adds the lanes of a bit mask.
    pub fn insert_all(&self, lanes: u64) {
        self.0.fetch_or(lanes, Ordering::SeqCst);
    }

    /// Removes a lane; whether it was there.
    pub fn remove(&self, lane: u16) -> bool {
        let bit = 1u64 << lane;
        // Mostly it is not there, and lanes that write would take the line from each other.
        self.0.load(Ordering::SeqCst) & bit != 0
            && self.0.fetch_and(!bit, Ordering::SeqCst) & bit != 0
    }

    #[cfg(all(test, loom))]
    fn contains(&self, lane: u16) -> bool {
        self.0.load(Ordering::SeqCst) & 1 << lane != 0
    }

    /// Its lanes as a bit mask.
    pub fn bits(&self) -> u64 {
        // A read-modify-write, for a plain load could miss an `insert` that came before our
        // queueing in the total order.
        self.0.fetch_or(0, Ordering::SeqCst)
    }

    /// Removes and returns the first lane.
    pub fn take(&self) -> Option<u16> {
        let mut set = self.bits();
        while set != 0 {
            let lane = set.trailing_zeros();
            let bit = 1u64 << lane;
            let before = self.0.fetch_and(!bit, Ordering::SeqCst);
            if before & bit != 0 {
                return u16::try_from(lane).ok();
            }
            set = before & !bit;
        }
        None
    }

    /// Removes all lanes and returns them as a bit mask.
    pub fn take_all(&self) -> u64 {
        self.0.swap(0, Ordering::SeqCst)
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::LaneSet;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, Ordering};

    /// A lane that dies at rest: the poster may wake it and nobody else, so it hands its turn on.
    #[test]
    fn a_lane_that_dies_hands_its_turn_on() {
        loom::model(|| {
            // Lanes 1 and 2 are at rest; 1 dies. A lane that is woken takes what is queued.
            let shared = Arc::new((LaneSet::new(), AtomicBool::new(false), LaneSet::new()));
            let (idle, queued, gone) = &*shared;
            idle.insert(1);
            idle.insert(2);
            let dying = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (idle, _, gone) = &*shared;
                    gone.insert(1);
                    idle.remove(1);
                    idle.take()
                })
            };
            queued.swap(true, Ordering::SeqCst);
            // The poster skips a lane that it finds gone.
            let woken = loop {
                match idle.take() {
                    Some(1) if gone.contains(1) => {}
                    woken => break woken,
                }
            };
            let handed = dying.join().expect("the lane dies");
            assert!(
                woken == Some(2) || handed == Some(2),
                "nobody was woken for the work: {woken:?} {handed:?}"
            );
        });
    }

    /// A lane that waits for a chunk in another's hands sees it given back, or is woken.
    #[test]
    fn a_chunk_that_is_given_back_is_seen_or_announced() {
        loom::model(|| {
            let shared = Arc::new((LaneSet::new(), AtomicBool::new(false)));
            let holder = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (waiting, free) = &*shared;
                    free.swap(true, Ordering::AcqRel);
                    waiting.take_all()
                })
            };
            let (waiting, free) = &*shared;
            let mut claimed = free.swap(false, Ordering::AcqRel);
            if !claimed {
                waiting.insert(5);
                claimed = free.swap(false, Ordering::AcqRel);
            }
            let woken = holder.join().expect("the holder lets go");
            assert!(claimed || woken == 1 << 5, "the chunk was left behind");
        });
    }

    #[test]
    fn work_is_never_left_with_every_lane_at_rest() {
        loom::model(|| {
            // The queue is modelled by a flag; pushing is a read-modify-write, as in a real queue.
            let shared = Arc::new((LaneSet::new(), AtomicBool::new(false)));
            let lane = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    let (idle, queued) = &*shared;
                    if queued.swap(false, Ordering::AcqRel) {
                        return true;
                    }
                    idle.insert(3);
                    queued.swap(false, Ordering::AcqRel)
                })
            };
            let (idle, queued) = &*shared;
            queued.swap(true, Ordering::Release);
            let woken = idle.take();
            let found = lane.join().expect("the lane ends");
            assert!(found || woken == Some(3), "the work was left behind");
        });
    }
}
