//! The plugin's log, on standard error: it shares no state with the log of the program that loads it.

use std::sync::Once;

use tracing_subscriber::EnvFilter;

/// The variable that says which lines appear, as for the program `tcpx`.
const VARIABLE: &str = "RUST_LOG";

/// Starts the log, once for a process.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let filter = std::env::var(VARIABLE)
            .ok()
            .and_then(|text| EnvFilter::try_new(text).ok())
            .unwrap_or_else(|| EnvFilter::new("warn"));
        // It fails where the log was started before, which is as good.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .try_init();
    });
}
