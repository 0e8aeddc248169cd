//! `tcpx perf`: bandwidth and latency between two hosts, with contents compared before any rate is printed.

mod client;
mod server;
pub(crate) mod summary;

use crate::args::perf::{PerfArgs, PerfSide};
use crate::error::Error;

/// Runs one side.
pub(crate) fn run(args: &PerfArgs) -> Result<(), Error> {
    match &args.side {
        PerfSide::Server(args) => server::run(args),
        PerfSide::Client(args) => client::run(args),
    }
}

/// Regions that take turns, so that the next transfer is matched while the last one is finished off.
const REGIONS: u64 = 2;
