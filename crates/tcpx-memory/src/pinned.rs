//! Pinned slots in which networks stage bytes: pinned once, shared by all connections, never given
//! back.
//!
//! A GPU has one set of slots, and the host has one. Each connection takes [`PinnedPool`]s of it: a
//! number of slots is guaranteed to each pool while there are plenty, and the rest goes to whoever
//! wants it, so that one busy connection gets most of them. A peer that stalls may keep what it has
//! for ever. So a pool that has no slot and finds none uses one of its own, of ordinary memory,
//! which a GPU reaches by way of its copy worker: whatever others hold, no connection stalls.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};

use crate::error::MemoryError;
use crate::free_slots::FreeSlots;
use crate::lease::{Access, Hold, Lease, LeaseTable};
use crate::region::Region;
use crate::slice::RegionSlice;

/// Slots that are guaranteed to a pool for sends and to one for receives, while there are plenty. A
/// send keeps its slot until the peer has received, a receive only until what is in it is copied.
const FOR_SENDS: usize = 6;
const FOR_RECEIVES: usize = 2;
/// A guarantee takes at most this part of what is not guaranteed yet, so that many connections get
/// one.
const PART: usize = 8;
/// Slots beyond its guarantee that a pool may have for each that would still be left to others.
const PER_SLOT_LEFT: usize = 4;
/// Slots that short chunks take in turn: enough that a slot has left the core's cache before its
/// next use, and few enough to stay in the shared caches.
const ROTATING_SLOTS: usize = 40;
/// Slots that long chunks take one behind the other: of more than these, each would have left the
/// shared caches before its next use. 4 MiB between staged host memories took 0.70 s of processor
/// time for 10^9 bytes with 256 of them, 0.48 with 64.
const ADJACENT_SLOTS: usize = 64;

/// Fixed-size slots of pinned memory; ordinary memory in a process without a GPU. Cheap to clone.
///
/// The slots belong to all pools of the GPU, or of the host. No pool can have more than a part of
/// what is not guaranteed to others: a peer that holds slots up holds up its own connection.
#[derive(Clone)]
pub struct PinnedPool(Arc<Share>);

/// Where to search for a slot first: users with different purposes start in different halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolHalf {
    /// The first half.
    Lower,
    /// The second half.
    Upper,
}

type Callback = Arc<dyn Fn() + Send + Sync>;

/// The slots of a GPU, or of the host.
pub(crate) struct Slots {
    region: Region,
    /// Keeps other users away from the bytes.
    _lease: Lease,
    /// The number of references to each slot.
    users: Box<[AtomicU32]>,
    /// Who touches the bytes of each slot.
    uses: Box<[LeaseTable]>,
    free: FreeSlots,
    /// Slots that are neither guaranteed to a pool nor taken beyond a guarantee.
    spare: AtomicUsize,
    /// Slots that are taken, whosever they are.
    taken: AtomicUsize,
    /// Whether a pool found no slot since one became spare.
    starved: AtomicBool,
    shares: RwLock<Vec<Weak<Share>>>,
}

/// A pool's part in the slots.
struct Share {
    slots: Arc<Slots>,
    guaranteed: usize,
    most: usize,
    taken: AtomicUsize,
    /// The slot that it has while it gets none of the shared ones.
    own: OnceLock<Own>,
    own_taken: AtomicBool,
    /// Whether a user found no slot since the last one was returned.
    starved: AtomicBool,
    watchers: RwLock<(u64, Vec<(u64, Callback)>)>,
}

/// A slot of ordinary memory.
struct Own {
    region: Region,
    users: AtomicU32,
    uses: LeaseTable,
}

/// In place of a slot's number: the pool's own.
const OWN: u32 = u32::MAX;

impl Slots {
    /// All of a region, which nobody else uses, as slots.
    pub(crate) fn new(region: Region) -> Result<Arc<Self>, MemoryError> {
        let count = region.len() / PinnedPool::SLOT_BYTES;
        let lease = region.lease_as(.., Access::Write, "the pinned slots")?;
        let free = FreeSlots::new(count);
        // No more slots than an u32 counts: each has a megabyte.
        (0..count as u32).for_each(|slot| free.give_back(slot));
        Ok(Arc::new(Self {
            region,
            _lease: lease,
            users: (0..count).map(|_| AtomicU32::new(0)).collect(),
            uses: (0..count).map(|_| LeaseTable::default()).collect(),
            free,
            spare: AtomicUsize::new(count),
            taken: AtomicUsize::new(0),
            starved: AtomicBool::new(false),
            shares: RwLock::default(),
        }))
    }

