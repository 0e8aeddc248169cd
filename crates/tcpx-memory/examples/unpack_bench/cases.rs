//! What is measured: lists of fragments, verified and then timed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_memory::{BouncePool, Descriptors, Gpu, Region};
use tcpx_wire::{Fragment, Limits, ScatterList};

use super::ways::{Movers, Set, Way};
use super::{Result, spread};

/// Room of one set, and sets that take turns, so that neither end is in the GPU's cache.
const ROOM: usize = 64 << 20;
const SETS: usize = 4;
/// Beyond the room, for a misaligned pool.
const SLACK: usize = 4096;
const POISON: u8 = 0xA5;
/// Turns that the ways of a case take in a round, so that a slow moment of the machine is shared by them.
const TURNS: usize = 4;
/// Time for one way in a turn, and the most calls in it.
const BUDGET: Duration = Duration::from_millis(15);
const CALLS: usize = 50;

/// A list and the ways to be measured with it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    fragment: usize,
    skew: usize,
    pinned: bool,
    /// Over one set, which stays in the cache where it fits.
    cached: bool,
    ways: &'static [Way],
}

const GPU: &[Way] = &[
    Way::Kernel,
    Way::WorkerKernel,
    Way::Plain,
    Way::Copy,
    Way::Each,
    Way::Batch,
];
const MERGED: &[Way] = &[Way::D2d, Way::WorkerD2d, Way::Kernel, Way::Each, Way::Copy];
const FLOOR: &[Way] = &[Way::Kernel, Way::WorkerKernel, Way::Plain, Way::Copy];
const CROSSING: &[Way] = &[Way::Kernel, Way::D2d];

const fn case(
    name: &'static str,
    bytes: usize,
    fragment: usize,
    skew: usize,
    ways: &'static [Way],
) -> Case {
    Case {
        name,
        bytes,
        fragment,
        skew,
        pinned: false,
        cached: false,
        ways,
    }
}

const fn pinned(case: Case) -> Case {
    Case {
        pinned: true,
        ..case
    }
}

const fn cached(case: Case) -> Case {
    Case {
        cached: true,
        ..case
    }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

const CASES: [Case; 23] = [
    case("1 B, GPU", 1, 1, 0, FLOOR),
    case("512 KiB in 4 KiB, GPU", 512 * KIB, 4 * KIB, 0, GPU),
    cached(case(
        "512 KiB in 4 KiB, GPU, cached",
        512 * KIB,
        4 * KIB,
        0,
        GPU,
    )),
    case("4 MiB in 4 KiB, GPU", 4 * MIB, 4 * KIB, 0, GPU),
    cached(case(
        "4 MiB in 4 KiB, GPU, cached",
        4 * MIB,
        4 * KIB,
        0,
        GPU,
    )),
    case("64 MiB in 4 KiB, GPU", 64 * MIB, 4 * KIB, 0, GPU),
    case("4 MiB in 1,448 B, GPU", 4 * MIB, 1448, 3, GPU),
    case("64 MiB in 1,448 B, GPU", 64 * MIB, 1448, 3, GPU),
    pinned(case("4 MiB in 4 KiB, pinned", 4 * MIB, 4 * KIB, 0, GPU)),
    pinned(case("64 MiB in 4 KiB, pinned", 64 * MIB, 4 * KIB, 0, GPU)),
    pinned(case("64 MiB in 1,448 B, pinned", 64 * MIB, 1448, 3, GPU)),
    case("4 MiB in one, GPU", 4 * MIB, 4 * MIB, 0, MERGED),
    case("64 MiB in one, GPU", 64 * MIB, 64 * MIB, 0, MERGED),
    pinned(case("64 MiB in one, pinned", 64 * MIB, 64 * MIB, 0, MERGED)),
    case(
        "checksum of 64 MiB, GPU",
        64 * MIB,
        64 * MIB,
        0,
        &[Way::Checksum, Way::WorkerChecksum, Way::Copy],
    ),
    case("64 KiB in one, GPU", 64 * KIB, 64 * KIB, 0, CROSSING),
    case("1 MiB in one, GPU", MIB, MIB, 0, CROSSING),
    case("16 MiB in one, GPU", 16 * MIB, 16 * MIB, 0, CROSSING),
    case("64 MiB in 16 MiB, GPU", 64 * MIB, 16 * MIB, 0, CROSSING),
    case("64 MiB in 4 MiB, GPU", 64 * MIB, 4 * MIB, 0, CROSSING),
    pinned(case(
        "1 MiB in 256 KiB, pinned",
        MIB,
        256 * KIB,
        0,
        CROSSING,
    )),
    pinned(case(
        "8 MiB in 512 KiB, pinned",
        8 * MIB,
        512 * KIB,
        0,
        CROSSING,
    )),
    pinned(case("64 MiB in 1 MiB, pinned", 64 * MIB, MIB, 0, CROSSING)),
];

/// One way's medians over the rounds, in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) case: &'static str,
    pub(crate) way: &'static str,
    pub(crate) bytes: u64,
    pub(crate) micros: Vec<f64>,
}

