//! Flags of `tcpx bench`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};

use super::link::LinkArgs;
use super::perf::Place;
use crate::bench::net::orders::{Layout, Mode, Op};
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
}

#[derive(Args, Debug)]
pub(crate) struct NetArgs {
    /// Serve one benchmark with this memory (a GPU's number or `host`), then end.
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
    #[arg(
        long,
        value_enum,
        value_name = "MODE,...",
        value_delimiter = ',',
        default_value = "latency,one,both"
    )]
    pub(crate) modes: Vec<Mode>,
    /// Messages in flight when streaming.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) in_flight: Vec<u16>,
    /// One case instead of all combinations: latency, one or both, a size, and how many are in flight; a name in front is for --runs.
    #[arg(hide = true, long = "case", value_name = "[NAME=]MODE:SIZE[:N]", conflicts_with_all = ["sizes", "modes", "in_flight"])]
    pub(crate) cases: Vec<CaseArg>,
    /// One-sided operations to measure beside send and receive, in the same rounds.
    #[arg(long = "op", value_enum, value_name = "OP,...", value_delimiter = ',')]
    pub(crate) ops: Vec<Op>,
    /// Bytes of each piece of a batch [default: 64 pieces a message].
    #[arg(long, value_name = "SIZE")]
    pub(crate) piece_bytes: Option<Size>,
    /// Messages of so many pieces, in place of --sizes.
    #[arg(long, value_name = "N", requires = "piece_bytes", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) pieces: Option<u32>,
    /// Order of the pieces in their batch.
    #[arg(
        long,
        value_enum,
        value_name = "LAYOUT",
        default_value = "shuffled",
        requires = "piece_bytes"
    )]
    pub(crate) layout: Layout,
    /// Start each message without waiting for work on the GPU's default streams.
    #[arg(hide = true, long)]
    pub(crate) at_once: bool,
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
    /// Write each measurement to DIR/CASE.WHO.N.json, for bench-collect; N counts on from what is there.
    #[arg(hide = true, long, value_name = "DIR")]
    pub(crate) runs: Option<PathBuf>,
    /// Write every figure as comma-separated values.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Write a plot of the rates as SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum PeerName {
    /// Plain loops over as many streams, sockets set up the same way.
    Raw,
    /// The program of that name, which must be installed at both ends.
    Iperf3,
}

/// `4m-8=one:4MiB:8`, `latency:8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CaseArg {
    /// For files: letters, digits, `-` and `_`.
    pub(crate) name: Option<String>,
    pub(crate) mode: Mode,
    pub(crate) size: Size,
    pub(crate) in_flight: u16,
}

impl FromStr for CaseArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected MODE:SIZE:N, as in `one:4MiB:8`, got `{text}`");
        let (name, case) = match text.split_once('=') {
            Some((name, case)) => (Some(name), case),
            None => (None, text),
        };
        let is_plain = |name: &str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            !name.is_empty() && name.bytes().all(plain)
        };
        if let Some(bad) = name.filter(|name| !is_plain(name)) {
            return Err(format!(
                "`{bad}` names files: take letters, digits, - and _ only"
            ));
        }
        let mut parts = case.split(':');
        let (Some(mode), Some(size)) = (parts.next(), parts.next()) else {
            return Err(expected());
        };
        let mode = Mode::from_str(mode, false)
            .map_err(|_| format!("expected latency, one or both, got `{mode}`"))?;
        let in_flight = match parts.next() {
            None => 1,
            Some(count) => count
                .parse()
                .ok()
                .filter(|count| (1..=64).contains(count))
                .ok_or_else(|| format!("expected 1 to 64 messages in flight, got `{count}`"))?,
        };
        if parts.next().is_some() || (mode == Mode::Latency && in_flight > 1) {
            return Err(expected());
        }
        Ok(Self {
            name: name.map(str::to_owned),
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
    fn a_case_is_a_mode_a_size_and_a_number_with_a_name_in_front() {
        for (text, name, mode, bytes, in_flight) in [
            ("4m-8=one:4MiB:8", Some("4m-8"), Mode::One, 4 << 20, 8),
            ("latency:8", None, Mode::Latency, 8, 1),
            ("both:1KiB", None, Mode::Both, 1024, 1),
        ] {
            let case: CaseArg = text.parse().expect(text);
            assert_eq!(case.name.as_deref(), name);
            assert_eq!(
                (case.mode, case.size.0, case.in_flight),
                (mode, bytes, in_flight)
            );
        }
    }

    #[test]
    fn a_case_that_is_none_is_refused_with_what_was_expected() {
        for (text, why) in [
            ("one", "MODE:SIZE:N"),
            ("one:1KiB:8:9", "MODE:SIZE:N"),
            ("latency:8:2", "MODE:SIZE:N"),
            ("two:1KiB", "latency, one or both"),
            ("one:1KiB:0", "1 to 64"),
            ("one:1KiB:65", "1 to 64"),
            ("a/b=one:1KiB", "names files"),
            ("=one:1KiB", "names files"),
        ] {
            let error = text.parse::<CaseArg>().expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!("one:lots".parse::<CaseArg>().is_err());
    }
}
