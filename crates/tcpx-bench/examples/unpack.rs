//! Measures the unpackers on one GPU, after every byte of every list was compared:
//!
//!     cargo run --release -p tcpx-bench --example unpack [GPU [ROUNDS]] >benchmarks/unpack.json
#![expect(
    clippy::cast_possible_truncation,
    reason = "sizes that fit in this host's addresses"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_bench::pattern::Pattern;
use tcpx_bench::report::{Row, Subject, machine};
use tcpx_bench::statistics::median;
use tcpx_memory::{BouncePool, CopyWorker, Descriptors, Gpu, Region, UnpackMethod, Work};
use tcpx_wire::{Fragment, Limits, ScatterList};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Sets of a case that take turns, so that neither end is in the GPU's cache.
const SETS: usize = 4;
const ROOM: usize = 64 << 20;
/// Bytes before each fragment of a misaligned list.
const SKEW: usize = 3;
/// Longest wait for one call.
const LIMIT: Duration = Duration::from_secs(20);
/// Time for one way in a round, and the most calls in it.
const BUDGET: Duration = Duration::from_millis(60);
const CALLS: usize = 200;

/// Name, bytes, bytes of a fragment, whether the pool is pinned host memory. One fragment is one
/// copy.
const CASES: [(&str, usize, usize, bool); 10] = [
    ("1 B, GPU", 1, 1, false),
    ("4 MiB in 4 KiB, GPU", 4 << 20, 4 << 10, false),
    ("64 MiB in 4 KiB, GPU", 64 << 20, 4 << 10, false),
    ("4 MiB in 1,448 B, GPU", 4 << 20, 1448, false),
    ("64 MiB in 4 MiB, GPU", 64 << 20, 4 << 20, false),
    ("4 MiB in one, GPU", 4 << 20, 4 << 20, false),
    ("64 MiB in one, GPU", 64 << 20, 64 << 20, false),
    ("4 MiB in 4 KiB, pinned", 4 << 20, 4 << 10, true),
    ("64 MiB in 4 KiB, pinned", 64 << 20, 4 << 10, true),
    ("64 MiB in one, pinned", 64 << 20, 64 << 20, true),
];

const WAYS: [(UnpackMethod, &str); 3] = [
    (UnpackMethod::Kernel, "kernel"),
    (UnpackMethod::D2d, "d2d"),
    (UnpackMethod::Host, "host"),
];

const NOTES: [&str; 3] = [
    "From the call until the bytes are visible, each byte counted once; a run is the median of up to 200 calls, and the ways of a case take turns within a round. Every way was compared before, on fresh contents and a poisoned destination.",
    "Four sets take turns, so that neither end is in the GPU's cache. Lists are shuffled; 1,448-byte fragments begin 3 bytes behind an aligned address. `d2d` of one fragment is one copy.",
    "The time of 1 byte is what the launch and the way back cost: no unpack can take less.",
];

/// Fragments in a pool and where they belong.
struct Set {
    pool: BouncePool,
    list: Arc<Descriptors>,
    to: Region,
    from: usize,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let gpu = Gpu::open(arguments.next().map_or(Ok(0), |text| text.parse())?)?;
    let rounds = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let worker = CopyWorker::for_gpu(&gpu)?;
    let mut rows = Vec::new();
    for (name, bytes, fragment, pinned) in CASES {
        let sets: Vec<Set> = (0..SETS)
            .map(|set| make(&gpu, set, bytes, fragment, pinned))
            .collect::<Result<_>>()?;
        // A copy for each of thousands of fragments takes milliseconds, and only shows that it
        // does.
        let ways = WAYS
            .iter()
            .filter(|(way, _)| *way != UnpackMethod::Host || bytes < ROOM);
        let mut ways: Vec<_> = ways.map(|way| (way, Vec::new())).collect();
        for ((way, _), _) in &ways {
            sets.iter().try_for_each(|set| verify(&worker, set, *way))?;
        }
        for _ in 0..rounds {
            for ((way, _), micros) in &mut ways {
                micros.push(time(&worker, &sets, *way)?);
            }
        }
        for ((_, way), micros) in &ways {
            let rates: Vec<f64> = micros.iter().map(|us| bytes as f64 / us / 1e3).collect();
            rows.push(Row::of(format!("{name}: {way}"), "us", micros));
            rows.push(Row::of(format!("{name}: {way}"), "GB/s", &rates));
        }
    }
    let notes = NOTES.map(str::to_owned).to_vec();
    let subject = Subject::new("Unpack", machine(&gpu.info().name), rows, notes);
    subject.check()?;
    eprintln!("{}", subject.table());
    print!("{}", subject.json());
    Ok(())
}

