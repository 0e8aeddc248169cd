//! `tcpx bench`: the network over sizes, directions and depths, with its peers in the same rotation; and reports.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use tcpx_bench::process::Process;
use tcpx_bench::report::Subject;
use tcpx_bench::rotation::{Peer, Plan};
use tcpx_bench::{Mode, Op, Run, iperf3};

use crate::args::bench::{BenchArgs, BenchCommand, NetArgs, PeerArg, ShowArgs};
use crate::args::perf::Place;
use crate::error::Error;
use crate::host::{HostFacts, RealHost};
use crate::link::{self, Link};
use crate::measuring;
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::output::json::{self, Told};
use crate::output::say::{self, aside, say};
use crate::second_process::{Second, place_for_second};
use crate::sizes::Size;

/// Measures, or shows what was measured.
pub(crate) fn run(args: &BenchArgs) -> Result<Told, Error> {
    match &args.what {
        BenchCommand::Net(args) => net(args),
        BenchCommand::Show(args) => merge(args),
    }
    .map(|()| Told::Nothing)
}

/// Refuses what has no rate.
pub(crate) fn some_bytes(size: Size) -> Result<(), Error> {
    match size.0 {
        0 => Err(Error::usage(
            "a message of 0 bytes has no rate",
            "give a size of 1 byte or more",
        )),
        _ => Ok(()),
    }
}

/// The line about the host, which begins with its devices.
pub(crate) fn machine(memory: &MemoryChoice, devices: &Devices) -> String {
    let facts = HostFacts::of(&RealHost::default()).line();
    match &memory.gpu {
        Some(gpu) => format!("{} x {}, {facts}", devices.count(), gpu.info().name),
        None => format!("host memory, {facts}"),
    }
}

/// Prints a report: the table, or the file.
pub(crate) fn show(subject: &Subject) -> Result<(), Error> {
    if say::is_json() {
        return json::print_text(subject.json().trim_end());
    }
    say!("{}", subject.table().trim_end());
    subject.notes.iter().for_each(|note| say!("{note}"));
    Ok(())
}

/// What the arguments ask for, small messages first.
fn cases(args: &NetArgs) -> Result<Vec<Run>, Error> {
    let mut cases = Vec::new();
    for size in &args.sizes {
        some_bytes(*size)?;
        for mode in &args.modes {
            let depths = match mode {
                Mode::Latency => &[1][..],
                _ => &args.in_flight[..],
            };
            let run = |depth: &u16| Run::new(*mode, Op::Send, size.0, 1, *depth);
            cases.extend(depths.iter().map(run));
        }
    }
    Ok(cases)
}

/// Makes a peer ready.
fn peer(arg: &PeerArg) -> Result<Peer, Error> {
    Ok(match arg {
        PeerArg::Raw => Peer::Plain,
        PeerArg::Iperf3 => {
            aside!("beside it: {}", iperf3::version()?);
            Peer::Iperf3
        }
        PeerArg::Other(name, words) => {
            let mut command = Command::new(&words[0]);
            // A group of its own: it is stopped while it has no turn, if it polls.
            command.args(&words[1..]).process_group(0);
            let process =
                Process::start(&mut command).map_err(Error::io("start", Path::new(&words[0])))?;
            Peer::Other(name.clone(), process)
        }
    })
}

fn net(args: &NetArgs) -> Result<(), Error> {
    let peers: Result<_, Error> = args.peers.iter().map(peer).collect();
    let mut plan = Plan {
        cases: cases(args)?,
        ops: args.ops.clone(),
        piece: args.piece_bytes.map_or(0, |size| size.0),
        peers: peers?,
        rounds: args.rounds,
        span: args.span.0,
    };
    let devices = Devices::probe();
    let memory = devices.choose(&Place::memory_of(args.from), 0)?;
    let to = args.to;
    let to = to.unwrap_or_else(|| place_for_second(&memory, devices.count()));
    let second = Second::start(&["perf", "server", &to.to_string()], &args.link)?;
    let link_args = second.link(&args.link);
    let link = Link::new(&link_args, &memory, false)?;
    let connection = link.connect(&link_args, &second.address().to_string())?;
    say!("{}", link.describe(&connection, &memory));
    let (path, peer) = (connection.path(), connection.peer().memory.clone());
    let measured = measuring::measure(&connection, &memory, args.link.timeout.0, |meter| {
        Ok(plan.measure(meter, |bytes| {
            if !say::is_json() {
                aside!("measuring messages of {}, contents verified", Size(bytes));
            }
        })?)
    });
    let (rows, beside) = link::part_after(connection, measured)?;
    drop(second);
    let mut notes = vec![
        "Each run is one measurement in its round; the contenders of a case take turns within a round. Contents of every size were compared before anything was timed.".to_owned(),
    ];
    if !beside.is_empty() {
        notes.push(format!(
            "Beside it: {}. `raw` are plain send and receive loops over host memory with as many streams in one process, a thread for each end of each; a message is divided among them.",
            beside.join("; ")
        ));
    }
    let ends = format!("Network, {} -> {}", short(memory.name()), short(&peer));
    let mut subject = Subject::new(&ends, machine(&memory, &devices), rows, notes);
    subject.path = Some(path);
    show(&subject)
}

/// One report out of the files of repeated runs.
fn merge(args: &ShowArgs) -> Result<(), Error> {
    let read = |path: &std::path::PathBuf| {
        let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
        Subject::parse(&text).map_err(|why| {
            let hint = "give files that `tcpx bench net --json` or `tcpx perf client --json` made";
            Error::failed(format!("{}: {why}", path.display()), hint)
        })
    };
    let subjects = args.files.iter().map(read).collect::<Result<_, _>>()?;
    let Some(mut merged) = Subject::merge(subjects) else {
        return Err(Error::usage("no file is given", "name one or more"));
    };
    for (field, given) in [
        (&mut merged.subject, &args.subject),
        (&mut merged.machine, &args.machine),
        (&mut merged.command, &args.command),
    ] {
        if let Some(given) = given {
            field.clone_from(given);
        }
    }
    merged.notes.extend(args.notes.iter().cloned());
    show(&merged)
}
