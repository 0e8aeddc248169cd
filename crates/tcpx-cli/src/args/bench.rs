//! Flags of `tcpx bench`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tcpx_bench::orders::MOST_IN_FLIGHT;
use tcpx_bench::{Mode, Op};

use super::link::LinkArgs;
use super::perf::Place;
use crate::sizes::{Limit, Size, SizeError};

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the network over sizes, directions and depths, beside other programs in the same rounds.
    Net(Box<NetArgs>),
    /// Print one report of the files that --json left.
    Show(ShowArgs),
}

#[derive(Args, Debug)]
pub(crate) struct NetArgs {
    /// Host where `tcpx perf server` runs [default: a second process on this host].
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
    /// What is measured: round trips, one direction (`back`: to this end), both directions at once.
    #[arg(long, value_parser = named::<Mode>, value_name = "MODE,...", value_delimiter = ',', default_value = "latency,one,both")]
    pub(crate) modes: Vec<Mode>,
    /// Messages in flight when streaming.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_IN_FLIGHT)))]
    pub(crate) in_flight: Vec<u16>,
    /// One case instead of all combinations: latency, one or both, a size, and how many are in flight.
    #[arg(hide = true, long = "case", value_name = "MODE:SIZE[:N]", conflicts_with_all = ["sizes", "modes", "in_flight"])]
    pub(crate) cases: Vec<CaseArg>,
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
    /// Peers to measure in the same rounds: `raw` (plain send and receive loops over host memory), `iperf3`.
    #[arg(
        long = "peer",
        value_enum,
        value_name = "PEER,...",
        value_delimiter = ','
    )]
    pub(crate) peers: Vec<PeerName>,
    /// Write a plot as SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
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
    /// Write a plot as SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerName {
    /// Plain loops over as many streams, sockets set up the same way.
    Raw,
    /// The program of that name, which must be installed at both ends.
    Iperf3,
}

/// A word that is known to the protocol of orders, such as `one` of a [`Mode`].
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let found = serde_json::from_value(Value::String(text.to_owned()));
    found.map_err(|error| error.to_string())
}

/// `one:4MiB:8`, `latency:8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CaseArg {
    pub(crate) mode: Mode,
    pub(crate) size: Size,
    pub(crate) in_flight: u16,
}

impl FromStr for CaseArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected MODE:SIZE:N, as in `one:4MiB:8`, got `{text}`");
        let parts: Vec<&str> = text.split(':').collect();
        let (mode, size, count) = match parts[..] {
            [mode, size] => (mode, size, "1"),
            [mode, size, count] => (mode, size, count),
            _ => return Err(expected()),
        };
        let mode = named(mode)?;
        let in_flight = count.parse().ok();
        let in_flight = in_flight.filter(|count| (1..=MOST_IN_FLIGHT).contains(count));
        let wrong = || format!("expected 1 to {MOST_IN_FLIGHT} messages in flight, got `{count}`");
        let in_flight = in_flight.ok_or_else(wrong)?;
        if mode == Mode::Latency && in_flight > 1 {
            return Err(expected());
        }
        Ok(Self {
            mode,
            size: size.parse().map_err(|error: SizeError| error.to_string())?,
            in_flight,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_a_mode_a_size_and_a_number() {
        for (text, mode, bytes, in_flight) in [
            ("one:4MiB:8", Mode::One, 4 << 20, 8),
            ("latency:8", Mode::Latency, 8, 1),
        ] {
            let case: CaseArg = text.parse().expect(text);
            let expected = CaseArg {
                mode,
                size: Size(bytes),
                in_flight,
            };
            assert_eq!(case, expected);
        }
        for (text, why) in [
            ("one", "MODE:SIZE:N"),
            ("one:1KiB:8:9", "MODE:SIZE:N"),
            ("latency:8:2", "MODE:SIZE:N"),
            ("two:1KiB", "unknown variant `two`"),
            ("one:1KiB:0", "1 to 64"),
            ("one:lots", "a size such as"),
        ] {
            let error = text.parse::<CaseArg>().expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
