//! How long jobs take from submission to completion. GB/s are 10^9 bytes a second, bytes counted once.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tcpx_memory::{BouncePool, MemoryKind, Region, UnpackMethod, Work};
use tcpx_wire::Fragment;

use crate::support::{Bench, Outcome, Random, unpack_work};

const SIZES: [(&str, usize); 3] = [
    ("512 KiB", 512 << 10),
    ("4 MiB", 4 << 20),
    ("64 MiB", 64 << 20),
];
/// Time for one cell of the table, and the runs it may take.
const BUDGET: Duration = Duration::from_millis(250);
const RUNS: usize = 50;

pub(crate) fn table(bench: &Bench, timings: &mut Value) -> Outcome {
    let mut rows = Vec::new();
    let gpu = bench.gpu.kind();
    for (name, size) in SIZES {
        for (from, to) in [
            (MemoryKind::Pinned, gpu),
            (gpu, MemoryKind::Pinned),
            (gpu, gpu),
            (MemoryKind::Host, gpu),
        ] {
            let (from, to) = (filled(bench, from, size)?, filled(bench, to, size)?);
            let work = Work::Copy {
                from: from.all(),
                to: to.all(),
            };
            let label = format!("copy {name} {} to {}", from.kind(), to.kind());
            rows.push(row(bench, label, size, &work)?);
        }
        let of = bench.region(gpu, size)?;
        rows.push(row(
            bench,
            format!("checksum {name} {gpu}"),
            size,
            &Work::Checksum { of: of.all() },
        )?);
    }
    for (name, size) in SIZES {
        for (shape, length, skew) in [("4096 aligned", 4096, 0), ("1448 misaligned", 1448, 3)] {
            let list = shuffled(size, length, skew);
            for kind in [MemoryKind::Pinned, gpu] {
                let pool = BouncePool::from(filled(bench, kind, size + 4096)?);
                let to = bench.region(gpu, size)?;
                for with in UnpackMethod::ALL {
                    let work = unpack_work(&pool, to.all(), with, &list)?;
                    let label = format!("unpack {name} {shape} {kind} {with}");
                    rows.push(row(bench, label, size, &work)?);
                }
            }
        }
    }
    let count = rows.len();
    *timings = Value::Array(rows);
    Ok(format!("{count} rows"))
}

/// Memory whose pages are all there.
fn filled(bench: &Bench, kind: MemoryKind, size: usize) -> Result<Region, String> {
    bench.region_of(kind, &vec![1; size])
}

/// The destination in order, its sources shuffled.
fn shuffled(size: usize, length: usize, skew: usize) -> Vec<Fragment> {
    let mut sources: Vec<usize> = (0..size / length).collect();
    Random::new().shuffle(&mut sources);
    let fragment = |(index, source): (usize, usize)| Fragment {
        source_offset: (source * length + skew) as u64,
        length: length as u32,
        destination_offset: (index * length) as u64,
    };
    sources.into_iter().enumerate().map(fragment).collect()
}

fn row(bench: &Bench, label: String, bytes: usize, work: &Work) -> Result<Value, String> {
    let mut times = Vec::with_capacity(RUNS);
    let start = Instant::now();
    // The first run is not counted.
    while times.len() < 2 || (times.len() <= RUNS && start.elapsed() < BUDGET) {
        let work = work.clone();
        let submitted = Instant::now();
        bench
            .run(work, None)
            .map_err(|error| format!("{label}: {error}"))?;
        times.push(submitted.elapsed());
    }
    times.remove(0);
    times.sort_unstable();
    let median = times[times.len() / 2].as_secs_f64();
    let (best, rate) = (times[0].as_secs_f64() * 1e6, bytes as f64 / median / 1e9);
    println!(
        "{label:<60} {:>10.1} us  {rate:>8.2} GB/s  best {best:>10.1} us  {} runs",
        median * 1e6,
        times.len()
    );
    Ok(
        json!({ "what": label, "bytes": bytes, "median_us": median * 1e6, "best_us": best, "gb_per_s": rate }),
    )
}
