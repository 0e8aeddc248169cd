//! Pinned slots in which networks stage bytes: pinned once, taken and returned without the driver.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use crate::error::MemoryError;
use crate::free_slots::FreeSlots;
use crate::gpu::{Gpu, WeakGpu};
use crate::lease::{Access, Hold, Lease, LeaseTable};
use crate::lock;
use crate::region::Region;
use crate::slice::RegionSlice;

/// Most slots pinned at a time.
const BLOCK_SLOTS: usize = 64;
/// Slots that the pools of a GPU's connections have together before later ones get fewer.
const AMPLE_SLOTS: usize = 256;
/// Slots that every connection gets.
const LEAST_SLOTS: usize = 8;
/// Slots that short chunks take in turn: enough that a slot has left the core's cache before its next
/// use, and few enough to stay in the shared caches.
const ROTATING_SLOTS: usize = 40;

/// Fixed-size slots of pinned memory; ordinary memory in a process without a GPU. Cheap to clone.
///
/// A network whose slots a peer can hold up, or whose pages the kernel may still send when a chunk has ended,
/// takes a pool for each connection ([`CopyWorker::pool`](crate::CopyWorker::pool)): then no peer can keep slots from another
/// connection, or see what another one sends.
#[derive(Clone)]
pub struct PinnedPool(Arc<Inner>);

/// Where to search for a slot first: users with different purposes start in different halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolHalf {
    /// The first half.
    Lower,
    /// The second half.
    Upper,
}

type Callback = Arc<dyn Fn() + Send + Sync>;

struct Inner {
    /// Grows by blocks up to the cap; `None` after the GPU is gone, or on the host.
    gpu: Option<WeakGpu>,
    /// Slots of a block, and of all.
    block_slots: usize,
    cap: usize,
    tally: Arc<Tally>,
    /// It is one of the pools that the tally counts.
    counted: bool,
    /// One per block; the pool's own lease keeps other users away from the bytes.
    blocks: Box<[OnceLock<(Region, Lease)>]>,
    /// The number of references to each slot.
    users: Box<[AtomicU32]>,
    /// Who touches the bytes of each slot.
    uses: Box<[LeaseTable]>,
    free: FreeSlots,
    pinned: AtomicUsize,
    growing: Mutex<()>,
    /// Whether a user found no free slot since the last one was returned.
    starved: AtomicBool,
    watchers: RwLock<(u64, Vec<(u64, Callback)>)>,
}

/// What the pools of a worker have in common.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Pools of connections.
    pools: AtomicUsize,
    /// Slots that are taken, of all pools.
    taken: AtomicUsize,
}

impl Tally {
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

impl PinnedPool {
    /// Bytes of a slot.
    pub const SLOT_BYTES: usize = 1 << 20;
    /// Most bytes a pool pins.
    pub const CAP_BYTES: usize = 256 << 20;

    const CAP_SLOTS: usize = Self::CAP_BYTES / Self::SLOT_BYTES;

    /// The pool that a worker's users share. It grows by [`reserve`](Self::reserve).
    pub(crate) fn shared(gpu: Option<&Gpu>, tally: &Arc<Tally>) -> Result<Self, MemoryError> {
        let pool = Self::empty(gpu, tally, Self::CAP_SLOTS, BLOCK_SLOTS, false);
        if gpu.is_none() {
            // Host memory costs nothing before it is used, so all of it can be there at once.
            pool.reserve(Self::CAP_SLOTS)?;
        }
        Ok(pool)
    }

    /// A pool for one connection, of `most` slots while few have one.
    pub(crate) fn own(
        gpu: Option<&Gpu>,
        tally: &Arc<Tally>,
        most: usize,
    ) -> Result<Self, MemoryError> {
        let others = tally.pools.fetch_add(1, Ordering::Relaxed);
        let share = (AMPLE_SLOTS / (others + 1)).max(LEAST_SLOTS);
        let slots = most.clamp(1, BLOCK_SLOTS).min(share);
        // One block, so that one copy can reach any neighbours.
        let pool = Self::empty(gpu, tally, slots, slots, true);
        pool.reserve(slots)?;
        Ok(pool)
    }

