//! Flags of `tcpx connection`.

use clap::Args;

use super::link::{LinkArgs, MemoryArgs};

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx connection server [OPTIONS]\n       tcpx connection <SERVER_IP> [OPTIONS]"
)]
pub(crate) struct ConnectionArgs {
    /// The word `server`, or the address of the server to connect to.
    #[arg(value_name = "server|SERVER_IP")]
    pub(crate) peer: String,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}
