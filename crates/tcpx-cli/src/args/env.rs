//! Flags of `tcpx env`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Which program the variables are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EnvFor {
    /// Google's TCPX plugin.
    Tcpx,
    /// NCCL, and what uses it (PyTorch, ...), with libnccl-net-tcpx.so as its network.
    Nccl,
}

#[derive(Args, Debug)]
pub(crate) struct EnvArgs {
    /// Which variables to print.
    #[arg(value_enum)]
    pub(crate) whose: EnvFor,
    /// Plugin file for NCCL [default: our own].
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
}
