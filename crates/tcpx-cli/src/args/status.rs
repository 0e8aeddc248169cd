//! Flags of `tcpx status`.

use clap::Args;

use crate::sizes::Limit;

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// This process alone [default: every process of this user, for root of every user].
    #[arg(value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Show it again and again, until a signal ends it.
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// Time between two looks, over which rates are measured.
    #[arg(short, long, value_name = "TIME", default_value = "1s")]
    pub(crate) interval: Limit,
}
