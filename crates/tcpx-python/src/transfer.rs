//! A running operation.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tcpx::{Error, Report};

use crate::completions::{Completions, Waker};
use crate::error::{check, raise};
use crate::lock;
use crate::options::duration;

/// A waiting thread looks this often whether a signal (Ctrl-C) has come: a program ends within a
/// tenth of a second.
const SIGNALS: Duration = Duration::from_millis(50);

/// What `look` finds, which waits at most for as long as it is told; it is called again and again,
/// at most for `timeout` seconds.
pub(crate) fn wait_for<T>(
    py: Python<'_>,
    timeout: Option<f64>,
    mut look: impl FnMut(Duration) -> PyResult<Option<T>>,
) -> PyResult<T> {
    let span = timeout.map(|seconds| duration("timeout", seconds));
    let deadline = span.transpose()?.map(|span| Instant::now() + span);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let limit = left.map_or(SIGNALS, |left| left.min(SIGNALS));
        if let Some(found) = look(limit)? {
            return Ok(found);
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= limit) {
            return Err(crate::error::wait_ran_out(py, timeout.unwrap_or_default()));
        }
    }
}

/// A send, receive, put, get or batch that has started. Dropping it cancels it; its memory stays in
/// use until nothing points at it any more.
#[pyclass(frozen, module = "tcpx")]
#[derive(Debug)]
pub(crate) struct Transfer {
    transfer: tcpx::Transfer,
    /// Tasks that await it.
    tasks: Arc<Tasks>,
    /// Where the program makes the progress.
    manual: Option<tcpx::Connection>,
    /// The program has asked for its end.
    is_cancelled: AtomicBool,
}

impl Drop for Transfer {
    fn drop(&mut self) {
        /// Once is enough to learn of it.
        static WARNED: AtomicBool = AtomicBool::new(false);
        if self.is_cancelled.load(Ordering::Relaxed)
            || WARNED.load(Ordering::Relaxed)
            || crate::held::interpreter_ends()
            || self.transfer.test().is_some()
            || WARNED.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let warn = |py: Python<'_>| {
            // It may be dropped as an exception leaves the expression that it is of.
            let raised = PyErr::take(py);
            let text = c"a transfer was dropped before its end, which cancels it: keep what send, recv, put and get \
                         return, and wait for it or await it";
            let kind = py.get_type::<PyRuntimeWarning>();
            if let Err(error) = PyErr::warn(py, &kind, text, 1) {
                error.write_unraisable(py, None);
            }
            if let Some(raised) = raised {
                raised.restore(py);
            }
        };
        // Nobody is told where there is no interpreter any more.
        let _ = Python::try_attach(warn);
    }
}

/// Wakes every task that awaits the same.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Mutex<Vec<Arc<Waker>>>);

impl Tasks {
    /// Has `completions` told under `token` when something has happened.
    pub(crate) fn add(&self, completions: &Completions, token: u64) {
        lock(&self.0).push(completions.waker(token));
    }

    /// Takes back [`add`](Self::add): nobody waits under this token any more.
    pub(crate) fn remove(&self, completions: &Completions, token: u64) {
        lock(&self.0).retain(|task| !completions.is_of(task, token));
    }
}

impl Wake for Tasks {
    fn wake(self: Arc<Self>) {
        let tasks = std::mem::take(&mut *lock(&self.0));
        tasks.into_iter().for_each(Wake::wake);
    }
}

#[pymethods]
impl Transfer {
    /// The report, or `None` while the transfer runs. Never waits.
    fn test(&self, py: Python<'_>) -> PyResult<Option<PyReport>> {
        self.outcome(py, Duration::ZERO)
    }

    /// As `test`, for an event loop that is about to await it: waits for a moment, unless that was
    /// in vain before.
    fn poll_once(&self, py: Python<'_>, completions: &Completions) -> PyResult<Option<PyReport>> {
        completions
            .first_look(|limit| self.outcome(py, limit).transpose())
            .transpose()
    }

    /// Waits for the end. `timeout` (seconds) bounds the wait and not the transfer, which goes on.
    /// `progress(done, total)` is called about ten times a second meanwhile, with bytes, and once
    /// at the end.
    #[pyo3(signature = (timeout=None, progress=None))]
    fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyReport> {
        wait_for(py, timeout, |limit| {
            let report = self.outcome(py, limit)?;
            if let Some(progress) = progress {
                let ended = report.as_ref().map(|report| (report.nbytes, report.nbytes));
                progress.call1(ended.unwrap_or_else(|| self.progress()))?;
            }
            Ok(report)
        })
    }

