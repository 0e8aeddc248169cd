//! The plugin's log, on standard error: it shares no state with the log of the program that loads
//! it.

use std::sync::Once;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// The variable that says which lines appear, as for the program `tcpx`.
const VARIABLE: &str = "RUST_LOG";

/// Starts the log, once for a process.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let filter = std::env::var(VARIABLE)
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
        let lines = tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .with_filter(filter);
        // It fails where the log was started before, which is as good.
        let _ = tracing_subscriber::registry().with(lines).try_init();
    });
}
