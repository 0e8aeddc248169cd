//! Flags of `tcpx devmem`.

use clap::{Args, Subcommand};

use crate::sizes::Limit;

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
    /// Bind, steer, receive and undo on one card, and report each step.
    SelfTest(SelfTestArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// This interface alone.
    #[arg(value_name = "INTERFACE")]
    pub(crate) interface: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct SelfTestArgs {
    /// The card's interface.
    #[arg(value_name = "INTERFACE")]
    pub(crate) interface: String,
    /// GPU whose memory to bind; host memory otherwise.
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<u32>,
    /// Queue to bind; the last free one otherwise.
    #[arg(long, value_name = "N")]
    pub(crate) queue: Option<u32>,
    /// Also wait this long for another host to send, and report where its bytes landed.
    #[arg(long, value_name = "TIME")]
    pub(crate) wait: Option<Limit>,
    /// Port to wait on.
    #[arg(long, value_name = "PORT", default_value_t = 12346)]
    pub(crate) port: u16,
}
