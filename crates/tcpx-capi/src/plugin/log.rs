//! Where the plugin's log lines and the results of its calls go.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{PoisonError, RwLock};

use nccl_net::{CallReport, LogLevel, LogRecord, ResultCode, clear_log_sink, set_log_sink};

use crate::error::{Failure, guard};

/// Log level: what went wrong.
pub const TCPX_LOG_WARN: c_int = 2;
/// Log level: what the plugin does, and the result of each of its calls.
pub const TCPX_LOG_INFO: c_int = 3;
/// Log level: everything.
pub const TCPX_LOG_TRACE: c_int = 5;

/// Takes one line of the log. Called from any thread, also from the plugin's own, and possibly
/// from several at once; it must be quick and must not call this library. The text is valid during
/// the call.
#[expect(non_camel_case_types, reason = "the name in C")]
pub type tcpx_log_fn =
    Option<unsafe extern "C" fn(level: c_int, text: *const c_char, user: *mut c_void)>;

#[derive(Clone, Copy)]
struct Sink {
    call: unsafe extern "C" fn(c_int, *const c_char, *mut c_void),
    user: *mut c_void,
    most: c_int,
}

// SAFETY: C promises with `tcpx_set_log` that the function may be called from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// Sends log lines up to `level` to `log`, with `user` handed through; NULL for `log` stops them.
/// Without this, lines go to standard error if UCCL_TCPX_DEBUG is set (and not 0), else nowhere.
///
/// `log` and `user` must stay usable until another one is set and the calls under way have ended.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_set_log(log: tcpx_log_fn, user: *mut c_void, level: c_int) -> c_int {
    guard("tcpx_set_log", || {
        let Some(call) = log else {
            set(None);
            return Ok(());
        };
        if !(0..=TCPX_LOG_TRACE).contains(&level) {
            return Err(Failure::argument(format!(
                "level is {level}: pass TCPX_LOG_WARN, TCPX_LOG_INFO or TCPX_LOG_TRACE"
            )));
        }
        set(Some(Sink {
            call,
            user,
            most: level,
        }));
        Ok(())
    })
}

fn set(sink: Option<Sink>) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = sink;
    match sink {
        None => clear_log_sink(),
        Some(sink) => set_log_sink(
            plugin_line,
            match sink.most {
                ..=TCPX_LOG_WARN => LogLevel::Warn,
                TCPX_LOG_INFO => LogLevel::Info,
                _ => LogLevel::Trace,
            },
        ),
    }
}

/// Lines to standard error if the variable asks for them and nobody has set another sink.
pub(crate) fn from_environment() {
    let asked = std::env::var_os("UCCL_TCPX_DEBUG").is_some_and(|v| !v.is_empty() && v != "0");
    let taken = SINK
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .is_some();
    if asked && !taken {
        set(Some(Sink {
            call: to_standard_error,
            user: std::ptr::null_mut(),
            most: TCPX_LOG_INFO,
        }));
    }
}

unsafe extern "C" fn to_standard_error(_level: c_int, text: *const c_char, _user: *mut c_void) {
    use std::io::Write;
    // SAFETY: `line` passes a terminated string.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    // Nobody is left to tell.
    let _ = writeln!(std::io::stderr(), "[tcpx] {}", text.to_string_lossy());
}

fn line(level: c_int, text: &str) {
    let sink = *SINK.read().unwrap_or_else(PoisonError::into_inner);
    let Some(sink) = sink.filter(|sink| level <= sink.most) else {
        return;
    };
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // SAFETY: C's function, with what C asked to be handed, and a text that outlives the call.
    unsafe { (sink.call)(level, text.as_ptr(), sink.user) };
}

fn plugin_line(record: &LogRecord<'_>) {
    let level = match record.level {
        LogLevel::Abort | LogLevel::Warn => TCPX_LOG_WARN,
        LogLevel::Version | LogLevel::Info => TCPX_LOG_INFO,
        LogLevel::Trace | LogLevel::Other(_) => TCPX_LOG_TRACE,
    };
    line(level, &format!("plugin: {}", record.message));
}

/// Told of every call of the plugin.
pub(crate) fn call_ended(report: &CallReport) {
    let level = match report.rc {
        ResultCode::Success => TCPX_LOG_INFO,
        _ => TCPX_LOG_WARN,
    };
    line(level, &format!("{} returned {}", report.call, report.rc));
}

/// A line of our own.
pub(crate) fn info(text: &str) {
    line(TCPX_LOG_INFO, text);
}
