//! The sending side: two transfers whose contents the server compares, then the timed ones.

use std::time::Duration;

use serde_json::{Value, json};
use tcpx::Connection;

use super::REGIONS;
use super::summary::{Latency, ProcessorTime, Shares, Summary, cpu_per_gb, rate_of, text};
use crate::args::perf::PerfClientArgs;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{self, Devices, MemoryChoice};
use crate::messages::{self, ANSWER, PAYLOAD, REQUEST, Request, Spent, VERDICT, Verdict};
use crate::output::progress::Progress;
use crate::output::say::{self, aside, say};
use crate::pattern::Pattern;
use crate::sizes::{Size, rate, time};

/// Measures; returns what `--json` prints.
pub(super) fn run(args: &PerfClientArgs) -> Result<Value, Error> {
    if args.size.0 == 0 {
        return Err(Error::Usage {
            what: "a size of 0 has no rate".into(),
            hint: "give --size 1 or more".into(),
        });
    }
    let memory = Devices::probe().choose(&args.place.memory(), 0)?;
    let link = Link::new(&args.link, &memory, false)?;
    let connection = link.connect(&args.link, &args.server)?;
    say!("{}", link.describe(&connection, &memory));
    let work = Work {
        bytes: args.size.0,
        iterations: args.iterations,
        limit: args.link.timeout.0,
        debug: say::is_debug(),
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
    /// Transfers that are timed.
    pub(super) iterations: u32,
    /// Longest time that a step may stand still.
    pub(super) limit: Duration,
    /// Say each transfer's time.
    pub(super) debug: bool,
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
    let path = connection.path().to_owned();
    let measured = link::part_after(connection, measured)?;
    measured.summary(work, path, [memory.describe(), peer.memory])
}

/// What the timed transfers gave.
struct Measured {
    times: Vec<Duration>,
    ours: Spent,
    theirs: Spent,
}

impl Measured {
    fn summary(&self, work: &Work, path: String, memory: [String; 2]) -> Result<Summary, Error> {
        let figures = Latency::of(&self.times).zip(rate_of(work.bytes, &self.times));
        let (latency_us, gb_per_second) = figures.ok_or_else(|| Error::Failed {
            what: "the transfers took no time that this clock can show".into(),
            hint: "give a larger --size or more --iterations",
        })?;
        #[expect(
            clippy::cast_precision_loss,
            reason = "shown without digits after the point"
        )]
        let fragments_per_transfer = self.theirs.fragments as f64 / f64::from(work.iterations);
        Ok(Summary {
            bytes: work.bytes,
            iterations: work.iterations.into(),
            gb_per_second,
            latency_us,
            sender_percent: Shares::of(&self.ours),
            receiver_percent: Shares::of(&self.theirs),
            fragments_per_transfer,
            cpu_seconds_per_gb: cpu_per_gb(work.bytes, work.iterations, &self.ours, &self.theirs),
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
    let (bytes, limit) = (work.bytes, work.limit);
    let seed = getrandom::u64().map_err(crate::key::KeyError::random)?;
    let source = memory.allocate_pages(bytes)?;
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    let send = || {
        let slice = source
            .slice(..length)
            .map_err(Error::memory("start a send"))?;
        Ok::<_, Error>(connection.send(slice, PAYLOAD).start()?.wait()?)
    };
    let verdict = messages::expect(connection, VERDICT, messages::LONGEST_TRANSFER)?;
    let mut answer = messages::expect(connection, ANSWER, limit)?;
    messages::tell(
        connection,
        REQUEST,
        &Request::Perf {
            bytes,
            iterations: work.iterations,
            seed,
        },
    )?;
    // The server compares before it answers again: 100 MB/s is slow enough for any host.
    let comparing = limit + Duration::from_secs(bytes / 100_000_000);
    for index in 0..REGIONS {
        memory_choice::fill(&source, bytes, Pattern::new(seed.wrapping_add(index)))?;
        messages::ready(answer)?;
        answer = messages::expect(connection, ANSWER, comparing)?;
        send()?;
    }
    messages::ready(answer)?;
    go()?;
    let mut progress = Progress::new("sending", bytes.saturating_mul(work.iterations.into()));
    let mut times = Vec::with_capacity(usize::try_from(work.iterations).unwrap_or(0));
    let mut ours = Spent::default();
    let cpu = ProcessorTime::start();
    for index in 0..work.iterations {
        let report = send()?;
        ours.add(&report);
        times.push(report.elapsed);
        if work.debug {
            let speed = rate(bytes, report.elapsed).unwrap_or_default();
            aside!(
                "debug: iteration {index}: {} in {}, {speed:.3} GB/s",
                Size(bytes),
                time(report.elapsed)
            );
        }
        progress.at(bytes.saturating_mul(u64::from(index) + 1));
    }
    ours.cpu = cpu.microseconds();
    match verdict.wait_at_most(limit, "a verdict")? {
        Verdict::Passed {
            spent: Some(theirs),
            ..
        } => Ok(Measured {
            times,
            ours,
            theirs,
        }),
        Verdict::Passed { .. } => Err(Error::Unexpected {
            expected: "the server's times",
            arrived: "a verdict without them".into(),
        }),
        Verdict::Failed { why, hint } => Err(Error::Peer { what: why, hint }),
    }
}
