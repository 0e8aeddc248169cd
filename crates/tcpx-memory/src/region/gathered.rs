//! Many pieces of host memory, or of one GPU's, as one region.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::{Backing, Region, RegionId};
use crate::error::MemoryError;
use crate::gpu::Gpu;
use crate::kind::MemoryKind;
use crate::lease::{Access, Lease};
use crate::slice::RegionSlice;

/// Pieces of other regions, which are leased while this lives.
pub(super) struct Gathered {
    pieces: Arc<[Part]>,
    /// Whose memory it is; `None` for host memory.
    gpu: Option<Gpu>,
    leases: Vec<Lease>,
}

// SAFETY: an address and a length. Whoever uses them leases the bytes, through the region they are
// pieces of.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

#[derive(Clone, Copy, Debug)]
struct Part {
    /// One behind its last byte among the bytes of all.
    end: usize,
    /// Of a GPU's memory it is the device address, which means nothing to the CPU.
    start: *mut u8,
}

/// Addresses and lengths of the memory of a range, in its order.
#[derive(Clone, Debug)]
pub struct HostParts<'a> {
    /// The rest of the first part.
    first: (*mut u8, usize),
    rest: std::slice::Iter<'a, Part>,
    /// Where the first part ends among all bytes, and where the range does.
    at: usize,
    end: usize,
}

impl HostParts<'_> {
    pub(super) fn one(start: *mut u8, len: usize) -> Self {
        Self {
            first: (start, len),
            rest: [].iter(),
            at: len,
            end: len,
        }
    }
}

impl Iterator for HostParts<'_> {
    type Item = (*mut u8, usize);

    fn next(&mut self) -> Option<Self::Item> {
        if self.first.1 == 0 {
            if self.at == self.end {
                return None;
            }
            let piece = self.rest.next()?;
            let len = piece.end.min(self.end) - self.at;
            self.at += len;
            return Some((piece.start, len));
        }
        let first = self.first;
        self.first.1 = 0;
        Some(first)
    }
}

/// Device addresses and lengths of the memory of a range, in its order.
#[derive(Clone, Debug)]
pub struct DeviceParts<'a>(HostParts<'a>);

impl DeviceParts<'_> {
    pub(super) fn one(start: u64, len: usize) -> Self {
        Self(HostParts::one(device_place(start), len))
    }
}

impl Iterator for DeviceParts<'_> {
    type Item = (u64, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let (start, len) = self.0.next()?;
        Some((start.addr() as u64, len))
    }
}

/// A device address where a piece keeps its address.
fn device_place(address: u64) -> *mut u8 {
    std::ptr::without_provenance_mut(address as usize)
}

impl Gathered {
    pub(super) fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// The regions that the pieces are of.
    pub(super) fn parents(&self) -> impl Iterator<Item = &Region> {
        self.leases.iter().map(Lease::region)
    }

    pub(super) fn host_parts(&self, range: Range<usize>) -> Option<HostParts<'_>> {
        self.gpu.is_none().then(|| self.parts(range))
    }

    pub(super) fn device_parts(&self, range: Range<usize>) -> Option<DeviceParts<'_>> {
        self.gpu.is_some().then(|| DeviceParts(self.parts(range)))
    }

    fn parts(&self, range: Range<usize>) -> HostParts<'_> {
        let index = self
            .pieces
            .partition_point(|piece| piece.end <= range.start);
        let (before, rest) = self.pieces.split_at(index);
        let begins = before.last().map_or(0, |piece| piece.end);
        let mut rest = rest.iter();
        let first = match rest.next() {
            Some(piece) if !range.is_empty() => {
                let start = piece.start.wrapping_add(range.start - begins);
                (start, piece.end.min(range.end) - range.start)
            }
            _ => (std::ptr::null_mut(), 0),
        };
        HostParts {
            first,
            rest,
            at: range.start + first.1,
            end: range.end,
        }
    }
}

/// Many pieces of host memory, or of one GPU's, each a range of a slice: what [`Gather::region`]
/// makes one region of.
#[derive(Clone, Debug)]
pub struct Gather {
    pieces: Arc<[Part]>,
    gpu: Option<Gpu>,
    leased: Vec<Leased>,
    access: Access,
    len: usize,
}

/// What is leased of one region.
#[derive(Clone, Debug)]
struct Leased {
    region: Region,
    range: Range<usize>,
    pieces: Option<Arc<[Range<usize>]>>,
}

