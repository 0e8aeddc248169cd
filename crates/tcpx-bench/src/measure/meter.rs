//! The measuring end of a connection: gives orders, does its own part, and takes the other end's
//! costs.

use std::time::Duration;

use tcpx::Connection;

use crate::Error;
use crate::cost::Cost;
use crate::end::{Allocate, Buffers, End, Part, depth};
use crate::orders::{Answer, MOST_MESSAGES, Mode, Op, Order, Run, Talk};
use crate::process::{Figures, Metric};
use crate::statistics::{median, percentile};

/// Times that are kept for the percentiles.
const MOST_TIMES: usize = 4_000_000;

/// A connection that is measured, with this end's memory.
#[expect(missing_debug_implementations, reason = "it holds what joins the ends")]
pub struct Meter<'a> {
    /// What is measured.
    pub connection: &'a Connection,
    /// What joins it with the other end.
    pub talk: &'a mut dyn Talk,
    /// Longest time without progress.
    pub limit: Duration,
    allocate: Allocate<'a>,
    buffers: Buffers,
}

/// What one measurement gave.
#[derive(Debug, Default)]
pub struct Sample {
    /// This end's part.
    pub part: Part,
    /// What it cost the other end.
    pub theirs: Cost,
    /// Payload bytes, of both directions together where there are two.
    pub moved: u64,
}

impl Sample {
    /// Out of both ends' parts. The peer's reason wins over what this end saw of it.
    pub(crate) fn of(
        part: Result<Part, Error>,
        theirs: Result<Cost, Error>,
        moved: u64,
    ) -> Result<Self, Error> {
        match (part, theirs) {
            (_, Err(error @ Error::Peer(_))) | (Err(error), _) | (_, Err(error)) => Err(error),
            (Ok(part), Ok(theirs)) => Ok(Self {
                part,
                theirs,
                moved,
            }),
        }
    }

    /// 10^9 bytes a second.
    pub fn rate(&self) -> f64 {
        self.moved as f64 / 1e9 / self.part.elapsed.as_secs_f64().max(1e-9)
    }

    /// Processor seconds of both ends for 10^9 bytes.
    pub fn cpu(&self) -> f64 {
        // Microseconds a byte are 1,000 seconds for 10^9 bytes.
        let us = self.part.cost.cpu_us + self.theirs.cpu_us;
        us as f64 * 1e3 / (self.moved as f64).max(1.0)
    }

    /// Microseconds of each message, or of half of each round trip.
    pub fn micros(&self) -> Vec<f64> {
        let us = |time: &Duration| time.as_secs_f64() * 1e6;
        self.part.times.iter().map(us).collect()
    }

    /// What is compared of such a measurement.
    pub(crate) fn figures(&self, mode: Mode) -> Figures {
        if mode != Mode::Latency {
            return Figures::from([(Metric::Rate, self.rate()), (Metric::Cpu, self.cpu())]);
        }
        let times = self.micros();
        let p99 = percentile(&times, 99).map(|p99| (Metric::P99, p99));
        [(Metric::P50, median(&times))]
            .into_iter()
            .chain(p99)
            .collect()
    }

    /// Adds what came next.
    pub fn join(&mut self, next: &Self) {
        let room = MOST_TIMES.saturating_sub(self.part.times.len());
        self.part.times.extend(next.part.times.iter().take(room));
        self.part.elapsed += next.part.elapsed;
        self.part.cost.join(&next.part.cost);
        self.theirs.join(&next.theirs);
        self.moved = self.moved.saturating_add(next.moved);
    }
}

impl<'a> Meter<'a> {
    /// The other end must [serve](crate::serve) orders.
    pub fn new(
        connection: &'a Connection,
        talk: &'a mut dyn Talk,
        allocate: Allocate<'a>,
        limit: Duration,
    ) -> Self {
        let buffers = Buffers::default();
        Self {
            connection,
            talk,
            limit,
            allocate,
            buffers,
        }
    }

