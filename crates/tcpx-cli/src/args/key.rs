//! Flags of `tcpx key`.

use std::path::PathBuf;

use clap::Args;

/// Make a server's key.
#[derive(Args, Debug)]
pub(crate) struct KeyArgs {
    /// The server's key file, for --key-file. It is made unless it is there, readable by its owner alone.
    pub(crate) file: PathBuf,
}
