//! The engine's failures on their way to C.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicU32, Ordering};

use tcpx::{Delivered, Error, ErrorKind};
use tcpx_memory::fork;

use super::codes::*;
use super::text;
use crate::error::{self, Failure, Outcome};
use crate::plugin::codes::{TCPX_BAD_HANDLE, TCPX_INVALID_ARGUMENT, TCPX_INVALID_USAGE};

/// tcpx_error_delivered: the last failure was not about a transfer.
pub const TCPX_DELIVERED_NO_TRANSFER: c_int = 0;
/// Not one byte of the destination was written.
pub const TCPX_DELIVERED_NONE: c_int = 1;
/// Some bytes are placed; others may be written in part.
pub const TCPX_DELIVERED_PARTIAL: c_int = 2;
/// Every byte is placed; what failed came after.
pub const TCPX_DELIVERED_ALL: c_int = 3;
/// It cannot be known.
pub const TCPX_DELIVERED_UNKNOWN: c_int = 4;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match (&error, error.kind()) {
            (Error::OtherProcess { .. }, _) => TCPX_ERR_FORKED,
            (_, ErrorKind::Connect) => TCPX_ERR_CONNECT,
            (_, ErrorKind::TimedOut) => TCPX_ERR_TIMED_OUT,
            (_, ErrorKind::ConnectionLost) => TCPX_ERR_CONNECTION_LOST,
            (_, ErrorKind::Closed) => TCPX_ERR_CLOSED,
            (_, ErrorKind::Cancelled) => TCPX_ERR_CANCELLED,
            (_, ErrorKind::TooLarge) => TCPX_ERR_TOO_LARGE,
            (_, ErrorKind::Corrupt) => TCPX_ERR_CORRUPT,
            (_, ErrorKind::Operation) => TCPX_ERR_TRANSFER,
            (_, ErrorKind::Setting) => TCPX_ERR_SETTING,
            (_, ErrorKind::Memory) => TCPX_ERR_MEMORY,
            (_, ErrorKind::System) => TCPX_ERR_SYSTEM,
            _ => TCPX_ERR_DEFECT,
        };
        Self {
            check: error.check(),
            delivered: error.delivered(),
            ..Self::new(code, error.to_string())
        }
    }
}

impl From<tcpx::MemoryError> for Failure {
    fn from(error: tcpx::MemoryError) -> Self {
        Error::from(error).into()
    }
}

/// The time given to a call ran out.
pub(crate) fn again(what: &'static str) -> Failure {
    Failure::new(TCPX_AGAIN, what)
}

pub(crate) fn setting(text: impl Into<String>) -> Failure {
    Failure::new(TCPX_ERR_SETTING, text)
}

/// Runs the body of a call of the engine: its failure or panic becomes a code, with the text kept.
pub(crate) fn guard(call: &'static str, body: impl FnOnce() -> Outcome<()>) -> c_int {
    let checked = || {
        check_process()?;
        body()
    };
    match error::run(call, engine_code, checked) {
        Ok(()) => TCPX_OK,
        Err(code) => code,
    }
}

/// What both headers have, in the engine's numbers.
const fn engine_code(code: c_int) -> c_int {
    match code {
        ..=0 => code,
        TCPX_INVALID_ARGUMENT => TCPX_ERR_ARGUMENT,
        TCPX_BAD_HANDLE => TCPX_ERR_HANDLE,
        TCPX_INVALID_USAGE => TCPX_ERR_USAGE,
        _ => TCPX_ERR_DEFECT,
    }
}

