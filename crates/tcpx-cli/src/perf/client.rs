//! The measuring side: contents are compared, then what is sent or received is timed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tcpx::Connection;

use super::summary::{Interval, Latency, Shares, Spent, Summary, cpu_per_gb, text};
use crate::args::perf::{PerfClientArgs, Place};
use crate::bench::net::meter::Meter;
use crate::bench::net::orders::{MOST_MESSAGES, Mode, Op, Run};
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::output::progress::Progress;
use crate::output::say::say;
use crate::sizes::rate;

/// Times that are kept for the percentiles.
const MOST_TIMES: usize = 4_000_000;

/// Intervals that are kept for the JSON.
const MOST_INTERVALS: usize = 100_000;

/// How much is measured at a stretch where nobody asks for intervals.
const STRETCH: Duration = Duration::from_secs(1);

/// Measures; returns what `--json` prints.
pub(super) fn run(args: &PerfClientArgs) -> Result<Value, Error> {
    if args.size.0 == 0 {
        return Err(Error::usage(
            "a size of 0 has no rate",
            "give --size 1 or more",
        ));
    }
    let memory = Devices::probe().choose(&Place::memory_of(args.place), 0)?;
    let link = Link::new(&args.link, &memory, false)?;
    let connection = link.connect(&args.link, &args.server)?;
    say!("{}", link.describe(&connection, &memory));
    let work = Work {
        bytes: args.size.0,
        mode: match (args.reverse, args.bidir) {
            (true, _) => Mode::Back,
            (_, true) => Mode::Both,
            _ => Mode::One,
        },
        in_flight: args.in_flight,
        amount: match args.time {
            Some(time) => Amount::Time(time.0),
            None => Amount::Transfers(args.iterations),
        },
        interval: args.interval.map(|interval| interval.0),
        warm_up: args.warm_up.0,
        limit: args.link.timeout.0,
    };
    let summary = one(connection, &memory, &work, || Ok(()))?;
    say!("{}", text(&summary).trim_end());
    Ok(json!(summary))
}

/// What is to be measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Bytes of one transfer.
    pub(super) bytes: u64,
    pub(super) mode: Mode,
    /// Transfers of one direction under way at a time.
    pub(super) in_flight: u16,
    pub(super) amount: Amount,
    /// Report each of these.
    pub(super) interval: Option<Duration>,
    /// What comes before the first transfer that counts.
    pub(super) warm_up: Duration,
    /// Longest time that a step may stand still.
    pub(super) limit: Duration,
}

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Amount {
    /// So many transfers, in each direction.
    Transfers(u32),
    /// As many as this time takes.
    Time(Duration),
}

impl Work {
    fn run(&self, count: u32) -> Run {
        Run::new(self.mode, Op::Send, self.bytes, count, self.in_flight)
    }
}

/// Measures over a fresh connection to a server, and closes it. `go` returns when the timed transfers may
/// begin; the contents are proven then.
pub(super) fn one(
    connection: Connection,
    memory: &MemoryChoice,
    work: &Work,
    go: impl FnOnce() -> Result<(), Error>,
) -> Result<Summary, Error> {
    let measured = measure(&connection, memory, work, go);
    let peer = connection.peer().clone();
    let path = connection.path();
    let measured = link::part_after(connection, measured)?;
    measured.summary(work, path, [memory.describe(), peer.memory])
}

/// What the timed transfers gave.
#[derive(Default)]
struct Measured {
    transfers: u64,
    bytes: u64,
    elapsed: Duration,
    times: Vec<Duration>,
    intervals: Vec<Interval>,
    ours: Spent,
    theirs: Spent,
    cpu_us: u64,
}

impl Measured {
    /// How many transfers come next, if one takes `each`.
    fn next(&self, work: &Work, each: Duration) -> u32 {
        let span = work.interval.unwrap_or(STRETCH);
        let in_time = |span: Duration| {
            let count = span.as_nanos() / each.as_nanos().max(1);
            u32::try_from(count)
                .unwrap_or(u32::MAX)
                .clamp(1, MOST_MESSAGES)
        };
        match work.amount {
            Amount::Transfers(all) => {
                let left = u64::from(all).saturating_sub(self.transfers);
                in_time(span).min(u32::try_from(left).unwrap_or(u32::MAX))
            }
            Amount::Time(all) => match all.saturating_sub(self.elapsed) {
                // A rest that is shorter than a transfer, or tells nothing.
                left if self.transfers > 0 && left < each.max(span / 20) => 0,
                left if left.is_zero() => 0,
                left => in_time(span.min(left)),
            },
        }
    }

