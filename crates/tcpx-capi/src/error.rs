//! Failures on their way to C: a code, a text for the calling thread, and no panic.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nccl_net::{HostError, LoadError, ResultCode};
use tcpx::Delivered;

use crate::plugin::codes::{
    TCPX_BAD_HANDLE, TCPX_INTERNAL_ERROR, TCPX_INVALID_ARGUMENT, TCPX_INVALID_USAGE,
    TCPX_LOAD_FAILED, TCPX_NOT_LOADED, TCPX_PANIC, TCPX_PLUGIN_FAULT, TCPX_SUCCESS, phrase,
};

/// Why a call failed, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    pub(crate) text: String,
    /// The check of `tcpx doctor` that explains it.
    pub(crate) check: Option<&'static str>,
    /// What the destination of the transfer holds that it is about.
    pub(crate) delivered: Option<Delivered>,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(code: c_int, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
            check: None,
            delivered: None,
        }
    }

    /// The same of a part of the call.
    pub(crate) fn about(mut self, part: &str) -> Self {
        self.text = format!("{part}: {}", self.text);
        self
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(TCPX_INVALID_ARGUMENT, text)
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(TCPX_INVALID_USAGE, text)
    }

    pub(crate) fn closed(what: &str) -> Self {
        Self::new(
            TCPX_BAD_HANDLE,
            format!("{what} was closed by another thread: set it up afresh"),
        )
    }

    /// A lock whose holder panicked: what it guards may be half changed.
    pub(crate) fn poisoned() -> Self {
        Self::new(
            TCPX_PANIC,
            "an earlier call on this object ended in a defect of libtcpx: close it, and report \
             the message that went to standard error",
        )
    }
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        let code = match &error {
            HostError::Call(call) => match call.rc {
                ResultCode::Success | ResultCode::Unknown(_) => TCPX_INTERNAL_ERROR,
                rc => rc.to_raw(),
            },
            HostError::NotInitialised | HostError::InitFailed => TCPX_NOT_LOADED,
            HostError::AlreadyInitialised
            | HostError::SetupEnded
            | HostError::ConsumeOrder { .. } => TCPX_INVALID_USAGE,
            HostError::NoSuchDevice { .. }
            | HostError::ForeignMemory
            | HostError::OutOfRange { .. }
            | HostError::TooLarge { .. } => TCPX_INVALID_ARGUMENT,
            HostError::MissingFunction { .. }
            | HostError::DeviceCount { .. }
            | HostError::NullComm { .. }
            | HostError::ImpossibleSize { .. } => TCPX_PLUGIN_FAULT,
        };
        Self::new(code, error.to_string())
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Self::new(TCPX_LOAD_FAILED, error.to_string())
    }
}

/// What the calling thread's last failure leaves.
#[derive(Debug, Default)]
pub(crate) struct Last {
    pub(crate) code: c_int,
    text: CString,
    pub(crate) check: Option<CString>,
    pub(crate) delivered: Option<Delivered>,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::new(Last::default());
}

fn remember(call: &str, failure: &Failure) {
    // An inner NUL would cut the text; plugins choose some of the words.
    let text = format!("{call}: {}", failure.text).replace('\0', "?");
    let last = Last {
        code: failure.code,
        text: CString::new(text).unwrap_or_default(),
        check: failure.check.and_then(|check| CString::new(check).ok()),
        delivered: failure.delivered,
    };
    // A thread that is ending has no place for it any more.
    let _ = LAST.try_with(|kept| kept.replace(last));
}

/// Reads what the calling thread's last failure left; `None` on a thread that is ending.
pub(crate) fn with_last<T>(read: impl FnOnce(&Last) -> T) -> Option<T> {
    LAST.try_with(|last| read(&last.borrow())).ok()
}

/// The text of the calling thread's last failure; "" if none failed. Valid until the next failure
/// on this thread.
pub(crate) fn last_text() -> *const c_char {
    with_last(|last| last.text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs the body of a call: its failure or panic becomes a code, with the text kept.
pub(crate) fn guard(call: &'static str, body: impl FnOnce() -> Outcome<()>) -> c_int {
    match guarded(call, body) {
        Ok(()) => TCPX_SUCCESS,
        Err(code) => code,
    }
}

/// As [`guard`], for calls with an answer.
pub(crate) fn guarded<T>(
    call: &'static str,
    body: impl FnOnce() -> Outcome<T>,
) -> Result<T, c_int> {
    run(call, |code| code, body)
}

/// As [`guarded`], with `translate` between our codes and those of the header.
pub(crate) fn run<T>(
    call: &'static str,
    translate: fn(c_int) -> c_int,
    body: impl FnOnce() -> Outcome<T>,
) -> Result<T, c_int> {
    let mut failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let phrase = phrase(TCPX_PANIC).to_string_lossy();
            let failure = Failure::new(TCPX_PANIC, format!("{phrase}: {}", panic_words(&*panic)));
            // It may panic when dropped, outside of any catch.
            std::mem::forget(panic);
            failure
        }
    };
    failure.code = translate(failure.code);
    remember(call, &failure);
    Err(failure.code)
}

fn panic_words(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without words")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the text stays until the next failure of this thread.
        unsafe { CStr::from_ptr(last_text()) }
            .to_string_lossy()
            .into_owned()
    }

    #[test]
    fn a_panic_is_a_code_and_its_words_are_kept() {
        let code = guard("tcpx_test", || panic!("the {} broke", "ring"));
        assert_eq!(code, TCPX_PANIC);
        assert!(last().contains("tcpx_test") && last().contains("the ring broke"));
    }

    #[test]
    fn a_panic_whose_words_panic_when_dropped_does_not_reach_c() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("and again");
            }
        }
        assert_eq!(
            guard("tcpx_test", || std::panic::panic_any(Bomb)),
            TCPX_PANIC
        );
        assert!(last().contains("a panic without words"));
    }

    #[test]
    fn a_success_leaves_the_text_of_the_last_failure() {
        assert_eq!(guard("a", || Err(Failure::usage("one\0two"))), 5);
        assert_eq!(last(), "a: one?two");
        assert_eq!(guard("b", || Ok(())), 0);
        assert_eq!(last(), "a: one?two");
        std::thread::spawn(|| assert_eq!(last(), ""))
            .join()
            .expect("another thread has its own text");
    }

    #[test]
    fn codes_of_the_plugin_pass_and_strange_ones_do_not() {
        let plugin = |rc| {
            let error = HostError::Call(nccl_net::CallError {
                call: "test",
                rc: ResultCode::from_raw(rc),
                hint: "",
            });
            Failure::from(error).code
        };
        for rc in 1..=7 {
            assert_eq!(plugin(rc), rc);
        }
        assert_eq!((plugin(19), plugin(-3), plugin(0)), (3, 3, 3));
    }
}
