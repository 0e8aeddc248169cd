//! Copies of memory in pieces: to and from slots by the kernel, and between all other kinds of
//! memory.

use std::ops::Range;

use super::*;
use crate::region::Gather;
use crate::slice::RegionSlice;

const KIB: usize = 1 << 10;

/// Numbers that follow from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Pieces all over some regions of the GPU, none of which touches another, and what the regions
/// should say.
struct Scattered {
    regions: Vec<Region>,
    pieces: Vec<(usize, Range<usize>)>,
    content: Vec<Vec<u8>>,
}

impl Scattered {
    /// `count` pieces of the lengths that `length` gives, in no order.
    fn new(bench: &Bench, count: usize, seed: u64, length: impl Fn(&mut Dice) -> usize) -> Self {
        let mut dice = Dice(seed);
        let mut ends = [0; 3];
        let mut pieces: Vec<_> = (0..count)
            .map(|_| {
                let region = dice.below(ends.len());
                let start = ends[region] + 1 + dice.below(40);
                ends[region] = start + length(&mut dice);
                (region, start..ends[region])
            })
            .collect();
        for at in (1..count).rev() {
            pieces.swap(at, dice.below(at + 1));
        }
        let content: Vec<_> = (0..)
            .zip(ends)
            .map(|(region, end)| noise(end + 33, seed as u32 + region))
            .collect();
        let regions = content
            .iter()
            .map(|bytes| bench.region(bench.gpu.kind(), bytes));
        Self {
            regions: regions.collect(),
            pieces,
            content,
        }
    }

    fn region(&self, access: Access) -> Region {
        let parents: Vec<_> = self.regions.iter().map(Region::all).collect();
        let gather = Gather::new(&parents, self.pieces.iter().cloned(), access);
        gather.unwrap().region("a test").unwrap()
    }

    /// What the pieces say, one behind the other.
    fn joined(&self) -> Vec<u8> {
        let piece = |(region, range): &(usize, Range<usize>)| &self.content[*region][range.clone()];
        self.pieces.iter().flat_map(piece).copied().collect()
    }

    /// From now on the pieces should say this; what lies between them says what it did.
    fn expect(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        for (region, range) in &self.pieces {
            let (now, later) = rest.split_at(range.len());
            self.content[*region][range.clone()].copy_from_slice(now);
            rest = later;
        }
        assert!(rest.is_empty());
    }

    fn is_as_expected(&self) -> bool {
        let mut all = self.regions.iter().zip(&self.content);
        all.all(|(region, expected)| content(region) == *expected)
    }
}

/// A copy for each chunk of two ends, the last first.
fn chunks(from: &RegionSlice, to: &RegionSlice, chunk: usize) -> Vec<Work> {
    let works = from
        .pieces(chunk)
        .zip(to.pieces(chunk))
        .map(|(from, to)| Work::Copy { from, to });
    let mut works: Vec<_> = works.collect();
    works.reverse();
    works
}

/// Runs works at a time; all of them must end well.
fn run_all(bench: &Bench, works: Vec<Work>) {
    let lengths: Vec<_> = (0..)
        .zip(&works)
        .map(|(token, work)| (token, Ok(work.bytes())))
        .collect();
    assert_eq!(together::run_together(bench, works), lengths);
}

fn launches(of: &Region) -> usize {
    fake::launches(of.all().device_address().unwrap())
}

#[test]
fn short_pieces_are_packed_and_scattered_by_few_launches() {
    let bench = Bench::new();
    type Length = fn(&mut Dice) -> usize;
    let shapes: [(usize, usize, Length); 5] = [
        (1, 7, |_| 5),
        (700, 1000, |dice| 1 + dice.below(70)),
        (300, 64 * KIB, |dice| 4095 + dice.below(3)),
        (60, 100_001, |_| 32 * KIB),
        (9, 900_000, |dice| 1 + dice.below(500 * KIB)),
    ];
    for (seed, (count, chunk, length)) in (9..).zip(shapes) {
        let mut scattered = Scattered::new(&bench, count, seed, length);
        let bytes = scattered.joined();
        let slots = bench.region(MemoryKind::Pinned, &vec![1; bytes.len() + 20]);
        let slot = slots.slice(11..11 + bytes.len()).unwrap();
        let before = launches(&slots);

        // Chunks are parts of one lease, as those of one transfer.
        let lease = scattered
            .region(Access::Read)
            .lease(.., Access::Read)
            .unwrap();
        let works = chunks(&lease.all(), &slot, chunk);
        let most = 2 * works.len();
        run_all(&bench, works);
        drop(lease);
        let packed = content(&slots);
        assert!(packed[11..11 + bytes.len()] == bytes, "{count} packed");
        assert_eq!(
            (&packed[..11], &packed[11 + bytes.len()..]),
            (&[1; 11][..], &[1; 9][..])
        );
        assert!(scattered.is_as_expected(), "sources are only read");
        let packs = launches(&slots) - before;
        assert!((1..=most).contains(&packs), "{packs} launches");

        let new = noise(bytes.len(), 77 + count as u32);
        slot.write_from(&new).unwrap();
        let lease = scattered
            .region(Access::Write)
            .lease(.., Access::Write)
            .unwrap();
        run_all(&bench, chunks(&slot, &lease.all(), chunk));
        drop(lease);
        scattered.expect(&new);
        assert!(scattered.is_as_expected(), "{count} scattered");
        let scatters = launches(&slots) - before - packs;
        assert!((1..=most).contains(&scatters), "{scatters} launches");
    }
}

