//! A plugin in front of another one, with habits that the double has not: where it is.

use std::path::Path;

/// The variable that names the plugin behind it.
pub const OF: &str = "TCPX_HABITS_OF";
/// The variable that lists habits; without it the plugin fills its table in `init` only.
pub const HABITS: &str = "TCPX_HABITS";

/// Path of the shared object, whose table is of version 7.
pub fn path() -> &'static Path {
    Path::new(env!("TCPX_HABITS_SO"))
}

/// The variable that names a file in which processes see each other's closes.
pub const PAIRS: &str = "TCPX_HABITS_PAIRS";

/// Path of a plugin of its own, with a table of version 9, that takes every liberty which the
/// interface leaves.
pub fn liberal() -> &'static Path {
    Path::new(env!("TCPX_LIBERAL_SO"))
}
