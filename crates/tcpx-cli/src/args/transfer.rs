//! Flags of `tcpx transfer`.

use std::path::PathBuf;

use clap::Args;

use super::link::{LinkArgs, MemoryArgs};
use crate::sizes::Size;

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx transfer server [--out DIR] [OPTIONS]\n       tcpx transfer <SERVER_IP> [--file FILE] [OPTIONS]"
)]
pub(crate) struct TransferArgs {
    /// The word `server`, or the address of the server to connect to.
    #[arg(value_name = "server|SERVER_IP")]
    pub(crate) peer: String,
    /// Client: send this file instead of the greeting.
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Server: accept a file and write it to this directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Server: replace a file of the same name.
    #[arg(long, requires = "out")]
    pub(crate) overwrite: bool,
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
