//! The receiving side: posts receives ahead of the sends, compares the first one, and reports its times.

use std::collections::VecDeque;
use std::time::Duration;

use serde_json::{Value, json};
use tcpx::{Connection, Region, Report, Transfer};

use super::REGIONS;
use super::summary::ProcessorTime;
use crate::args::perf::PerfServerArgs;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{self, Devices, MemoryChoice};
use crate::messages::{self, ANSWER, Answer, PAYLOAD, REQUEST, Request, Spent, VERDICT, Verdict};
use crate::output::progress::Progress;
use crate::output::say::say;
use crate::pattern::Pattern;
use crate::sizes::{Size, grouped};

/// Serves one client; returns what `--json` prints.
pub(super) fn run(args: &PerfServerArgs) -> Result<Value, Error> {
    let memory = Devices::probe().choose(&args.place.memory(), 0)?;
    let link = Link::new(&args.link, &memory, true)?;
    let connection = link.serve(&args.link, &format!("perf client SERVER_IP {}", args.place))?;
    say!("{}", link.describe(&connection, &memory));
    let done = one(connection, &memory, args.link.timeout.0)?;
    say!(
        "received {} transfers of {}, contents verified; the client has the figures",
        grouped(done.iterations.into()),
        Size(done.bytes)
    );
    Ok(json!({
        "bytes": done.bytes, "iterations": done.iterations, "verified": true, "spent_us": done.spent,
    }))
}

/// What a client had measured.
#[derive(Debug)]
pub(super) struct Served {
    bytes: u64,
    iterations: u32,
    spent: Spent,
}

/// Serves one client, and closes its connection.
pub(super) fn one(
    connection: Connection,
    memory: &MemoryChoice,
    limit: Duration,
) -> Result<Served, Error> {
    let request = messages::expect(&connection, REQUEST, limit)?.wait("a request to measure")?;
    let Request::Perf {
        bytes,
        iterations,
        seed,
    } = request
    else {
        let expected = "a request to measure";
        let failed = messages::refuse(&connection, expected, &request, "tcpx transfer server");
        return link::part_after(connection, Err(failed));
    };
    let regions = match prove(&connection, memory, bytes, seed) {
        Ok(regions) => regions,
        Err(error) => {
            let refusal = Answer::Refused {
                why: messages::brief(&error.what()),
                hint: messages::brief(&error.hint()),
            };
            let failed = messages::refused(&connection, &refusal, error);
            return link::part_after(connection, Err(failed));
        }
    };
    let result = receive(&connection, &regions, bytes, iterations);
    let verdict = match &result {
        Ok(spent) => Verdict::Passed {
            crc32c: None,
            spent: Some(*spent),
        },
        Err(error) => Verdict::Failed {
            why: messages::brief(&error.what()),
            hint: messages::brief(&error.hint()),
        },
    };
    let told = messages::tell(&connection, VERDICT, &verdict);
    let parted = link::part(connection);
    let spent = result?;
    told.and(parted)?;
    Ok(Served {
        bytes,
        iterations,
        spent,
    })
}

/// One transfer into each region, every byte compared: after it the memory is proven, and warm.
fn prove(
    connection: &Connection,
    memory: &MemoryChoice,
    bytes: u64,
    seed: u64,
) -> Result<Vec<Region>, Error> {
    let mut regions = Vec::new();
    for index in 0..REGIONS {
        let region = memory.allocate_pages(bytes)?;
        memory_choice::poison(&region)?;
        let transfer = post(connection, &region, bytes)?;
        messages::tell(connection, ANSWER, &Answer::Ready)?;
        of_size(&transfer.wait()?, bytes)?;
        memory_choice::compare(&region, bytes, Pattern::new(seed.wrapping_add(index)))?;
        regions.push(region);
    }
    Ok(regions)
}

/// The timed transfers, posted ahead of the sends.
fn receive(
    connection: &Connection,
    regions: &[Region],
    bytes: u64,
    iterations: u32,
) -> Result<Spent, Error> {
    let mut spent = Spent::default();
    let mut progress = Progress::new("receiving", bytes.saturating_mul(iterations.into()));
    let mut posted = VecDeque::with_capacity(regions.len());
    let mut next = 0;
    let mut told = false;
    let cpu = ProcessorTime::start();
    for done in 1..=iterations {
        while next < iterations && posted.len() < regions.len() {
            let region = &regions[next as usize % regions.len()];
            posted.push_back(post(connection, region, bytes)?);
            next += 1;
        }
        if !told {
            messages::tell(connection, ANSWER, &Answer::Ready)?;
            told = true;
        }
        let Some(transfer) = posted.pop_front() else {
            break;
        };
        let report = transfer.wait()?;
        of_size(&report, bytes)?;
        spent.add(&report);
        progress.at(bytes.saturating_mul(done.into()));
    }
    spent.cpu = cpu.microseconds();
    Ok(spent)
}

fn post(connection: &Connection, region: &Region, bytes: u64) -> Result<Transfer, Error> {
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    let slice = region
        .slice(..length)
        .map_err(Error::memory("post a receive"))?;
    Ok(connection.receive(slice, PAYLOAD).start()?)
}

fn of_size(report: &Report, bytes: u64) -> Result<(), Error> {
    if report.bytes == bytes {
        return Ok(());
    }
    Err(Error::Unexpected {
        expected: "transfers of the agreed size",
        arrived: format!("{} bytes instead of {bytes}", report.bytes),
    })
}