    fn summary(&self, work: &Work, path: String, memory: [String; 2]) -> Result<Summary, Error> {
        let gb_per_second = rate(self.bytes, self.elapsed).ok_or_else(|| {
            Error::failed(
                "the transfers took no time that this clock can show",
                "give a larger --size or more --iterations",
            )
        })?;
        let (sender, receiver) = match work.mode {
            Mode::Back => (&self.theirs, &self.ours),
            Mode::One | Mode::Both | Mode::Latency => (&self.ours, &self.theirs),
        };
        let fragments = self.ours.fragments + self.theirs.fragments;
        let received = (self.bytes / work.bytes.max(1)).max(1);
        #[expect(
            clippy::cast_precision_loss,
            reason = "shown without digits after the point"
        )]
        let fragments_per_transfer = fragments as f64 / received as f64;
        Ok(Summary {
            bytes: work.bytes,
            iterations: self.transfers,
            direction: match work.mode {
                Mode::One | Mode::Latency => "to the server",
                Mode::Back => "from the server",
                Mode::Both => "both ways, sum",
            }
            .to_owned(),
            in_flight: work.in_flight,
            seconds: self.elapsed.as_secs_f64(),
            gb_per_second,
            latency_us: Latency::of(&self.times),
            intervals: self.intervals.clone(),
            sender_percent: Shares::of(sender),
            receiver_percent: Shares::of(receiver),
            fragments_per_transfer,
            cpu_seconds_per_gb: cpu_per_gb(self.bytes, self.cpu_us),
            path,
            memory,
            verified: true,
        })
    }
}

fn measure(
    connection: &Connection,
    memory: &MemoryChoice,
    work: &Work,
    go: impl FnOnce() -> Result<(), Error>,
) -> Result<Measured, Error> {
    let mut meter = Meter::begin(connection, memory, work.limit)?;
    meter.verify(Op::Send, work.bytes, work.in_flight)?;
    go()?;
    let mut each = warm_up(&mut meter, work)?;
    let total = match work.amount {
        Amount::Transfers(count) => Some(work.run(count).moved()),
        Amount::Time(_) => None,
    };
    let mut progress = Progress::from("measuring", total, 0);
    let mut measured = Measured::default();
    loop {
        let count = measured.next(work, each);
        if count == 0 {
            break;
        }
        let run = work.run(count);
        let (part, theirs) = meter.run(&run, each.saturating_mul(count))?;
        each = part.elapsed / count;
        let start = measured.elapsed;
        measured.transfers += u64::from(count);
        measured.bytes = measured.bytes.saturating_add(run.moved());
        measured.elapsed += part.elapsed;
        measured.ours.join(&part.cost.spent);
        measured.theirs.join(&theirs.spent);
        measured.cpu_us += part.cost.cpu_us + theirs.cpu_us;
        let room = MOST_TIMES - measured.times.len();
        measured.times.extend(part.times.into_iter().take(room));
        progress.at(measured.bytes);
        let rate = rate(run.moved(), part.elapsed).unwrap_or_default();
        if work.interval.is_some() {
            let end = measured.elapsed;
            let (from, to) = (start.as_secs_f64(), end.as_secs_f64());
            say!("  {from:8.2} to {to:8.2} s  {rate:8.3} GB/s");
            if measured.intervals.len() < MOST_INTERVALS {
                measured.intervals.push(Interval {
                    start: start.as_secs_f64(),
                    end: end.as_secs_f64(),
                    gb_per_second: rate,
                });
            }
        }
    }
    meter.end()?;
    Ok(measured)
}

/// Moves what does not count; returns how long one transfer takes.
fn warm_up(meter: &mut Meter<'_>, work: &Work) -> Result<Duration, Error> {
    let started = Instant::now();
    let least = u32::from(work.in_flight);
    let mut count = least;
    loop {
        let (part, _) = meter.run(&work.run(count), work.warm_up)?;
        let each = part.elapsed / count;
        let left = work.warm_up.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Ok(each);
        }
        let wanted = u32::try_from(left.as_nanos() / each.as_nanos().max(1));
        count = wanted.unwrap_or(u32::MAX).clamp(least, MOST_MESSAGES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: Duration = Duration::from_millis(10);

    fn work(amount: Amount, interval: Option<Duration>) -> Work {
        Work {
            bytes: 1,
            mode: Mode::One,
            in_flight: 1,
            amount,
            interval,
            warm_up: Duration::ZERO,
            limit: STRETCH,
        }
    }

    fn measured(transfers: u64) -> Measured {
        Measured {
            transfers,
            elapsed: EACH * u32::try_from(transfers).expect("few"),
            ..Measured::default()
        }
    }

    #[test]
    fn a_number_of_transfers_is_met_exactly() {
        let ten = work(Amount::Transfers(250), None);
        assert_eq!(measured(0).next(&ten, EACH), 100);
        assert_eq!(measured(200).next(&ten, EACH), 50);
        assert_eq!(measured(250).next(&ten, EACH), 0);
    }

    #[test]
    fn a_time_is_met_by_whole_intervals_and_the_rest() {
        let half = Some(Duration::from_millis(500));
        let work = work(Amount::Time(Duration::from_millis(1200)), half);
        assert_eq!(measured(0).next(&work, EACH), 50);
        assert_eq!(measured(100).next(&work, EACH), 20);
        assert_eq!(measured(120).next(&work, EACH), 0);
        // One transfer that takes longer than all the time is measured once.
        assert_eq!(measured(0).next(&work, Duration::from_secs(5)), 1);
    }
}
