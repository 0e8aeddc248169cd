//! Flags of `tcpx transfer`.

use std::path::PathBuf;

use clap::Args;

use super::link::{LinkArgs, MemoryArgs};
use crate::sizes::Size;

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx transfer server [--out DIR] [OPTIONS]\n       tcpx transfer <SERVER_IP> [--file PATH...] [OPTIONS]"
)]
pub(crate) struct TransferArgs {
    /// The word `server`, or the address of the server to connect to.
    #[arg(value_name = "server|SERVER_IP")]
    pub(crate) peer: String,
    /// Client: send these files and directories instead of the greeting; `-` is standard input.
    #[arg(short, long, value_name = "PATH", num_args = 1..)]
    pub(crate) file: Vec<PathBuf>,
    /// Client: the name that standard input gets at the server.
    #[arg(long, value_name = "NAME", default_value = "stdin")]
    pub(crate) name: String,
    /// Server: accept files, and put them into this directory; `-` writes one file to standard output.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Server: replace files of the same name.
    #[arg(long, requires = "out")]
    pub(crate) overwrite: bool,
    /// Server: stay for more clients, until a signal ends it.
    #[arg(short, long, requires = "out")]
    pub(crate) keep: bool,
    /// Let contents travel in the clear, at both sides: anyone on the path can read them. Otherwise they are encrypted, where there is a key and the network is tcp.
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
