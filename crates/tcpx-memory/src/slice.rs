//! A part of a region.

use std::ops::{Bound, Range, RangeBounds};

use crate::error::MemoryError;
use crate::kind::MemoryKind;
use crate::lease::{Access, Held, Hold, Lease, ReadUntilWritten};
use crate::region::{DeviceParts, HostParts, Region};
use crate::worker::blocking;

const READER: &str = "a read by the program";
const WRITER: &str = "a write by the program";

/// Turns any range into `start..end` within `len`.
pub(crate) fn resolve(
    range: impl RangeBounds<usize>,
    len: usize,
) -> Result<Range<usize>, MemoryError> {
    let start = match range.start_bound() {
        Bound::Included(&at) => at,
        Bound::Excluded(&at) => at.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&at) => at.saturating_add(1),
        Bound::Excluded(&at) => at,
        Bound::Unbounded => len,
    };
    if start > end || end > len {
        return Err(MemoryError::OutOfBounds { start, end, len });
    }
    Ok(start..end)
}

/// A part of a region that keeps the region alive. Cheap to clone.
///
/// A slice from [`Region::slice`] is plain: a job that gets it leases the bytes for its duration. A
/// slice from [`Lease::slice`] or [`crate::PinnedSlot::slice`] rides on what it came from.
#[derive(Clone, Debug)]
pub struct RegionSlice {
    region: Region,
    range: Range<usize>,
    hold: Option<Hold>,
}

impl RegionSlice {
    pub(crate) fn plain(region: Region, range: Range<usize>) -> Self {
        Self {
            region,
            range,
            hold: None,
        }
    }

    pub(crate) fn held(region: Region, range: Range<usize>, hold: Hold) -> Self {
        Self {
            region,
            range,
            hold: Some(hold),
        }
    }

    /// The region this is a part of.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Where the part starts in its region, in bytes.
    pub fn offset(&self) -> usize {
        self.range.start
    }

    /// Bytes in this part.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no bytes in it.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Where the bytes live.
    pub fn kind(&self) -> MemoryKind {
        self.region.kind()
    }