    fn empty(
        gpu: Option<&Gpu>,
        tally: &Arc<Tally>,
        cap: usize,
        block_slots: usize,
        counted: bool,
    ) -> Self {
        Self(Arc::new(Inner {
            gpu: gpu.map(Gpu::downgrade),
            block_slots,
            cap,
            tally: Arc::clone(tally),
            counted,
            blocks: (0..cap / block_slots).map(|_| OnceLock::new()).collect(),
            users: (0..cap).map(|_| AtomicU32::new(0)).collect(),
            uses: (0..cap).map(|_| LeaseTable::default()).collect(),
            free: FreeSlots::new(cap),
            pinned: AtomicUsize::new(0),
            growing: Mutex::new(()),
            starved: AtomicBool::new(false),
            watchers: RwLock::default(),
        }))
    }

    /// Pins more memory until the pool has `slots`, or its cap. Pinning takes about 20 ms per 64 MiB and
    /// calls the driver: for set-up, never during transfers.
    ///
    /// # Errors
    /// The driver's or the system's refusal; what was pinned before stays usable.
    pub fn reserve(&self, slots: usize) -> Result<(), MemoryError> {
        let _growing = lock(&self.0.growing);
        let slots = slots.min(self.0.cap);
        while self.slots() < slots {
            let first = self.slots();
            let region = self.block()?;
            let lease = region.lease_as(.., Access::Write, "a pool of pinned slots")?;
            if self.0.blocks[first / self.0.block_slots]
                .set((region, lease))
                .is_err()
            {
                // Only this function sets blocks, one after the other, under the lock.
                return Ok(());
            }
            let end = first + self.0.block_slots;
            self.0.pinned.store(end, Ordering::Release);
            for slot in first..end {
                self.0.put_back(slot as u32);
            }
        }
        Ok(())
    }

    fn block(&self) -> Result<Region, MemoryError> {
        let bytes = self.0.block_slots * Self::SLOT_BYTES;
        match &self.0.gpu {
            None => Region::host(bytes),
            Some(gpu) => match gpu.upgrade() {
                Some(gpu) => Region::pinned(&gpu, bytes),
                None => Err(MemoryError::WorkerStopped),
            },
        }
    }

    /// Slots, free or taken.
    pub fn slots(&self) -> usize {
        self.0.pinned.load(Ordering::Acquire)
    }

    /// Free slots.
    pub fn free_slots(&self) -> usize {
        self.0.free.len()
    }

    /// Takes the first free slot, if there is one, so that a user of few slots touches few. Never calls
    /// the driver, never blocks. Its bytes are whatever the last user left.
    pub fn try_take(&self) -> Option<PinnedSlot> {
        self.take(|inner| inner.free.take_first())
    }

    /// As [`Self::try_take`], but in turn, for short chunks: their bytes would still lie in the cache of
    /// the core that used the slot last, where a GPU reads them at half the speed.
    pub fn try_take_rested(&self) -> Option<PinnedSlot> {
        self.take(|inner| inner.free.take_in_turn(ROTATING_SLOTS))
    }

    /// As [`Self::try_take`], but preferably the slot at `place`, which counts around one half of the
    /// pool, or the same of the other half. Adjacent chunks that ask for adjacent places mostly get
    /// adjacent slots, and the copy worker moves those in one copy; a user of few slots touches one half.
    pub fn try_take_at(&self, half: PoolHalf, place: u64) -> Option<PinnedSlot> {
        let middle = self.slots() / 2;
        // The remainder is below the number of slots.
        let low = (place % middle.max(1) as u64) as usize;
        let places = match half {
            PoolHalf::Lower => [low, low + middle],
            PoolHalf::Upper => [low + middle, low],
        };
        self.take(|inner| {
            let at = |place: usize| inner.free.take_among(place..place + 1);
            let near = || inner.free.take_among(places[0]..self.slots());
            places
                .into_iter()
                .find_map(at)
                .or_else(near)
                .or_else(|| inner.free.take_first())
        })
    }

