//! Flags of `tcpx doctor`.

use std::path::PathBuf;

use clap::Args;

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Plugin file to look at [default: UCCL_TCPX_PLUGIN_PATH, else the vendor's if it is there, else our own].
    #[arg(long, value_name = "PATH")]
    pub(crate) plugin: Option<PathBuf>,
    /// Explain one check, such as TCPX-D012, and measure it here; `all` lists every check.
    #[arg(long, value_name = "ID")]
    pub(crate) explain: Option<String>,
}
