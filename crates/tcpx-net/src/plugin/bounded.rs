//! Calls of a plugin on a thread made for them: one that does not return must not hold whoever wants its answer.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// There is no thread for the call.
    NoThread(io::Error),
    /// It has not returned. It keeps its thread, and what it was given, until it does.
    Stuck,
    /// It panicked.
    Panicked,
}

/// Runs `work` on a thread of its own and waits for it until `limit` has passed.
pub(super) fn bounded<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoAnswer> {
    let (answer, answered) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("tcpx-set-up".to_owned())
        .spawn(move || {
            // Nobody waits any more once the limit has passed: what came up is closed here.
            let _ = answer.send(work());
        })
        .map_err(NoAnswer::NoThread)?;
    answered.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => NoAnswer::Stuck,
        RecvTimeoutError::Disconnected => NoAnswer::Panicked,
    })
}

/// What to tell of a panic.
pub(super) const PANICKED: &str = "the thread that made it panicked: report this with the log";
