//! `tcpx bench`: what a host's network can do, beside what others do there.

pub(crate) mod file;
pub(crate) mod net;

use std::fs;
use std::path::Path;

use crate::args::bench::{BenchArgs, BenchCommand};
use crate::error::Error;
use crate::output::json::Told;

/// Runs the benchmark.
pub(crate) fn run(args: &BenchArgs) -> Result<Told, Error> {
    let BenchCommand::Net(args) = &args.what;
    net::run(args).map(|()| Told::Nothing)
}

/// Finds out before anything is measured; what the file holds stays until there are figures.
fn can_write(path: &Path) -> Result<(), Error> {
    let opened = fs::OpenOptions::new().create(true).append(true).open(path);
    opened.map(drop).map_err(|source| Error::Io {
        doing: "write",
        path: path.to_owned(),
        source,
    })
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(|source| Error::Io {
        doing: "write",
        path: path.to_owned(),
        source,
    })
}
