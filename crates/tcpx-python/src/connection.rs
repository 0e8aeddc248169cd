//! A connection to one peer.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use tcpx::{Error, ErrorKind, Gpu, Options, ProgressMode};

use crate::error::check;
use crate::lock;
use crate::memory::{Use, memory};
use crate::opening::Closing;
use crate::options::{after, deadlines, duration};
use crate::transfer::{Tasks, Transfer, started};
use crate::window::{Batch, NextNotification, Window};

/// Seconds that a close waits for the goodbye by default.
const CLOSE_SECONDS: f64 = 5.0;

/// An authenticated connection; send and receive on it from any thread.
#[pyclass(frozen, subclass, module = "tcpx")]
#[derive(Debug)]
pub(crate) struct Connection {
    connection: Mutex<Option<tcpx::Connection>>,
    /// While it is being closed, for those who ask again.
    closing: Arc<Mutex<Option<tcpx::Connection>>>,
    /// The GPU whose memory it moves.
    gpu: Option<Gpu>,
    /// The program makes progress, and no thread of the engine.
    manual: bool,
    /// Tasks that await a notification.
    notified: Arc<Tasks>,
}

impl Connection {
    /// A connection that was opened with `options`.
    pub(crate) fn new(connection: tcpx::Connection, options: &Options) -> Self {
        Self {
            connection: Mutex::new(Some(connection)),
            closing: Arc::default(),
            gpu: options.gpu.clone(),
            manual: options.progress == ProgressMode::Manual,
            notified: Arc::default(),
        }
    }

    pub(crate) const fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    pub(crate) fn open(&self) -> PyResult<tcpx::Connection> {
        let connection = lock(&self.connection);
        connection
            .clone()
            .ok_or_else(|| crate::error::closed("the connection is closed"))
    }
}

