//! Flags of `tcpx demo`.

use std::path::PathBuf;

use clap::Args;

use super::link::MemoryArgs;
use crate::sizes::{Limit, Size};

#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// Bytes of each large transfer.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) size: Size,
    /// Plugin file for the historic path [default: our own, beside the program].
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
    /// Fail if there is no progress for this long.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(crate) timeout: Limit,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}
