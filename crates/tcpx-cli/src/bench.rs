//! `tcpx bench`: what a host's network can do, beside what others do there.

pub(crate) mod file;
pub(crate) mod net;

use crate::args::bench::{BenchArgs, BenchCommand};
use crate::error::Error;
use crate::output::json::Told;

/// Runs the benchmark.
pub(crate) fn run(args: &BenchArgs) -> Result<Told, Error> {
    let BenchCommand::Net(args) = &args.what;
    net::run(args).map(|()| Told::Nothing)
}
