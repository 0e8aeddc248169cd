//! The host's logger, as an exported plugin sees it.

use std::ffi::{CStr, CString, c_int, c_ulong};

use crate::constants::{level, subsystem as subsystems};
use crate::tables::LoggerFn;

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

    /// Logs one line. `message` may hold anything: it is passed as an argument of `%s`, never as
    /// a format, and is cut at its first NUL. A warning is for every subsystem, as NCCL's own are: the
    /// host drops lines of subsystems that its user did not ask for, and networks are none of those that
    /// NCCL shows by itself.
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
