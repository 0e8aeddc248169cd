//! Log lines, the plugin's among them, go to standard error; `RUST_LOG` chooses them.

use std::io::{self, IsTerminal};

use nccl_net::{LogLevel, LogRecord};
use tracing_subscriber::EnvFilter;

/// Starts logging: warnings and errors, or with `debug` everything.
pub(crate) fn start(debug: bool) {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(if debug { "debug" } else { "warn" }));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .compact()
        .init();
    nccl_net::set_log_sink(plugin_line, LogLevel::Trace);
}

/// A plugin calls this from its own threads; the filter drops what nobody asked for.
fn plugin_line(record: &LogRecord<'_>) {
    let LogRecord {
        file,
        line,
        message,
        suppressed,
        ..
    } = *record;
    let message = message.trim_end();
    match record.level {
        LogLevel::Abort => tracing::error!(target: "plugin", file, line, suppressed, "{message}"),
        LogLevel::Warn => tracing::warn!(target: "plugin", file, line, suppressed, "{message}"),
        LogLevel::Version | LogLevel::Info => {
            tracing::info!(target: "plugin", file, line, suppressed, "{message}");
        }
        LogLevel::Trace | LogLevel::Other(_) => {
            tracing::debug!(target: "plugin", file, line, suppressed, "{message}");
        }
    }
}
