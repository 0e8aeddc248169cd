//! Windows of GPU and host memory at either end.

use std::time::Duration;

use tcpx::{Gpu, Level, Rights};

use crate::bench::{Bench, Outcome, POISON, close, compare, poisoned, random, region, text};

/// Regions that hold the pieces of a list, at either end.
const PARTS: usize = 3;

const LONG: Duration = Duration::from_secs(30);

/// Puts and gets of every interesting size at odd offsets; what lies around the pieces stays as it
/// was.
pub(crate) fn puts_and_gets(bench: &Bench) -> Outcome {
    let lens = [0, 1, 23, 4096, 65_536, 131_073, 600_001, 16 << 20];
    let kinds: [(Option<&Gpu>, Option<&Gpu>); 3] = [
        (Some(&bench.from), Some(&bench.to)),
        (None, Some(&bench.to)),
        (Some(&bench.from), None),
    ];
    let mut count = 0;
    for channels in [1, 4] {
        let (user, owner) = bench.pair(channels, None)?;
        for (near, far) in kinds {
            for (number, len) in lens.into_iter().enumerate() {
                let offset = 1000 * number + 3;
                let named = |error: String| {
                    format!("{len} bytes at {offset}, {channels} channels: {error}")
                };
                let level = [Level::Placed, Level::Verified][number % 2];
                let mut model = vec![POISON; offset + len + 77];
                let memory = region(far, &model)?;
                let window = owner.expose(memory.all(), Rights::GetAndPut);
                let window = window.map_err(text)?;
                let bytes = random(len);
                model[offset..offset + len].copy_from_slice(&bytes);
                let source = region(near, &bytes)?;
                let put = user.put(source.all(), &window.key(), offset as u64);
                let put = put.level(level).notify(b"there").start().map_err(text)?;
                let told = owner.notification(LONG).map_err(text)?;
                if told.as_deref() != Some(&b"there"[..]) {
                    return Err(named(format!("notified of {told:?}")));
                }
                // Whoever is notified may use the memory: before the transfer has ended here.
                let mut found = vec![0; model.len()];
                memory.read_to(0, &mut found).map_err(text)?;
                if found != model {
                    return Err(named("the window holds something else".to_owned()));
                }
                put.wait().map_err(text).map_err(named)?;
                let back = poisoned(near, len)?;
                let into = back.slice(..len).map_err(text)?;
                let get = user.get(into, &window.key(), offset as u64).level(level);
                let get = get.start().map_err(text)?.wait();
                get.map_err(text).map_err(named)?;
                compare(&back, &bytes).map_err(named)?;
                window.revoke(LONG).map_err(text)?;
                count += 2;
            }
        }
        close(user, owner)?;
    }
    Ok(format!("{count} puts and gets"))
}

/// Blocks of one cache go to other places of another one, as batches with one notification each.
pub(crate) fn batches(bench: &Bench) -> Outcome {
    const BLOCK: usize = 72 << 10;
    const BLOCKS: usize = 1500;
    let (user, owner) = bench.pair(4, None)?;
    let memory = region(Some(&bench.to), &vec![POISON; BLOCK * BLOCKS])?;
    let window = owner.expose(memory.all(), Rights::Put).map_err(text)?;
    let mut rate: f64 = 0.0;
    for round in 0..4 {
        let bytes = random(BLOCK * BLOCKS);
        let source = region(Some(&bench.from), &bytes)?;
        // Every block once, far from its neighbours.
        let place = |block: usize| block * 787 % BLOCKS;
        let mut batch = user.batch().notify(&[round; 8]);
        for block in 0..BLOCKS {
            let piece = source.slice(block * BLOCK..(block + 1) * BLOCK);
            let offset = (place(block) * BLOCK) as u64;
            batch = batch.put(piece.map_err(text)?, &window.key(), offset);
        }
        let batch = batch.start().map_err(text)?;
        let told = owner.notification(LONG).map_err(text)?;
        if told.as_deref() != Some(&[round; 8][..]) {
            return Err(format!("notified of {told:?}"));
        }
        let mut found = vec![0; bytes.len()];
        memory.read_to(0, &mut found).map_err(text)?;
        for block in 0..BLOCKS {
            let there = place(block) * BLOCK;
            if found[there..there + BLOCK] != bytes[block * BLOCK..(block + 1) * BLOCK] {
                return Err(format!("round {round}: block {block} differs"));
            }
        }
        let report = batch.wait().map_err(text)?;
        rate = rate.max(report.bytes as f64 / report.elapsed.as_secs_f64() / 1e9);
    }
    window.revoke(LONG).map_err(text)?;
    close(user, owner)?;
    Ok(format!(
        "4 batches of {BLOCKS} blocks of {BLOCK} bytes, {rate:.1} GB/s"
    ))
}

/// A piece of a list: the region, the offset in it, the bytes.
type Piece = (usize, usize, usize);

