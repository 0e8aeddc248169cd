//! The measuring side: contents are compared, then what is sent or received is timed.

use std::time::Duration;

use tcpx::Connection;
use tcpx_bench::report::{Row, Subject};
use tcpx_bench::statistics::percentile;
use tcpx_bench::{Meter, Mode, Op, Run, Sample, depth, fitting, rotation};

use crate::bench;
use crate::error::Error;
use crate::link::{self, Link};
use crate::measuring;
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::output::json::Told;
use crate::output::progress::Progress;
use crate::output::say::say;
use crate::perf::{PerfClientArgs, Place};

/// How long a server may take to start.
const SERVER_START_LIMIT: Duration = Duration::from_secs(5);

/// How long it measures where nobody says.
const USUAL_TIME: Duration = Duration::from_secs(3);

/// How much is measured at a stretch where nobody asks for intervals.
const STRETCH: Duration = Duration::from_secs(1);

/// Measures and reports.
pub(super) fn run(args: &PerfClientArgs) -> Result<Told, Error> {
    bench::some_bytes(args.size)?;
    let devices = Devices::probe();
    let memory = devices.choose(&Place::memory_of(args.place), 0)?;
    let link = Link::new(&args.link, &memory, false)?;
    let connection = link.connect_within(
        &args.link,
        &args.server,
        SERVER_START_LIMIT,
        Error::is_refused,
    )?;
    say!("{}", link.describe(&connection, &memory));
    let mode = match (args.reverse, args.bidir) {
        (true, _) => Mode::Back,
        (_, true) => Mode::Both,
        _ => Mode::One,
    };
    let depth = depth(args.size.0, args.in_flight);
    let (count, time) = extent(args.time.map(|time| time.0), args.iterations);
    let work = Work {
        run: Run::new(mode, Op::Send, args.size.0, count, depth),
        time,
        interval: args.interval.map(|interval| interval.0),
        warm_up: args.warm_up.0,
        limit: args.link.timeout.0,
    };
    let (path, peer) = (connection.path(), connection.peer().memory.clone());
    let ends = format!("{} -> {}", short(memory.name()), short(&peer));
    let (whole, transfers, intervals) = one(connection, &memory, &work)?;
    let mut rows = rows(&whole, transfers, &work.run, &ends);
    rows.extend(intervals);
    let notes = vec!["Contents were verified before.".to_owned()];
    let mut subject = Subject::new("Two hosts", bench::machine(&memory, &devices), rows, notes);
    subject.path = Some(path);
    bench::show(&subject)?;
    Ok(Told::Nothing)
}

/// How many transfers, and for how long: a number that no time ends, or a time.
fn extent(time: Option<Duration>, iterations: Option<u32>) -> (u32, Duration) {
    match (time, iterations) {
        (None, Some(count)) => (count, Duration::MAX),
        (time, _) => (u32::MAX, time.unwrap_or(USUAL_TIME)),
    }
}

/// What is to be measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// As many transfers in each direction at most.
    pub(super) run: Run,
    /// Time for them at most.
    pub(super) time: Duration,
    /// Report each of these.
    pub(super) interval: Option<Duration>,
    /// What comes before the first transfer that counts.
    pub(super) warm_up: Duration,
    /// Longest time that a step may stall.
    pub(super) limit: Duration,
}

impl Work {
    /// How many transfers come next after so many in so much time, if one takes `each`.
    fn next(&self, transfers: u32, elapsed: Duration, each: Duration) -> u32 {
        let span = self.interval.unwrap_or(STRETCH);
        let left = self.time.saturating_sub(elapsed);
        // A rest that is shorter than a transfer, or tells nothing.
        if left.is_zero() || (transfers > 0 && left < each.max(span / 20)) {
            return 0;
        }
        fitting(span.min(left), each).min(self.run.count - transfers)
    }
}

/// What the transfers gave together, how many there were, and a row for each interval.
type Measured = (Sample, u32, Vec<Row>);

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

