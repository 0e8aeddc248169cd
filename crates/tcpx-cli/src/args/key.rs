//! Flags of `tcpx key`.

use std::path::PathBuf;

use clap::Args;
use tcpx::KeyName;

/// Make a server's key, or keys of its clients.
#[derive(Args, Debug)]
pub(crate) struct KeyArgs {
    /// The server's key file, for --key-file; with NAME a folder of keys. It is made unless it is there, readable by its owner alone. A folder without NAME is listed.
    pub(crate) file: PathBuf,
    /// A client that gets a key of its own, FILE/NAME.key; to remove that file shuts the client out.
    pub(crate) name: Option<KeyName>,
}
