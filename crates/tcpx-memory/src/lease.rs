//! Leases: who may touch which bytes of a region, and for how long.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ops::{Range, RangeBounds};
use std::slice;
use std::sync::{Arc, Mutex};

use crate::error::MemoryError;
use crate::lock;
use crate::pinned::SlotHold;
use crate::region::Region;
use crate::slice::{RegionSlice, resolve};

/// What the holder of a lease may do with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only read: other readers may overlap.
    Read,
    /// Read and write: no other lease may overlap.
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "reading",
            Self::Write => "writing",
        })
    }
}

#[derive(Debug)]
struct Entry {
    id: u64,
    range: Range<usize>,
    /// What of the range it is about, if not all: in order, apart from each other.
    pieces: Option<Arc<[Range<usize>]>>,
    access: Access,
    holder: &'static str,
    /// A reader that makes way for writers; dropped before one of them begins.
    gives_way: Option<Guard>,
}

/// What lasts as long as a [`ReadUntilWritten`].
type Guard = Box<dyn Any + Send>;

impl Entry {
    fn pieces(&self) -> &[Range<usize>] {
        let range = slice::from_ref(&self.range);
        self.pieces.as_deref().unwrap_or(range)
    }
}

/// Whether ranges of two series, each in order, have bytes in common.
fn overlap(mut one: &[Range<usize>], mut other: &[Range<usize>]) -> bool {
    while let ([first, rest @ ..], [second, others @ ..]) = (one, other) {
        if first.start.max(second.start) < first.end.min(second.end) {
            return true;
        }
        if first.end <= second.end {
            one = rest;
        } else {
            other = others;
        }
    }
    false
}

/// The leases of one region, or those who use one lease.
#[derive(Debug, Default)]
pub(crate) struct LeaseTable {
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    /// Nobody is kept away, and nobody is entered.
    shared: bool,
    next: u64,
    /// How many may write.
    writing: usize,
    /// As a rule there is one at a time, which costs no allocation.
    first: Option<Entry>,
    /// In the order of their ids; the oldest usually leaves first.
    others: VecDeque<Entry>,
}

/// The id of who is not entered; those who are count from 1.
const NOT_ENTERED: u64 = 0;

impl LeaseTable {
    /// Keeps nobody away from now on.
    pub(crate) fn share(&self) {
        lock(&self.entries).shared = true;
    }

    pub(crate) fn is_shared(&self) -> bool {
        lock(&self.entries).shared
    }

