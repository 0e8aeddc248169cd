//! Flags of `tcpx bench`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tcpx_bench::orders::MOST_IN_FLIGHT;
use tcpx_bench::{Mode, Op};

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
    /// Measure this host over sizes, directions and depths, beside other programs in the same rounds.
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
    /// Also puts and gets of as many bytes in pieces of this size, in any order, that a batch lists.
    #[arg(long, value_name = "SIZE", requires = "ops")]
    pub(crate) piece_bytes: Option<Size>,
    /// Rounds over all cases, contenders taking turns; the figures are medians over them.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// How long one measurement should take.
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    pub(crate) span: Limit,
    /// Peers to measure in the same rounds: `raw` (plain send and receive loops over host memory, as many streams set up
    /// the same way), `iperf3` (where it is installed), or NAME=COMMAND, which measures another library on
    /// command (`python -m tcpx.bench` has some).
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
