//! The lanes that share one queue: the chunks that none of them has taken yet, which lanes have
//! nothing to do, and what each of them has written and keeps until its peer is through with it.
//!
//! Whoever queues a chunk wakes a lane at rest. A lane that finds nothing notes that it rests and
//! looks **once more**, so that no chunk is left behind with every lane at rest. Chunks of lanes
//! that ended go first.

use std::collections::VecDeque;

use crossbeam_queue::ArrayQueue;

#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use crate::idle::LaneSet;

/// Lanes that share a queue. A chunk is a `C` in a lane's hands, and a `Q` in the queue.
#[derive(Debug)]
pub struct LaneGroup<C, Q = C> {
    queue: ArrayQueue<Q>,
    /// Chunks of lanes that ended.
    again: Mutex<VecDeque<Q>>,
    /// How many those are.
    resends: AtomicUsize,
    /// Lanes at rest because there was no chunk.
    idle: LaneSet,
    /// Lanes in mid-chunk whose sockets have no room.
    full: LaneSet,
    lanes: Box<[LaneRecord<C>]>,
    /// Chunks that lanes keep though nobody waits for them.
    unwanted: AtomicUsize,
}

/// What is known of a lane, on cache lines of its own: each loop writes that of its lanes.
#[derive(Debug)]
#[repr(align(64))]
struct LaneRecord<C> {
    moves: AtomicU64,
    taken: AtomicU64,
    acknowledged: AtomicU64,
    /// What it has written, in this order.
    kept: Mutex<VecDeque<RetainedChunk<C>>>,
}

/// A chunk that a lane has written.
#[derive(Debug)]
struct RetainedChunk<C> {
    chunk: C,
    /// The place of its end in the lane's stream.
    end: u64,
    /// Somebody waits for it. Otherwise the lane's socket may refer to its memory, which stays as
    /// it is: the peer drops the chunk, but it must not see anything else.
    wanted: bool,
}

/// What becomes of a chunk that nobody waits for any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The peer has read it from this lane, and all that the lane wrote before.
    Read,
    /// No socket refers to its memory.
    Free,
    /// The lane's socket may refer to its memory: that stays until the peer has read what the lane
    /// wrote later, and its system has acknowledged it. A lane that comes back is read only after
    /// its former stream was closed.
    Lent,
}

/// What [`LaneGroup::release`] came to; drop it outside of locks.
#[derive(Debug)]
pub struct Released<C> {
    /// The chunk, unless its memory is still [lent](Fate::Lent).
    pub chunk: Option<C>,
    _lent_before: Vec<C>,
}

/// What a lane has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// Signs of life: calls in which its socket took bytes, and acknowledgements.
    pub moves: u64,
    /// Chunks that it took, without those that others took over.
    pub taken: u64,
    /// Those of them that the peer has acknowledged, or that nobody waits for any more.
    pub acknowledged: u64,
}

impl Done {
    /// Chunks that the lane has under way.
    pub fn under_way(&self) -> u64 {
        self.taken.saturating_sub(self.acknowledged)
    }

    /// While the lane owes acknowledgements: something that changes with each sign of life.
    pub fn owes(&self) -> Option<u64> {
        (self.under_way() > 0).then_some(self.moves)
    }
}

impl<C, Q> LaneGroup<C, Q> {
    /// So many lanes, with room for so many chunks that no lane has had.
    pub fn new(lanes: usize, room: usize) -> Self {
        let lane = |_| LaneRecord {
            moves: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            kept: Mutex::new(VecDeque::new()),
        };
        Self {
            queue: ArrayQueue::new(room),
            again: Mutex::new(VecDeque::new()),
            resends: AtomicUsize::new(0),
            idle: LaneSet::new(),
            full: LaneSet::new(),
            lanes: (0..lanes).map(lane).collect(),
            unwanted: AtomicUsize::new(0),
        }
    }

