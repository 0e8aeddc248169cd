//! The plugin's log lines and the results of its calls, on standard error if a variable asks for
//! them.

use std::io::Write;
use std::sync::OnceLock;

use nccl_net::{CallReport, LogLevel, LogRecord, set_log_sink};

/// Whether lines are printed: `UCCL_TCPX_DEBUG` is set, and not 0. From the first call on plugins'
/// own lines are, too.
pub(crate) fn from_environment() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let asked = std::env::var_os("UCCL_TCPX_DEBUG").is_some_and(|v| !v.is_empty() && v != "0");
        if asked {
            set_log_sink(plugin_line, LogLevel::Info);
        }
        asked
    })
}

/// A line of our own.
pub(crate) fn info(text: &str) {
    if from_environment() {
        // Nobody is left to tell.
        let _ = writeln!(std::io::stderr(), "[tcpx] {text}");
    }
}

fn plugin_line(record: &LogRecord<'_>) {
    info(&format!("plugin: {}", record.message));
}

/// Told of every call of the plugin.
pub(crate) fn call_ended(report: &CallReport) {
    info(&format!("{} returned {}", report.call, report.rc));
}
