//! Flags of `tcpx send` and `tcpx receive`.

use std::path::PathBuf;

use clap::Args;

use super::link::{LinkArgs, MemoryArgs};
use crate::sizes::Size;

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx send FILE... HOST [OPTIONS]\n       tcpx send --serve DIR [OPTIONS]"
)]
pub(crate) struct SendArgs {
    /// Files and directories, and last the host that runs `tcpx receive`; `-` is standard input.
    #[arg(value_name = "FILE... HOST", required_unless_present = "serve")]
    pub(crate) paths: Vec<PathBuf>,
    /// Share this directory instead: clients fetch from it with `tcpx receive HOST:PATH`, until a signal ends it.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["paths", "name", "follow", "include", "exclude", "dry_run"])]
    pub(crate) serve: Option<PathBuf>,
    /// The name that standard input gets at the receiver.
    #[arg(long, value_name = "NAME", default_value = "stdin")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    #[command(flatten)]
    pub(crate) way: WayArgs,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "tcpx receive [--out DIR] [OPTIONS]\n       tcpx receive HOST:PATH... [--out DIR] [OPTIONS]"
)]
pub(crate) struct ReceiveArgs {
    /// Fetch these files and directories of a host that runs `tcpx send --serve DIR`; `HOST:.` is all of DIR. Without one, wait for `tcpx send`.
    #[arg(value_name = "HOST:PATH")]
    pub(crate) sources: Vec<String>,
    /// Put everything into this directory; `-` writes one file to standard output.
    #[arg(short, long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    /// Replace files that are there and differ.
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Stay for more clients, several at once, until a signal ends it.
    #[arg(short, long, conflicts_with = "sources")]
    pub(crate) keep: bool,
    #[command(flatten)]
    pub(crate) selection: SelectionArgs,
    #[command(flatten)]
    pub(crate) way: WayArgs,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// What is sent, as the client says it.
#[derive(Args, Clone, Debug)]
pub(crate) struct SelectionArgs {
    /// Send what links point to in their place. Without it, links are kept, but for those to files outside of what is sent.
    #[arg(short = 'L', long = "copy-links")]
    pub(crate) follow: bool,
    /// Send only files that match, such as '*.safetensors'; with a / in it, the path below what is sent must match. May be given again.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) include: Vec<String>,
    /// Leave out files and directories that match. May be given again, and wins over --include.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) exclude: Vec<String>,
    /// Compare both ends and say what would be moved; move and write nothing.
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
}

/// How contents travel.
#[derive(Args, Clone, Debug)]
pub(crate) struct WayArgs {
    /// Let contents travel in the clear, at both sides: anyone on the path can read them. Otherwise they are encrypted, where there is a key and the network is tcp.
    #[arg(long)]
    pub(crate) plain: bool,
    /// Move at most so many bytes a second, such as 50MB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) bwlimit: Option<Size>,
}
