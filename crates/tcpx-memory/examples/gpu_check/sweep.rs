//! Every length at every alignment, and a million random lists: named checks, because they take a
//! while.

#[path = "../../src/cpu/tests/random_lists.rs"]
mod random_lists;

use tcpx_memory::{MemoryKind, Region, UnpackMethod};
use tcpx_wire::Fragment;

use crate::support::{Bench, Outcome, Random};

const POOL: usize = 32 << 20;
/// Lengths in one list; each at 256 pairs of alignments.
const LENGTHS: usize = 64;
/// Random lists, fragments of as many of them as share a launch, and which of them have a launch of
/// their own.
const LISTS: usize = 1_000_000;
const TOGETHER: usize = 16_384;
const ALONE: usize = 64;
/// Room of one random list, as in the test on the CPU.
const ROOM: usize = 96 << 10;

/// Lengths 1 to 8,192 at all alignments of both ends, with guard bytes between all fragments.
pub(crate) fn lengths(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    let bytes = random.bytes(POOL);
    let pool = bench.region_of(bench.gpu.kind(), &bytes)?;
    let mut target = Target::default();
    let mut fragments = 0;
    for first in (1..=8192).step_by(LENGTHS) {
        let mut list = Vec::with_capacity(LENGTHS * 256);
        let mut end = 16;
        for length in first..first + LENGTHS {
            for pair in 0..256 {
                let at = end + pair / 16;
                let source = random.below(POOL - length - 16) / 16 * 16 + pair % 16;
                list.push(fragment(source, length, at));
                end = (at + length + 16).next_multiple_of(16);
            }
        }
        random.shuffle(&mut list);
        fragments += list.len();
        let to = target.of(bench, end + 64)?;
        let places = (&pool, &bytes[..]);
        bench
            .unpack(places, (to, 0), UnpackMethod::Kernel, &list)
            .map_err(|error| format!("lengths from {first}: {error}"))?;
    }
    Ok(format!("{fragments} alignments and lengths"))
}

/// Pages and packets, shuffled and in order, 1 to 16,384 of them, with either end misaligned.
pub(crate) fn counts(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    let bytes = random.bytes(2 * POOL + POOL / 8);
    let pools = [
        bench.region_of(bench.gpu.kind(), &bytes)?,
        bench.region_of(MemoryKind::Pinned, &bytes)?,
    ];
    let mut target = Target::default();
    let mut lists = 0;
    for count in [
        1, 2, 3, 127, 128, 129, 240, 241, 255, 257, 1023, 1024, 1025, 2047, 2048, 2049, 8192,
        16_384,
    ] {
        for length in [1448, 4096] {
            for shuffled in [false, true] {
                let mut places: Vec<usize> = (0..count).collect();
                if shuffled {
                    random.shuffle(&mut places);
                }
                let (from, start) = (random.below(16), random.below(16));
                let list: Vec<_> = places
                    .iter()
                    .enumerate()
                    .map(|(index, place)| fragment(place * length + from, length, index * length))
                    .collect();
                for pool in &pools {
                    let to = target.of(bench, start + count * length + 64)?;
                    bench
                        .unpack((pool, &bytes), (to, start), UnpackMethod::Kernel, &list)
                        .map_err(|error| {
                            format!("{count} of {length} from {}: {error}", pool.kind())
                        })?;
                    lists += 1;
                }
            }
        }
    }
    Ok(format!("{lists} lists"))
}

/// The random lists of the test on the CPU, with guard bytes between them: most many to a launch,
/// some alone.
pub(crate) fn random_lists(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    let bytes = random.bytes(ROOM);
    let pool = bench.region_of(bench.gpu.kind(), &bytes)?;
    let mut lists = random_lists::Random::new(random.next());
    let (mut target, mut single) = (Target::default(), Target::default());
    let (mut together, mut end) = (Vec::with_capacity(TOGETHER), 0);
    let unpack = |target: &mut Target, list: &[Fragment], end: usize| {
        let to = target.of(bench, end + 64)?;
        bench.unpack((&pool, &bytes), (to, 0), UnpackMethod::Kernel, list)
    };
    for number in 0..LISTS {
        let list = lists.list(ROOM, ROOM).into_iter().map(|one| Fragment {
            source_offset: one.source_offset.into(),
            length: one.length,
            destination_offset: one.destination_offset,
        });
        let list: Vec<_> = list.collect();
        let ends = list
            .iter()
            .map(|one| one.destination_offset + u64::from(one.length));
        let len = ends.max().unwrap_or(0) as usize;
        let failed = |error| format!("list {number}: {error}");
        if number % ALONE == 0 {
            unpack(&mut single, &list, len).map_err(failed)?;
            continue;
        }
        together.extend(list.into_iter().map(|one| Fragment {
            destination_offset: one.destination_offset + end as u64,
            ..one
        }));
        end += len + 64;
        if together.len() + 24 > TOGETHER || number + 1 == LISTS {
            unpack(&mut target, &together, end).map_err(failed)?;
            (end, together) = (0, Vec::with_capacity(TOGETHER));
        }
    }
    Ok(format!("{LISTS} lists"))
}

/// A destination that is made anew only to grow or where it would be much too large.
#[derive(Default)]
struct Target(Option<Region>);

impl Target {
    fn of(&mut self, bench: &Bench, len: usize) -> Result<&Region, String> {
        let fits = |region: &Region| (len..=len + len / 4 + 4096).contains(&region.len());
        let region = match self.0.take().filter(fits) {
            Some(region) => region,
            None => bench.region(bench.gpu.kind(), len + len / 8)?,
        };
        Ok(self.0.insert(region))
    }
}

fn fragment(source: usize, length: usize, destination: usize) -> Fragment {
    Fragment {
        source_offset: source as u64,
        length: length as u32,
        destination_offset: destination as u64,
    }
}