    /// Asks for an early end; the transfer still ends once, with `CancelledError` or as it would
    /// have.
    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.transfer.cancel();
    }

    /// Bytes placed so far, and bytes in all (0 until a receive is matched).
    #[getter]
    fn progress(&self) -> (u64, u64) {
        let progress = self.transfer.progress();
        (progress.bytes_done, progress.bytes_total)
    }

    /// The report if there is one; else `completions` are told of the end under `token`.
    fn watch(&self, completions: &Completions, token: u64) -> PyResult<Option<PyReport>> {
        self.tasks.add(completions, token);
        let waker = Arc::clone(&self.tasks).into();
        match self.transfer.poll_outcome(&mut Context::from_waker(&waker)) {
            Poll::Pending => Ok(None),
            Poll::Ready(outcome) => Ok(Some(PyReport::of(&check(outcome)?))),
        }
    }

    /// Takes back `watch`.
    fn unwatch(&self, completions: &Completions, token: u64) {
        self.tasks.remove(completions, token);
    }

    /// What an event loop watches to make progress, where the program does that.
    fn progress_fd(&self) -> PyResult<Option<i32>> {
        progress_fd(self.manual.as_ref())
    }

    /// Makes the progress that can be made now; whether there may be more.
    fn make_progress(&self, py: Python<'_>) -> PyResult<bool> {
        make_progress(py, self.manual.as_ref())
    }

    /// Awaits the end, and calls `progress(done, total)` every `every` seconds meanwhile and once
    /// at the end.
    #[pyo3(signature = (progress, every=0.1))]
    fn track<'py>(
        slf: &Bound<'py, Self>,
        progress: &Bound<'py, PyAny>,
        every: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("tcpx._loop")?;
        module.call_method1("track", (slf, progress, every))
    }

    /// The report, once the transfer has ended. A task that is cancelled meanwhile cancels it.
    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static WAIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        WAIT.import(slf.py(), "tcpx._loop", "wait")?.call1((slf,))
    }

    fn __repr__(&self) -> String {
        let (done, total) = self.progress();
        format!("<tcpx.Transfer {done} of {total} bytes>")
    }
}

impl Transfer {
    /// The report, or `None` if the transfer still runs after `limit`.
    fn outcome(&self, py: Python<'_>, limit: Duration) -> PyResult<Option<PyReport>> {
        let outcome = crate::held::detached(py, || self.transfer.wait_timeout(limit));
        let report = outcome.map(check).transpose()?;
        Ok(report.as_ref().map(PyReport::of))
    }
}

/// What a finished transfer tells.
#[pyclass(frozen, name = "Report", module = "tcpx", get_all)]
#[derive(Debug)]
pub(crate) struct PyReport {
    /// Bytes moved; a receive may move fewer than it has room for.
    nbytes: u64,
    /// What is known: "sent", "placed" or "verified".
    level: &'static str,
    /// Seconds from the start to the end.
    seconds: f64,
    /// CRC32C of the bytes at level "verified".
    digest: Option<u32>,
}

impl PyReport {
    fn of(report: &Report) -> Self {
        Self {
            nbytes: report.bytes,
            level: crate::options::level_name(report.level),
            seconds: report.elapsed.as_secs_f64(),
            digest: report.digest,
        }
    }
}

#[pymethods]
impl PyReport {
    fn __repr__(&self) -> String {
        format!(
            "<tcpx.Report {} bytes {} in {:.6} s>",
            self.nbytes, self.level, self.seconds
        )
    }
}

/// A transfer that has started on a connection, or why it has not.
pub(crate) fn started(
    outcome: Result<tcpx::Transfer, Error>,
    manual: Option<tcpx::Connection>,
) -> PyResult<Transfer> {
    let transfer = outcome.map_err(raise)?;
    let tasks = Arc::default();
    Ok(Transfer {
        transfer,
        tasks,
        manual,
        is_cancelled: AtomicBool::new(false),
    })
}

/// The descriptor of a connection on which the program makes progress; none once it has ended, as
/// the engine's thread finishes it.
pub(crate) fn progress_fd(manual: Option<&tcpx::Connection>) -> PyResult<Option<i32>> {
    let Some(connection) = manual else {
        return Ok(None);
    };
    match connection.progress_fd() {
        Ok(descriptor) => Ok(Some(descriptor.as_raw_fd())),
        Err(Error::Setting { .. }) => Ok(None),
        Err(error) => Err(raise(error)),
    }
}

pub(crate) fn make_progress(py: Python<'_>, manual: Option<&tcpx::Connection>) -> PyResult<bool> {
    let Some(connection) = manual else {
        return Ok(false);
    };
    check(crate::held::detached(py, || connection.progress()))
}