pub(crate) struct Bench {
    gpu: Gpu,
    movers: Movers,
    pools: [Region; 2],
    to: Region,
    content: Vec<u8>,
    random: Random,
}

impl Bench {
    pub(crate) fn open(ordinal: u32) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        let size = SETS * ROOM + SLACK;
        let mut content = vec![0; size];
        let mut random = Random::new();
        for word in content.chunks_mut(8) {
            word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]);
        }
        let pools = [Region::cuda(&gpu, size)?, Region::pinned(&gpu, size)?];
        for pool in &pools {
            pool.write_from(0, &content)?;
        }
        Ok(Self {
            movers: Movers::new(&gpu)?,
            pools,
            to: Region::cuda(&gpu, SETS * ROOM)?,
            content,
            random,
            gpu,
        })
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Verifies every way of every case, then times them round by round; in a round, a case's ways in turn.
    pub(crate) fn run(&mut self, rounds: u32) -> Result<Vec<Outcome>> {
        // As in a program that keeps the context current on the threads that poll.
        let gpu = self.gpu.clone();
        let _current = gpu.enter()?;
        let mut outcomes = Vec::new();
        let mut prepared = Vec::new();
        for case in &CASES {
            let sets = self.sets(case)?;
            let first = outcomes.len();
            for way in case.ways.iter().copied() {
                if self.movers.has(way) {
                    self.verify(case, way, &sets)?;
                    outcomes.push(Outcome {
                        case: case.name,
                        way: way.name(),
                        bytes: sets.first().map_or(0, |set| set.list.bytes()),
                        micros: Vec::new(),
                    });
                }
            }
            prepared.push((first, case, sets));
        }
        for _ in 0..rounds {
            for (first, case, sets) in &prepared {
                let medians = self.round(case, sets)?;
                for (outcome, median) in outcomes[*first..].iter_mut().zip(medians) {
                    outcome.micros.push(median);
                }
            }
        }
        Ok(outcomes)
    }

    fn sets(&mut self, case: &Case) -> Result<Vec<Set>> {
        let region = &self.pools[usize::from(case.pinned)];
        let count = if case.cached { 1 } else { SETS };
        (0..count)
            .map(|set| {
                let start = set * ROOM;
                let list = Arc::new(shuffled(case, &mut self.random)?);
                let bytes = list.bytes() as usize;
                let pool = region.slice(start..start + bytes + SLACK.min(case.skew))?;
                Ok(Set {
                    pool: BouncePool::new(pool),
                    list,
                    to: self.to.slice(start..start + bytes)?,
                })
            })
            .collect()
    }

    /// Unpacks into a poisoned destination and compares every byte.
    fn verify(&mut self, case: &Case, way: Way, sets: &[Set]) -> Result<()> {
        let wrong =
            |at: usize| format!("{}, {}: wrong contents at byte {at}", case.name, way.name());
        for (index, set) in sets.iter().enumerate() {
            let source = &self.content[index * ROOM..];
            let mut arrived = vec![POISON; set.to.len()];
            set.to.write_from(&arrived)?;
            let result = self.movers.go(way, set)?;
            if matches!(way, Way::Checksum | Way::WorkerChecksum) {
                let region = Region::host(set.pool.len())?;
                region.write_from(0, &source[..set.pool.len()])?;
                if result != u64::from(region.checksum(..)?) {
                    return Err(wrong(0).into());
                }
                continue;
            }
            set.to.read_to(&mut arrived)?;
            let straight = way == Way::Copy;
            for one in set.list.as_slice() {
                let to = one.destination_offset as usize;
                let from = if straight {
                    to
                } else {
                    one.source_offset as usize
                };
                let length = one.length as usize;
                if arrived[to..to + length] != source[from..from + length] {
                    return Err(wrong(to).into());
                }
            }
        }
        Ok(())
    }

    /// The median of many calls of each way, in microseconds.
    fn round(&mut self, case: &Case, sets: &[Set]) -> Result<Vec<f64>> {
        let ways = case.ways.iter().copied();
        let ways: Vec<_> = ways.filter(|way| self.movers.has(*way)).collect();
        let mut times = vec![Vec::new(); ways.len()];
        for turn in 0..TURNS {
            for (way, times) in ways.iter().zip(&mut times) {
                let is_slow = way.is_slow() && case.fragment < 64 * KIB;
                match is_slow {
                    false => self.time(*way, sets, (3, CALLS), times)?,
                    true if turn == 0 => self.time(*way, sets, (2, 4), times)?,
                    true => {}
                }
            }
        }
        Ok(times.iter().map(|times| spread(times).0).collect())
    }

    /// Adds the microseconds of some calls, as many as the budget has time for.
    fn time(
        &mut self,
        way: Way,
        sets: &[Set],
        (least, most): (usize, usize),
        times: &mut Vec<f64>,
    ) -> Result<()> {
        let start = Instant::now();
        for (index, set) in sets.iter().cycle().enumerate() {
            // A list that was built just now is in the CPU's cache.
            let touched: u64 = set
                .list
                .as_slice()
                .iter()
                .map(|one| u64::from(one.length))
                .sum();
            let listed = set.list.even_pieces();
            let named: u32 = listed.map_or(0, |even| even.sources.iter().fold(0, |a, b| a ^ b));
            std::hint::black_box((touched, named));
            let call = Instant::now();
            self.movers.go(way, set)?;
            // The first call of each set is not counted.
            let Some(counted) = (index + 1).checked_sub(sets.len()) else {
                continue;
            };
            if counted > 0 {
                times.push(call.elapsed().as_secs_f64() * 1e6);
            }
            if counted >= most || (counted >= least && start.elapsed() > BUDGET) {
                break;
            }
        }
        Ok(())
    }
}