#[pymethods]
impl Connection {
    /// Starts a send of a buffer, tensor or `(address, bytes, device)`.
    #[pyo3(signature = (source, tag=0, *, level="placed", timeout=None, stall=None, stream=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "each is a keyword argument in Python"
    )]
    fn send(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::options::tag)] tag: u64,
        level: &str,
        timeout: Option<f64>,
        stall: Option<f64>,
        stream: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let limits = deadlines(timeout, stall)?;
        self.start(py, source, Use::Read, tag, level, limits, stream)
    }

    /// Starts a receive into a writable buffer, tensor or `(address, bytes, device)`, at least as
    /// long as the matching send.
    #[pyo3(signature = (destination, tag=0, *, level="placed", timeout=None, stall=None, stream=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "each is a keyword argument in Python"
    )]
    fn recv(
        &self,
        py: Python<'_>,
        destination: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = crate::options::tag)] tag: u64,
        level: &str,
        timeout: Option<f64>,
        stall: Option<f64>,
        stream: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let limits = deadlines(timeout, stall)?;
        self.start(py, destination, Use::Write, tag, level, limits, stream)
    }

    /// Opens memory to the peer; `rights` are "get", "put" or "get+put".
    #[pyo3(signature = (memory, rights="get+put"))]
    fn expose(&self, py: Python<'_>, memory: &Bound<'_, PyAny>, rights: &str) -> PyResult<Window> {
        Window::open(py, self, memory, rights)
    }

    /// Starts a write into a window of the peer.
    #[pyo3(signature = (source, key, offset=0, *, notify=None, level="placed", timeout=None, stall=None, stream=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "each is a keyword argument in Python"
    )]
    fn put(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        key: &[u8],
        #[pyo3(from_py_with = crate::options::offset)] offset: u64,
        notify: Option<&[u8]>,
        level: &str,
        timeout: Option<f64>,
        stall: Option<f64>,
        stream: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let mut batch = self.batch(level, timeout, stall, stream)?;
        batch.add(Use::Read, source, key, offset)?;
        batch.set_notification(notify);
        batch.launch(py)
    }

    /// Starts a read from a window of the peer, which fills the destination.
    #[pyo3(signature = (destination, key, offset=0, *, notify=None, level="placed", timeout=None, stall=None, stream=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "each is a keyword argument in Python"
    )]
    fn get(
        &self,
        py: Python<'_>,
        destination: &Bound<'_, PyAny>,
        key: &[u8],
        #[pyo3(from_py_with = crate::options::offset)] offset: u64,
        notify: Option<&[u8]>,
        level: &str,
        timeout: Option<f64>,
        stall: Option<f64>,
        stream: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let mut batch = self.batch(level, timeout, stall, stream)?;
        batch.add(Use::Write, destination, key, offset)?;
        batch.set_notification(notify);
        batch.launch(py)
    }

    /// Puts and gets that run together as one transfer.
    #[pyo3(signature = (*, level="placed", timeout=None, stall=None, stream=None))]
    fn batch(
        &self,
        level: &str,
        timeout: Option<f64>,
        stall: Option<f64>,
        stream: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Batch> {
        Ok(Batch::new(
            self.open()?,
            self.manual,
            self.gpu.clone(),
            crate::options::level(level)?,
            deadlines(timeout, stall)?,
            stream.map(Bound::unbind),
        ))
    }

    /// Sends bytes that the peer's program gets from `notification()`.
    fn notify(&self, py: Python<'_>, message: &[u8]) -> PyResult<Transfer> {
        let connection = self.open()?;
        let outcome = crate::held::detached(py, || connection.notify(message));
        started(outcome, self.manual(&connection))
    }

    /// The peer's next notification: wait for it, or await it.
    fn notification(&self) -> PyResult<NextNotification> {
        let tasks = Arc::clone(&self.notified);
        Ok(NextNotification::new(self.open()?, self.manual, tasks))
    }

    /// `host:port` of the peer.
    #[getter]
    fn peer(&self) -> PyResult<String> {
        Ok(self.open()?.peer().address.to_string())
    }

    /// The path that the bytes take, and why, in one line.
    #[getter]
    fn path(&self) -> PyResult<String> {
        Ok(self.open()?.path())
    }

    /// Makes all the progress that can be made now and never waits; whether there may be more to do
    /// at once. For `progress="manual"`; else there is no need for it.
    fn progress(&self, py: Python<'_>) -> PyResult<bool> {
        let connection = self.open()?;
        check(crate::held::detached(py, || connection.progress()))
    }

    /// A descriptor that is readable while `progress()` finds something to do, for `select` and the
    /// like under `progress="manual"`: call `progress()` until it is false, then wait.
    fn progress_fd(&self) -> PyResult<i32> {
        check(
            self.open()?
                .progress_fd()
                .map(|descriptor| descriptor.as_raw_fd()),
        )
    }

    /// Every live operation: where it stands and which side must act next, a line each.
    fn status(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let connection = self.open()?;
        Ok(py.detach(|| connection.status()))
    }

    /// Counters of the data plane by name.
    fn statistics(
        &self,
        py: Python<'_>,
    ) -> PyResult<std::collections::BTreeMap<&'static str, u64>> {
        let connection = self.open()?;
        let counters = py.detach(|| connection.statistics());
        Ok([
            ("bytes_sent", counters.bytes_sent),
            ("bytes_received", counters.bytes_received),
            ("chunks_sent", counters.chunks_sent),
            ("chunks_received", counters.chunks_received),
            ("chunks_resent", counters.chunks_resent),
            ("lanes_lost", counters.lanes_lost),
            ("lanes_restored", counters.lanes_restored),
            ("streams", counters.streams),
        ]
        .into())
    }

    /// Finishes running transfers, says goodbye and waits for the peer's, at most `timeout`
    /// seconds.
    #[pyo3(signature = (timeout=CLOSE_SECONDS))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.aclose(timeout)?.wait(py)
    }

    /// The same, to be awaited. It begins at once. Of several that wait, the longest time counts.
    #[pyo3(signature = (timeout=CLOSE_SECONDS))]
    fn aclose(&self, timeout: f64) -> PyResult<Closing> {
        let timeout = duration("timeout", timeout)?;
        let mut closing = lock(&self.closing);
        let open = lock(&self.connection).take();
        *closing = open.or_else(|| closing.take());
        let Some(connection) = closing.clone() else {
            return Ok(Closing::ended());
        };
        let closing = Arc::clone(&self.closing);
        Closing::start("tcpx-close", move || {
            let closed = connection.close(timeout);
            let kind = closed.as_ref().err().map(Error::kind);
            // What has not ended goes on, and another close waits for it.
            if !matches!(kind, Some(ErrorKind::TimedOut | ErrorKind::Defect)) {
                *lock(&closing) = None;
            }
            closed
        })
    }

    #[getter]
    fn closed(&self) -> bool {
        lock(&self.connection).is_none()
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
        let closed = self.close(py, CLOSE_SECONDS);
        // The exception of the block is the news.
        if kind.is_some() { Ok(()) } else { closed }
    }

    fn __repr__(&self) -> String {
        match self.open() {
            Ok(connection) => format!("<tcpx.Connection {}>", connection.peer().address),
            Err(_) => "<tcpx.Connection closed>".to_owned(),
        }
    }
}

impl Connection {
    fn manual(&self, connection: &tcpx::Connection) -> Option<tcpx::Connection> {
        self.manual.then(|| connection.clone())
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "what sends and receives share are keyword arguments in Python"
    )]
    fn start(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        access: Use,
        tag: u64,
        level: &str,
        limits: Option<tcpx::Deadlines>,
        stream: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let level = crate::options::level(level)?;
        let connection = self.open()?;
        let memory = memory(object, access, self.gpu.as_ref())?;
        let after = after(stream.as_ref(), memory.on_gpu, memory.torch_gpu, py)?;
        let slice = memory.region.all();
        let outcome = crate::held::detached(py, || {
            let request = match access {
                Use::Read => connection.send(slice, tag),
                Use::Write => connection.receive(slice, tag),
            };
            let mut request = request.after(after).level(level);
            if let Some(limits) = limits {
                request = request.deadlines(limits);
            }
            request.start()
        });
        started(outcome, self.manual(&connection))
    }
}
