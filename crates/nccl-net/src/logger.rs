//! The logger handed to plugins: bounded, rate-limited, callable from any thread, silent by
//! default.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_ulonglong};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Once, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use crate::constants::level;
use crate::limiter::RateLimiter;
use crate::tables::LoggerFn;

/// Lines a second that reach the sink, for each level.
const LINES_PER_SECOND: u32 = 100;
/// Warnings of one place in the plugin: real plugins repeat one for every chunk of a transfer.
const WARNINGS_PER_SECOND: u32 = 3;
/// Places that are told apart, about.
const PLACES: usize = 64;

/// Severity of a plugin's log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogLevel {
    /// Version banner.
    Version,
    /// Warnings and errors.
    Warn,
    /// Information.
    Info,
    /// Last words before an abort.
    Abort,
    /// Traces.
    Trace,
    /// A number outside the ABI.
    Other(c_int),
}

impl LogLevel {
    const fn from_raw(raw: c_int) -> Self {
        match raw {
            level::VERSION => Self::Version,
            level::WARN => Self::Warn,
            level::INFO => Self::Info,
            level::ABORT => Self::Abort,
            level::TRACE => Self::Trace,
            other => Self::Other(other),
        }
    }

    /// Sort key: 0 is always worth a line, 3 is chatter.
    const fn verbosity(self) -> c_int {
        match self {
            Self::Abort => 0,
            Self::Warn => 1,
            Self::Version | Self::Info => 2,
            Self::Trace | Self::Other(_) => 3,
        }
    }
}

/// One line of a plugin.
#[derive(Clone, Copy, Debug)]
pub struct LogRecord<'a> {
    /// Severity.
    pub level: LogLevel,
    /// Subsystem bits, see [`crate::constants::subsystem`].
    pub subsystems: u64,
    /// Source file or function, as the plugin gave it.
    pub file: &'a str,
    /// Line.
    pub line: i32,
    /// Text, cut at 1023 bytes.
    pub message: &'a str,
    /// Lines of this level, or warnings of this place, that the rate limit dropped just before.
    pub suppressed: u64,
}

/// Where lines go. Called on the plugin's threads: must be quick and must not call the plugin.
pub type LogSink = fn(&LogRecord<'_>);

static SINK: RwLock<Option<LogSink>> = RwLock::new(None);
/// Highest verbosity that passes; -1 while there is no sink.
static VERBOSITY: AtomicI32 = AtomicI32::new(-1);
static LEVELS: [RateLimiter; 4] = [const { RateLimiter::new(LINES_PER_SECOND) }; 4];
static WARNINGS: [RateLimiter; PLACES] = [const { RateLimiter::new(WARNINGS_PER_SECOND) }; PLACES];

/// Sends the log lines of every plugin in the process to `sink`, up to the verbosity of
/// `most_verbose`.
pub fn set_log_sink(sink: LogSink, most_verbose: LogLevel) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    VERBOSITY.store(most_verbose.verbosity(), Ordering::Release);
}

/// Drops log lines again.
pub fn clear_log_sink() {
    VERBOSITY.store(-1, Ordering::Release);
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = None;
}

fn seconds() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs()
}

/// The limit for warnings of a place, which is known by its format's address.
fn of_place(format: *const c_char) -> &'static RateLimiter {
    let spread = (format.addr() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    &WARNINGS[(spread >> 58) as usize % PLACES]
}

extern "C" fn admit(raw: c_int, format: *const c_char, suppressed: *mut c_ulonglong) -> c_int {
    let level = LogLevel::from_raw(raw);
    let verbosity = level.verbosity();
    if verbosity > VERBOSITY.load(Ordering::Acquire) {
        return 0;
    }
    let limiter = match level {
        LogLevel::Warn => Some(of_place(format)),
        _ => usize::try_from(verbosity).ok().and_then(|v| LEVELS.get(v)),
    };
    let Some(dropped) = limiter.and_then(|limiter| limiter.check(seconds())) else {
        return 0;
    };
    // SAFETY: the shim passes the address of a local variable.
    unsafe { suppressed.write(dropped) };
    1
}

extern "C" fn emit(
    raw: c_int,
    flags: c_ulong,
    file: *const c_char,
    line: c_int,
    text: *const c_char,
    len: usize,
    suppressed: c_ulonglong,
) {
    let Some(sink) = *SINK.read().unwrap_or_else(PoisonError::into_inner) else {
        return;
    };
    // SAFETY: the shim passes its own buffer, of which `len` bytes are written.
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    let file = if file.is_null() {
        String::new()
    } else {
        // SAFETY: a C string literal of the plugin.
        unsafe { CStr::from_ptr(file) }
            .to_string_lossy()
            .into_owned()
    };
    let record = LogRecord {
        level: LogLevel::from_raw(raw),
        subsystems: flags,
        file: &file,
        line,
        message: &String::from_utf8_lossy(text),
        suppressed,
    };
    // A panic must not unwind into the plugin. The sink's own state is its own business.
    let _ = catch_unwind(AssertUnwindSafe(|| sink(&record)));
}

