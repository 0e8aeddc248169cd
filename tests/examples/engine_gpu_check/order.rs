//! Order with the program's own GPU work, and independence from it.

use std::time::{Duration, Instant};

use tcpx::After;

use crate::bench::{Bench, Outcome, POISON, close, compare, poisoned, random, region, text};
use crate::user::{LEGACY, after};

const LEN: usize = 9 << 20;
const DELAY: Duration = Duration::from_millis(80);

/// A kernel of the program still writes the source when `send` is called.
pub(crate) fn source_still_written(bench: &Bench) -> Outcome {
    let user = bench.user(0)?;
    let (sending, receiving) = bench.pair(1, None)?;
    for (value, stream, default) in [(0x11, user.stream, false), (0x22, LEGACY, true)] {
        let source = region(Some(&bench.from), &vec![POISON; LEN])?;
        let destination = poisoned(Some(&bench.to), LEN)?;
        let receive = receiving
            .receive(destination.all(), 1)
            .start()
            .map_err(text)?;
        let delay = DELAY.as_nanos() as u64;
        user.slow_fill(stream, source.all().address(), LEN, value, delay)?;
        let send = sending.send(source.all(), 1);
        // Without a word, everything on the default streams comes first.
        let send = if default {
            send
        } else {
            send.after(after(stream))
        };
        send.start().map_err(text)?.wait().map_err(text)?;
        receive.wait().map_err(text)?;
        compare(&destination, &vec![value; LEN])
            .map_err(|error| format!("default stream {default}: {error}"))?;
    }
    close(sending, receiving)?;
    Ok("behind kernels of 80 ms on a stream and on the default stream".to_owned())
}

/// A kernel of the program still writes the destination when `receive` is called: the transfer's
/// bytes must come last.
pub(crate) fn destination_still_written(bench: &Bench) -> Outcome {
    let user = bench.user(1)?;
    let (sending, receiving) = bench.pair(1, None)?;
    let bytes = random(LEN);
    let source = region(Some(&bench.from), &bytes)?;
    let destination = poisoned(Some(&bench.to), LEN)?;
    let delay = DELAY.as_nanos() as u64;
    user.slow_fill(user.stream, destination.all().address(), LEN, 0x33, delay)?;
    let receive = receiving
        .receive(destination.all(), 1)
        .after(after(user.stream))
        .start()
        .map_err(text)?;
    let send = sending.send(source.all(), 1).start().map_err(text)?;
    send.wait().map_err(text)?;
    receive.wait().map_err(text)?;
    user.wait(user.stream)?;
    compare(&destination, &bytes)?;
    close(sending, receiving)?;
    Ok("behind a kernel of 80 ms".to_owned())
}

/// A kernel that spins until the transfer has completed must not stop it.
pub(crate) fn spinning_kernel(bench: &Bench) -> Outcome {
    let (sending, receiving) = bench.pair(2, None)?;
    let mut report = Vec::new();
    for (name, legacy) in [("own stream", false), ("legacy default stream", true)] {
        let bytes = random(LEN);
        let source = region(Some(&bench.from), &bytes)?;
        let destination = poisoned(Some(&bench.to), LEN)?;
        let mut spinning = Vec::new();
        for end in [0, 1] {
            let user = bench.user(end)?;
            let stream = if legacy { LEGACY } else { user.stream };
            let flag = user.flag()?;
            user.spin(stream, &flag, 20_000_000_000)?;
            spinning.push((user, stream, flag));
        }
        let start = Instant::now();
        let outcome = (|| {
            let receive = receiving
                .receive(destination.all(), 1)
                .after(After::Nothing)
                .start()
                .map_err(text)?;
            let send = sending
                .send(source.all(), 1)
                .after(After::Nothing)
                .start()
                .map_err(text)?;
            send.wait().map_err(text)?;
            receive.wait().map_err(text)
        })();
        let took = start.elapsed();
        // Both may spin on the one default stream, one behind the other.
        for (_, _, flag) in &spinning {
            flag.raise();
        }
        for (user, stream, flag) in &spinning {
            user.wait(*stream)?;
            if flag.answer() != 1 {
                return Err(format!(
                    "{name}: the kernel gave up before the transfer had ended"
                ));
            }
        }
        outcome.map_err(|error: String| format!("{name}: {error}"))?;
        compare(&destination, &bytes)?;
        report.push(format!("{name} {took:.0?}"));
    }
    close(sending, receiving)?;
    Ok(report.join(", "))
}
