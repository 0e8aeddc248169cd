//! Bytes from one end to the other.

use tcpx::{Gpu, Level};

use tcpx_tests::scenario::sizes_up_to;

use crate::bench::{Bench, Outcome, close, compare, poisoned, random, region, text};

/// Every interesting size, verified by checksum and by comparison.
pub(crate) fn sizes(bench: &Bench) -> Outcome {
    let mut fragments = 0;
    let lens = sizes_up_to(64 << 20);
    for &method in bench.methods() {
        for channels in [1, 4] {
            let (sending, receiving) = bench.pair(channels, method)?;
            for len in lens {
                let named = |error: String| {
                    format!("{len} bytes, {channels} channels, {method:?}: {error}")
                };
                let bytes = random(len);
                let source = region(Some(&bench.from), &bytes)?;
                let destination = poisoned(Some(&bench.to), len)?;
                let receive = receiving
                    .receive(destination.all(), 42)
                    .start()
                    .map_err(text)?;
                let send = sending
                    .send(source.all(), 42)
                    .level(Level::Verified)
                    .start()
                    .map_err(text)?;
                send.wait().map_err(text).map_err(named)?;
                let report = receive.wait().map_err(text).map_err(named)?;
                fragments += report.fragments;
                compare(&destination, &bytes).map_err(named)?;
            }
            close(sending, receiving)?;
        }
    }
    Ok(format!("{} sizes, {fragments} fragments", lens.len()))
}

/// Host and GPU memory at either end of one connection.
pub(crate) fn kinds(bench: &Bench) -> Outcome {
    let (sending, receiving) = bench.pair(1, None)?;
    let pairs: [(Option<&Gpu>, Option<&Gpu>); 2] =
        [(None, Some(&bench.to)), (Some(&bench.from), None)];
    for (from, to) in pairs {
        for len in [5, 16 << 10, 5 << 20] {
            let bytes = random(len);
            let source = region(from, &bytes)?;
            let destination = poisoned(to, len)?;
            let receive = receiving
                .receive(destination.all(), 1)
                .start()
                .map_err(text)?;
            let send = sending.send(source.all(), 1).start().map_err(text)?;
            send.wait().map_err(text)?;
            receive.wait().map_err(text)?;
            compare(&destination, &bytes).map_err(|error| {
                format!(
                    "{len} bytes from {} to {}: {error}",
                    source.kind(),
                    destination.kind()
                )
            })?;
        }
    }
    close(sending, receiving)?;
    Ok("host to GPU, GPU to host".to_owned())
}

pub(crate) fn both_directions(bench: &Bench) -> Outcome {
    let (here, there) = bench.pair(2, None)?;
    let len = 96 << 20;
    let (one, two) = (random(len), random(len));
    let (source_here, source_there) = (
        region(Some(&bench.from), &one)?,
        region(Some(&bench.to), &two)?,
    );
    let (to_there, to_here) = (
        poisoned(Some(&bench.to), len)?,
        poisoned(Some(&bench.from), len)?,
    );
    let transfers = [
        there.receive(to_there.all(), 1).start(),
        here.receive(to_here.all(), 2).start(),
        here.send(source_here.all(), 1).start(),
        there.send(source_there.all(), 2).start(),
    ];
    for transfer in transfers {
        transfer.map_err(text)?.wait().map_err(text)?;
    }
    compare(&to_there, &one)?;
    compare(&to_here, &two)?;
    close(here, there)?;
    Ok("96 MiB each way".to_owned())
}

/// Many transfers in flight, received in another order than sent.
pub(crate) fn many_at_once(bench: &Bench) -> Outcome {
    let (sending, receiving) = bench.pair(2, None)?;
    let count = 64usize;
    let mut sends = Vec::new();
    let mut receives = Vec::new();
    for index in 0..count {
        let bytes = random(1 + index * 37_003);
        let source = region(Some(&bench.from), &bytes)?;
        sends.push(
            sending
                .send(source.all(), index as u64)
                .start()
                .map_err(text)?,
        );
        receives.push((index, bytes));
    }
    receives.reverse();
    let mut waiting = Vec::new();
    for (index, bytes) in receives {
        let destination = poisoned(Some(&bench.to), bytes.len())?;
        let receive = receiving
            .receive(destination.all(), index as u64)
            .start()
            .map_err(text)?;
        waiting.push((receive, destination, bytes));
    }
    for send in sends {
        send.wait().map_err(text)?;
    }
    for (receive, destination, bytes) in waiting {
        receive.wait().map_err(text)?;
        compare(&destination, &bytes)?;
    }
    close(sending, receiving)?;
    Ok(format!("{count} transfers"))
}

/// Offsets beyond 4 GiB.
pub(crate) fn large(bench: &Bench) -> Outcome {
    if !bench.large {
        return Ok("skipped: --large was not given".to_owned());
    }
    let (sending, receiving) = bench.pair(4, None)?;
    let bytes = random((5 << 30) + 3);
    let source = region(Some(&bench.from), &bytes)?;
    let destination = poisoned(Some(&bench.to), bytes.len())?;
    let receive = receiving
        .receive(destination.all(), 1)
        .start()
        .map_err(text)?;
    let send = sending.send(source.all(), 1).start().map_err(text)?;
    let report = send.wait().map_err(text)?;
    receive.wait().map_err(text)?;
    compare(&destination, &bytes)?;
    close(sending, receiving)?;
    let rate = report.bytes as f64 / report.elapsed.as_secs_f64() / 1e9;
    Ok(format!("{} bytes, {rate:.1} GB/s", report.bytes))
}
