//! The measuring side: contents are compared, then what is sent or received is timed.

use std::time::{Duration, Instant};

use tcpx::Connection;
use tcpx_bench::cost::{Latency, Spent};
use tcpx_bench::report::{Row, Subject};
use tcpx_bench::{Meter, Mode, Op, Run, depth, orders::MOST_MESSAGES, rotation};

use crate::args::perf::{PerfClientArgs, Place};
use crate::bench;
use crate::error::Error;
use crate::link::{self, Link};
use crate::measuring;
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::output::json::Told;
use crate::output::progress::Progress;
use crate::output::say::say;
use crate::sizes::rate;

/// Times that are kept for the percentiles, and intervals for the report.
const MOST_TIMES: usize = 4_000_000;
const MOST_INTERVALS: usize = 100_000;

/// How much is measured at a stretch where nobody asks for intervals.
const STRETCH: Duration = Duration::from_secs(1);

/// Measures and reports.
pub(super) fn run(args: &PerfClientArgs) -> Result<Told, Error> {
    bench::some_bytes(args.size)?;
    let devices = Devices::probe();
    let memory = devices.choose(&Place::memory_of(args.place), 0)?;
    let link = Link::new(&args.link, &memory, false)?;
    let connection = link.connect(&args.link, &args.server)?;
    say!("{}", link.describe(&connection, &memory));
    let mode = match (args.reverse, args.bidir) {
        (true, _) => Mode::Back,
        (_, true) => Mode::Both,
        _ => Mode::One,
    };
    let depth = depth(args.size.0, args.in_flight);
    let work = Work {
        run: Run::new(mode, Op::Send, args.size.0, 1, depth),
        amount: match args.time {
            Some(time) => Amount::Time(time.0),
            None => Amount::Transfers(args.iterations),
        },
        interval: args.interval.map(|interval| interval.0),
        warm_up: args.warm_up.0,
        limit: args.link.timeout.0,
    };
    let (path, peer) = (connection.path(), connection.peer().memory.clone());
    let ends = format!("{} -> {}", short(memory.name()), short(&peer));
    let measured = one(connection, &memory, &work)?;
    let mut rows = measured.rows(&work, &ends)?;
    rows.extend(measured.intervals);
    let notes = vec!["Contents were verified before.".to_owned()];
    let mut subject = Subject::new("Two hosts", bench::machine(&memory, &devices), rows, notes);
    subject.path = Some(path);
    bench::show(&subject)?;
    Ok(Told::Nothing)
}

/// What is to be measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) run: Run,
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

/// Measures over a fresh connection to a server, and closes it. The contents are proven first.
pub(super) fn one(
    connection: Connection,
    memory: &MemoryChoice,
    work: &Work,
) -> Result<Measured, Error> {
    let measured = measuring::measure(&connection, memory, work.limit, |meter| {
        meter.verify(&work.run)?;
        timed(meter, work)
    });
    link::part_after(connection, measured)
}

/// What the timed transfers gave.
#[derive(Default)]
pub(super) struct Measured {
    transfers: u64,
    bytes: u64,
    elapsed: Duration,
    times: Vec<Duration>,
    intervals: Vec<Row>,
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
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            count.clamp(1, MOST_MESSAGES)
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

    /// 10^9 bytes a second, and processor seconds of both ends for 10^9 bytes.
    #[expect(clippy::cast_precision_loss, reason = "a figure with a few digits")]
    pub(super) fn rate_and_cpu(&self) -> Result<(f64, f64), Error> {
        let rate = rate(self.bytes, self.elapsed).ok_or_else(|| {
            Error::failed(
                "the transfers took no time that this clock can show",
                "give a larger --size or more --iterations",
            )
        })?;
        // Microseconds a byte are 1,000 seconds for 10^9 bytes.
        Ok((rate, self.cpu_us as f64 * 1e3 / self.bytes as f64))
    }

    /// The report.
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
    fn rows(&self, work: &Work, ends: &str) -> Result<Vec<Row>, Error> {
        let (rate, cpu) = self.rate_and_cpu()?;
        let (direction, sender, receiver) = match work.run.mode {
            Mode::Back => ("from the server", &self.theirs, &self.ours),
            Mode::Both => ("both ways, sum", &self.ours, &self.theirs),
            Mode::One | Mode::Latency => ("to the server", &self.ours, &self.theirs),
        };
        let case = rotation::title(&work.run);
        let name = format!("{case}: {ends}, {direction}");
        let mut row = Row::of(name, "GB/s", &[rate]).cpu(&[cpu]);
        row.notes = format!("{} transfers", self.transfers);
        let mut rows = vec![row];
        // As their sender sees them; none where that is the server.
        if let Some(latency) = Latency::of(&self.times) {
            rows.extend(latency.rows(&format!("{case}: time of a transfer")));
        }
        rows.extend(sender.rows(&format!("{case}: sender")));
        rows.extend(receiver.rows(&format!("{case}: receiver")));
        let fragments = self.ours.fragments + self.theirs.fragments;
        let received = (self.bytes / work.run.bytes.max(1)).max(1);
        let each = fragments as f64 / received as f64;
        rows.push(Row::of(
            format!("{case}: fragments of a transfer"),
            "fragments",
            &[each],
        ));
        Ok(rows)
    }
}

fn timed(meter: &mut Meter<'_>, work: &Work) -> Result<Measured, Error> {
    let run = |count: u32| Run { count, ..work.run };
    let mut each = warm_up(meter, work)?;
    let total = match work.amount {
        Amount::Transfers(count) => Some(run(count).moved()),
        Amount::Time(_) => None,
    };
    let mut progress = Progress::from("measuring", total, 0);
    let mut measured = Measured::default();
    loop {
        let count = measured.next(work, each);
        if count == 0 {
            break;
        }
        let sample = meter.run(&run(count), each.saturating_mul(count))?;
        let part = &sample.part;
        each = part.elapsed / count;
        let start = measured.elapsed.as_secs_f64();
        measured.transfers += u64::from(count);
        measured.bytes = measured.bytes.saturating_add(sample.moved);
        measured.elapsed += part.elapsed;
        measured.ours.join(&part.cost.spent);
        measured.theirs.join(&sample.theirs.spent);
        measured.cpu_us += part.cost.cpu_us + sample.theirs.cpu_us;
        let room = MOST_TIMES - measured.times.len();
        measured.times.extend(part.times.iter().take(room));
        progress.at(measured.bytes);
        if work.interval.is_some() {
            let (end, rate) = (measured.elapsed.as_secs_f64(), sample.rate());
            say!("  {start:8.2} to {end:8.2} s  {rate:8.3} GB/s");
            if measured.intervals.len() < MOST_INTERVALS {
                let name = format!("{start:.2} to {end:.2} s");
                measured.intervals.push(Row::of(name, "GB/s", &[rate]));
            }
        }
    }
    Ok(measured)
}

/// Moves what does not count; returns how long one transfer takes.
fn warm_up(meter: &mut Meter<'_>, work: &Work) -> Result<Duration, Error> {
    let started = Instant::now();
    let least = u32::from(work.run.depth);
    let mut count = least;
    loop {
        let sample = meter.run(&Run { count, ..work.run }, work.warm_up)?;
        let each = sample.part.elapsed / count;
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
            run: Run::new(Mode::One, Op::Send, 1, 1, 1),
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
