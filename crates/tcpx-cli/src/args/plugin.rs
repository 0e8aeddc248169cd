//! Flags of `tcpx plugin`.

use std::path::PathBuf;

use clap::Args;

use crate::args::link::abi;
use crate::sizes::Limit;

#[derive(Args, Debug)]
pub(crate) struct PluginArgs {
    /// The plugin file; without it the vendor's, or our own.
    #[arg(value_name = "PATH", env = "UCCL_TCPX_PLUGIN_PATH")]
    pub(crate) path: Option<PathBuf>,
    /// Use the table of one version instead of the newest.
    #[arg(long, value_name = "vN", value_parser = abi)]
    pub(crate) abi: Option<u8>,
    /// The plugin's device for the self-test.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) device: usize,
    /// Leave the self-test out.
    #[arg(long)]
    pub(crate) no_test: bool,
    /// Longest time that the plugin's start, or a transfer of the self-test, may stand still.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(crate) timeout: Limit,
    /// Print one JSON document and nothing else on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}
