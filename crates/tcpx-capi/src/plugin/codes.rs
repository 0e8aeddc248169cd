//! Result codes: what the calls return.

use std::ffi::{CStr, c_char, c_int};

use crate::error::last_text;

/// Done; what a pointer argument should have received is there, or NULL for "not yet".
pub const TCPX_SUCCESS: c_int = 0;
/// 1 to 7 are ncclResult_t: the plugin's answer as it stands. A CUDA call failed inside the plugin.
pub const TCPX_CUDA_ERROR: c_int = 1;
/// A system call of the plugin failed, or the peer closed the connection.
pub const TCPX_SYSTEM_ERROR: c_int = 2;
/// The plugin refused the call or failed inside.
pub const TCPX_INTERNAL_ERROR: c_int = 3;
/// An argument is wrong: NULL, out of range, of another comm.
pub const TCPX_INVALID_ARGUMENT: c_int = 4;
/// The call is not allowed now: twice, out of order, while requests are in flight.
pub const TCPX_INVALID_USAGE: c_int = 5;
/// The plugin says that the peer failed.
pub const TCPX_REMOTE_ERROR: c_int = 6;
/// The plugin says that the call is not finished; make it again.
pub const TCPX_IN_PROGRESS: c_int = 7;
/// No plugin: call tcpx_load_plugin first.
pub const TCPX_NOT_LOADED: c_int = 16;
/// The plugin file could not be loaded.
pub const TCPX_LOAD_FAILED: c_int = 17;
/// A handle that this library did not give out, or that was closed or finished before.
pub const TCPX_BAD_HANDLE: c_int = 18;
/// The time was over before the call was done: a request is still in flight, a comm not yet
/// connected or closed. Make the call again to go on waiting.
pub const TCPX_TIMEOUT: c_int = 19;
/// The plugin reported something that cannot be. The comm takes no more requests: close it.
pub const TCPX_PLUGIN_FAULT: c_int = 20;
/// A defect of this library. Close what the call was about.
pub const TCPX_PANIC: c_int = 21;

/// One phrase for a result code, for ever valid. Never NULL. tcpx_last_error says more.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_strerror(code: c_int) -> *const c_char {
    phrase(code).as_ptr()
}

/// What went wrong in the last failing call of the calling thread, and what to do; "" if none
/// failed. Never NULL. Valid until the next call of this library on the same thread.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_last_error() -> *const c_char {
    last_text()
}

pub(crate) const fn phrase(code: c_int) -> &'static CStr {
    match code {
        TCPX_SUCCESS => c"success",
        TCPX_CUDA_ERROR => c"a CUDA call failed inside the plugin: check device and context",
        TCPX_SYSTEM_ERROR => c"a system call failed or the peer closed: connect afresh",
        TCPX_INTERNAL_ERROR => c"the plugin refused the call or failed inside: see its log",
        TCPX_INVALID_ARGUMENT => c"wrong argument: see tcpx_last_error",
        TCPX_INVALID_USAGE => c"not allowed now: see tcpx_last_error",
        TCPX_REMOTE_ERROR => c"the peer failed: see its log",
        TCPX_IN_PROGRESS => c"not finished: call again",
        TCPX_NOT_LOADED => c"no plugin is loaded: call tcpx_load_plugin",
        TCPX_LOAD_FAILED => c"the plugin file cannot be loaded: see tcpx_last_error",
        TCPX_BAD_HANDLE => c"closed, finished or unknown handle: see tcpx_last_error",
        TCPX_TIMEOUT => c"not done in time: call again to go on waiting",
        TCPX_PLUGIN_FAULT => c"the plugin breaks its contract: close the comm",
        TCPX_PANIC => c"a defect of libtcpx: close what the call was about and report it",
        _ => c"a code that libtcpx does not return",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_own_phrase() {
        let codes = (0..=7).chain(16..=21);
        let phrases: std::collections::BTreeSet<_> = codes.clone().map(phrase).collect();
        assert_eq!(phrases.len(), codes.count());
        assert!(!phrases.contains(phrase(8)));
        assert_eq!(phrase(-1), phrase(22));
    }
}
