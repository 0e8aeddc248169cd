//! Windows of this side, puts and gets in those of the peer, notifications.

use std::sync::{Arc, Mutex};
use std::task::Context;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;
use tcpx::{Deadlines, Gpu, Level, RegionSlice, Rights, WindowKey};

use crate::completions::Completions;
use crate::connection::Connection;
use crate::error::check;
use crate::lock;
use crate::memory::{Use, memory};
use crate::opening::Closing;
use crate::options::{after, duration};
use crate::transfer::{Tasks, Transfer, make_progress, progress_fd, started, wait_for};

/// Seconds that a revoke waits for what the peer has under way by default.
const REVOKE_SECONDS: f64 = 5.0;

/// Memory that is open to the peer. Dropping it revokes it.
#[pyclass(frozen, module = "tcpx")]
#[derive(Debug)]
pub(crate) struct Window {
    state: Mutex<State>,
    key: WindowKey,
}

#[derive(Debug)]
enum State {
    Open(tcpx::Window),
    /// Whoever revokes it again waits for the same.
    Revoked(Closing),
}

impl Window {
    pub(crate) fn open(
        py: Python<'_>,
        connection: &Connection,
        object: &Bound<'_, PyAny>,
        rights: &str,
    ) -> PyResult<Self> {
        let (rights, access) = match rights {
            "get" => (Rights::Get, Use::Read),
            "put" => (Rights::Put, Use::Write),
            "get+put" => (Rights::GetAndPut, Use::Write),
            other => {
                return Err(crate::error::setting(&format!(
                    "rights: expected \"get\", \"put\" or \"get+put\", got {other:?}"
                )));
            }
        };
        let memory = memory(object, access, connection.gpu())?;
        let connection = connection.open()?;
        let window = crate::held::detached(py, || connection.expose(memory.region.all(), rights));
        let window = check(window)?;
        Ok(Self {
            key: window.key(),
            state: Mutex::new(State::Open(window)),
        })
    }

    fn closing(&self, timeout: Duration) -> PyResult<Closing> {
        let mut state = lock(&self.state);
        let closing = match std::mem::replace(&mut *state, State::Revoked(Closing::ended())) {
            State::Open(window) => Closing::start("tcpx-revoke", move || window.revoke(timeout))?,
            State::Revoked(closing) => closing,
        };
        *state = State::Revoked(closing.clone());
        Ok(closing)
    }
}

#[pymethods]
impl Window {
    /// What lets the peer in: bytes for `put` and `get` there.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.key.to_bytes())
    }

    /// Closes the window, and waits at most `timeout` seconds for the end of what uses it. It is
    /// closed also where the wait is interrupted.
    #[pyo3(signature = (timeout=REVOKE_SECONDS))]
    fn revoke(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.closing(duration("timeout", timeout)?)?.wait(py)
    }

    #[getter]
    fn revoked(&self) -> bool {
        matches!(&*lock(&self.state), State::Revoked(_))
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.key.bytes).unwrap_or(usize::MAX)
    }

    const fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _value: Option<&Bound<'_, PyAny>>,
        _trace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let revoked = self.revoke(py, REVOKE_SECONDS);
        // The exception of the block is the news.
        if kind.is_some() { Ok(()) } else { revoked }
    }

    fn __repr__(&self) -> String {
        let state = if self.revoked() { "revoked" } else { "open" };
        format!("<tcpx.Window {} bytes, {state}>", self.key.bytes)
    }
}

/// A put or a get of a batch.
#[derive(Debug)]
struct Part {
    access: Use,
    slice: RegionSlice,
    key: WindowKey,
    offset: u64,
}

/// Puts and gets that have not started yet.
#[pyclass(module = "tcpx")]
#[derive(Debug)]
pub(crate) struct Batch {
    connection: tcpx::Connection,
    manual: bool,
    gpu: Option<Gpu>,
    level: Level,
    deadlines: Option<Deadlines>,
    stream: Option<Py<PyAny>>,
    parts: Vec<Part>,
    on_gpu: bool,
    torch_gpu: Option<u32>,
    notification: Option<Vec<u8>>,
}

impl Batch {
    pub(crate) const fn new(
        connection: tcpx::Connection,
        manual: bool,
        gpu: Option<Gpu>,
        level: Level,
        deadlines: Option<Deadlines>,
        stream: Option<Py<PyAny>>,
    ) -> Self {
        Self {
            connection,
            manual,
            gpu,
            level,
            deadlines,
            stream,
            parts: Vec::new(),
            on_gpu: false,
            torch_gpu: None,
            notification: None,
        }
    }

    pub(crate) fn add(
        &mut self,
        access: Use,
        object: &Bound<'_, PyAny>,
        key: &[u8],
        offset: u64,
    ) -> PyResult<()> {
        let key = WindowKey::from_bytes(key)
            .map_err(|error| crate::error::setting(&error.to_string()))?;
        let memory = memory(object, access, self.gpu.as_ref())?;
        self.on_gpu |= memory.on_gpu;
        self.torch_gpu = self.torch_gpu.or(memory.torch_gpu);
        self.parts.push(Part {
            access,
            slice: memory.region.all(),
            key,
            offset,
        });
        Ok(())
    }

