//! Ctrl-C, TERM and HUP: noticed between two steps, so that a transfer ends in order.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

use crate::error::Error;

/// How often a wait looks at the signals.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// The signal that came, 0 before; `None` where nobody listens for signals.
static CAME: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Has signals be noticed instead of ending the process. The second one ends it at once.
///
/// # Errors
/// The system refuses a handler.
pub(crate) fn listen() -> Result<(), Error> {
    let came = CAME.get_or_init(Arc::default);
    let failed = Error::process("listen for signals");
    let again = Arc::new(AtomicBool::new(false));
    for (signal, number) in [(SIGINT, 2_usize), (SIGTERM, 15), (SIGHUP, 1)] {
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again))
            .map_err(failed)?;
        flag::register(signal, Arc::clone(&again)).map_err(failed)?;
        flag::register_usize(signal, Arc::clone(came), number).map_err(failed)?;
    }
    // A write beyond `ulimit -f` is then an error of the write.
    flag::register(SIGXFSZ, Arc::default()).map_err(failed)?;
    Ok(())
}

/// [`Error::Interrupted`] once a signal came.
pub(crate) fn check() -> Result<(), Error> {
    match CAME.get().map_or(0, |came| came.load(Ordering::Relaxed)) {
        0 => Ok(()),
        signal => Err(Error::Interrupted {
            signal: u8::try_from(signal).unwrap_or(2),
        }),
    }
}

/// Runs `work`, which has limits of its own, and returns early when a signal comes: `work` is left
/// behind then, and the process is about to end.
pub(crate) fn unless_interrupted<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (done, end) = mpsc::channel();
    let started = std::thread::Builder::new()
        .name("tcpx-step".into())
        .spawn(move || {
            let _ = done.send(work());
        });
    started.map_err(Error::process("start a thread"))?;
    receive(&end, None)?.unwrap_or_else(|| {
        Err(Error::failed(
            "a step of the program ended without a result",
            "report this as a defect of tcpx",
        ))
    })
}

/// The next value; `None` when there will be none, or `limit` passed.
pub(crate) fn receive<T>(
    from: &mpsc::Receiver<T>,
    limit: Option<Duration>,
) -> Result<Option<T>, Error> {
    let started = Instant::now();
    loop {
        match from.recv_timeout(LOOK) {
            Ok(value) => return Ok(Some(value)),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => check()?,
        }
        if limit.is_some_and(|limit| started.elapsed() >= limit) {
            return Ok(None);
        }
    }
}
