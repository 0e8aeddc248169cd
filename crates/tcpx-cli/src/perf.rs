//! `tcpx perf`: bandwidth and latency between two hosts, with contents compared before any rate is printed.

mod client;
mod matrix;
mod server;
pub(crate) mod summary;
mod world;

use crate::args::perf::{PerfArgs, PerfSide};
use crate::error::Error;
use crate::output::json::Told;

/// Runs one side.
pub(crate) fn run(args: &PerfArgs) -> Result<Told, Error> {
    match &args.side {
        None => matrix::run(&args.matrix),
        Some(PerfSide::Server(args)) => server::run(args),
        Some(PerfSide::Client(args)) => client::run(args).map(Told::Fields),
    }
}
