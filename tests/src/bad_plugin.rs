//! Plugins that fail at their start: where they are.

use std::path::Path;

/// The variable that says how [`path`] fails.
pub const WAY: &str = "TCPX_BAD_PLUGIN";

/// A plugin of version 8 that fails as its variable says.
pub fn path() -> &'static Path {
    Path::new(env!("TCPX_BAD_SO"))
}

/// A plugin that exports the table of version 4 and no other.
pub fn old() -> &'static Path {
    Path::new(env!("TCPX_OLD_SO"))
}