    /// Slots of ordinary memory.
    pub(crate) fn of_host() -> Result<Arc<Self>, MemoryError> {
        Self::new(Region::host(PinnedPool::HOST_BYTES)?)
    }

    /// A pool for sends of at most so many slots.
    pub(crate) fn to_send(self: &Arc<Self>, most: usize) -> PinnedPool {
        self.pool(most, FOR_SENDS)
    }

    /// A pool for receives.
    pub(crate) fn to_receive(self: &Arc<Self>, most: usize) -> PinnedPool {
        self.pool(most, FOR_RECEIVES)
    }

    fn pool(self: &Arc<Self>, most: usize, wanted: usize) -> PinnedPool {
        let most = most.clamp(1, self.len());
        self.share(most, |spare| wanted.min(most).min(spare / PART))
    }

    fn share(self: &Arc<Self>, most: usize, guarantee: impl Fn(usize) -> usize) -> PinnedPool {
        let mut guaranteed = 0;
        let guarantee = |spare: usize| {
            guaranteed = guarantee(spare);
            Some(spare - guaranteed)
        };
        // The closure always gives a number.
        let _ = self
            .spare
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, guarantee);
        let share = Arc::new(Share {
            slots: Arc::clone(self),
            guaranteed,
            most,
            taken: AtomicUsize::new(0),
            own: OnceLock::new(),
            own_taken: AtomicBool::new(false),
            starved: AtomicBool::new(false),
            watchers: RwLock::default(),
        });
        let mut shares = self.shares.write().unwrap_or_else(PoisonError::into_inner);
        shares.retain(|share| share.strong_count() > 0);
        shares.push(Arc::downgrade(&share));
        PinnedPool(share)
    }

    pub(crate) fn len(&self) -> usize {
        self.users.len()
    }

    /// Slots that are taken, whosever they are.
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Takes a spare slot for a pool that has `beyond` its guarantee.
    fn take_spare(&self, beyond: usize) -> bool {
        let take = |spare: usize| {
            let left = spare.checked_sub(1)?;
            let enough = beyond <= left.saturating_mul(PER_SLOT_LEFT);
            enough.then_some(spare - 1)
        };
        self.spare
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
            .is_ok()
    }

    /// Slots have become spare: pools that found none look again.
    fn give_spare(&self, count: usize) {
        self.spare.fetch_add(count, Ordering::SeqCst);
        if self.starved.swap(false, Ordering::SeqCst) {
            let shares = self.shares.read().unwrap_or_else(PoisonError::into_inner);
            let starved: Vec<_> = shares.iter().filter_map(Weak::upgrade).collect();
            drop(shares);
            starved.iter().for_each(|share| share.wake());
        }
    }
}

impl Share {
    /// Counts one more slot as this pool's, if there is one for it.
    fn claim(&self) -> bool {
        let mut taken = self.taken.load(Ordering::SeqCst);
        loop {
            if taken >= self.most {
                return false;
            }
            let beyond = taken.checked_sub(self.guaranteed);
            if beyond.is_some_and(|beyond| !self.slots.take_spare(beyond)) {
                return false;
            }
            let counted =
                self.taken
                    .compare_exchange(taken, taken + 1, Ordering::SeqCst, Ordering::SeqCst);
            match counted {
                Ok(_) => return true,
                Err(now) => {
                    if beyond.is_some() {
                        self.slots.give_spare(1);
                    }
                    taken = now;
                }
            }
        }
    }

    /// A slot that was claimed is free again.
    fn give_back(&self) {
        let before = self.taken.fetch_sub(1, Ordering::SeqCst);
        self.wake();
        if before > self.guaranteed {
            self.slots.give_spare(1);
        }
    }