fn make(gpu: &Gpu, set: usize, bytes: usize, fragment: usize, pinned: bool) -> Result<Set> {
    let skew = if fragment.is_multiple_of(16) { 0 } else { SKEW };
    let region = match pinned {
        true => Region::pinned(gpu, bytes + skew)?,
        false => Region::cuda(gpu, bytes + skew)?,
    };
    tcpx_bench::fill(&region, region.len() as u64, Pattern::new(set as u64))?;
    let pool = BouncePool::new(region.all());
    let list = Arc::new(shuffled(bytes, fragment, skew)?);
    let to = Region::cuda(gpu, bytes)?;
    Ok(Set {
        pool,
        list,
        to,
        from: set,
    })
}

fn go(worker: &CopyWorker, set: &Set, with: UnpackMethod) -> Result<()> {
    let work = Work::Unpack {
        pool: set.pool.clone(),
        descriptors: Arc::clone(&set.list),
        to: set.to.all(),
        with,
    };
    worker.run(work, LIMIT)?;
    Ok(())
}

/// Unpacks into a poisoned destination and compares every byte.
fn verify(worker: &CopyWorker, set: &Set, way: UnpackMethod) -> Result<()> {
    tcpx_bench::poison(&set.to)?;
    go(worker, set, way)?;
    let mut arrived = vec![0; set.to.len()];
    set.to.read_to(0, &mut arrived)?;
    for one in set.list.as_slice() {
        let to = one.destination_offset as usize;
        let piece = &arrived[to..to + one.length as usize];
        Pattern::new(set.from as u64).compare(u64::from(one.source_offset), piece)?;
    }
    Ok(())
}

/// The median of many calls in microseconds.
fn time(worker: &CopyWorker, sets: &[Set], way: UnpackMethod) -> Result<f64> {
    let (mut micros, began) = (Vec::new(), Instant::now());
    for set in sets.iter().cycle() {
        let call = Instant::now();
        go(worker, set, way)?;
        micros.push(call.elapsed().as_secs_f64() * 1e6);
        if micros.len() > CALLS || (micros.len() > SETS && began.elapsed() > BUDGET) {
            break;
        }
    }
    // The first call of each set has to find its memory.
    Ok(median(&micros[SETS.min(micros.len() - 1)..]))
}

/// The destination in order, the sources shuffled.
fn shuffled(bytes: usize, fragment: usize, skew: usize) -> Result<Descriptors> {
    let count = bytes / fragment;
    let mut sources: Vec<u64> = (0..count as u64).collect();
    sources.sort_by_key(|at| (at ^ (at >> 7)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut scatter = ScatterList::with_capacity(count);
    for (index, source) in (0u64..).zip(sources) {
        scatter.push(Fragment {
            source_offset: source * fragment as u64 + skew as u64,
            length: fragment as u32,
            destination_offset: index * fragment as u64,
        });
    }
    let moved = (count * fragment) as u64;
    let limits = Limits {
        pool_bytes: moved + skew as u64,
        destination_bytes: bytes as u64,
        received_bytes: moved,
    };
    let mut list = Descriptors::with_capacity(count);
    list.build(&scatter, limits)?;
    Ok(list)
}
