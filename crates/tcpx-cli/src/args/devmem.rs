//! Flags of `tcpx devmem`.

use clap::{Args, Subcommand};

#[derive(Args, Debug)]
pub(crate) struct DevmemArgs {
    #[command(subcommand)]
    pub(crate) what: DevmemCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DevmemCommand {
    /// Show which processes hold queues of network cards, and what they changed there.
    Status,
    /// Undo what dead processes left on network cards.
    Release(ReleaseArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// This interface alone.
    #[arg(value_name = "INTERFACE")]
    pub(crate) interface: Option<String>,
}