    /// Takes the pool's own slot, where it has no other.
    fn take_own(&self) -> Option<&Own> {
        if self.taken.load(Ordering::SeqCst) > 0 || self.own_taken.swap(true, Ordering::SeqCst) {
            return None;
        }
        if self.own.get().is_none() {
            match Region::host(PinnedPool::SLOT_BYTES) {
                Ok(region) => {
                    let users = AtomicU32::new(0);
                    let uses = LeaseTable::default();
                    // Whoever has set `own_taken` is alone here.
                    let _ = self.own.set(Own {
                        region,
                        users,
                        uses,
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection waits for a slot of others");
                    self.own_taken.store(false, Ordering::SeqCst);
                }
            }
        }
        self.own.get()
    }

    fn wake(&self) {
        if self.starved.swap(false, Ordering::SeqCst) {
            let watchers = self.watchers.read().unwrap_or_else(PoisonError::into_inner);
            watchers.1.iter().for_each(|(_, wake)| wake());
        }
    }

    fn starve(&self) {
        self.starved.store(true, Ordering::SeqCst);
        self.slots.starved.store(true, Ordering::SeqCst);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // Every slot keeps its share, so none is taken.
        self.slots.give_spare(self.guaranteed);
    }
}

impl PinnedPool {
    /// Bytes of a slot.
    pub const SLOT_BYTES: usize = 1 << 20;
    /// Bytes of all slots of a GPU, unless `TCPX_PINNED_MIB` says otherwise.
    pub const GPU_BYTES: usize = 64 << 20;
    /// Bytes of all slots of the host, of ordinary memory, which costs nothing before it is used.
    pub const HOST_BYTES: usize = 256 << 20;

    /// The most slots that this pool has at a time.
    pub fn slots(&self) -> usize {
        self.0.most
    }

    /// Slots that are guaranteed to this pool.
    pub fn guaranteed(&self) -> usize {
        self.0.guaranteed
    }

    /// Of those that this pool may have, how many it has not.
    pub fn free_slots(&self) -> usize {
        let taken = self.0.taken.load(Ordering::SeqCst);
        self.0.most.saturating_sub(taken)
    }

    /// Takes the first free slot, if there is one, so that a user of few slots touches few. Never
    /// calls the driver, never blocks. Its bytes are whatever the last user left.
    pub fn try_take(&self) -> Option<PinnedSlot> {
        self.take(FreeSlots::take_first)
    }

    /// As [`Self::try_take`], but in turn, for short chunks: their bytes would still lie in the
    /// cache of the core that used the slot last, where a GPU reads them at half the speed.
    pub fn try_take_rested(&self) -> Option<PinnedSlot> {
        self.take(|free| free.take_in_turn(ROTATING_SLOTS))
    }

    /// As [`Self::try_take`], but preferably the slot at `place`, which counts around one half of
    /// the first slots, or the same of the other half. Adjacent chunks that ask for adjacent places
    /// mostly get adjacent slots, and the copy worker moves those in one copy; a user of few slots
    /// touches one half.
    pub fn try_take_at(&self, half: PoolHalf, place: u64) -> Option<PinnedSlot> {
        let slots = self.0.slots.len();
        let middle = slots.min(ADJACENT_SLOTS) / 2;
        // The remainder is below the number of slots.
        let low = (place % middle.max(1) as u64) as usize;
        let places = match half {
            PoolHalf::Lower => [low, low + middle],
            PoolHalf::Upper => [low + middle, low],
        };
        self.take(|free| {
            let at = |place: usize| free.take_among(place..place + 1);
            let near = || free.take_among(places[0]..slots);
            places
                .into_iter()
                .find_map(at)
                .or_else(near)
                .or_else(|| free.take_first())
        })
    }

    fn take(&self, pop: impl Fn(&FreeSlots) -> Option<u32>) -> Option<PinnedSlot> {
        let claimed = self.0.claim() || {
            // Looking again after setting the flags finds a slot that was returned in between.
            self.0.starve();
            self.0.claim()
        };
        let slots = &self.0.slots;
        if !claimed {
            let own = self.0.take_own()?;
            own.users.store(1, Ordering::Relaxed);
            return Some(self.hold(&own.region, 0, OWN));
        }
        // A slot is free before it is counted as such, so one is there for each claim; but another
        // thread may take the one that this search has passed by.
        let index = loop {
            if let Some(index) = pop(&slots.free) {
                break index;
            }
            std::hint::spin_loop();
        };
        let slot = index as usize;
        slots.taken.fetch_add(1, Ordering::Relaxed);
        slots.users[slot].store(1, Ordering::Relaxed);
        Some(self.hold(&slots.region, slot * Self::SLOT_BYTES, index))
    }

    fn hold(&self, region: &Region, start: usize, index: u32) -> PinnedSlot {
        let hold = Hold::Slot(SlotHold {
            share: Arc::clone(&self.0),
            index,
        });
        let range = start..start + Self::SLOT_BYTES;
        PinnedSlot(RegionSlice::held(region.clone(), range, hold))
    }

    /// Calls `wake` whenever there may be a slot after [`Self::try_take`] found none, until the
    /// watch is dropped. The call is made on the thread that returns the slot, which may be the
    /// copy worker's, and must not block.
    pub fn on_free(&self, wake: Callback) -> FreeWatch {
        let watchers = self.0.watchers.write();
        let mut watchers = watchers.unwrap_or_else(PoisonError::into_inner);
        watchers.0 += 1;
        let id = watchers.0;
        watchers.1.push((id, wake));
        FreeWatch {
            share: Arc::clone(&self.0),
            id,
        }
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Share {
            guaranteed, most, ..
        } = &*self.0;
        write!(f, "PinnedPool({guaranteed} to {most} slots)")
    }
}

/// A slot of a [`PinnedPool`]. It is returned when it and all slices made from it are dropped, so
/// no copy in flight can meet the slot's next user.
#[derive(Debug)]
pub struct PinnedSlot(RegionSlice);

impl PinnedSlot {
    /// The slot's bytes, as a slice that keeps the slot.
    pub fn slice(&self) -> &RegionSlice {
        &self.0
    }

    /// Bytes in the slot.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first byte, for the slot's one user; `None` never happens for a slot.
    pub fn host_ptr(&self) -> Option<*mut u8> {
        self.0.host_ptr()
    }
}

/// One reference to a taken slot.
pub(crate) struct SlotHold {
    share: Arc<Share>,
    index: u32,
}

impl SlotHold {
    /// The pool's own slot, if it is that.
    fn own(&self) -> Option<&Own> {
        self.share.own.get().filter(|_| self.index == OWN)
    }

    pub(crate) fn uses(&self) -> &LeaseTable {
        match self.own() {
            Some(own) => &own.uses,
            None => &self.share.slots.uses[self.index as usize],
        }
    }

    fn users(&self) -> &AtomicU32 {
        match self.own() {
            Some(own) => &own.users,
            None => &self.share.slots.users[self.index as usize],
        }
    }
}

impl Clone for SlotHold {
    fn clone(&self) -> Self {
        // As for `Arc`: a new reference made from an old one needs no ordering.
        self.users().fetch_add(1, Ordering::Relaxed);
        Self {
            share: Arc::clone(&self.share),
            index: self.index,
        }
    }
}

impl Drop for SlotHold {
    fn drop(&mut self) {
        // Release this user's writes and acquire the others', before the next user takes the slot.
        if self.users().fetch_sub(1, Ordering::AcqRel) == 1 {
            if self.index == OWN {
                self.share.own_taken.store(false, Ordering::SeqCst);
                return self.share.wake();
            }
            let slots = &self.share.slots;
            slots.taken.fetch_sub(1, Ordering::Relaxed);
            slots.free.give_back(self.index);
            self.share.give_back();
        }
    }
}

impl fmt::Debug for SlotHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.index)
    }
}

