//! The host's logger, as an exported plugin sees it.

use std::ffi::{CStr, CString, c_int, c_ulong};
use std::time::Instant;

use crate::constants::{level, subsystem as subsystems};
use crate::limiter::RateLimiter;
use crate::tables::LoggerFn;

/// Lines a second of a [`Log`]; the rest is counted.
const LINES_PER_SECOND: u32 = 20;

/// The logger that the host passed to `init`; silent when it passed none.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostLogger(Option<LoggerFn>);

impl HostLogger {
    /// Wraps the host's function pointer.
    ///
    /// # Safety
    /// The pointer is NULL or a logger of the ncclNet ABI that stays callable, from any thread,
    /// for the life of the process.
    pub const unsafe fn new(logger: Option<LoggerFn>) -> Self {
        Self(logger)
    }

    /// Logs one line. `message` may hold anything: it is passed as an argument of `%s`, never as a
    /// format, and is cut at its first NUL. A warning is for every subsystem, as NCCL's own are:
    /// the host drops lines of subsystems that its user did not ask for, and networks are none of
    /// those that NCCL shows by itself.
    pub fn log(self, level: c_int, subsystem: c_ulong, file: &CStr, line: u32, message: &str) {
        let Some(logger) = self.0 else { return };
        let text = message.split('\0').next().unwrap_or_default();
        let Ok(text) = CString::new(text) else { return };
        let subsystem = if level == level::WARN {
            subsystems::ALL
        } else {
            subsystem
        };
        // SAFETY: `new` vouches for the pointer; the strings are NUL-terminated and outlive the
        // call; the one argument matches the one conversion of the format.
        unsafe {
            logger(
                level,
                subsystem,
                file.as_ptr(),
                c_int::try_from(line).unwrap_or(0),
                c"%s".as_ptr(),
                text.as_ptr(),
            );
        }
    }
}

/// The host's logger behind a rate limit, for the lines of one network. Callable from any thread.
#[derive(Debug)]
pub struct Log {
    logger: HostLogger,
    network: &'static CStr,
    limiter: RateLimiter,
    start: Instant,
}

impl Log {
    /// Lines begin with the name of the network.
    pub fn new(logger: HostLogger, network: &'static CStr) -> Self {
        Self {
            logger,
            network,
            limiter: RateLimiter::new(LINES_PER_SECOND),
            start: Instant::now(),
        }
    }

    /// Something is wrong.
    pub fn warn(&self, text: &str) {
        self.line(level::WARN, text);
    }

    /// Something is worth knowing.
    pub fn info(&self, text: &str) {
        self.line(level::INFO, text);
    }

    fn line(&self, level: c_int, text: &str) {
        let second = self.start.elapsed().as_secs();
        let Some(dropped) = self.limiter.check(second) else {
            return;
        };
        let mut text = format!("NET/{} : {text}", self.network.to_string_lossy());
        if dropped > 0 {
            text += &format!(" ({dropped} lines before this one were dropped)");
        }
        let subsystem = subsystems::INIT | subsystems::NET;
        self.logger.log(level, subsystem, self.network, 0, &text);
    }
}
