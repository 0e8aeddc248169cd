//! Flags of `tcpx bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare the unpackers with copies and with a plain kernel on one GPU.
    Unpack(UnpackArgs),
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