fn timed(meter: &mut Meter<'_>, work: &Work) -> Result<Measured, Error> {
    let mut each = meter.warm_up(&work.run, work.warm_up)?;
    let total = (work.time == Duration::MAX).then(|| work.run.moved());
    let mut progress = Progress::from("measuring", total, 0);
    let (mut whole, mut transfers, mut intervals) = (Sample::default(), 0, Vec::new());
    loop {
        let count = work.next(transfers, whole.part.elapsed, each);
        if count == 0 {
            return Ok((whole, transfers, intervals));
        }
        let run = Run { count, ..work.run };
        let sample = meter.run(&run, each.saturating_mul(count))?;
        each = sample.part.elapsed / count;
        let start = whole.part.elapsed.as_secs_f64();
        transfers += count;
        whole.join(&sample);
        progress.at(whole.moved);
        if work.interval.is_some() {
            let (end, rate) = (whole.part.elapsed.as_secs_f64(), sample.rate());
            say!("  {start:8.2} to {end:8.2} s  {rate:8.3} GB/s");
            let name = format!("{start:.2} to {end:.2} s");
            intervals.push(Row::of(name, "GB/s", &[rate]));
        }
    }
}

/// The report.
fn rows(whole: &Sample, transfers: u32, run: &Run, ends: &str) -> Vec<Row> {
    let (ours, theirs) = (&whole.part.cost.spent, &whole.theirs.spent);
    let (direction, sender, receiver) = match run.mode {
        Mode::Back => ("from the server", theirs, ours),
        Mode::Both => ("both ways, sum", ours, theirs),
        Mode::One | Mode::Latency => ("to the server", ours, theirs),
    };
    let case = rotation::title(run);
    let name = format!("{case}: {ends}, {direction}");
    let mut row = Row::of(name, "GB/s", &[whole.rate()]).cpu(&[whole.cpu()]);
    row.notes = format!("{transfers} transfers");
    let mut rows = vec![row];
    // As their sender sees them; none where that is the server.
    let times = whole.micros();
    let what = format!("{case}: time of a transfer");
    if !times.is_empty() {
        rows.push(Row::of(format!("{what}, p50"), "us", &times));
    }
    for percent in [90, 99] {
        let time = percentile(&times, percent);
        rows.extend(time.map(|us| Row::of(format!("{what}, p{percent}"), "us", &[us])));
    }
    rows.extend(sender.rows(&format!("{case}: sender")));
    rows.extend(receiver.rows(&format!("{case}: receiver")));
    let received = (whole.moved / run.bytes.max(1)).max(1);
    let each = (ours.fragments + theirs.fragments) as f64 / received as f64;
    let name = format!("{case}: fragments of a transfer");
    rows.push(Row::of(name, "fragments", &[each]));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: Duration = Duration::from_millis(10);

    #[test]
    fn a_number_or_a_time_ends_it_and_else_three_seconds_do() {
        let second = Duration::from_secs(1);
        assert_eq!(extent(None, None), (u32::MAX, 3 * second));
        assert_eq!(extent(Some(second), None), (u32::MAX, second));
        assert_eq!(extent(None, Some(5)), (5, Duration::MAX));
    }

    fn work(count: u32, time: Duration, interval: Option<Duration>) -> Work {
        Work {
            run: Run::new(Mode::One, Op::Send, 1, count, 1),
            time,
            interval,
            warm_up: Duration::ZERO,
            limit: STRETCH,
        }
    }

    #[test]
    fn a_number_of_transfers_is_met_exactly() {
        let work = work(250, Duration::MAX, None);
        for (transfers, next) in [(0, 100), (200, 50), (250, 0)] {
            assert_eq!(work.next(transfers, EACH * transfers, EACH), next);
        }
    }

    #[test]
    fn a_time_is_met_by_whole_intervals_and_the_rest() {
        let half = Some(Duration::from_millis(500));
        let work = work(u32::MAX, Duration::from_millis(1200), half);
        for (transfers, next) in [(0, 50), (100, 20), (120, 0)] {
            assert_eq!(work.next(transfers, EACH * transfers, EACH), next);
        }
        // One transfer that takes longer than all the time is measured once.
        assert_eq!(work.next(0, Duration::ZERO, Duration::from_secs(5)), 1);
    }
}