impl Gather {
    /// The pieces in their order: which of `parents` each is a range of, and the range.
    ///
    /// # Errors
    /// A piece lies outside of its parent; [`MemoryError::Unlike`] where parents are in host memory
    /// and on a GPU, or on two; [`MemoryError::InPieces`] where one is such a region itself;
    /// [`MemoryError::Busy`] where two pieces overlap that are to be written.
    pub fn new(
        parents: &[RegionSlice],
        pieces: impl Iterator<Item = (usize, Range<usize>)>,
        access: Access,
    ) -> Result<Self, MemoryError> {
        let mut bases = Vec::with_capacity(parents.len());
        let mut regions: HashMap<RegionId, usize> = HashMap::new();
        // Each region, whether nobody is kept away from it, and what is leased there.
        let mut ranges: Vec<(&Region, bool, Vec<Range<usize>>)> = Vec::new();
        let gpu = gpu_of(parents)?;
        for parent in parents {
            let base = match gpu {
                Some(_) => parent.device_address().map(device_place),
                None => parent.host_ptr(),
            };
            let kind = parent.kind();
            let base = base.ok_or(MemoryError::InPieces { kind })?;
            let of = *regions.entry(parent.region().id()).or_insert_with(|| {
                let region = parent.region();
                ranges.push((region, region.leases().is_shared(), Vec::new()));
                ranges.len() - 1
            });
            bases.push((base, parent.offset(), parent.len(), of));
        }
        let mut all: Vec<Part> = Vec::with_capacity(pieces.size_hint().0);
        // One behind the last piece in memory.
        let mut behind = std::ptr::null_mut();
        let mut total = 0_usize;
        for (parent, Range { start, end }) in pieces {
            let parents = bases.len();
            let known = bases.get(parent);
            let &(base, offset, len, of) =
                known.ok_or(MemoryError::NoParent { parent, parents })?;
            if start > end || end > len {
                return Err(MemoryError::OutOfBounds { start, end, len });
            }
            if start == end {
                continue;
            }
            let (_, is_shared, ranges) = &mut ranges[of];
            let range = offset + start..offset + end;
            match ranges.first_mut().filter(|_| *is_shared) {
                Some(all) => *all = all.start.min(range.start)..all.end.max(range.end),
                None => ranges.push(range),
            }
            let piece = base.wrapping_add(start);
            total = total.saturating_add(end - start);
            match all.last_mut().filter(|_| behind == piece) {
                Some(last) => last.end = total,
                None => all.push(Part {
                    end: total,
                    start: piece,
                }),
            }
            behind = base.wrapping_add(end);
        }
        let leased = ranges.into_iter().filter(|(.., ranges)| !ranges.is_empty());
        let leased = leased.map(|(region, _, ranges)| Leased::new(region.clone(), ranges, access));
        Ok(Self {
            pieces: all.into(),
            gpu: gpu.cloned(),
            leased: leased.collect::<Result<_, _>>()?,
            access,
            len: total,
        })
    }

    /// One region whose bytes are those of the pieces. They are leased as long as it, its slices
    /// and leases live.
    ///
    /// # Errors
    /// [`MemoryError::Busy`], as for a lease.
    pub fn region(&self, holder: &'static str) -> Result<Region, MemoryError> {
        let lease = |leased: &Leased| {
            let Leased {
                region,
                range,
                pieces,
            } = leased.clone();
            Lease::take_pieces(&region, range, pieces, self.access, holder)
        };
        let gathered = Gathered {
            pieces: Arc::clone(&self.pieces),
            gpu: self.gpu.clone(),
            leases: self.leased.iter().map(lease).collect::<Result<_, _>>()?,
        };
        let kind = self.gpu.as_ref().map_or(MemoryKind::Host, Gpu::kind);
        let backing = Backing::Gathered(gathered);
        Ok(Region::new(kind, self.len, backing))
    }