    fn take(&self, pop: impl Fn(&Inner) -> Option<u32>) -> Option<PinnedSlot> {
        let index = pop(&self.0).or_else(|| {
            // Searching again after setting the flag finds a slot that was returned in between.
            self.0.starved.store(true, Ordering::SeqCst);
            pop(&self.0)
        })?;
        let slot = index as usize;
        let (region, _) = self.0.blocks.get(slot / self.0.block_slots)?.get()?;
        self.0.tally.taken.fetch_add(1, Ordering::Relaxed);
        self.0.users[slot].store(1, Ordering::Relaxed);
        let start = slot % self.0.block_slots * Self::SLOT_BYTES;
        let hold = Hold::Slot(SlotHold {
            pool: Arc::clone(&self.0),
            index,
        });
        let range = start..start + Self::SLOT_BYTES;
        Some(PinnedSlot(RegionSlice::held(region.clone(), range, hold)))
    }

    /// Calls `wake` whenever a slot is returned after [`Self::try_take`] found none, until the watch is
    /// dropped. The call is made on the thread that returns the slot, which may be the copy worker's,
    /// and must not block.
    pub fn on_free(&self, wake: Callback) -> FreeWatch {
        let mut watchers = self
            .0
            .watchers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        watchers.0 += 1;
        let id = watchers.0;
        watchers.1.push((id, wake));
        FreeWatch {
            pool: Arc::clone(&self.0),
            id,
        }
    }
}

impl Inner {
    fn put_back(&self, slot: u32) {
        self.free.give_back(slot);
        if self.starved.swap(false, Ordering::SeqCst) {
            let watchers = self.watchers.read().unwrap_or_else(PoisonError::into_inner);
            watchers.1.iter().for_each(|(_, wake)| wake());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.counted {
            self.tally.pools.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "PinnedPool({} of {} slots free)",
            self.free_slots(),
            self.slots()
        )
    }
}

/// A slot of a [`PinnedPool`]. It is returned when it and all slices made from it are dropped, so no copy
/// in flight can meet the slot's next user.
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
    pool: Arc<Inner>,
    index: u32,
}

impl SlotHold {
    pub(crate) fn uses(&self) -> &LeaseTable {
        &self.pool.uses[self.index as usize]
    }
}

impl Clone for SlotHold {
    fn clone(&self) -> Self {
        // As for `Arc`: a new reference made from an old one needs no ordering.
        self.pool.users[self.index as usize].fetch_add(1, Ordering::Relaxed);
        Self {
            pool: Arc::clone(&self.pool),
            index: self.index,
        }
    }
}

impl Drop for SlotHold {
    fn drop(&mut self) {
        // Release this user's writes and acquire the others', before the next user takes the slot.
        if self.pool.users[self.index as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.pool.tally.taken.fetch_sub(1, Ordering::Relaxed);
            self.pool.put_back(self.index);
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
    pool: Arc<Inner>,
    id: u64,
}

impl Drop for FreeWatch {
    fn drop(&mut self) {
        let mut watchers = self
            .pool
            .watchers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
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
    use super::*;

    fn pool() -> PinnedPool {
        PinnedPool::shared(None, &Arc::default()).unwrap()
    }

    #[test]
    fn every_connection_gets_slots_and_later_ones_fewer() {
        let tally = Arc::default();
        let own = || PinnedPool::own(None, &tally, 64).unwrap();
        let pools: Vec<_> = (0..40).map(|_| own()).collect();
        let slots: Vec<_> = pools.iter().map(PinnedPool::slots).collect();
        assert_eq!(slots[..6], [64, 64, 64, 64, 51, 42]);
        assert_eq!((slots[31], slots[39]), (8, 8));
        // What one takes the others keep.
        let taken: Vec<_> = std::iter::from_fn(|| pools[0].try_take()).collect();
        assert_eq!((taken.len(), tally.taken()), (64, 64));
        assert_eq!(pools[1].free_slots(), 64);
        drop((pools, taken));
        assert_eq!((own().slots(), tally.taken()), (64, 0));
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
        let pool = PinnedPool::own(Some(&Gpu::fake()), &Arc::default(), 64).unwrap();
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
