//! `tcpx bench net`: the network over sizes, directions and depths, with its peers in the same rotation.

mod case;
mod engine;
mod iperf3;
mod measure;
pub(crate) mod meter;
mod one_sided;
pub(crate) mod orders;
mod plot;
mod raw;
mod report;
pub(crate) mod server;

use std::fs::{self, OpenOptions};

use crate::args::bench::{NetArgs, PeerName};
use crate::args::perf::Place;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::output::json;
use crate::output::say::{self, aside, say};
use crate::second_process::{Second, place_for_second};

use measure::Bench;
use meter::Meter;
use report::About;

/// Serves a benchmark, or measures.
pub(super) fn run(args: &NetArgs) -> Result<(), Error> {
    match args.serve {
        Some(place) => server::run(args, place),
        None => measure(args),
    }
}

fn measure(args: &NetArgs) -> Result<(), Error> {
    let cases = args.cases.iter().map(|case| case.size);
    if args
        .sizes
        .iter()
        .copied()
        .chain(cases)
        .any(|size| size.0 == 0)
    {
        return Err(Error::usage(
            "a message of 0 bytes has no rate",
            "give --sizes of 1 byte or more",
        ));
    }
    // Not after minutes of measuring.
    for path in [&args.csv, &args.plot].into_iter().flatten() {
        // What the file holds stays until there are figures.
        let opened = OpenOptions::new().create(true).append(true).open(path);
        opened.map_err(Error::io("write", path))?;
    }
    if args.peers.contains(&PeerName::Iperf3) {
        let version = iperf3::version()?;
        aside!("beside it: {version}");
    }
    let devices = Devices::probe();
    let from = Place::memory_of(args.from);
    let memory = devices.choose(&from, 0)?;
    let (mut link_args, mut second) = (args.link.clone(), None);
    let server = match &args.server {
        Some(server) => server.clone(),
        None => {
            let to = args.to;
            let to = to.unwrap_or_else(|| place_for_second(&memory, devices.count()));
            let to = to.to_string();
            let started = Second::start(&["bench", "net", "--serve", &to], &args.link)?;
            link_args = started.link(&args.link);
            let address = started.address().to_string();
            second = Some(started);
            address
        }
    };
    let link = Link::new(&link_args, &memory, false)?;
    let connection = link.connect(&link_args, &server)?;
    say!("{}", link.describe(&connection, &memory));
    let about = About {
        ends: format!(
            "{} -> {}",
            short(memory.name()),
            short(&connection.peer().memory)
        ),
        path: connection.path(),
        devices: devices_of(&memory, &devices),
    };
    let meter = Meter::begin(&connection, &memory, args.link.timeout.0);
    let measured = meter.and_then(|meter| Bench { meter, args }.run());
    let results = link::part_after(connection, measured)?;
    drop(second);
    if say::is_json() {
        json::print_text(&results.json(&about))?;
    } else {
        say!("{}", results.table());
        for note in &results.notes {
            say!("{note}");
        }
    }
    if let Some(path) = &args.csv {
        fs::write(path, results.csv()).map_err(Error::io("write", path))?;
    }
    if let Some(path) = &args.plot {
        fs::write(path, plot::svg(&results, &about)).map_err(Error::io("write", path))?;
    }
    Ok(())
}

fn devices_of(memory: &MemoryChoice, devices: &Devices) -> String {
    match &memory.gpu {
        Some(gpu) => format!("{} x {}", devices.count(), gpu.info().name),
        None => "host memory".to_owned(),
    }
}