    pub(crate) fn enter(
        &self,
        range: Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<u64, MemoryError> {
        self.enter_pieces(range, None, access, holder, None)
    }

    /// As [`Self::enter`], of these pieces of the range. Who has something made for it gives way to
    /// writers; it is not entered where nothing is.
    fn enter_pieces(
        &self,
        range: Range<usize>,
        pieces: Option<Arc<[Range<usize>]>>,
        access: Access,
        holder: &'static str,
        make: Option<&mut dyn FnMut() -> Option<Guard>>,
    ) -> Result<u64, MemoryError> {
        let mut guard = lock(&self.entries);
        let Entries {
            shared,
            next,
            writing,
            first,
            others,
        } = &mut *guard;
        if *shared {
            return Ok(NOT_ENTERED);
        }
        let conflicts = |held: &Entry| {
            let conflicts = held.access == Access::Write || access == Access::Write;
            let is_apart = held.range.end <= range.start || range.end <= held.range.start;
            let pieces = pieces.as_deref().unwrap_or_else(|| slice::from_ref(&range));
            conflicts && !is_apart && overlap(held.pieces(), pieces)
        };
        let conflict = match (access, *writing) {
            // Readers share.
            (Access::Read, 0) => None,
            _ => {
                let mut all = first.iter().chain(&*others);
                all.find(|held| held.gives_way.is_none() && conflicts(held))
            }
        };
        if let Some(held) = conflict {
            return Err(MemoryError::Busy {
                wanted: range,
                range: held.range.clone(),
                held: held.access,
                by: held.holder,
            });
        }
        if access == Access::Write {
            first.take_if(|held| held.gives_way.is_some() && conflicts(held));
            others.retain(|held| held.gives_way.is_none() || !conflicts(held));
        }
        let gives_way = match make.map(|make| make()) {
            Some(None) => return Ok(NOT_ENTERED),
            made => made.flatten(),
        };
        *next += 1;
        *writing += usize::from(access == Access::Write);
        let id = *next;
        let entry = Entry {
            id,
            range,
            pieces,
            access,
            holder,
            gives_way,
        };
        if first.is_none() {
            *first = Some(entry);
        } else {
            others.push_back(entry);
        }
        Ok(id)
    }

    fn has(&self, id: u64) -> bool {
        let guard = lock(&self.entries);
        let mut all = guard.first.iter().chain(&guard.others);
        id == NOT_ENTERED || all.any(|entry| entry.id == id)
    }

    fn reserve(&self, most: usize) {
        lock(&self.entries).others.reserve(most);
    }

    pub(crate) fn end_lease(&self, id: u64) {
        let mut guard = lock(&self.entries);
        let left = guard.first.take_if(|entry| entry.id == id).or_else(|| {
            let found = guard.others.binary_search_by_key(&id, |entry| entry.id);
            found.ok().and_then(|at| guard.others.remove(at))
        });
        guard.writing -= usize::from(left.is_some_and(|entry| entry.access == Access::Write));
    }
}

struct Inner {
    region: Region,
    id: u64,
    range: Range<usize>,
    access: Access,
    /// Who touches the bytes under this lease.
    uses: LeaseTable,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.region.leases().end_lease(self.id);
    }
}

/// The right to touch a range of a region. A clone is the same lease; it ends with the last clone
/// and the last slice made from it.
#[derive(Clone)]
pub struct Lease(Arc<Inner>);

impl Lease {
    pub(crate) fn take(
        region: &Region,
        range: Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<Self, MemoryError> {
        Self::take_pieces(region, range, None, access, holder)
    }

    /// A lease of pieces of a range, in order and apart from each other.
    pub(crate) fn take_pieces(
        region: &Region,
        range: Range<usize>,
        pieces: Option<Arc<[Range<usize>]>>,
        access: Access,
        holder: &'static str,
    ) -> Result<Self, MemoryError> {
        let leases = region.leases();
        let id = leases.enter_pieces(range.clone(), pieces, access, holder, None)?;
        Ok(Self(Arc::new(Inner {
            region: region.clone(),
            id,
            range,
            access,
            uses: LeaseTable::default(),
        })))
    }

    /// Makes room for so many users of the lease at a time, which then need no allocation.
    pub fn reserve_users(&self, most: usize) {
        self.0.uses.reserve(most);
    }

    /// The region the lease is on.
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    /// The leased bytes, relative to the region.
    pub fn range(&self) -> Range<usize> {
        self.0.range.clone()
    }

    /// What the lease allows.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// Copies `bytes` to the start of the leased ones; blocks for GPU memory.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::LeasedForReading`], [`MemoryError::Busy`] while
    /// a job or somebody else uses them under this lease, or the driver's refusal.
    pub fn write_from(&mut self, bytes: &[u8]) -> Result<(), MemoryError> {
        if !self.is_alone() {
            return self.all().write_from(bytes);
        }
        let range = resolve(..bytes.len(), self.0.range.len())?;
        let start = self.0.range.start;
        self.allows(Access::Write, &(start..start + range.len()))?;
        self.0.region.write_held(start, bytes)
    }

    /// Appends all leased bytes to `bytes`; blocks for GPU memory.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] while a job or somebody else writes them under this lease, or the
    /// driver's refusal; nothing was appended then.
    pub fn append_to(&mut self, bytes: &mut Vec<u8>) -> Result<(), MemoryError> {
        match self.is_alone() {
            true => self.0.region.append_held(self.range(), bytes),
            false => self.all().append_to(bytes),
        }
    }

    /// Whether these are bytes that only the CPU could touch, and nobody else can: there is no
    /// other clone, and no slice rides on the lease.
    fn is_alone(&mut self) -> bool {
        let is_here = self.0.region.kind().is_cpu_accessible();
        is_here && Arc::get_mut(&mut self.0).is_some()
    }

    fn allows(&self, access: Access, range: &Range<usize>) -> Result<(), MemoryError> {
        if access == Access::Write && self.0.access == Access::Read {
            let range = range.clone();
            return Err(MemoryError::LeasedForReading { range });
        }
        Ok(())
    }

    /// Whether both are clones of one.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A part of the leased bytes, relative to the start of the lease. The slice rides on this
    /// lease: jobs that get it take no lease of their own, and the lease lasts until the slice is
    /// gone. Several users of one lease are kept apart as those of a region are: a second one is
    /// refused where either writes.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<RegionSlice, MemoryError> {
        let range = resolve(range, self.0.range.len())?;
        let start = self.0.range.start + range.start;
        Ok(RegionSlice::held(
            self.0.region.clone(),
            start..start + range.len(),
            Hold::Lease(self.clone()),
        ))
    }