/// Keeps a callback of [`PinnedPool::on_free`] registered.
#[must_use = "the callback is unregistered when this is dropped"]
pub struct FreeWatch {
    share: Arc<Share>,
    id: u64,
}

impl Drop for FreeWatch {
    fn drop(&mut self) {
        let watchers = self.share.watchers.write();
        let mut watchers = watchers.unwrap_or_else(PoisonError::into_inner);
        watchers.1.retain(|(id, _)| *id != self.id);
    }
}

impl fmt::Debug for FreeWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FreeWatch({})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slots(count: usize) -> Arc<Slots> {
        Slots::new(Region::host(count * PinnedPool::SLOT_BYTES).unwrap()).unwrap()
    }

    /// All slots, each guaranteed.
    fn pool() -> PinnedPool {
        slots(256).share(256, |_| 256)
    }

    fn all_of(pool: &PinnedPool) -> Vec<PinnedSlot> {
        std::iter::from_fn(|| pool.try_take()).collect()
    }

    #[test]
    fn guarantees_shrink_with_the_number_of_connections() {
        let slots = slots(64);
        let pools: Vec<_> = (0..12)
            .map(|_| {
                let pool = |wanted| slots.pool(64, wanted);
                (pool(FOR_SENDS), pool(FOR_RECEIVES))
            })
            .collect();
        let guarantees: Vec<_> = pools
            .iter()
            .map(|(send, receive)| (send.guaranteed(), receive.guaranteed()))
            .collect();
        assert_eq!(guarantees[..3], [(6, 2), (6, 2), (6, 2)]);
        assert_eq!(guarantees[10..], [(1, 1), (1, 0)], "{guarantees:?}");
        drop(pools);
        assert_eq!(slots.spare.load(Ordering::SeqCst), 64);
    }

    #[test]
    fn one_connection_leaves_each_other_its_own_slots() {
        let slots = slots(64);
        let pools: Vec<_> = (0..4).map(|_| slots.to_send(64)).collect();
        // What one takes the others keep.
        let taken = all_of(&pools[0]);
        assert!(taken.len() > 32, "{}", taken.len());
        for pool in &pools[1..] {
            assert!(all_of(pool).len() >= pool.guaranteed());
        }
        drop(taken);
        assert_eq!((slots.taken(), pools[3].free_slots()), (0, 64));
    }

    proptest! {
        #[test]
        fn no_connection_starves_whatever_others_hold(
            count in 1usize..80,
            connections in 1usize..=40,
            stalled in prop::collection::vec(any::<(bool, bool)>(), 40),
        ) {
            let slots = slots(count);
            let mut held = Vec::new();
            let all: Vec<_> = (0..connections)
                .map(|number| {
                    let pools = [slots.to_send(64), slots.to_receive(64)];
                    let (sends, receives) = stalled[number];
                    held.extend(pools.iter().zip([sends, receives]).filter(|(_, stalls)| *stalls).map(|(pool, _)| all_of(pool)));
                    pools
                })
                .collect();
            for (number, pools) in all.iter().enumerate() {
                let (sends, receives) = stalled[number];
                for (pool, stalls) in pools.iter().zip([sends, receives]) {
                    let slot = pool.try_take();
                    prop_assert_eq!(slot.is_none(), stalls, "{} of {}", number, connections);
                    if let Some(slot) = slot {
                        slot.slice().write_from(&[1]).unwrap();
                    }
                }
            }
            prop_assert!(held.iter().all(|slots| !slots.is_empty()));
            drop(held);
            prop_assert_eq!((slots.taken(), slots.free.len()), (0, count));
        }
    }

    #[test]
    fn a_pools_own_slot_is_used_while_there_is_no_other() {
        let slots = slots(1);
        let (one, other) = (slots.to_send(64), slots.to_send(64));
        let shared = one.try_take().unwrap();
        let woken = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&woken);
        let _watch = other.on_free(Arc::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        }));
        let own = other.try_take().unwrap();
        assert!(other.try_take().is_none());
        let part = own.slice().slice(5..8).unwrap();
        drop(own);
        part.write_from(b"abc").unwrap();
        assert_eq!(woken.load(Ordering::SeqCst), 0);
        drop(part);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        drop(shared);
        let index = |slot: &PinnedSlot| slot.slice().region().len() / PinnedPool::SLOT_BYTES;
        let taken = other.try_take().unwrap();
        assert_eq!((index(&taken), slots.taken()), (1, 1));
    }

    #[test]
    fn a_pool_without_a_slot_is_woken_by_another_ones() {
        let slots = slots(16);
        let (one, other) = (slots.to_send(16), slots.to_send(16));
        let woken = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&woken);
        let _watch = other.on_free(Arc::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        }));
        let held = all_of(&one);
        let own = all_of(&other);
        assert_eq!(woken.load(Ordering::SeqCst), 0);
        drop(held);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(other.try_take().is_some());
        drop(own);
    }

    #[test]
    fn no_slot_has_two_holders_and_none_is_lost() {
        let slots = slots(12);
        let held: Arc<Vec<AtomicU32>> = Arc::new((0..12).map(|_| AtomicU32::new(0)).collect());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (slots, held) = (&slots, Arc::clone(&held));
                scope.spawn(move || {
                    for round in 0..500 {
                        let pool = slots.pool(1 + round % 7, (thread + round) % 4);
                        let all = all_of(&pool);
                        for slot in all
                            .iter()
                            .filter(|slot| slot.slice().region().len() > PinnedPool::SLOT_BYTES)
                        {
                            let number = slot.slice().offset() / PinnedPool::SLOT_BYTES;
                            assert_eq!(held[number].fetch_add(1, Ordering::SeqCst), 0);
                            held[number].fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert_eq!((slots.taken(), slots.free.len()), (0, 12));
        assert_eq!(slots.spare.load(Ordering::SeqCst), 12);
    }

    #[test]
    fn slots_are_disjoint_and_come_back() {
        let pool = pool();
        let slots: Vec<_> = std::iter::from_fn(|| pool.try_take()).collect();
        assert_eq!((slots.len(), pool.free_slots()), (256, 0));
        let mut starts: Vec<_> = slots.iter().map(|slot| slot.slice().address()).collect();
        starts.sort_unstable();
        assert!(
            starts
                .windows(2)
                .all(|pair| pair[1] - pair[0] >= PinnedPool::SLOT_BYTES as u64)
        );
        drop(slots);
        assert_eq!(pool.free_slots(), 256);
    }

    #[test]
    fn short_pieces_take_slots_in_turn_and_others_the_first() {
        let pool = pool();
        let address = |slot: &PinnedSlot| slot.slice().address();
        let turns: Vec<u64> = (0..2 * ROTATING_SLOTS)
            .map(|_| address(&pool.try_take_rested().unwrap()))
            .collect();
        let (once, again) = turns.split_at(ROTATING_SLOTS);
        assert_eq!(once, again);
        assert!(once.windows(2).all(|pair| pair[0] < pair[1]));
        let first = address(&pool.try_take().unwrap());
        assert_eq!(address(&pool.try_take().unwrap()), first);
    }

    #[test]
    fn pieces_that_follow_each_other_get_slots_that_do() {
        let pool = slots(64).share(64, |_| 64);
        let middle = pool.slots() as u64 / 2;
        let index = |slot: &PinnedSlot| (slot.slice().offset() / PinnedPool::SLOT_BYTES) as u64;
        for (half, first) in [(PoolHalf::Lower, 0), (PoolHalf::Upper, middle)] {
            // Not in order, and around the half's end.
            let places = [middle - 1, middle + 1, middle - 2, middle];
            let taken = places.map(|place| pool.try_take_at(half, place).unwrap());
            let expected = [middle - 1, 1, middle - 2, 0].map(|place| first + place);
            assert_eq!(taken.each_ref().map(index), expected);
            // What is taken there is taken from the other half, and then from what comes next.
            let other = pool.try_take_at(half, 0).unwrap();
            assert_eq!(index(&other), middle - first);
            let next = pool.try_take_at(half, 0).unwrap();
            assert_eq!(index(&next), first + 2);
            let region = next.slice().region().id();
            assert!(
                taken
                    .iter()
                    .all(|slot| slot.slice().region().id() == region)
            );
        }
    }

    #[test]
    fn every_order_comes_to_all_slots() {
        let pool = pool();
        let lower = |pool: &PinnedPool| pool.try_take_at(PoolHalf::Lower, 77);
        let upper = |pool: &PinnedPool| pool.try_take_at(PoolHalf::Upper, u64::MAX);
        for take in [
            PinnedPool::try_take,
            PinnedPool::try_take_rested,
            lower,
            upper,
        ] {
            let all: Vec<_> = std::iter::from_fn(|| take(&pool)).collect();
            assert_eq!((all.len(), pool.free_slots()), (256, 0));
        }
        assert_eq!(pool.free_slots(), 256);
    }

    #[test]
    fn a_slot_is_taken_until_its_last_slice_is_gone() {
        let pool = pool();
        let slot = pool.try_take().unwrap();
        let part = slot.slice().slice(10..20).unwrap();
        let other = part.clone();
        drop(slot);
        drop(part);
        assert_eq!(pool.free_slots(), 255);
        other.write_from(b"abc").unwrap();
        drop(other);
        assert_eq!(pool.free_slots(), 256);
    }

    #[test]
    fn nobody_reaches_a_slot_through_its_region() {
        let pool = pool();
        let slot = pool.try_take().unwrap();
        let region = slot.slice().region();
        assert!(matches!(
            region.read_to(0, &mut [0]),
            Err(MemoryError::Busy { .. })
        ));
        slot.slice().write_from(&[1]).unwrap();
    }

    #[test]
    fn who_found_no_slot_is_woken_when_one_comes_back() {
        let pool = pool();
        let woken = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&woken);
        let watch = pool.on_free(Arc::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        }));
        let mut slots: Vec<_> = std::iter::from_fn(|| pool.try_take()).collect();
        slots.pop();
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        slots.pop();
        assert_eq!(woken.load(Ordering::SeqCst), 1, "nobody was waiting");
        drop(watch);
        assert!(pool.try_take().is_some() && pool.try_take().is_some());
    }
}
