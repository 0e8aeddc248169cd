//! Flags of `tcpx plugin`, and of the process that it starts.

use std::path::PathBuf;

use clap::Args;

use crate::sizes::Limit;

#[derive(Args, Clone, Debug)]
pub(crate) struct PluginArgs {
    /// The plugin's file.
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Version of the plugin's table, v5 to v12 [default: its newest].
    #[arg(long, value_name = "vN", value_parser = super::link::abi)]
    pub(crate) abi: Option<u8>,
    /// End the plugin's process if one step takes longer.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(crate) timeout: Limit,
}

/// What the process that loads the plugin is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct PluginPartArgs {
    pub(crate) path: PathBuf,
    #[arg(long, value_parser = super::link::abi)]
    pub(crate) abi: Option<u8>,
}