unsafe extern "C" {
    fn nccl_net_logger_hooks(
        admit: extern "C" fn(c_int, *const c_char, *mut c_ulonglong) -> c_int,
        emit: extern "C" fn(
            c_int,
            c_ulong,
            *const c_char,
            c_int,
            *const c_char,
            usize,
            c_ulonglong,
        ),
    );
    fn nccl_net_logger(
        level: c_int,
        flags: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    );
}

/// The logger to pass to a plugin's `init`.
pub(crate) fn plugin_logger() -> LoggerFn {
    static HOOKS: Once = Once::new();
    // SAFETY: the hooks are functions of this crate and stay for the life of the process.
    HOOKS.call_once(|| unsafe { nccl_net_logger_hooks(admit, emit) });
    nccl_net_logger
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::{level, subsystem};
    use crate::export::HostLogger;
    use std::sync::Mutex;

    static LINES: Mutex<Vec<(LogLevel, String, String, u64)>> = Mutex::new(Vec::new());

    /// Of this test: others of this process log too.
    fn is_ours(record: &LogRecord<'_>) -> bool {
        ["a.cc", "b.cc", ""].contains(&record.file)
    }

    fn collect(record: &LogRecord<'_>) {
        if !is_ours(record) {
            return;
        }
        LINES.lock().unwrap().push((
            record.level,
            record.file.to_owned(),
            record.message.to_owned(),
            record.suppressed,
        ));
    }

    static MARKED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

    fn mark(record: &LogRecord<'_>) {
        if !is_ours(record) {
            return;
        }
        MARKED.lock().unwrap().push(record.subsystems);
    }

    /// One test, because the sink is the process's.
    #[test]
    fn foreign_threads_lines_are_formatted_and_limited() {
        let logger = plugin_logger();
        set_log_sink(collect, LogLevel::Info);
        let long = std::ffi::CString::new(vec![b'x'; 5000]).unwrap();
        // SAFETY: formats and arguments match; strings are NUL-terminated.
        unsafe {
            logger(
                3,
                16,
                c"a.cc".as_ptr(),
                7,
                c"%d of %s".as_ptr(),
                5 as c_int,
                c"six".as_ptr(),
            );
            logger(3, 16, std::ptr::null(), 7, c"%s".as_ptr(), long.as_ptr());
            logger(5, 16, c"a.cc".as_ptr(), 7, c"a trace".as_ptr());
            logger(3, 16, c"a.cc".as_ptr(), 7, std::ptr::null());
        }
        let lines = std::mem::take(&mut *LINES.lock().unwrap());
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert_eq!(
            lines[0],
            (LogLevel::Info, "a.cc".into(), "5 of six".into(), 0)
        );
        assert_eq!(lines[1].1, "");
        assert_eq!(lines[1].2.len(), 1023);

        set_log_sink(mark, LogLevel::Info);
        // SAFETY: a logger of this process, which stays.
        let host = unsafe { HostLogger::new(Some(logger)) };
        host.log(level::WARN, subsystem::NET, c"a.cc", 1, "a call failed");
        host.log(level::INFO, subsystem::NET, c"a.cc", 1, "news");
        let marked = std::mem::take(&mut *MARKED.lock().unwrap());
        assert_eq!(marked, [subsystem::ALL, subsystem::NET]);
        set_log_sink(collect, LogLevel::Info);

        let began = Instant::now();
        let total: u64 = 200_000;
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..total / 2 {
                        // SAFETY: as above.
                        unsafe { logger(2, 16, c"b.cc".as_ptr(), 1, c"flood".as_ptr()) };
                    }
                });
            }
        });
        let lines = std::mem::take(&mut *LINES.lock().unwrap());
        assert!(!lines.is_empty());
        let accounted = lines.len() as u64 + lines.iter().map(|line| line.3).sum::<u64>();
        assert!(accounted <= total);
        // One more second on each side, which it may have touched.
        let seconds = began.elapsed().as_secs() + 2;
        let limit = u64::from(WARNINGS_PER_SECOND) * seconds;
        let passed = lines.len() as u64;
        assert!(passed <= limit, "{passed} in {seconds} s");
        // Places may share a limit; these do not all share the flood's.
        for elsewhere in [c"one", c"another place", c"a third", c"the last of them"] {
            // SAFETY: as above.
            unsafe { logger(2, 16, c"b.cc".as_ptr(), 2, elsewhere.as_ptr()) };
        }
        assert!(!std::mem::take(&mut *LINES.lock().unwrap()).is_empty());

        clear_log_sink();
        // SAFETY: as above.
        unsafe { logger(4, 16, c"b.cc".as_ptr(), 1, c"nobody listens".as_ptr()) };
        assert!(LINES.lock().unwrap().is_empty());
    }
}
