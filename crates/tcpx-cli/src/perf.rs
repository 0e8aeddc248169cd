//! `tcpx perf`: bandwidth and latency between two hosts, with contents compared before any rate is printed.

mod agent;
mod client;
mod hosts;
mod matrix;
mod memory_limit;
mod orders;
mod server;
pub(crate) mod summary;

use serde_json::Value;

use crate::args::perf::{PerfArgs, PerfSide};
use crate::error::Error;
use crate::output::json;
use crate::output::say::{self, Voice};

/// Runs one side.
pub(crate) fn run(args: &PerfArgs) -> Result<(), Error> {
    let (is_json, result) = match &args.side {
        None => return matrix::run(&args.matrix),
        Some(PerfSide::Agent(args)) => return agent::run(args),
        Some(PerfSide::Server(args)) => (args.json, voice(args.json, || server::run(args))),
        Some(PerfSide::Client(args)) => (args.json, voice(args.json, || client::run(args))),
    };
    match result {
        Ok(value) if is_json => json::print(&json::success(SCHEMA, value)),
        Ok(_) => Ok(()),
        Err(error) => {
            if is_json {
                json::print(&json::failure(SCHEMA, &error))?;
            }
            Err(error)
        }
    }
}

/// What `--json` prints.
const SCHEMA: &str = "tcpx.perf";

/// Runs a side; with JSON on standard output the lines for people go elsewhere.
fn voice(is_json: bool, side: impl FnOnce() -> Result<Value, Error>) -> Result<Value, Error> {
    if is_json {
        say::set_voice(Voice::Aside);
    }
    side()
}

/// Regions that take turns, so that the next transfer is matched while the last one is finished off.
const REGIONS: u64 = 2;