/// Pieces of these lengths in several regions, in turned order, with gaps that leave no two ends
/// aligned alike; and how long each region is.
fn scatter(lengths: &[usize], turn: usize) -> (Vec<Piece>, [usize; PARTS]) {
    let mut ends = [1; PARTS];
    let count = lengths.len();
    let mut pieces = vec![(0, 0, 0); count];
    for number in 0..count {
        let at = number * turn % count;
        let place = (number + turn) % PARTS;
        pieces[at] = (place, ends[place], lengths[at]);
        ends[place] += lengths[at] + 1 + (number * 7 + turn) % 37;
    }
    (pieces, ends.map(|end| end + 50))
}

/// Lists of pieces of every interesting length at odd places of several regions, to and from a GPU
/// and host memory; what lies between the pieces stays as it was.
pub(crate) fn lists_of_pieces(bench: &Bench) -> Outcome {
    let lists: [&dyn Fn(usize) -> usize; 6] = [
        &|at| 1 + at % 67,
        &|at| 4096 + at % 2,
        &|_| 32 << 10,
        &|at| 500 + at * 7919 % 100_000,
        &|at| 300_000 + at % 3,
        &|at| if at % 2 == 0 { 11 } else { 1_200_000 },
    ];
    let kinds: [(Option<&Gpu>, Option<&Gpu>); 3] = [
        (Some(&bench.from), Some(&bench.to)),
        (None, Some(&bench.to)),
        (Some(&bench.from), None),
    ];
    let (user, owner) = bench.pair(4, None)?;
    let mut moved = 0;
    for (number, length) in lists.iter().enumerate() {
        let count = [4001, 2003, 997, 499, 47, 29][number];
        let lengths: Vec<usize> = (0..count).map(length).collect();
        for (near, far) in kinds {
            let named = |error: String| format!("list {number} from {near:?} to {far:?}: {error}");
            let (here, near_ends) = scatter(&lengths, 577);
            let (there, far_ends) = scatter(&lengths, 283);
            let contents = near_ends.map(random);
            let sources = contents.iter().map(|bytes| region(near, bytes));
            let sources: Vec<_> = sources.collect::<Result<_, _>>()?;
            let mut models = far_ends.map(|end| vec![POISON; end]);
            let memory = models.iter().map(|bytes| region(far, bytes));
            let memory: Vec<_> = memory.collect::<Result<_, _>>()?;
            let windows = memory
                .iter()
                .map(|one| owner.expose(one.all(), Rights::GetAndPut));
            let windows: Vec<_> = windows.collect::<Result<_, _>>().map_err(text)?;
            let level = [Level::Placed, Level::Verified][number % 2];
            let mut puts = user.batch().level(level).notify(b"there");
            for (&(from, start, len), &(to, at, _)) in here.iter().zip(&there) {
                let piece = sources[from].slice(start..start + len).map_err(text)?;
                puts = puts.put(piece, &windows[to].key(), at as u64);
                models[to][at..at + len].copy_from_slice(&contents[from][start..start + len]);
                moved += len;
            }
            let puts = puts.start().map_err(text).map_err(named)?;
            let told = owner.notification(LONG).map_err(text)?;
            if told.as_deref() != Some(&b"there"[..]) {
                return Err(named(format!("notified of {told:?}")));
            }
            // Whoever is notified may use the memory: before the transfer has ended here.
            for (one, model) in memory.iter().zip(&models) {
                compare(one, model).map_err(|error| named(format!("a window: {error}")))?;
            }
            puts.wait().map_err(text).map_err(named)?;
            // Back to where they came from, over poison.
            let mut models = near_ends.map(|end| vec![POISON; end]);
            let backs = models.iter().map(|bytes| region(near, bytes));
            let backs: Vec<_> = backs.collect::<Result<_, _>>()?;
            let mut gets = user.batch().level(level);
            for (&(to, start, len), &(from, at, _)) in here.iter().zip(&there) {
                let piece = backs[to].slice(start..start + len).map_err(text)?;
                gets = gets.get(piece, &windows[from].key(), at as u64);
                models[to][start..start + len].copy_from_slice(&contents[to][start..start + len]);
            }
            let gets = gets.prepare().map_err(text).map_err(named)?;
            for round in 0..2 {
                let run = gets.start().map_err(text).map_err(named)?;
                run.wait().map_err(text).map_err(named)?;
                for (one, model) in backs.iter().zip(&models) {
                    compare(one, model)
                        .map_err(|error| named(format!("round {round}, got: {error}")))?;
                    one.write_from(0, &vec![POISON; model.len()])
                        .map_err(text)?;
                }
            }
            for window in windows {
                window.revoke(LONG).map_err(text)?;
            }
        }
    }
    close(user, owner)?;
    Ok(format!(
        "{} lists, {moved} bytes put",
        lists.len() * kinds.len()
    ))
}
