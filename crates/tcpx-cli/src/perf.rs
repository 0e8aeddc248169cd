//! `tcpx perf`: bandwidth and latency between two hosts, with contents compared before any rate is printed.

mod agent;
mod client;
mod hosts;
mod matrix;
mod memory_limit;
mod orders;
mod server;
pub(crate) mod summary;

use crate::args::perf::{PerfArgs, PerfSide};
use crate::error::Error;

/// Runs one side.
pub(crate) fn run(args: &PerfArgs) -> Result<(), Error> {
    match &args.side {
        None => matrix::run(&args.matrix),
        Some(PerfSide::Server(args)) => server::run(args),
        Some(PerfSide::Client(args)) => client::run(args),
        Some(PerfSide::Agent(args)) => agent::run(args),
    }
}

/// Regions that take turns, so that the next transfer is matched while the last one is finished off.
const REGIONS: u64 = 2;