    /// Has fresh contents cross into poisoned memory, in both directions where both ends move them;
    /// every byte is compared.
    ///
    /// # Errors
    /// A byte that differs, or why nothing crossed.
    pub fn verify(&mut self, run: &Run) -> Result<(), Error> {
        let mode = match run.op {
            Op::Send => Mode::Both,
            Op::Put | Op::Get => Mode::One,
        };
        let depth = depth(run.receives_of(), run.depth);
        let mut seed = [0; 8];
        getrandom::fill(&mut seed)
            .map_err(|error| Error::failed(error.to_string(), "try again"))?;
        let run = Run {
            piece: run.piece,
            seed: Some(u64::from_le_bytes(seed)),
            ..Run::new(mode, run.op, run.bytes, depth.into(), depth)
        };
        self.run(&run, Duration::ZERO).map(drop)
    }

    /// Does one measurement, which takes about `span`.
    ///
    /// # Errors
    /// The peer's reason wins over what this end saw of it.
    pub fn run(&mut self, run: &Run, span: Duration) -> Result<Sample, Error> {
        let patience = self.patience(run, span);
        self.buffers.fit(run, self.allocate)?;
        let end = End {
            connection: self.connection,
            buffers: &self.buffers,
            run,
            measures: true,
        };
        let mut keys = Vec::new();
        let mut was_ready = false;
        let mut begin = || {
            self.talk.send_order(&Order::Run { run: *run })?;
            match self.talk.answer(patience)? {
                Answer::Ready { keys: theirs } => keys = theirs,
                other => return Err(Error::unexpected("its readiness", format!("{other:?}"))),
            }
            was_ready = true;
            Ok(())
        };
        let part = match run.op {
            Op::Send => end.take_part(begin),
            Op::Put | Op::Get => {
                let begun = end.prepare().and_then(|()| begin());
                begun.and_then(|()| end.move_all(&keys))
            }
        };
        if !was_ready {
            return part.and_then(|_| Err(Error::failed("the peer did not begin", "run it again")));
        }
        if run.op != Op::Send && part.is_ok() {
            self.talk.send_order(&Order::Over)?;
        }
        let theirs = self.talk.done(patience);
        Sample::of(part, theirs, run.moved())
    }

    /// Warms up for about `span`; how long a message of the run takes.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn warm_up(&mut self, run: &Run, span: Duration) -> Result<Duration, Error> {
        warm_up(run, span, |run| self.run(run, span))
    }

    /// Time for the other end to make, fill or compare memory: 100 MB/s is slow enough for any
    /// host.
    pub(crate) fn patience(&self, run: &Run, span: Duration) -> Duration {
        let bytes = run.receives_of().saturating_mul(u64::from(run.depth) * 4);
        self.limit + span * 4 + Duration::from_secs(bytes / 100_000_000)
    }

    /// Says that there are no more orders.
    ///
    /// # Errors
    /// The other end is gone.
    pub fn end(self) -> Result<(), Error> {
        self.talk.send_order(&Order::End)?;
        self.talk.done(self.limit).map(drop)
    }
}

/// Moves what does not count for about `span`; how long one message takes.
pub(crate) fn warm_up(
    run: &Run,
    span: Duration,
    mut measure: impl FnMut(&Run) -> Result<Sample, Error>,
) -> Result<Duration, Error> {
    let mut count = u32::from(run.depth).max(2);
    let mut each = Duration::ZERO;
    // A few messages say little about many: twice is enough to come near.
    for _ in 0..2 {
        each = measure(&Run { count, ..*run })?.part.elapsed / count;
        count = fitting(span, each).max(count);
    }
    Ok(each)
}

/// How many messages go into `span` if one takes `each`.
pub fn fitting(span: Duration, each: Duration) -> u32 {
    let count = span.as_nanos() / each.as_nanos().max(1);
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    count.clamp(1, MOST_MESSAGES)
}

/// A run of as many messages as take about `span`, when `measure` moves them.
pub(crate) fn calibrate(
    run: &Run,
    span: Duration,
    measure: impl FnMut(&Run) -> Result<Sample, Error>,
) -> Result<Run, Error> {
    // A quarter says enough of the whole.
    let each = warm_up(run, span / 4, measure)?;
    let count = fitting(span, each).max(u32::from(run.depth).max(2));
    Ok(Run { count, ..*run })
}
