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
    /// Device of the plugin that the self-test uses, counted from 0.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) plugin_device: usize,
    /// Set this variable for the plugin before it is loaded; it wins over the environment and over what tcpx chooses. May be given again.
    #[arg(long, value_name = "NAME=VALUE", value_parser = super::link::assignment)]
    pub(crate) plugin_env: Vec<(String, String)>,
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
    #[arg(long)]
    pub(crate) device: usize,
    #[arg(long)]
    pub(crate) timeout_ms: u64,
}
