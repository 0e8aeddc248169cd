//! Every unpacker against a plain copy.

use tcpx_memory::UnpackMethod;
use tcpx_wire::Fragment;

use crate::support::{Bench, Outcome, Random, number, text};

const POOL: usize = 32 << 20;

/// All alignments of both ends at many lengths, each fragment with guard bytes around it, in lists
/// that travel with the launch and in longer ones.
pub(crate) fn alignments(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    let bytes = random.bytes(POOL);
    let pool = bench.region_of(bench.gpu.kind(), &bytes)?;
    let pinned = bench.region_of(tcpx_memory::MemoryKind::Pinned, &bytes)?;
    let lengths = [
        1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 127, 255, 300, 511, 1448,
        4096,
    ];
    let mut list = Vec::new();
    let mut end = 16;
    for length in lengths {
        for from in 0..16 {
            for to in 0..16 {
                let at = end + to;
                let source = random.below(POOL - length - 32) / 16 * 16 + from;
                list.push(fragment(source, length, at));
                end = (at + length + 16).next_multiple_of(16);
            }
        }
    }
    random.shuffle(&mut list);
    let to = bench.region(bench.gpu.kind(), end + 64)?;
    let mut lists = 0;
    for batch in [240, 2032, list.len()] {
        for part in list.chunks(batch).take(12) {
            for start in [0, 7] {
                for source in [&pool, &pinned] {
                    let places = (source, &bytes[..]);
                    bench
                        .unpack(places, (&to, start), UnpackMethod::Kernel, part)
                        .map_err(|error| {
                            format!(
                                "{} to a GPU, {} fragments: {error}",
                                source.kind(),
                                part.len()
                            )
                        })?;
                    lists += 1;
                }
            }
        }
    }
    Ok(format!(
        "{} alignments and lengths in {lists} lists",
        list.len()
    ))
}

/// Random lists of many shapes between all pairs of memories by all methods.
pub(crate) fn random_lists(bench: &Bench) -> Outcome {
    let mut random = Random::new();
    let bytes = random.bytes(POOL);
    let mut lists = 0;
    let most_copies = number("GPU_CHECK_MOST_COPIES").unwrap_or(u64::MAX) as usize;
    let pools = bench.kinds().map(|kind| bench.region_of(kind, &bytes));
    for (name, list) in shapes(&mut random) {
        let end = list
            .iter()
            .map(|one| one.destination_offset + u64::from(one.length))
            .max();
        let len = end.unwrap_or(0) as usize;
        for pool in &pools {
            let pool = pool.as_ref().map_err(text)?;
            for kind in bench.kinds() {
                let start = random.below(16);
                let to = bench.region(kind, start + len + 64)?;
                for with in UnpackMethod::ALL {
                    if !with.is_possible(pool.kind(), kind)
                        || (with == UnpackMethod::D2d && list.len() > most_copies)
                    {
                        continue;
                    }
                    bench
                        .unpack((pool, &bytes), (&to, start), with, &list)
                        .map_err(|error| {
                            format!("{name}, method {with}, {} to {kind}: {error}", pool.kind())
                        })?;
                    lists += 1;
                }
            }
        }
    }
    Ok(format!("{lists} lists"))
}

fn shapes(random: &mut Random) -> Vec<(&'static str, Vec<Fragment>)> {
    let mut shape = |name, count: usize, low, high, gaps: usize, aligned| {
        let mut end = 0;
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            let length = random.between(low, high);
            end += random.below(gaps + 1);
            let mut source = random.below(POOL - length);
            if aligned {
                source = source / 4096 * 4096;
            }
            list.push(fragment(source, length, end));
            end += length;
        }
        random.shuffle(&mut list);
        (name, list)
    };
    vec![
        shape("one byte", 1, 1, 1, 0, false),
        shape("200 small", 200, 1, 300, 19, false),
        shape("1,500 of any size", 1500, 1, 3000, 19, false),
        shape("1,024 pages", 1024, 4096, 4096, 0, true),
        shape("3,000 of 1,448", 3000, 1448, 1448, 0, false),
        shape("40,000 tiny", 40_000, 1, 60, 3, false),
        shape("one of 8 MiB", 1, (8 << 20) + 13, (8 << 20) + 13, 3, false),
        shape("large and larger", 12, 200_000, 900_000, 5, false),
    ]
}

fn fragment(source: usize, length: usize, destination: usize) -> Fragment {
    Fragment {
        source_offset: source as u64,
        length: length as u32,
        destination_offset: destination as u64,
    }
}
