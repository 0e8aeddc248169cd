//! Flags of `tcpx transfer`.

use clap::Args;

use super::link::{LinkArgs, MemoryArgs};
use crate::sizes::Size;

#[derive(Args, Debug)]
pub(crate) struct TransferArgs {
    /// The word `server`, or the address of the server to connect to.
    #[arg(value_name = "server|SERVER_IP")]
    pub(crate) peer: String,
    /// Let the greeting travel in the clear, at both sides. Otherwise it is encrypted, where there is a key and the network is tcp.
    #[arg(long)]
    pub(crate) plain: bool,
    /// Client: bytes of the greeting; bytes beyond its 23 are random.
    #[arg(
        long,
        value_name = "SIZE",
        env = "UCCL_TCPX_PAYLOAD_BYTES",
        default_value = "23"
    )]
    pub(crate) payload_bytes: Size,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}