    /// Whether they are memory of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether they have no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The GPU in whose memory all of these lie; `None` for host memory.
fn gpu_of(parents: &[RegionSlice]) -> Result<Option<&Gpu>, MemoryError> {
    fn gpu(one: &RegionSlice) -> Option<&Gpu> {
        // Pinned memory has a GPU, too.
        let on_gpu = matches!(one.kind(), MemoryKind::Cuda { .. });
        one.region().gpu().filter(|_| on_gpu)
    }
    let Some(first) = parents.first() else {
        return Ok(None);
    };
    let of = gpu(first);
    let is_alike = |one: &RegionSlice| match (of, gpu(one)) {
        (Some(gpu), Some(other)) => gpu.is_same(other),
        (one, other) => one.is_none() && other.is_none(),
    };
    match parents.iter().find(|one| !is_alike(one)) {
        Some(other) => Err(MemoryError::Unlike {
            one: first.kind(),
            other: other.kind(),
        }),
        None => Ok(of),
    }
}

impl Leased {
    /// All the ranges, of which there is one at least.
    fn new(
        region: Region,
        mut ranges: Vec<Range<usize>>,
        access: Access,
    ) -> Result<Self, MemoryError> {
        ranges.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match joined.last_mut() {
                Some(last) if range.start < last.end && access == Access::Write => {
                    return Err(MemoryError::Busy {
                        wanted: range,
                        range: last.clone(),
                        held: access,
                        by: "another piece of the same transfer",
                    });
                }
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        let start = joined.first().map_or(0, |first| first.start);
        let end = joined.last().map_or(0, |last| last.end);
        Ok(Self {
            region,
            range: start..end,
            pieces: (joined.len() > 1).then(|| joined.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu;
    use crate::job::Work;

    fn numbered(len: usize) -> Region {
        let region = Region::host(len).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
        region.write_from(0, &bytes).unwrap();
        region
    }

    fn gathered(
        parents: &[RegionSlice],
        pieces: &[(usize, Range<usize>)],
        access: Access,
    ) -> Result<Region, MemoryError> {
        Gather::new(parents, pieces.iter().cloned(), access)?.region("a test")
    }

    #[test]
    fn pieces_are_read_and_written_in_their_order() {
        let (one, other) = (numbered(100), numbered(100));
        let parents = [one.slice(10..90).unwrap(), other.all()];
        let pieces = [(1, 50..53), (0, 0..2), (0, 2..4), (1, 7..7), (1, 0..5)];
        let region = gathered(&parents, &pieces, Access::Write).unwrap();
        let expected = [50, 51, 52, 10, 11, 12, 13, 0, 1, 2, 3, 4];
        assert_eq!(region.len(), expected.len());
        let lease = region.lease(.., Access::Write).unwrap();
        for start in 0..=expected.len() {
            for end in start..=expected.len() {
                let slice = lease.slice(start..end).unwrap();
                let mut bytes = vec![0; end - start];
                slice.read_to(&mut bytes).unwrap();
                assert_eq!(bytes, expected[start..end], "{start}..{end}");
                let mut appended = vec![9];
                slice.append_to(&mut appended).unwrap();
                assert_eq!(appended[1..], expected[start..end]);
                let parts = slice.host_parts(0..end - start).unwrap().unwrap();
                assert_eq!(parts.map(|(_, len)| len).sum::<usize>(), end - start);
            }
        }
        let flat = Region::host(12).unwrap();
        let copy = |from: RegionSlice, to: RegionSlice| cpu::run(&Work::Copy { from, to });
        copy(lease.all(), flat.all()).unwrap();
        let of = lease.all();
        let sum = cpu::run(&Work::checksum(of)).unwrap();
        assert_eq!(sum, u64::from(flat.checksum(..).unwrap()));
        flat.write_from(0, &[200; 12]).unwrap();
        copy(flat.slice(2..5).unwrap(), lease.slice(2..5).unwrap()).unwrap();
        drop((lease, region));
        let at = |region: &Region, at| region.with_bytes(at..at + 1, |bytes| bytes[0]).unwrap();
        assert_eq!(
            [at(&other, 51), at(&other, 52), at(&other, 53)],
            [51, 200, 53]
        );
        assert_eq!(
            [at(&one, 9), at(&one, 10), at(&one, 11), at(&one, 12)],
            [9, 200, 200, 12]
        );
    }

    #[test]
    fn pieces_are_leased_and_what_lies_between_them_is_not() {
        let region = numbered(100);
        let parents = [region.all()];
        let even: Vec<_> = (0..10).map(|at| (0, at * 10..at * 10 + 5)).collect();
        let odd: Vec<_> = (0..10).map(|at| (0, at * 10 + 5..at * 10 + 10)).collect();
        let first = gathered(&parents, &even, Access::Write).unwrap();
        let second = gathered(&parents, &odd, Access::Write).unwrap();
        assert!(gathered(&parents, &[(0, 4..6)], Access::Read).is_err());
        assert!(region.lease(44..45, Access::Read).is_err());
        drop(second);
        assert!(region.lease(45..50, Access::Write).is_ok());
        let slice = first.slice(3..4).unwrap();
        drop(first);
        assert!(region.lease(0..5, Access::Read).is_err());
        drop(slice);
        assert!(region.lease(.., Access::Write).is_ok());
    }

    #[test]
    fn a_piece_of_no_parent_is_refused() {
        let parents = [numbered(10).all()];
        for (parents, parent) in [(&parents[..], 1), (&[], 0)] {
            let refused = Gather::new(parents, [(parent, 0..5)].into_iter(), Access::Read);
            let parents = parents.len();
            assert_eq!(
                refused.map(drop),
                Err(MemoryError::NoParent { parent, parents })
            );
        }
    }

    #[test]
    fn pieces_that_overlap_are_read_and_never_written() {
        let region = numbered(10);
        let twice = [(0, 0..5), (0, 4..6)];
        assert!(gathered(&[region.all()], &twice, Access::Read).is_ok());
        let refused = gathered(&[region.all()], &twice, Access::Write);
        assert!(matches!(refused, Err(MemoryError::Busy { .. })));
        let outside = gathered(&[region.all()], &[(0, 5..11)], Access::Read);
        assert!(matches!(outside, Err(MemoryError::OutOfBounds { .. })));
    }
}