/// Numbers that no unpacker can guess (SplitMix64).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self(now.map_or(1, |now| now.as_nanos() as u64))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }
}

/// The destination in order, the sources shuffled.
fn shuffled(case: &Case, random: &mut Random) -> Result<Descriptors> {
    let count = case.bytes / case.fragment;
    let mut sources: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        sources.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
    let mut scatter = ScatterList::with_capacity(count);
    for (index, source) in sources.into_iter().enumerate() {
        scatter.push(Fragment {
            source_offset: (source * case.fragment + case.skew) as u64,
            length: case.fragment as u32,
            destination_offset: (index * case.fragment) as u64,
        });
    }
    let bytes = (count * case.fragment) as u64;
    let limits = Limits {
        pool_bytes: bytes + case.skew as u64,
        destination_bytes: bytes,
        received_bytes: bytes,
    };
    let mut list = Descriptors::with_capacity(count);
    list.build(&scatter, limits)?;
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_fit_their_room_and_have_names_of_their_own() {
        let mut names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CASES.len());
        for case in &CASES {
            assert!(case.bytes <= ROOM && case.skew <= SLACK && case.fragment <= case.bytes);
            let list = shuffled(case, 1).unwrap();
            assert_eq!(
                list.bytes() as usize,
                case.bytes / case.fragment * case.fragment
            );
        }
    }
}
