//! `tcpx bench`: the network over sizes, directions and depths, with its peers in the same
//! rotation; and reports.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use clap::{Args, Subcommand};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tcpx_bench::orders::MOST_IN_FLIGHT;
use tcpx_bench::process::Process;
use tcpx_bench::report::Subject;
use tcpx_bench::rotation::{Peer, Plan};
use tcpx_bench::{Mode, Op, Run, iperf3};

use crate::args::link::LinkArgs;
use crate::error::Error;
use crate::host::{HostFacts, RealHost};
use crate::link::{self, Link};
use crate::measuring;
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::output::json::{self, Told};
use crate::output::say::{self, aside, say};
use crate::perf::Place;
use crate::second_process::{Second, place_for_second};
use crate::sizes::{Limit, Size};

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure this host over sizes, directions and depths, beside other programs in the same
    /// rounds.
    Net(Box<NetArgs>),
    /// Print one report of the files that --json left.
    Show(ShowArgs),
}

#[derive(Args, Debug)]
pub(crate) struct NetArgs {
    /// Memory at this end: a GPU's number or `host` [default: GPU 0 if there is one].
    #[arg(long, value_name = "PLACE")]
    pub(crate) from: Option<Place>,
    /// Memory of the second process on this host [default: the next GPU if there is one].
    #[arg(long, value_name = "PLACE")]
    pub(crate) to: Option<Place>,
    /// Sizes of a message.
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB,1GiB"
    )]
    pub(crate) sizes: Vec<Size>,
    /// What is measured: round trips, one direction (`back`: to this end), both directions at once.
    #[arg(long, value_parser = named::<Mode>, value_name = "MODE,...", value_delimiter = ',', default_value = "latency,one,both")]
    pub(crate) modes: Vec<Mode>,
    /// Messages in flight when streaming.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_IN_FLIGHT)))]
    pub(crate) in_flight: Vec<u16>,
    /// One-sided operations to measure beside send and receive, in the same rounds: put, get.
    #[arg(long = "op", value_parser = named::<Op>, value_name = "OP,...", value_delimiter = ',')]
    pub(crate) ops: Vec<Op>,
    /// Also puts and gets of as many bytes in pieces of this size, in any order, that a batch
    /// lists.
    #[arg(long, value_name = "SIZE", requires = "ops")]
    pub(crate) piece_bytes: Option<Size>,
    /// Rounds over all cases, contenders taking turns; the figures are medians over them.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// How long one measurement should take.
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    pub(crate) span: Limit,
    /// Peers to measure in the same rounds: `raw` (plain send and receive loops over host memory,
    /// as many streams set up the same way), `iperf3` (where it is installed), or NAME=COMMAND,
    /// which measures another library on command (`python -m tcpx.bench` has some).
    #[arg(long = "peer", value_name = "PEER,...", value_delimiter = ',')]
    pub(crate) peers: Vec<PeerArg>,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ShowArgs {
    /// Files of repeated runs: a figure that several have is the spread over them.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Heading, in place of the first file's.
    #[arg(long, value_name = "TEXT")]
    pub(crate) subject: Option<String>,
    /// What says of the machine, in place of the first file's.
    #[arg(long, value_name = "TEXT")]
    pub(crate) machine: Option<String>,
    /// What repeats the measurement, in place of the files' commands.
    #[arg(long, value_name = "TEXT")]
    pub(crate) command: Option<String>,
    /// A sentence beside those of the files.
    #[arg(long = "note", value_name = "TEXT")]
    pub(crate) notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerArg {
    Raw,
    Iperf3,
    /// Its name, and the words of the command.
    Other(String, Vec<String>),
}

impl FromStr for PeerArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            None if text == "raw" => Ok(Self::Raw),
            None if text == "iperf3" => Ok(Self::Iperf3),
            Some((name, command)) if !name.is_empty() && !command.trim().is_empty() => {
                let words = command.split_whitespace().map(str::to_owned);
                Ok(Self::Other(name.to_owned(), words.collect()))
            }
            _ => Err("expected `raw`, `iperf3`, or NAME=COMMAND"),
        }
    }
}

/// A word that is known to the protocol of orders, such as `one` of a [`Mode`].
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let found = serde_json::from_value(Value::String(text.to_owned()));
    found.map_err(|error| error.to_string())
}

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
    let read = |path: &PathBuf| {
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