    /// All leased bytes as a slice that rides on this lease.
    pub fn all(&self) -> RegionSlice {
        RegionSlice::held(
            self.0.region.clone(),
            self.range(),
            Hold::Lease(self.clone()),
        )
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("region", &self.0.region.id())
            .field("range", &self.0.range)
            .field("access", &self.0.access)
            .finish()
    }
}

/// Something that lasts until bytes of a region are written by anybody who takes a lease for that,
/// or this is dropped.
pub struct ReadUntilWritten {
    region: Region,
    id: u64,
    /// Where leases keep nobody away, and nobody is entered.
    _guard: Option<Guard>,
}

impl ReadUntilWritten {
    pub(crate) fn take<G: Send + 'static>(
        slice: &RegionSlice,
        make: impl FnOnce() -> Option<G>,
    ) -> Option<Self> {
        let mut make = Some(make);
        let mut guard = || make.take()?().map(|made| Box::new(made) as Guard);
        let region = slice.region().clone();
        let range = slice.offset()..slice.offset() + slice.len();
        let entered = region.leases().enter_pieces(
            range,
            None,
            Access::Read,
            "a reader that gives way",
            Some(&mut guard),
        );
        let id = entered.ok()?;
        let guard = match id {
            NOT_ENTERED => Some(guard()?),
            _ => None,
        };
        Some(Self {
            region,
            id,
            _guard: guard,
        })
    }

    /// Whether nobody has written.
    pub fn lasts(&self) -> bool {
        self.region.leases().has(self.id)
    }
}

impl Drop for ReadUntilWritten {
    fn drop(&mut self) {
        self.region.leases().end_lease(self.id);
    }
}

impl fmt::Debug for ReadUntilWritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadUntilWritten")
            .field("region", &self.region.id())
            .field("lasts", &self.lasts())
            .finish_non_exhaustive()
    }
}

/// What keeps other users away from a slice's bytes.
#[derive(Clone, Debug)]
pub(crate) enum Hold {
    Lease(Lease),
    Slot(SlotHold),
}

/// One user's hold of some bytes; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    /// Where the user has no lease of its own: what it shares, and its number there.
    shared: Option<u64>,
    hold: Hold,
}

impl Held {
    /// What keeps the bytes, without a claim on them beside others who have it.
    pub(crate) fn whole(hold: Hold) -> Self {
        Self { shared: None, hold }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(id) = self.shared {
            self.hold.uses().end_lease(id);
        }
    }
}

impl Hold {
    /// Whether a range of the bytes may be used so.
    pub(crate) fn allows(&self, access: Access, range: &Range<usize>) -> Result<(), MemoryError> {
        match self {
            Self::Lease(lease) => lease.allows(access, range),
            Self::Slot(_) => Ok(()),
        }
    }

    fn uses(&self) -> &LeaseTable {
        match self {
            Self::Lease(lease) => &lease.0.uses,
            Self::Slot(slot) => slot.uses(),
        }
    }

