//! `tcpx perf`: bandwidth and latency between hosts, with contents compared before any rate is
//! printed.

mod client;
mod matrix;
mod world;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::{Args, Subcommand};
use serde_json::json;
use tcpx::Connection;
use tcpx_bench::orders::MOST_IN_FLIGHT;

use crate::args::link::{LinkArgs, MemoryArgs};
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::output::json::Told;
use crate::output::say::{aside, say};
use crate::sizes::{Amount, Limit, Size};
use crate::{interrupt, measuring};

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_value_name = "SIDE")]
pub(crate) struct PerfArgs {
    #[command(subcommand)]
    pub(crate) side: Option<PerfSide>,
    #[command(flatten)]
    pub(crate) matrix: MatrixArgs,
}

/// Without a side: every pair of hosts and GPUs, by the same command on every host.
#[derive(Args, Debug)]
pub(crate) struct MatrixArgs {
    /// Measure every pair of the hosts in this file, one address a line, on each of which this same
    /// command runs [default: what torchrun, mpirun, srun or a Kubernetes indexed job started
    /// together].
    #[arg(long, value_name = "FILE")]
    pub(crate) hosts: Option<PathBuf>,
    /// Bytes of one transfer.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) size: Size,
    /// Transfers that are timed for each pair.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) rounds: u32,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PerfSide {
    /// Receive, and check what arrives.
    Server(PerfServerArgs),
    /// Send, measure and report.
    Client(PerfClientArgs),
}

#[derive(Args, Debug)]
pub(crate) struct PerfServerArgs {
    /// Memory that takes part: a GPU's number or `host` [default: GPU 0 if there is one].
    #[arg(value_name = "PLACE")]
    pub(crate) place: Option<Place>,
    /// Stay for more clients, until a signal ends it.
    #[arg(short, long)]
    pub(crate) keep: bool,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
}

#[derive(Args, Debug)]
pub(crate) struct PerfClientArgs {
    /// Address of the server.
    #[arg(value_name = "SERVER_IP")]
    pub(crate) server: String,
    /// Memory that takes part: a GPU's number or `host` [default: GPU 0 if there is one].
    #[arg(value_name = "PLACE")]
    pub(crate) place: Option<Place>,
    /// Bytes of one transfer.
    #[arg(
        short,
        long,
        value_name = "SIZE",
        env = "UCCL_TCPX_PERF_SIZE",
        default_value = "4MiB"
    )]
    pub(crate) size: Size,
    /// Measure so many transfers instead of for a time.
    #[arg(short = 'n', long, value_name = "N", env = "UCCL_TCPX_PERF_ITERS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iterations: Option<u32>,
    /// Measure for this long [default: 3s].
    #[arg(short, long, value_name = "TIME")]
    pub(crate) time: Option<Limit>,
    /// Print the rate of each such part of the time.
    #[arg(short, long, value_name = "TIME")]
    pub(crate) interval: Option<Limit>,
    /// The server sends, the client receives.
    #[arg(short = 'R', long, conflicts_with = "bidir")]
    pub(crate) reverse: bool,
    /// Both send at once; rates are sums.
    #[arg(long)]
    pub(crate) bidir: bool,
    /// Transfers of one direction under way at a time.
    #[arg(short = 'P', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_IN_FLIGHT)))]
    pub(crate) in_flight: u16,
    /// Leave the first part out of the figures.
    #[arg(short = 'O', long, value_name = "TIME", default_value = "200ms")]
    pub(crate) warm_up: Limit,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
}

/// `0`, `1`, ... or `host`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Gpu(u32),
    Host,
}

impl Place {
    /// The memory of a place that may be left out: then what the other commands take without a
    /// flag.
    pub(crate) fn memory_of(place: Option<Self>) -> MemoryArgs {
        place.map(Self::memory).unwrap_or_default()
    }

    /// The same as the flags of the other commands.
    pub(crate) fn memory(self) -> MemoryArgs {
        match self {
            Self::Gpu(number) => MemoryArgs {
                gpu: Some(number),
                host: false,
            },
            Self::Host => MemoryArgs {
                gpu: None,
                host: true,
            },
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(number) => write!(f, "{number}"),
            Self::Host => f.write_str("host"),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "host" {
            return Ok(Self::Host);
        }
        text.parse()
            .map(Self::Gpu)
            .map_err(|_| format!("expected the number of a GPU or `host`, got `{text}`"))
    }
}

/// What the JSON of a server that stays is called, a line for each client.
const SCHEMA: &str = "tcpx.perf";

/// Runs one side.
pub(crate) fn run(args: &PerfArgs) -> Result<Told, Error> {
    match &args.side {
        None => matrix::run(&args.matrix),
        Some(PerfSide::Server(args)) => serve(args),
        Some(PerfSide::Client(args)) => client::run(args),
    }
}

/// Serves one client, or with `--keep` all that come.
fn serve(args: &PerfServerArgs) -> Result<Told, Error> {
    let memory = Devices::probe().choose(&Place::memory_of(args.place), 0)?;
    let mut link = Link::new(&args.link, &memory, true)?;
    if args.keep {
        interrupt::listen()?;
        link = link.for_many();
    }
    let place = args.place.map(|place| format!(" {place}"));
    let command = format!("perf client SERVER_IP{}", place.unwrap_or_default());
    link.invite(&args.link, &command)?;
    let running = AtomicUsize::new(0);
    let session = |connection| session(args, &link, &memory, &running, connection);
    match args.keep {
        true => link.serve_together(SCHEMA, session),
        false => session(link.accept(Some(args.link.wait.0))?),
    }
}

/// One client; `running` counts those that are measured.
fn session(
    args: &PerfServerArgs,
    link: &Link,
    memory: &MemoryChoice,
    running: &AtomicUsize,
    connection: Connection,
) -> Result<Told, Error> {
    say!("{}", link.describe(&connection, memory));
    let beside = running.fetch_add(1, Ordering::Relaxed);
    if beside > 0 {
        aside!(
            "note: clients measured at the same time: {}; their rates share this host",
            beside + 1
        );
    }
    let served = measuring::serve(&connection, memory, args.link.timeout.0);
    running.fetch_sub(1, Ordering::Relaxed);
    let served = link::part_after(connection, served)?;
    let contents = if served.verified {
        "contents verified"
    } else {
        "contents not compared"
    };
    let bytes = Amount(served.bytes);
    say!("measured with {bytes}, {contents}; the client has the figures");
    let fields = json!({ "bytes": served.bytes, "verified": served.verified });
    Ok(Told::Fields(fields))
}