    /// A part of this part, relative to its start.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self, MemoryError> {
        let range = resolve(range, self.len())?;
        let start = self.range.start + range.start;
        Ok(Self {
            region: self.region.clone(),
            range: start..start + range.len(),
            hold: self.hold.clone(),
        })
    }

    /// Makes something that is dropped before anybody who takes a lease to write these bytes has
    /// it: for those who read them elsewhere. `None` where they are written now, or nothing was
    /// made.
    pub fn until_written<G: Send + 'static>(
        &self,
        make: impl FnOnce() -> Option<G>,
    ) -> Option<ReadUntilWritten> {
        ReadUntilWritten::take(self, make)
    }

    /// The bytes before and from `at`, relative to the start of this part.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] when `at` lies behind the end.
    pub fn split_at(&self, at: usize) -> Result<(Self, Self), MemoryError> {
        Ok((self.slice(..at)?, self.slice(at..)?))
    }

    /// This part and the one that begins where it ends, as one. `None` unless both ride on one
    /// lease.
    pub fn joined(&self, next: &Self) -> Option<Self> {
        match (&self.hold, &next.hold) {
            (Some(Hold::Lease(one)), Some(Hold::Lease(other)))
                if one.is_same(other) && self.range.end == next.range.start =>
            {
                Some(Self {
                    region: self.region.clone(),
                    range: self.range.start..next.range.end,
                    hold: self.hold.clone(),
                })
            }
            _ => None,
        }
    }

    /// This part in pieces of `piece` bytes, the last one shorter; `piece` 0 counts as 1.
    pub fn pieces(&self, piece: usize) -> impl Iterator<Item = Self> + '_ {
        let piece = piece.max(1);
        self.range.clone().step_by(piece).map(move |start| Self {
            region: self.region.clone(),
            range: start..self.range.end.min(start.saturating_add(piece)),
            hold: self.hold.clone(),
        })
    }

    /// The first byte's address for the CPU; `None` for memory the CPU cannot address, and for a
    /// [gathered](crate::Gather) region. Whoever reads
    /// or writes through it must hold a lease on the bytes.
    pub fn host_ptr(&self) -> Option<*mut u8> {
        // `wrapping_add` because an empty slice may stand at the end of a region of no bytes.
        self.region
            .host_base()
            .map(|base| base.wrapping_add(self.range.start))
    }

    /// The memory of a range of this part, in its order: one address and length, or those of the
    /// pieces of a [gathered](crate::Gather) region. `None` for memory that the CPU cannot address.
    /// As for [`Self::host_ptr`].
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn host_parts(&self, range: Range<usize>) -> Result<Option<HostParts<'_>>, MemoryError> {
        let range = resolve(range, self.len())?;
        let start = self.range.start + range.start;
        Ok(self.region.host_parts(start..start + range.len()))
    }

    /// As [`Self::host_parts`] for CUDA devices; `None` for memory that they cannot address.
    ///
    /// # Errors
    /// As there.
    pub fn device_parts(
        &self,
        range: Range<usize>,
    ) -> Result<Option<DeviceParts<'_>>, MemoryError> {
        let range = resolve(range, self.len())?;
        let start = self.range.start + range.start;
        Ok(self.region.device_parts(start..start + range.len()))
    }

    /// Whether the bytes are those of a [gathered](crate::Gather) region, which has no address.
    pub fn is_in_pieces(&self) -> bool {
        self.region.is_in_pieces()
    }

    /// The first byte's address for CUDA devices; `None` for pageable host memory and for a
    /// [gathered](crate::Gather) region.
    pub fn device_address(&self) -> Option<u64> {
        self.region
            .device_base()
            .map(|base| base + self.range.start as u64)
    }

    /// The first byte's address in its own space: a CPU address for host and pinned memory, a
    /// device address for GPU memory.
    pub fn address(&self) -> u64 {
        match self.host_ptr() {
            Some(pointer) => pointer.addr() as u64,
            None => self.device_address().unwrap_or_default(),
        }
    }

    /// Whether the slice rides on a lease or a pinned slot.
    pub fn is_held(&self) -> bool {
        self.hold.is_some()
    }

    /// Copies `bytes` to the start of this part; blocks for GPU memory.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`], or the driver's refusal.
    pub fn write_from(&self, bytes: &[u8]) -> Result<(), MemoryError> {
        let range = self.first(bytes.len())?;
        if let Some(all) = self.on_gpu(&range, Access::Write, WRITER)? {
            return blocking::write(&all, bytes);
        }
        let _hold = self.hold_here(&range, Access::Write, WRITER)?;
        self.region.write_held(range.start, bytes)
    }

    /// Copies the start of this part to `bytes`; blocks for GPU memory.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Busy`], or the driver's refusal.
    pub fn read_to(&self, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let range = self.first(bytes.len())?;
        if let Some(all) = self.on_gpu(&range, Access::Read, READER)? {
            let mut rest = bytes;
            return blocking::read(&all, |piece| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len());
                now.copy_from_slice(piece);
                rest = later;
            });
        }
        let _hold = self.hold_here(&range, Access::Read, READER)?;
        self.region.read_held(range.start, bytes)
    }

    /// Appends all bytes of this part to `bytes`; blocks for GPU memory.
    ///
    /// # Errors
    /// [`MemoryError::Busy`], or the driver's refusal; nothing was appended then.
    pub fn append_to(&self, bytes: &mut Vec<u8>) -> Result<(), MemoryError> {
        let before = bytes.len();
        if let Some(all) = self.on_gpu(&self.range, Access::Read, READER)? {
            let read = blocking::read(&all, |piece| bytes.extend_from_slice(piece));
            return read.inspect_err(|_| bytes.truncate(before));
        }
        let _hold = self.hold_here(&self.range, Access::Read, READER)?;
        self.region.append_held(self.range.clone(), bytes)
    }

    /// A range of the region as what jobs of this access ride on, where it is memory of a GPU.
    fn on_gpu(
        &self,
        range: &Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<Option<Self>, MemoryError> {
        if self.kind().is_cpu_accessible() {
            return Ok(None);
        }
        let (region, range) = (self.region.clone(), range.clone());
        Ok(Some(match &self.hold {
            Some(hold) => Self::held(region, range, hold.clone()),
            None => Lease::take(&region, range, access, holder)?.all(),
        }))
    }

    /// Where the first `len` bytes of this part lie in the region.
    fn first(&self, len: usize) -> Result<Range<usize>, MemoryError> {
        let range = resolve(..len, self.len())?;
        Ok(self.range.start..self.range.start + range.len())
    }

    /// As [`Self::hold`] for a range of the region.
    fn hold_here(
        &self,
        range: &Range<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<Held, MemoryError> {
        match &self.hold {
            Some(hold) => hold.enter(range, access, holder),
            None => Lease::take(&self.region, range.clone(), access, holder)
                .map(|lease| Held::whole(Hold::Lease(lease))),
        }
    }

    /// What a user of these bytes must keep until it has finished: a new lease, or its part of the
    /// hold that the slice rides on.
    pub(crate) fn hold(&self, access: Access, holder: &'static str) -> Result<Held, MemoryError> {
        self.hold_here(&self.range, access, holder)
    }

    /// As [`Self::hold`], but users of one hold are not kept apart.
    pub(crate) fn keep(&self, access: Access, holder: &'static str) -> Result<Held, MemoryError> {
        match &self.hold {
            Some(hold) => hold
                .allows(access, &self.range)
                .map(|()| Held::whole(hold.clone())),
            None => self.hold(access, holder),
        }
    }

    /// Whether bytes may be written here, as far as the hold says that the slice rides on.
    ///
    /// # Errors
    /// [`MemoryError::LeasedForReading`].
    pub fn admits_writes(&self) -> Result<(), MemoryError> {
        let hold = self.hold.as_ref();
        hold.map_or(Ok(()), |hold| hold.allows(Access::Write, &self.range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Gpu;

    #[test]
    fn ranges_are_checked_without_overflow() {
        assert_eq!(resolve(.., 7), Ok(0..7));
        assert_eq!(resolve(2..=6, 7), Ok(2..7));
        assert!(resolve(0..=usize::MAX, 7).is_err());
        assert!(resolve(8.., 7).is_err());
        #[expect(clippy::reversed_empty_ranges, reason = "the case under test")]
        let backwards = resolve(5..3, 7);
        assert!(backwards.is_err());
    }

    #[test]
    fn slices_of_slices_keep_their_place() {
        let region = Region::host(100).unwrap();
        let slice = region.slice(10..90).unwrap().slice(5..15).unwrap();
        assert_eq!((slice.offset(), slice.len()), (15, 10));
        let (left, right) = slice.split_at(4).unwrap();
        assert_eq!(
            (left.offset(), left.len(), right.offset(), right.len()),
            (15, 4, 19, 6)
        );
        assert!(slice.split_at(11).is_err());
        let lengths: Vec<_> = slice
            .pieces(4)
            .map(|piece| (piece.offset(), piece.len()))
            .collect();
        assert_eq!(lengths, [(15, 4), (19, 4), (23, 2)]);
        assert_eq!(region.slice(7..7).unwrap().pieces(4).count(), 0);
    }

    #[test]
    fn bytes_are_appended_unless_memory_is_in_use() {
        for region in [
            Region::host(8).unwrap(),
            Region::cuda(&Gpu::fake(), 8).unwrap(),
        ] {
            region.write_from(0, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
            let part = region.slice(2..5).unwrap();
            let mut bytes = vec![9];
            part.append_to(&mut bytes).unwrap();
            assert_eq!(bytes, [9, 2, 3, 4]);
            let lease = region.lease(.., Access::Write).unwrap();
            let busy = part.append_to(&mut bytes);
            assert!(matches!(busy, Err(MemoryError::Busy { .. })));
            assert_eq!(bytes.len(), 4);
            drop(lease);
        }
    }

    #[test]
    fn neighbours_of_one_lease_join_and_others_do_not() {
        let region = Region::host(100).unwrap();
        let lease = region.lease(10..90, Access::Read).unwrap();
        let slice = |range| lease.slice(range).unwrap();
        let joined = slice(0..20).joined(&slice(20..50)).unwrap();
        assert_eq!((joined.offset(), joined.len()), (10, 50));
        assert!(slice(0..20).joined(&slice(21..50)).is_none());
        assert!(slice(20..50).joined(&slice(0..20)).is_none());
        let other = region.lease(0..100, Access::Read).unwrap();
        assert!(slice(0..20).joined(&other.slice(30..40).unwrap()).is_none());
        let plain = |range| region.slice(range).unwrap();
        assert!(plain(0..20).joined(&plain(20..50)).is_none());
    }

    #[test]
    fn addresses_follow_the_offset() {
        let region = Region::host(100).unwrap();
        let all = region.all();
        let part = region.slice(33..).unwrap();
        assert_eq!(part.address() - all.address(), 33);
        assert_eq!(part.device_address(), None);
    }

    #[test]
    fn a_read_lease_is_no_destination() {
        let region = Region::host(100).unwrap();
        let slice = region.lease(0..50, Access::Read).unwrap().all();
        assert_eq!(
            slice.write_from(&[1]),
            Err(MemoryError::LeasedForReading { range: 0..1 })
        );
        let slice = region.lease(50.., Access::Write).unwrap().all();
        slice.write_from(&[1, 2, 3]).unwrap();
        let mut back = [0; 3];
        slice.read_to(&mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
    }
}