    /// Keeps a range of the bytes for one of those who share the hold.
    pub(crate) fn enter(
        &self,
        range: &Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<Held, MemoryError> {
        self.allows(access, range)?;
        let id = self.uses().enter(range.clone(), access, holder)?;
        Ok(Held {
            shared: Some(id),
            hold: self.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounce::{BouncePool, UnpackMethod};
    use crate::job::Work;

    fn region() -> Region {
        Region::host(4096).unwrap()
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let region = region();
        let first = region.lease(0..100, Access::Read).unwrap();
        let second = region.lease(50..150, Access::Read).unwrap();
        let refused = region.lease(99..100, Access::Write).unwrap_err();
        assert!(
            matches!(
                refused,
                MemoryError::Busy {
                    held: Access::Read,
                    ..
                }
            ),
            "{refused}"
        );
        drop(first);
        drop(second);
        let _writer = region.lease(99..100, Access::Write).unwrap();
        assert!(region.lease(0..100, Access::Read).is_err());
        assert!(region.lease(0..99, Access::Write).is_ok());
        assert!(region.lease(100..4096, Access::Write).is_ok());
    }

    #[test]
    fn a_lease_lasts_as_long_as_its_slices() {
        let region = region();
        let slice = region
            .lease(0..10, Access::Write)
            .unwrap()
            .slice(2..5)
            .unwrap();
        assert_eq!((slice.offset(), slice.len()), (2, 3));
        let part = slice.slice(1..).unwrap();
        drop(slice);
        assert!(region.lease(9..10, Access::Read).is_err());
        drop(part);
        assert!(region.lease(9..10, Access::Read).is_ok());
    }

    #[test]
    fn leased_bytes_are_written_and_read_and_no_others() {
        let region = region();
        let mut lease = region.lease(10..14, Access::Write).unwrap();
        lease.write_from(b"abc").unwrap();
        assert!(matches!(
            lease.write_from(b"abcde"),
            Err(MemoryError::OutOfBounds { .. })
        ));
        let mut bytes = vec![9];
        lease.append_to(&mut bytes).unwrap();
        assert_eq!(bytes, *b"\x09abc\0");
        drop(lease);
        let mut lease = region.lease(10..14, Access::Read).unwrap();
        assert_eq!(
            lease.write_from(b"x"),
            Err(MemoryError::LeasedForReading { range: 10..11 })
        );
    }

    #[test]
    fn leases_of_shared_memory_keep_nobody_away() {
        let region = region();
        let before = region.lease(0..64, Access::Write).unwrap();
        // SAFETY: nothing borrows the bytes of this region.
        unsafe { region.share() };
        let others = [Access::Write, Access::Read, Access::Write];
        let others = others.map(|access| region.lease(0..4096, access).unwrap());
        drop(before);
        drop(others);
        assert!(region.lease(0..4097, Access::Read).is_err());
        assert!(region.lease(.., Access::Write).is_ok());
    }

    #[test]
    fn what_lasts_until_a_write_is_gone_before_it() {
        let lives = Arc::new(());
        let begin = |slice: &RegionSlice| slice.until_written(|| Some(Arc::clone(&lives)));
        let count = || Arc::strong_count(&lives) - 1;
        let region = region();
        let reads = region.lease(.., Access::Read).unwrap();
        let slice = region.slice(100..200).unwrap();
        let lasts = begin(&slice).unwrap();
        drop(reads);
        let beside = region.lease(0..100, Access::Write).unwrap();
        assert!(lasts.lasts() && count() == 1);
        let writer = region.lease(199..300, Access::Write).unwrap();
        assert!(!lasts.lasts() && count() == 0);
        assert!(begin(&slice).is_none() && count() == 0, "it is written");
        drop((writer, beside));
        assert!(slice.until_written(|| None::<()>).is_none());
        let again = begin(&slice).unwrap();
        drop(lasts);
        assert!(again.lasts());
        region.write_from(150, &[1]).unwrap();
        assert!(!again.lasts() && count() == 0);
        let third = begin(&slice).unwrap();
        drop(third);
        assert_eq!(count(), 0);
        // Where leases keep nobody away, they say nothing of writes either.
        // SAFETY: nothing borrows the bytes of this region.
        unsafe { region.share() };
        let shared = begin(&slice).unwrap();
        drop(region.lease(.., Access::Write).unwrap());
        assert!(shared.lasts() && count() == 1);
        drop(shared);
        assert_eq!(count(), 0);
    }

    #[test]
    fn a_lease_of_nothing_is_never_in_the_way() {
        let region = region();
        let _all = region.lease(.., Access::Write).unwrap();
        assert!(region.lease(10..10, Access::Write).is_ok());
    }

    #[test]
    fn safe_access_is_refused_while_a_transfer_holds_the_bytes() {
        let region = region();
        let lease = region.lease(0..64, Access::Write).unwrap();
        assert!(matches!(
            region.read_to(0, &mut [0; 8]),
            Err(MemoryError::Busy { .. })
        ));
        assert!(region.read_to(64, &mut [0; 8]).is_ok());
        drop(lease);
        assert!(region.read_to(0, &mut [0; 8]).is_ok());
    }

    #[test]
    fn users_of_one_lease_are_kept_apart() {
        let region = region();
        let mut lease = region.lease(0..64, Access::Write).unwrap();
        let (left, right, all) = (
            lease.slice(..32).unwrap(),
            lease.slice(32..).unwrap(),
            lease.all(),
        );
        let held = left.hold(Access::Write, "a test").unwrap();
        let refused = |result| matches!(result, Err(MemoryError::Busy { by: "a test", .. }));
        assert!(refused(all.write_from(&[1])));
        assert!(refused(lease.write_from(&[1])));
        assert!(refused(lease.append_to(&mut Vec::new())));
        assert!(right.write_from(&[1]).is_ok());
        drop(held);
        let reading = left.hold(Access::Read, "a test").unwrap();
        assert!(all.read_to(&mut [0; 64]).is_ok());
        assert!(refused(all.write_from(&[1])));
        drop(reading);
        assert!(all.write_from(&[1]).is_ok());
    }

    /// Miri finds the race if there is one.
    #[test]
    fn two_slices_of_one_lease_do_not_race() {
        let mut bytes = vec![0u8; 64].into_boxed_slice();
        let pointer = bytes.as_mut_ptr();
        // SAFETY: the bytes live until the end of the test, and only the region is used.
        let region = unsafe { Region::from_host_raw(pointer, 64, Arc::new(())) };
        let mut lease = region.lease(.., Access::Write).unwrap();
        let ended = std::thread::scope(|scope| {
            [1, 2]
                .map(|fill| {
                    let slice = lease.all();
                    scope.spawn(move || (fill, slice.write_from(&[fill; 64])))
                })
                .map(|thread| thread.join().unwrap())
        });
        let mut all = Vec::new();
        lease.append_to(&mut all).unwrap();
        let whole = |(fill, result): &(u8, _)| Result::is_ok(result) && all == [*fill; 64];
        assert!(ended.iter().any(whole), "{ended:?}: {all:?}");
        drop((lease, region));
        drop(bytes);
    }

    #[test]
    fn bounce_pool_parts_are_written_beside_unpacking() {
        let (pool, target) = (region(), region());
        let lease = pool.lease(.., Access::Write).unwrap();
        let into = target.lease(.., Access::Write).unwrap();
        let work = Work::Unpack {
            pool: BouncePool::new(lease.all()),
            descriptors: Arc::default(),
            to: into.all(),
            with: UnpackMethod::Host,
        };
        let held = [work.hold().unwrap(), work.hold().unwrap()];
        assert!(lease.slice(..8).unwrap().write_from(&[1; 8]).is_ok());
        drop(into);
        assert!(target.lease(.., Access::Read).is_err(), "the jobs keep it");
        drop((held, work));
        assert!(target.lease(.., Access::Read).is_ok());
    }
}