#[test]
fn neighbouring_chunks_share_launches() {
    const CHUNKS: usize = 32;
    let bench = Bench::new();
    let scattered = Scattered::new(&bench, CHUNKS * 16, 5, |_| 512);
    let bytes = scattered.joined();
    let slots = bench.region(MemoryKind::Pinned, &vec![1; bytes.len()]);
    let before = launches(&slots);
    let region = scattered.region(Access::Read);
    let works = chunks(&region.all(), &slots.all(), bytes.len() / CHUNKS);
    run_all(&bench, works);
    assert!(content(&slots) == bytes);
    let launches = launches(&slots) - before;
    assert!((1..=CHUNKS / 2).contains(&launches), "{launches} launches");
}

#[test]
fn long_pieces_are_copied_without_a_launch() {
    let bench = Bench::new();
    let mut scattered = Scattered::new(&bench, 5, 3, |dice| 800 * KIB + dice.below(99));
    let bytes = scattered.joined();
    let slots = bench.region(MemoryKind::Pinned, &vec![1; bytes.len()]);
    let before = launches(&slots);
    let region = scattered.region(Access::Write);
    run_all(&bench, chunks(&region.all(), &slots.all(), 1 << 20));
    assert!(content(&slots) == bytes);
    let new = noise(bytes.len(), 31);
    slots.write_from(0, &new).unwrap();
    run_all(&bench, chunks(&slots.all(), &region.all(), 1 << 20));
    drop(region);
    scattered.expect(&new);
    assert!(scattered.is_as_expected());
    assert_eq!(launches(&slots), before);
}

#[test]
fn pieces_reach_every_kind_of_memory_and_other_pieces() {
    let bench = Bench::new();
    let mut scattered = Scattered::new(&bench, 400, 21, |dice| 1 + dice.below(9000));
    for kind in bench.kinds() {
        let bytes = scattered.joined();
        let flat = bench.region(kind, &vec![1; bytes.len()]);
        let copy = |from: &Region, to: &Region| {
            let moved = bench.run(Work::Copy {
                from: from.all(),
                to: to.all(),
            });
            assert_eq!(moved, Ok(bytes.len() as u64), "{kind}");
        };
        copy(&scattered.region(Access::Read), &flat);
        assert!(content(&flat) == bytes, "{kind}");
        let new = noise(bytes.len(), 8);
        flat.write_from(0, &new).unwrap();
        copy(&flat, &scattered.region(Access::Write));
        scattered.expect(&new);
        assert!(scattered.is_as_expected(), "{kind}");
    }
    let bytes = scattered.joined();
    let mut other = Scattered::new(&bench, 1, 22, |_| bytes.len());
    let (from, to) = (scattered.region(Access::Read), other.region(Access::Write));
    run_all(&bench, chunks(&from.all(), &to.all(), 100_000));
    drop(to);
    other.expect(&bytes);
    assert!(other.is_as_expected());

    let expected = u64::from(crc_fast::crc32_iscsi(&bytes));
    assert_eq!(bench.run(Work::checksum(from.all())), Ok(expected));
    assert_eq!(from.checksum(..).map(u64::from), Ok(expected));
    assert!(content(&from) == bytes);
    drop(from);
    let region = scattered.region(Access::Write);
    region.write_from(3, &bytes[..77_777]).unwrap();
    drop(region);
    let mut new = bytes.clone();
    new[3..77_780].copy_from_slice(&bytes[..77_777]);
    scattered.expect(&new);
    assert!(scattered.is_as_expected());
}

