//! Flags of `tcpx bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::link::LinkArgs;
use super::perf::Place;
use crate::sizes::{Limit, Size};

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare the unpackers with copies and with a plain kernel on one GPU.
    Unpack(UnpackArgs),
    /// Measure the network over sizes, directions and depths, with other programs in the same rotation.
    Net(Box<NetArgs>),
}

#[derive(Args, Debug)]
pub(crate) struct UnpackArgs {
    /// GPU to measure on.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: u32,
    /// Rounds over all cases; the figures are medians over them, with the least and the most.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// Print a benchmark file (see benchmarks/README.md) and nothing else on standard output.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the table as comma-separated values.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Write a plot of the rates as SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct NetArgs {
    /// Serve one benchmark from this memory (a GPU's number or `host`), then end.
    #[arg(long, value_name = "PLACE", conflicts_with_all = ["server", "to"])]
    pub(crate) serve: Option<Place>,
    /// Host where `tcpx bench net --serve` runs [default: a second process on this host].
    #[arg(long, value_name = "SERVER_IP")]
    pub(crate) server: Option<String>,
    /// Memory at this end: a GPU's number or `host` [default: GPU 0 if there is one].
    #[arg(long, value_name = "PLACE")]
    pub(crate) from: Option<Place>,
    /// Memory of the second process on this host [default: the next GPU if there is one].
    #[arg(long, value_name = "PLACE", conflicts_with = "server")]
    pub(crate) to: Option<Place>,
    /// Sizes of a message.
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB,1GiB"
    )]
    pub(crate) sizes: Vec<Size>,
    /// What is measured: round trips, one direction, both directions at once.
    #[arg(long, value_enum, value_name = "MODE,...", value_delimiter = ',', default_values = ["latency", "one", "both"])]
    pub(crate) modes: Vec<ModeName>,
    /// Messages in flight when streaming.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "8"], value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) in_flight: Vec<u16>,
    /// Rounds over all cases, contenders taking turns; the figures are medians over them.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// How long one measurement should take.
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    pub(crate) span: Limit,
    /// What to measure beside it: `raw` are plain send and receive loops over host memory, `iperf3` the program.
    #[arg(long = "peer", value_enum, value_name = "PEER")]
    pub(crate) peers: Vec<PeerName>,
    /// Print a benchmark file (see benchmarks/README.md) and nothing else on standard output.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write every figure as comma-separated values.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Write a plot of the rates as SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeName {
    /// Half a round trip, one message at a time.
    Latency,
    /// From this end to the other.
    One,
    /// Both directions at once; rates are sums.
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum PeerName {
    /// Plain loops over as many streams, sockets set up the same way.
    Raw,
    /// The program of that name, which must be installed at both ends.
    Iperf3,
}