    pub(crate) fn set_notification(&mut self, message: Option<&[u8]>) {
        self.notification = message.map(<[u8]>::to_vec);
    }

    pub(crate) fn launch(&mut self, py: Python<'_>) -> PyResult<Transfer> {
        let stream = self.stream.as_ref().map(|stream| stream.bind(py).clone());
        let after = after(stream.as_ref(), self.on_gpu, self.torch_gpu, py)?;
        let transfer = crate::held::detached(py, || {
            let mut batch = self.connection.batch().after(after).level(self.level);
            for part in &self.parts {
                let slice = part.slice.clone();
                batch = match part.access {
                    Use::Read => batch.put(slice, &part.key, part.offset),
                    Use::Write => batch.get(slice, &part.key, part.offset),
                };
            }
            if let Some(deadlines) = self.deadlines {
                batch = batch.deadlines(deadlines);
            }
            if let Some(message) = &self.notification {
                batch = batch.notify(message);
            }
            batch.start()
        });
        // What was refused is kept: it may be started again.
        let manual = self.manual.then(|| self.connection.clone());
        let transfer = started(transfer, manual)?;
        self.parts.clear();
        self.notification = None;
        Ok(transfer)
    }
}

#[pymethods]
impl Batch {
    /// Adds a write into a window of the peer.
    #[pyo3(signature = (source, key, offset=0))]
    fn put<'py>(
        mut slf: PyRefMut<'py, Self>,
        source: &Bound<'_, PyAny>,
        key: &[u8],
        #[pyo3(from_py_with = crate::options::offset)] offset: u64,
    ) -> PyResult<PyRefMut<'py, Self>> {
        slf.add(Use::Read, source, key, offset)?;
        Ok(slf)
    }

    /// Adds a read from a window of the peer.
    #[pyo3(signature = (destination, key, offset=0))]
    fn get<'py>(
        mut slf: PyRefMut<'py, Self>,
        destination: &Bound<'_, PyAny>,
        key: &[u8],
        #[pyo3(from_py_with = crate::options::offset)] offset: u64,
    ) -> PyResult<PyRefMut<'py, Self>> {
        slf.add(Use::Write, destination, key, offset)?;
        Ok(slf)
    }

    /// Sends a notification behind the parts.
    fn notify<'py>(mut slf: PyRefMut<'py, Self>, message: &[u8]) -> PyRefMut<'py, Self> {
        slf.set_notification(Some(message));
        slf
    }

    /// Starts all of it. The batch is empty afterwards, and may be filled again.
    fn start(&mut self, py: Python<'_>) -> PyResult<Transfer> {
        self.launch(py)
    }

    fn __len__(&self) -> usize {
        self.parts.len()
    }
}

/// The peer's next notification.
#[pyclass(frozen, module = "tcpx._tcpx")]
#[derive(Debug)]
pub(crate) struct NextNotification {
    connection: tcpx::Connection,
    manual: bool,
    tasks: Arc<Tasks>,
}

impl NextNotification {
    pub(crate) const fn new(connection: tcpx::Connection, manual: bool, tasks: Arc<Tasks>) -> Self {
        Self {
            connection,
            manual,
            tasks,
        }
    }

    fn manual(&self) -> Option<&tcpx::Connection> {
        self.manual.then_some(&self.connection)
    }

    fn next<'py>(&self, py: Python<'py>, limit: Duration) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let found = crate::held::detached(py, || self.connection.notification(limit));
        Ok(check(found)?.map(|bytes| PyBytes::new(py, &bytes)))
    }
}

#[pymethods]
impl NextNotification {
    /// The notification. `timeout` (seconds) bounds the wait.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyBytes>> {
        wait_for(py, timeout, |limit| self.next(py, limit))
    }

    /// The notification, or `None` when there is none yet.
    fn test<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.next(py, Duration::ZERO)
    }

    /// As `test`, for an event loop that is about to await it: waits for a moment, unless that was
    /// in vain before.
    fn poll_once<'py>(
        &self,
        py: Python<'py>,
        completions: &Completions,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        completions
            .first_look(|limit| self.next(py, limit).transpose())
            .transpose()
    }

    /// The notification if there is one; else `completions` are told under `token` when there may
    /// be.
    fn watch<'py>(
        &self,
        py: Python<'py>,
        completions: &Completions,
        token: u64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.tasks.add(completions, token);
        let waker = Arc::clone(&self.tasks).into();
        let polled = self
            .connection
            .poll_notification(&mut Context::from_waker(&waker));
        match polled {
            std::task::Poll::Pending => Ok(None),
            std::task::Poll::Ready(found) => Ok(Some(PyBytes::new(py, &check(found)?))),
        }
    }

    /// Takes back `watch`.
    fn unwatch(&self, completions: &Completions, token: u64) {
        self.tasks.remove(completions, token);
    }

    /// What an event loop watches to make progress, where the program does that.
    fn progress_fd(&self) -> PyResult<Option<i32>> {
        progress_fd(self.manual())
    }

    /// Makes the progress that can be made now; whether there may be more.
    fn make_progress(&self, py: Python<'_>) -> PyResult<bool> {
        make_progress(py, self.manual())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static RESULT_OF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        RESULT_OF
            .import(slf.py(), "tcpx._loop", "result_of")?
            .call1((slf,))
    }
}
