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
mod runs;
pub(crate) mod server;

use tcpx::Congestion;

use super::{can_write, write};
use crate::args::bench::{ModeName, NetArgs, OpName, PeerName};
use crate::args::perf::Place;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::output::json;
use crate::output::say::{self, aside, say};
use crate::second_process::{Second, place_for_second};
use crate::sizes::Size;

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
        return Err(Error::Usage {
            what: "a message of 0 bytes has no rate".into(),
            hint: "give --sizes of 1 byte or more".into(),
        });
    }
    // Not after minutes of measuring.
    for path in [&args.csv, &args.plot].into_iter().flatten() {
        can_write(path)?;
    }
    if args.peers.contains(&PeerName::Iperf3) {
        let version = iperf3::version()?;
        aside!("beside it: {version}");
    }
    let devices = Devices::probe();
    let from = args.from.map(Place::memory).unwrap_or_default();
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
        path: connection.path().to_owned(),
        devices: devices_of(&memory, &devices),
        command: command(args),
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
        write(path, &results.csv())?;
    }
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&results, &about))?;
    }
    Ok(())
}

fn devices_of(memory: &MemoryChoice, devices: &Devices) -> String {
    match &memory.gpu {
        Some(gpu) => format!("{} x {}", devices.count(), gpu.info().name),
        None => "host memory".to_owned(),
    }
}

/// The command as it was typed, without where files go.
fn command(args: &NetArgs) -> String {
    let mut words = vec!["tcpx bench net".to_owned()];
    if let Some(server) = &args.server {
        words.push(format!("--server {server}"));
    }
    for (flag, place) in [("--from", args.from), ("--to", args.to)] {
        words.extend(place.map(|place| format!("{flag} {place}")));
    }
    words.extend(what(args));
    words.push(format!(
        "--rounds {} --span {}ms",
        args.rounds,
        args.span.0.as_millis()
    ));
    if let Congestion::Named(name) = args.link.network.congestion() {
        words.push(format!("--congestion {name}"));
    }
    for peer in &args.peers {
        words.push(match peer {
            PeerName::Raw => "--peer raw".to_owned(),
            PeerName::Iperf3 => "--peer iperf3".to_owned(),
        });
    }
    words.push("--json".to_owned());
    words.join(" ")
}

/// Flags that say what is measured.
fn what(args: &NetArgs) -> Vec<String> {
    let join = |items: Vec<String>| items.join(",");
    let mut words = Vec::new();
    if args.cases.is_empty() {
        let size = |size: &Size| {
            size.to_string()
                .replace([' ', ','], "")
                .replace("bytes", "B")
        };
        words.push(format!(
            "--sizes {}",
            join(args.sizes.iter().map(size).collect())
        ));
        let modes = args.modes.iter().map(ModeName::to_string);
        words.push(format!("--modes {}", join(modes.collect())));
        let depths = args.in_flight.iter().map(u16::to_string);
        words.push(format!("--in-flight {}", join(depths.collect())));
    } else {
        words.extend(args.cases.iter().map(|case| format!("--case {case}")));
    }
    if !args.ops.is_empty() {
        let ops = args.ops.iter().map(OpName::to_string);
        words.push(format!("--op {}", join(ops.collect())));
    }
    if args.at_once {
        words.push("--at-once".to_owned());
    }
    words
}
