//! `tcpx perf`: bandwidth and latency between hosts, with contents compared before any rate is printed.

mod client;
mod matrix;
mod world;

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tcpx::Connection;

use crate::args::perf::{PerfArgs, PerfServerArgs, PerfSide, Place};
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::output::json::Told;
use crate::output::say::{aside, say};
use crate::sizes::Amount;
use crate::{interrupt, measuring};

/// What the JSON of a server that stays is called, a line for each client.
const SCHEMA: &str = "tcpx.perf";

/// Runs one side.
pub(crate) fn run(args: &PerfArgs) -> Result<Told, Error> {
    match &args.side {
        None => matrix::run(&args.matrix),
        Some(PerfSide::Server(args)) => serve(args),
        Some(PerfSide::Client(args)) => client::run(args),
    }
}

/// Serves one client, or with `--keep` all that come.
fn serve(args: &PerfServerArgs) -> Result<Told, Error> {
    let memory = Devices::probe().choose(&Place::memory_of(args.place), 0)?;
    let mut link = Link::new(&args.link, &memory, true)?;
    if args.keep {
        interrupt::listen()?;
        link = link.for_many();
    }
    let place = args.place.map(|place| format!(" {place}"));
    let command = format!("perf client SERVER_IP{}", place.unwrap_or_default());
    link.invite(&args.link, &command)?;
    let running = AtomicUsize::new(0);
    let session = |connection| session(args, &link, &memory, &running, connection);
    match args.keep {
        true => link.serve_together(SCHEMA, session),
        false => session(link.accept(Some(args.link.wait.0))?),
    }
}

/// One client; `running` counts those that are measured.
fn session(
    args: &PerfServerArgs,
    link: &Link,
    memory: &MemoryChoice,
    running: &AtomicUsize,
    connection: Connection,
) -> Result<Told, Error> {
    say!("{}", link.describe(&connection, memory));
    let beside = running.fetch_add(1, Ordering::Relaxed);
    if beside > 0 {
        aside!(
            "note: clients measured at the same time: {}; their rates share this host",
            beside + 1
        );
    }
    let served = measuring::serve(&connection, memory, args.link.timeout.0);
    running.fetch_sub(1, Ordering::Relaxed);
    let served = link::part_after(connection, served)?;
    let contents = if served.verified {
        "contents verified"
    } else {
        "contents not compared"
    };
    let bytes = Amount(served.bytes);
    say!("measured with {bytes}, {contents}; the client has the figures");
    let fields = json!({ "bytes": served.bytes, "verified": served.verified });
    Ok(Told::Fields(fields))
}