    fn again(&self) -> MutexGuard<'_, VecDeque<Q>> {
        lock(&self.again)
    }

    fn kept(&self, lane: u16) -> MutexGuard<'_, VecDeque<RetainedChunk<C>>> {
        lock(&self.lanes[usize::from(lane)].kept)
    }

    /// Queues a chunk; [take a lane](Self::take_idle) to wake afterwards.
    ///
    /// # Errors
    /// The chunk, where there is no room.
    pub fn push(&self, chunk: Q) -> Result<(), Q> {
        self.queue.push(chunk)
    }

    /// Queues chunks of a lane that ended, the oldest first, before all others. Wake lanes
    /// afterwards.
    pub fn push_again(&self, chunks: impl IntoIterator<Item = Q>) {
        let mut again = self.again();
        again.extend(chunks);
        self.resends.store(again.len(), Ordering::SeqCst);
    }

    /// The next chunk, for whoever is no lane.
    pub fn pop(&self) -> Option<Q> {
        if self.resends.load(Ordering::SeqCst) > 0 {
            let mut again = self.again();
            let chunk = again.pop_front();
            self.resends.store(again.len(), Ordering::SeqCst);
            if chunk.is_some() {
                return chunk;
            }
        }
        self.queue.pop()
    }

    /// The next chunk for a lane, which says whether it [took](Self::took) it; `None` after noting
    /// that it rests.
    pub fn take(&self, lane: u16) -> Option<Q> {
        let chunk = self.pop().or_else(|| {
            self.idle.insert(lane);
            self.pop()
        })?;
        // Also where it found one at once: a lane may be woken for other reasons than its place
        // there, and one with a chunk in its hands must not be given another's turn.
        self.idle.remove(lane);
        Some(chunk)
    }

    /// Chunks that wait for a lane, about.
    pub fn queued(&self) -> usize {
        self.queue.len() + self.resends.load(Ordering::SeqCst)
    }

    /// Takes a lane that rests, to wake it for a chunk: the first one, so that as few lanes as keep
    /// up are awake, and what comes one at a time finds both ends of its lane still awake.
    pub fn take_idle(&self) -> Option<u16> {
        self.idle.take()
    }

    /// How many of so many lanes that live come by the queue soon: they neither rest nor wait for
    /// room in their sockets. A lane that comes to rest after this was asked looks at the queue
    /// afterwards.
    pub fn at_work(&self, live: usize) -> usize {
        let others = self.idle.bits() | self.full.bits();
        live.saturating_sub(others.count_ones() as usize)
    }

    /// Whether the socket of a lane in mid-chunk has no room.
    pub fn set_full(&self, lane: u16, full: bool) {
        match full {
            true => self.full.insert(lane),
            false => drop(self.full.remove(lane)),
        }
    }

    /// These lanes rest, whatever is queued: others do it.
    pub fn rest_all(&self, lanes: u64) {
        self.idle.insert_all(lanes);
    }

    /// The lane does not rest, or is gone.
    pub fn unrest(&self, lane: u16) {
        self.idle.remove(lane);
    }

    fn count(&self, lane: u16, which: impl Fn(&LaneRecord<C>) -> &AtomicU64) {
        if let Some(lane) = self.lanes.get(usize::from(lane)) {
            which(lane).fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The lane showed a sign of life.
    pub fn moved(&self, lane: u16) {
        self.count(lane, |lane| &lane.moves);
    }

    /// A lane has a chunk in its hands.
    pub fn took(&self, lane: u16) {
        self.count(lane, |lane| &lane.taken);
    }

    /// The peer has a chunk that the lane took, or nobody waits for it any more.
    pub fn acknowledged(&self, lane: u16) {
        self.count(lane, |lane| &lane.acknowledged);
        self.moved(lane);
    }

    /// The lane has written all of a chunk, which ends at this place of its stream, and keeps it.
    pub fn keep(&self, lane: u16, end: u64, chunk: C) {
        let wanted = true;
        self.kept(lane)
            .push_back(RetainedChunk { chunk, end, wanted });
    }

    /// The lane keeps a chunk that is [lent](Fate::Lent) to its socket and that nobody waits for.
    pub fn keep_lent(&self, lane: u16, chunk: C) {
        let (end, wanted) = (u64::MAX, false);
        self.kept(lane)
            .push_back(RetainedChunk { chunk, end, wanted });
        self.unwanted.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the lane keeps such a chunk.
    pub fn keeps(&self, lane: u16, such: impl Fn(&C) -> bool) -> bool {
        self.kept(lane).iter().any(|kept| such(&kept.chunk))
    }

    /// Chunks that are kept though nobody waits for them.
    pub fn unwanted(&self) -> usize {
        self.unwanted.load(Ordering::Relaxed)
    }

    /// The peer says on the lane that it has read up to this place: the next chunk that is no
    /// longer kept for that.
    pub fn read_to(&self, lane: u16, place: u64) -> Option<C> {
        let read = self
            .kept(lane)
            .pop_front_if(|kept| kept.end <= place)
            .map(|kept| kept.chunk)?;
        self.acknowledged(lane);
        Some(read)
    }

    /// Nobody waits any more for a chunk that the lane keeps; `None` if it keeps no such chunk.
    /// `fate` is asked with the chunk and the place of its end in the lane's stream.
    pub fn release(
        &self,
        lane: u16,
        such: impl Fn(&C) -> bool,
        fate: impl FnOnce(&C, u64) -> Fate,
    ) -> Option<Released<C>> {
        let mut kept = self.kept(lane);
        let at = kept.iter().position(|one| one.wanted && such(&one.chunk))?;
        self.acknowledged(lane);
        let (chunk, _lent_before) = match fate(&kept[at].chunk, kept[at].end) {
            Fate::Lent => {
                kept[at].wanted = false;
                self.unwanted.fetch_add(1, Ordering::Relaxed);
                (None, Vec::new())
            }
            Fate::Free => (kept.remove(at), Vec::new()),
            Fate::Read => (kept.remove(at), self.take_unwanted(&mut kept, at)),
        };
        Some(Released {
            chunk: chunk.map(|one| one.chunk),
            _lent_before,
        })
    }

    fn take_unwanted(&self, kept: &mut VecDeque<RetainedChunk<C>>, before: usize) -> Vec<C> {
        let mut taken = Vec::new();
        if self.unwanted() > 0 {
            for at in (0..before).rev() {
                let one = (!kept[at].wanted).then(|| kept.remove(at)).flatten();
                taken.extend(one.map(|one| one.chunk));
            }
            self.unwanted.fetch_sub(taken.len(), Ordering::Relaxed);
        }
        taken
    }

    /// The lane is over: the chunks that it keeps and that somebody waits for, the oldest first.
    /// Nothing of it is acknowledged afterwards.
    pub fn end(&self, lane: u16) -> Vec<C> {
        self.idle.remove(lane);
        self.full.remove(lane);
        let mut kept = self.kept(lane);
        let (unread, lent) = kept.drain(..).partition::<Vec<_>, _>(|one| one.wanted);
        kept.extend(lent);
        let lane = &self.lanes[usize::from(lane)];
        let acknowledged = lane.acknowledged.load(Ordering::Relaxed);
        lane.taken.store(acknowledged, Ordering::Relaxed);
        unread.into_iter().map(|one| one.chunk).collect()
    }

    /// What each lane has done.
    pub fn done(&self) -> impl Iterator<Item = Done> {
        self.lanes.iter().map(|lane| Done {
            acknowledged: lane.acknowledged.load(Ordering::Relaxed),
            taken: lane.taken.load(Ordering::Relaxed),
            moves: lane.moves.load(Ordering::Relaxed),
        })
    }

    /// Signs of life of all lanes.
    pub fn moves(&self) -> u64 {
        self.done().map(|done| done.moves).sum()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Its state is consistent between statements, so a panic elsewhere spoils nothing.
    mutex.lock().unwrap_or_else(|error| error.into_inner())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn group() -> LaneGroup<u32> {
        LaneGroup::new(64, 4)
    }

    #[test]
    fn the_first_lane_at_rest_is_woken() {
        let group = group();
        group.rest_all(1 << 1 | 1 << 4 | 1 << 63);
        let woken = [(); 4].map(|()| group.take_idle());
        assert_eq!(woken, [Some(1), Some(4), Some(63), None]);
    }

    #[test]
    fn lanes_at_rest_and_those_without_room_are_not_at_work() {
        let group = group();
        assert_eq!(group.at_work(4), 4);
        assert_eq!(group.take(0), None);
        group.set_full(1, true);
        assert_eq!(group.at_work(4), 2);
        group.set_full(1, false);
        group.set_full(0, true);
        assert_eq!((group.at_work(4), group.at_work(0)), (3, 0));
        group.end(0);
        assert_eq!(group.at_work(3), 3);
    }

    #[test]
    fn a_lane_that_found_work_is_not_at_rest() {
        let group = group();
        group.rest_all(1 << 2);
        group.push(7).unwrap();
        assert_eq!(group.take(2), Some(7));
        assert_eq!(group.take_idle(), None, "it has its hands full");
        assert_eq!(group.take(2), None);
        assert_eq!(group.take_idle(), Some(2));
    }

    #[test]
    fn chunks_of_lanes_that_ended_go_first() {
        let group = group();
        (0..4).for_each(|chunk| group.push(chunk).unwrap());
        assert_eq!(group.push(4), Err(4), "there is no room");
        group.push_again([10, 11]);
        assert_eq!(group.queued(), 6);
        let left: Vec<_> = std::iter::from_fn(|| group.take(0)).collect();
        assert_eq!((left, group.queued()), (vec![10, 11, 0, 1, 2, 3], 0));
    }

    #[test]
    fn a_lane_owes_while_it_has_chunks_under_way() {
        let group = group();
        let done = || group.done().nth(1).unwrap();
        assert_eq!(done().owes(), None);
        group.took(1);
        group.took(1);
        let before = done().owes();
        group.acknowledged(1);
        assert!(before.is_some() && done().owes() > before);
        assert_eq!((done().under_way(), done().acknowledged), (1, 1));
        group.end(1);
        assert_eq!((done().owes(), done().under_way()), (None, 0));
        // There is no such lane.
        group.took(64);
        assert!(group.done().all(|done| done.under_way() == 0));
    }

    #[test]
    fn a_chunk_is_kept_until_its_peer_has_read_it_or_the_lane_ends() {
        let group = group();
        for (chunk, end) in [(1, 10), (2, 20), (3, 30), (4, 40)] {
            group.took(5);
            group.keep(5, end, chunk);
        }
        assert_eq!(group.read_to(5, 9), None);
        assert_eq!(group.read_to(5, 29), Some(1));
        assert_eq!(group.read_to(5, 29), Some(2));
        assert_eq!(group.read_to(5, 29), None);
        let released = group.release(5, |chunk| *chunk == 4, |_, _| Fate::Free);
        assert_eq!(released.unwrap().chunk, Some(4));
        assert!(
            group
                .release(5, |chunk| *chunk == 4, |_, _| Fate::Free)
                .is_none()
        );
        assert_eq!(group.done().nth(5).unwrap().under_way(), 1);
        assert_eq!((group.end(4), group.end(5)), (vec![], vec![3]));
        assert!(!group.keeps(5, |_| true));
    }

    #[test]
    fn lent_memory_stays_until_later_bytes_were_read() {
        let group = group();
        for chunk in 0..4 {
            group.keep(chunk as u16 % 2, 0, chunk);
        }
        let release = |chunk: u32, fate| {
            let released = group.release(chunk as u16 % 2, |one| *one == chunk, |_, _| fate);
            let released = released.expect("it is kept");
            (released.chunk, released._lent_before)
        };
        assert_eq!(release(0, Fate::Lent), (None, vec![]));
        // What goes to a socket behind another lane's says nothing of it, nor does the end of its
        // own.
        assert_eq!(release(1, Fate::Read), (Some(1), vec![]));
        assert_eq!((group.end(0), group.unwanted()), (vec![2], 1));
        group.keep(0, 0, 4);
        group.keep_lent(0, 5);
        assert_eq!(release(4, Fate::Read), (Some(4), vec![0]));
        group.keep(0, 0, 6);
        assert_eq!(release(6, Fate::Free), (Some(6), vec![]));
        assert_eq!(
            (group.unwanted(), group.keeps(0, |one| *one == 5)),
            (1, true)
        );
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;

    use super::{Fate, LaneGroup};

    fn new(lanes: usize, room: usize) -> LaneGroup<u32> {
        LaneGroup::new(lanes, room)
    }

    /// One chunk is queued for the first time and one again, while a lane looks for work: it finds
    /// both, or is woken.
    #[test]
    fn no_chunk_is_left_behind_with_every_lane_at_rest() {
        for again in [false, true] {
            loom::model(move || {
                let group = Arc::new(new(1, 2));
                let lane = {
                    let group = Arc::clone(&group);
                    loom::thread::spawn(move || std::iter::from_fn(|| group.take(0)).count())
                };
                match again {
                    false => group.push(1).expect("there is room"),
                    true => group.push_again([1]),
                }
                // A lane at work is left to come by.
                let woken = match group.at_work(1) {
                    0 => group.take_idle(),
                    _ => None,
                };
                let found = lane.join().expect("the lane rests");
                assert!(found == 1 || woken == Some(0), "{found} found, {woken:?}");
            });
        }
    }

    /// Two lanes take the chunks of one that ended, each once.
    #[test]
    fn what_goes_again_goes_once() {
        loom::model(|| {
            let group = Arc::new(new(2, 2));
            group.push_again([1, 2]);
            let other = {
                let group = Arc::clone(&group);
                loom::thread::spawn(move || group.take(1))
            };
            let mine = group.take(0);
            let theirs = other.join().expect("the lane takes one");
            let mut both = [mine, theirs];
            both.sort_unstable();
            assert_eq!(both, [Some(1), Some(2)]);
        });
    }

    /// The peer has placed a chunk while the lane that wrote it ends: it is released or sent again,
    /// never both.
    #[test]
    fn a_chunk_that_is_placed_while_its_lane_ends_goes_one_way() {
        loom::model(|| {
            let group = Arc::new(new(1, 2));
            group.took(0);
            group.keep(0, 8, 1);
            let owner = {
                let group = Arc::clone(&group);
                loom::thread::spawn(move || group.release(0, |_| true, |_, _| Fate::Read).is_some())
            };
            let unread = group.end(0);
            let released = owner.join().expect("the owner");
            assert_eq!(released, unread.is_empty());
            assert!(group.done().all(|done| done.under_way() == 0));
        });
    }
}
