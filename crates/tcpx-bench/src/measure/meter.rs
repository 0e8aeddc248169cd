//! The measuring end of a connection: gives orders, does its own part, and takes the other end's costs.

use std::time::Duration;

use tcpx::Connection;

use crate::Error;
use crate::cost::{Cost, Latency};
use crate::end::{Allocate, Buffers, End, Part, depth};
use crate::orders::{Answer, MOST_MESSAGES, Mode, Op, Order, Run, Talk};

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

    /// Times of the messages, or halves of round trips.
    pub fn latency(&self) -> Option<Latency> {
        Latency::of(&self.part.times)
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

    /// Has fresh contents cross into poisoned memory, in both directions where both ends move them; every byte is
    /// compared.
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
            self.talk.say(&Order::Run { run: *run })?;
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
            self.talk.say(&Order::Over)?;
        }
        let theirs = self.talk.done(patience);
        Sample::of(part, theirs, run.moved())
    }

    /// How many messages of a run take about `span`.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn calibrate(&mut self, run: &Run, span: Duration) -> Result<u32, Error> {
        calibrate(run, span, |run| self.run(run, span))
    }

    /// Time for the other end to make, fill or compare memory: 100 MB/s is slow enough for any host.
    pub(crate) fn patience(&self, run: &Run, span: Duration) -> Duration {
        let bytes = run.receives_of().saturating_mul(u64::from(run.depth) * 4);
        self.limit + span * 4 + Duration::from_secs(bytes / 100_000_000)
    }

    /// Says that there are no more orders.
    ///
    /// # Errors
    /// The other end is gone.
    pub fn end(self) -> Result<(), Error> {
        self.talk.say(&Order::End)?;
        self.talk.done(self.limit).map(drop)
    }
}

/// How many messages of a run take about `span`, when `measure` moves them.
pub(crate) fn calibrate(
    run: &Run,
    span: Duration,
    mut measure: impl FnMut(&Run) -> Result<Sample, Error>,
) -> Result<u32, Error> {
    let least = u32::from(run.depth).max(2);
    let mut count = least;
    // A few messages say little about many: twice is enough to come near.
    for _ in 0..2 {
        let sample = measure(&Run { count, ..*run })?;
        let each = sample.part.elapsed.as_secs_f64() / f64::from(count);
        let wanted = (span.as_secs_f64() / each.max(1e-9)).min(f64::from(MOST_MESSAGES));
        count = (wanted as u32).clamp(least, MOST_MESSAGES);
    }
    Ok(count)
}
