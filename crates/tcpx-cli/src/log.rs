//! Log lines, the plugin's among them, go to standard error; flags and `RUST_LOG` choose them.

use std::io;

use nccl_net::{LogLevel, LogRecord};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::error::Error;
use crate::output::OutputArgs;
use crate::output::say::is_lively;

/// The variable that chooses log lines, in the notation of [`Targets`].
const VARIABLE: &str = "RUST_LOG";

/// Starts logging: warnings and errors, and what the flags ask for.
pub(crate) fn start(flags: &OutputArgs) -> Result<(), Error> {
    let chosen = std::env::var(VARIABLE).unwrap_or_default();
    let filter: Targets = directives(flags, &chosen).parse().map_err(|error| {
        Error::usage(
            format!("{VARIABLE}={chosen} chooses no log lines: {error}"),
            format!("write {VARIABLE}=debug, or {VARIABLE}=tcpx_net=debug for a part"),
        )
    })?;
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    // Who looks at each step also wants to know where in the program it is.
    let shows_target = flags.debug || flags.verbose > 1;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(is_lively() && !is_plain)
        .with_target(shows_target)
        .compact();
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .init();
    nccl_net::set_log_sink(plugin_line, LogLevel::Trace);
    Ok(())
}

/// What the filter lets through: the level of a flag holds whatever level the variable names, which
/// then adds parts alone.
fn directives(flags: &OutputArgs, chosen: &str) -> String {
    let level = match flags.verbose {
        _ if flags.quiet => Some("error"),
        0 if flags.debug => Some("debug"),
        0 => None,
        1 => Some("info"),
        2 => Some("debug"),
        3.. => Some("trace"),
    };
    match (level, chosen.trim()) {
        (None, "") => "warn".to_owned(),
        (None, chosen) => chosen.to_owned(),
        (Some(level), "") => level.to_owned(),
        // The last of two levels for everything holds.
        (Some(level), chosen) => format!("{chosen},{level}"),
    }
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