#[test]
fn pieces_go_to_other_pieces_by_few_launches() {
    const PIECES: usize = 640;
    let bench = Bench::new();
    let from = Scattered::new(&bench, PIECES, 41, |_| 2048);
    let mut to = Scattered::new(&bench, 2 * PIECES, 42, |_| 1024);
    let bytes = from.joined();
    let (source, destination) = (from.region(Access::Read), to.region(Access::Write));
    let works = chunks(&source.all(), &destination.all(), 64 * KIB);
    let before = fake::all_launches();
    run_all(&bench, works);
    let launches = fake::all_launches() - before;
    drop(destination);
    to.expect(&bytes);
    assert!(to.is_as_expected());
    assert!(launches >= 1, "the kernel moves them");
}

#[test]
fn a_refused_launch_fails_the_chunk_at_fault_alone() {
    const CHUNKS: usize = 12;
    let bench = Bench::new();
    let mut scattered = Scattered::new(&bench, CHUNKS * 8, 6, |_| 600);
    let bytes = noise(CHUNKS * 8 * 600, 4);
    let slots = bench.region(MemoryKind::Pinned, &bytes);
    // The first piece of a chunk.
    let (of, range) = scattered.pieces[5 * 8].clone();
    let bad = scattered.regions[of].slice(range).unwrap();
    fake::refuse_launches_to(bad.device_address().unwrap());
    let region = scattered.region(Access::Write);
    let works = chunks(&slots.all(), &region.all(), 8 * 600);
    for (token, result) in together::run_together(&bench, works) {
        // They were turned.
        let at_fault = token as usize == CHUNKS - 1 - 5;
        let refused = matches!(result, Err(MemoryError::Cuda(CudaError::Call { .. })));
        assert_eq!(refused, at_fault, "{token}: {result:?}");
    }
    drop(region);
    let mut expected = bytes;
    let old = scattered.joined();
    expected[5 * 4800..6 * 4800].copy_from_slice(&old[5 * 4800..6 * 4800]);
    scattered.expect(&expected);
    assert!(scattered.is_as_expected());
}

#[test]
fn a_refused_copy_of_a_long_piece_fails_its_job() {
    const LONG: usize = 400 * KIB;
    let bench = Bench::new();
    let good = bench.region(bench.gpu.kind(), &vec![3; LONG]);
    // SAFETY: the fake driver refuses this address, so nothing is touched.
    let bad = unsafe { Region::from_cuda_raw(&bench.gpu, fake::BAD_ADDRESS, LONG, Arc::new(())) };
    for flat in [MemoryKind::Pinned, MemoryKind::Host] {
        let slots = bench.region(flat, &vec![1; 2 * LONG]);
        let parents = [good.all(), bad.all()];
        let pieces = [(0, 0..LONG), (1, 0..LONG)].into_iter();
        let gather = Gather::new(&parents, pieces, Access::Read).unwrap();
        let ended = bench.run(Work::Copy {
            from: gather.region("a test").unwrap().all(),
            to: slots.all(),
        });
        assert!(
            matches!(ended, Err(MemoryError::Cuda(CudaError::Call { .. }))),
            "{ended:?}"
        );
        assert!(slots.lease(.., Access::Write).is_ok(), "nothing is held");
        assert!(good.lease(.., Access::Write).is_ok(), "nothing is held");
    }
}

#[test]
fn memory_of_a_launch_that_cannot_be_followed_is_kept() {
    let bench = Bench::new();
    let scattered = Scattered::new(&bench, 20, 13, |_| 100);
    let (of, range) = scattered.pieces[3].clone();
    let lost = scattered.regions[of].slice(range).unwrap();
    fake::lose_streams_of(lost.device_address().unwrap());
    let slots = bench.region(MemoryKind::Pinned, &[1; 2000]);
    let ended = bench.run(Work::Copy {
        from: scattered.region(Access::Read).all(),
        to: slots.all(),
    });
    assert!(
        matches!(ended, Err(MemoryError::EndUnknown { .. })),
        "{ended:?}"
    );
    assert!(slots.lease(.., Access::Write).is_err());
    for region in &scattered.regions {
        assert!(region.lease(.., Access::Write).is_err());
    }
}

#[test]
fn what_needs_one_address_refuses_pieces() {
    let bench = Bench::new();
    let scattered = Scattered::new(&bench, 3, 8, |_| 50);
    let region = scattered.region(Access::Read);
    let host = bench.region(MemoryKind::Host, &[0; 8]);
    let parents = [scattered.regions[0].all(), host.all()];
    let pieces = [(0, 0..1), (1, 0..1)].into_iter();
    let refused = Gather::new(&parents, pieces, Access::Read);
    assert!(matches!(refused, Err(MemoryError::Unlike { .. })));
    let refused = Gather::new(&[region.all()], std::iter::once((0, 0..1)), Access::Read);
    assert!(matches!(refused, Err(MemoryError::InPieces { .. })));
}