/// A fork's child has copies of locks that may be held, and none of the threads that would let go
/// of them: it is told so before it touches any.
fn check_process() -> Outcome<()> {
    /// No process has used the library yet.
    const NOBODY: u32 = u32::MAX;
    static OWNER: AtomicU32 = AtomicU32::new(NOBODY);
    let here = fork::generation();
    let owner = match OWNER.load(Ordering::Relaxed) {
        NOBODY => OWNER
            .compare_exchange(NOBODY, here, Ordering::Relaxed, Ordering::Relaxed)
            .map_or_else(|other| other, |_| here),
        owner => owner,
    };
    if owner == here {
        return Ok(());
    }
    Err(Failure::new(
        TCPX_ERR_FORKED,
        "this process is a fork's child, and libtcpx was in use before the fork: use it in one of \
         the two alone, beginning after the fork, or replace the child with exec",
    ))
}

/// The code of the calling thread's last failure; 0 if none failed. TCPX_AGAIN counts as one.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_error_code() -> c_int {
    error::with_last(|last| last.code).unwrap_or_default()
}

/// What went wrong in the last failing call of the calling thread, in one line that names the call;
/// "" if none failed. Never NULL. Valid until the next failure on the same thread.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_error_text() -> *const c_char {
    error::last_text()
}

/// The check of `tcpx doctor` that explains the last failure, such as "TCPX-D037"; NULL if there is
/// none. Valid as the text is.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_error_check() -> *const c_char {
    let check = error::with_last(|last| last.check.as_ref().map(|check| check.as_ptr()));
    check.flatten().unwrap_or(std::ptr::null())
}

/// What the destination of the transfer holds that the last failure was about: a TCPX_DELIVERED_
/// number. `bytes` may be NULL; it receives how many bytes are known to be placed.
///
/// # Safety
/// `bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_error_delivered(bytes: *mut u64) -> c_int {
    let delivered = error::with_last(|last| last.delivered).flatten();
    let (answer, placed) = match delivered {
        None => (TCPX_DELIVERED_NO_TRANSFER, 0),
        Some(Delivered::None) => (TCPX_DELIVERED_NONE, 0),
        Some(Delivered::Partial { bytes }) => (TCPX_DELIVERED_PARTIAL, bytes),
        Some(Delivered::All) => (TCPX_DELIVERED_ALL, 0),
        Some(Delivered::Unknown) => (TCPX_DELIVERED_UNKNOWN, 0),
    };
    // SAFETY: the caller's promise.
    unsafe { text::answer(bytes, placed) };
    answer
}

#[cfg(test)]
mod tests {
    use tcpx::OperationName;
    use tcpx_wire::session::{EndCause, OperationError, OperationKind};

    use super::*;

    #[test]
    fn what_both_headers_report_has_the_engines_number_here() {
        assert_eq!(
            guard("a", || Err(Failure::argument("x is NULL"))),
            TCPX_ERR_ARGUMENT
        );
        assert_eq!(tcpx_error_code(), TCPX_ERR_ARGUMENT);
        assert_eq!(guard("b", || Err(Failure::usage("not now"))), -34);
        assert_eq!(guard("c", || panic!("the ring broke")), TCPX_ERR_DEFECT);
        assert_eq!(guard("d", || Err(again("not yet"))), TCPX_AGAIN);
    }

    #[test]
    fn the_facts_of_an_error_come_along_and_go_with_the_next() {
        let error = Error::Operation {
            peer: ([127, 0, 0, 1], 1).into(),
            path: "tcp".to_owned(),
            operation: OperationName {
                kind: OperationKind::Send,
                tag: 1,
            },
            error: Box::new(OperationError {
                cause: EndCause::TooLarge {
                    bytes: 2,
                    capacity: 1,
                },
                delivered: Delivered::None,
            }),
        };
        assert_eq!(guard("a", || Err(error.into())), TCPX_ERR_TOO_LARGE);
        // SAFETY: NULL is allowed.
        let delivered = || unsafe { tcpx_error_delivered(std::ptr::null_mut()) };
        assert_eq!(delivered(), TCPX_DELIVERED_NONE);
        assert!(tcpx_error_check().is_null());
        assert_eq!(guard("b", || Err(again("not yet"))), TCPX_AGAIN);
        assert_eq!(delivered(), TCPX_DELIVERED_NO_TRANSFER);
    }
}
