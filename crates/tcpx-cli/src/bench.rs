//! `tcpx bench`: what a host and its network can do, beside what others do there.

mod cases;
pub(crate) mod file;
pub(crate) mod net;
mod plot;
mod report;
mod targets;
mod ways;

use std::fs;
use std::path::Path;

use crate::args::bench::{BenchArgs, BenchCommand, UnpackArgs};
use crate::error::Error;
use crate::output::json::{self, Told};
use crate::output::say::{self, say};

use cases::Bench;
use report::Report;

/// Runs the chosen benchmark.
pub(crate) fn run(args: &BenchArgs) -> Result<Told, Error> {
    match &args.what {
        BenchCommand::Unpack(args) => unpack(args)?,
        BenchCommand::Net(args) => net::run(args)?,
    }
    Ok(Told::Nothing)
}

fn unpack(args: &UnpackArgs) -> Result<(), Error> {
    let mut bench = Bench::open(args.gpu)?;
    let results = bench.run(args.rounds)?;
    let report = Report::new(bench.gpu(), args.rounds, &results);
    if say::is_json() {
        json::print_text(&report.json())?;
    } else {
        say!("{}", report.table());
    }
    if let Some(path) = &args.csv {
        write(path, &report.csv())?;
    }
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&results))?;
    }
    Ok(())
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
