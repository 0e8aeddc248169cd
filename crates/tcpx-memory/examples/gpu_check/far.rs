//! Destinations and sources around and beyond 4 GiB.

use tcpx_memory::{BouncePool, UnpackMethod};
use tcpx_wire::Fragment;

use crate::support::{Bench, Outcome, POISON, Random, same_bytes, text, unpack_work};

const LEN: usize = 5 << 30;
const BORDER: usize = 4 << 30;
/// Bytes looked at around each place.
const WINDOW: usize = 1 << 20;

pub(crate) fn destinations_and_sources(bench: &Bench) -> Outcome {
    let kind = bench.gpu.kind();
    let (pool, to) = (bench.region(kind, LEN)?, bench.region(kind, LEN)?);
    let mut random = Random::new();
    let windows = [0, BORDER - WINDOW / 2, LEN - WINDOW];
    let contents = windows.map(|_| random.bytes(WINDOW));
    for (start, content) in windows.into_iter().zip(&contents) {
        pool.write_from(start, content).map_err(text)?;
    }
    // Sources must start below 4 GiB; the second one passes it.
    let fragments = [
        (5, 1448, BORDER - 700),
        (BORDER - 3000, 6000, LEN - 6001),
        (3000, 70_000, BORDER + 3001),
        (BORDER - 1, 9, 17),
        (WINDOW / 2, 100_000, LEN - WINDOW + 1),
    ];
    let list = fragments.map(|(source, length, destination)| Fragment {
        source_offset: source as u64,
        length,
        destination_offset: destination as u64,
    });
    for with in UnpackMethod::ALL {
        let mut expected = windows.map(|_| vec![POISON; WINDOW]);
        for (start, poison) in windows.into_iter().zip(&expected) {
            to.write_from(start, poison).map_err(text)?;
        }
        for (source, length, destination) in fragments {
            let (from, at) = (
                window_of(&windows, source),
                window_of(&windows, destination),
            );
            let (source, destination) = (source - windows[from], destination - windows[at]);
            let length = length as usize;
            expected[at][destination..destination + length]
                .copy_from_slice(&contents[from][source..source + length]);
        }
        let work = unpack_work(&BouncePool::from(pool.clone()), to.all(), with, &list)?;
        bench
            .run(work, None)
            .map_err(|error| format!("{with}: {error}"))?;
        for (start, expected) in windows.into_iter().zip(&expected) {
            let mut content = vec![0; WINDOW];
            to.read_to(start, &mut content).map_err(text)?;
            same_bytes(&content, expected)
                .map_err(|error| format!("{with}, from {start}: {error}"))?;
        }
    }
    Ok(format!("{} fragments by 3 methods in 5 GiB", list.len()))
}

fn window_of(windows: &[usize], at: usize) -> usize {
    windows.iter().rposition(|&start| start <= at).unwrap_or(0)
}
