//! The other side: does its part of what the client measures.

use serde_json::{Value, json};
use tcpx::Connection;

use crate::args::perf::{PerfServerArgs, Place};
use crate::bench::net::server::{self, Served};
use crate::error::Error;
use crate::interrupt;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::output::json::Told;
use crate::output::say::say;
use crate::sizes::Size;

/// What the JSON of a server that stays is called, a line for each client.
const SCHEMA: &str = "tcpx.perf";

/// Serves one client, or with `--keep` one after the other.
pub(super) fn run(args: &PerfServerArgs) -> Result<Told, Error> {
    let memory = Devices::probe().choose(&Place::memory_of(args.place), 0)?;
    let mut link = Link::new(&args.link, &memory, true)?;
    if args.keep {
        interrupt::listen()?;
        link = link.for_many();
    }
    let place = args.place.map(|place| format!(" {place}"));
    let command = format!("perf client SERVER_IP{}", place.unwrap_or_default());
    link.invite(&args.link, &command)?;
    if !args.keep {
        let connection = link.accept(Some(args.link.wait.0))?;
        return session(args, &link, &memory, connection).map(Told::Fields);
    }
    link.serve_each(SCHEMA, |connection| {
        session(args, &link, &memory, connection)
    })
}

/// One client; returns what the JSON holds.
fn session(
    args: &PerfServerArgs,
    link: &Link,
    memory: &MemoryChoice,
    connection: Connection,
) -> Result<Value, Error> {
    say!("{}", link.describe(&connection, memory));
    let served = server::serve(&connection, memory, args.link.timeout.0);
    let Served { bytes, verified } = link::part_after(connection, served)?;
    let contents = if verified {
        "contents verified"
    } else {
        "contents not compared"
    };
    say!(
        "measured with {}, {contents}; the client has the figures",
        Size(bytes)
    );
    Ok(json!({ "bytes": bytes, "verified": verified }))
}
