//! Connections that begin and end while an event loop or a thread that may be interrupted waits for
//! that.
//!
//! The engine sets a connection up, and closes it or a window, on the thread that asks for it, so
//! each waits in a thread of this module, which knows nothing of the interpreter: one for all that
//! accept at an endpoint, while any does, and one for each dial and each close.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Wake;
use std::time::Duration;

use pyo3::prelude::*;
use tcpx::{Error, NetworkError, Options};

use crate::completions::Completions;
use crate::connection::Connection;
use crate::error::{check, raise};
use crate::lock;
use crate::transfer::{Tasks, wait_for};

type Outcome = Result<tcpx::Connection, Error>;

/// Nobody has come within the limit of one look, or before the endpoint was closed.
pub(crate) const fn is_nobody(error: &Error) -> bool {
    use NetworkError::{AcceptTimedOut, ListenerClosed};
    matches!(
        error,
        Error::Network(AcceptTimedOut { .. } | ListenerClosed { .. })
    )
}

/// What an endpoint and those that accept at it share.
#[derive(Debug)]
pub(crate) struct Listening {
    endpoint: Mutex<Option<Arc<tcpx::Endpoint>>>,
    pub(crate) options: Options,
    accepts: Mutex<Accepts>,
    tasks: Arc<Tasks>,
}

#[derive(Debug, Default)]
struct Accepts {
    /// Tasks that wait.
    waiting: usize,
    /// Connections for them. What a task leaves behind that gave up is for whoever asks next.
    ready: VecDeque<Outcome>,
    has_thread: bool,
}

impl Accepts {
    fn are_enough(&self) -> bool {
        self.ready.len() >= self.waiting
    }
}

impl Listening {
    pub(crate) fn new(endpoint: tcpx::Endpoint, options: Options) -> Arc<Self> {
        Arc::new(Self {
            endpoint: Mutex::new(Some(Arc::new(endpoint))),
            options,
            accepts: Mutex::default(),
            tasks: Arc::default(),
        })
    }

    pub(crate) fn open(&self) -> PyResult<Arc<tcpx::Endpoint>> {
        let endpoint = lock(&self.endpoint).clone();
        endpoint.ok_or_else(|| crate::error::closed("the endpoint is closed"))
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.endpoint).is_none()
    }

    pub(crate) fn close(&self) {
        if let Some(endpoint) = lock(&self.endpoint).take() {
            endpoint.close();
        }
        Arc::clone(&self.tasks).wake();
    }

    /// What was accepted for a task that gave up.
    pub(crate) fn left_behind(&self) -> Option<Outcome> {
        lock(&self.accepts).ready.pop_front()
    }

    /// Counts a task that waits, and sees to it that somebody accepts for it.
    fn wait(self: &Arc<Self>) -> std::io::Result<()> {
        let mut accepts = lock(&self.accepts);
        accepts.waiting += 1;
        if accepts.has_thread || accepts.are_enough() {
            return Ok(());
        }
        let listening = Arc::clone(self);
        let started = std::thread::Builder::new()
            .name("tcpx-accept".to_owned())
            .spawn(move || listening.accept_all());
        accepts.has_thread = started.is_ok();
        accepts.waiting -= usize::from(started.is_err());
        started.map(drop)
    }

    fn accept_all(&self) {
        loop {
            let endpoint = lock(&self.endpoint).clone();
            let mut accepts = lock(&self.accepts);
            let Some(endpoint) = endpoint.filter(|_| !accepts.are_enough()) else {
                accepts.has_thread = false;
                return;
            };
            drop(accepts);
            let enough = || lock(&self.accepts).are_enough();
            let accepted = endpoint.accept_unless(Duration::MAX, enough).transpose();
            if let Some(outcome) = accepted.filter(|it| !it.as_ref().is_err_and(is_nobody)) {
                lock(&self.accepts).ready.push_back(outcome);
                Arc::clone(&self.tasks).wake();
            }
        }
    }
}

/// The next connection of an endpoint, for an event loop.
#[pyclass(frozen, module = "tcpx._tcpx")]
#[derive(Debug)]
pub(crate) struct NextConnection(pub(crate) Arc<Listening>);

#[pymethods]
impl NextConnection {
    /// The connection, if there is one.
    fn poll_once(&self, _completions: &Completions) -> PyResult<Option<Connection>> {
        match self.0.left_behind() {
            Some(Ok(connection)) => Ok(Some(Connection::new(connection, &self.0.options))),
            Some(Err(error)) => Err(raise(error)),
            None => self.0.open().map(|_| None),
        }
    }

    /// The same; `completions` are told under `token` when there may be one, until `unwatch`.
    fn watch(&self, completions: &Completions, token: u64) -> PyResult<Option<Connection>> {
        self.0.tasks.add(completions, token);
        let started = self.0.wait();
        started.map_err(|error| crate::error::system("starting a thread", &error))?;
        self.poll_once(completions)
    }

    fn unwatch(&self, completions: &Completions, token: u64) {
        self.0.tasks.remove(completions, token);
        let mut accepts = lock(&self.0.accepts);
        accepts.waiting = accepts.waiting.saturating_sub(1);
        drop(accepts);
        if let Ok(endpoint) = self.0.open() {
            endpoint.nudge();
        }
    }
}

/// What a thread of its own does, which knows nothing of the interpreter.
#[derive(Debug)]
struct Background<T> {
    outcome: Mutex<Option<T>>,
    done: Condvar,
    tasks: Arc<Tasks>,
}

impl<T: Send + 'static> Background<T> {
    fn start(name: &str, work: impl FnOnce() -> T + Send + 'static) -> PyResult<Arc<Self>> {
        let shared = Arc::new(Self::ended(None));
        let told = Arc::clone(&shared);
        let started = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || told.end(work()));
        started.map_err(|error| crate::error::system("starting a thread", &error))?;
        Ok(shared)
    }

    fn ended(outcome: Option<T>) -> Self {
        Self {
            outcome: Mutex::new(outcome),
            done: Condvar::new(),
            tasks: Arc::default(),
        }
    }

    fn end(&self, outcome: T) {
        *lock(&self.outcome) = Some(outcome);
        self.done.notify_all();
        Arc::clone(&self.tasks).wake();
    }

    /// Looks at the outcome, and waits for it before, at most for so long.
    fn take_outcome<R>(&self, limit: Duration, take: impl FnOnce(&mut Option<T>) -> R) -> R {
        let outcome = lock(&self.outcome);
        let waited = self
            .done
            .wait_timeout_while(outcome, limit, |outcome| outcome.is_none());
        let (mut outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
        take(&mut outcome)
    }
}

/// A connection that is being dialled.
#[pyclass(frozen, module = "tcpx._tcpx")]
#[derive(Debug)]
pub(crate) struct Dialling {
    shared: Arc<Background<Outcome>>,
    options: Options,
}

impl Dialling {
    pub(crate) fn start(address: String, options: Options) -> PyResult<Self> {
        let with = options.clone();
        let dial = move || tcpx::Endpoint::connect(&*address, &with);
        let shared = Background::start("tcpx-dial", dial)?;
        Ok(Self { shared, options })
    }

    /// The connection, if it comes about within `limit`.
    pub(crate) fn within(&self, py: Python<'_>, limit: Duration) -> PyResult<Option<Connection>> {
        match py.detach(|| self.shared.take_outcome(limit, Option::take)) {
            Some(Ok(connection)) => Ok(Some(Connection::new(connection, &self.options))),
            Some(Err(error)) => Err(raise(error)),
            None => Ok(None),
        }
    }
}

#[pymethods]
impl Dialling {
    /// The connection, if it is there.
    fn poll_once(
        &self,
        py: Python<'_>,
        _completions: &Completions,
    ) -> PyResult<Option<Connection>> {
        self.within(py, Duration::ZERO)
    }

    /// The same; `completions` are told under `token` when it is there, or cannot be.
    fn watch(
        &self,
        py: Python<'_>,
        completions: &Completions,
        token: u64,
    ) -> PyResult<Option<Connection>> {
        self.shared.tasks.add(completions, token);
        self.poll_once(py, completions)
    }

    fn unwatch(&self, completions: &Completions, token: u64) {
        self.shared.tasks.remove(completions, token);
    }
}

/// A connection or a window that is being closed. Whoever waits for it may give up: it is closed
/// all the same.
#[pyclass(frozen, module = "tcpx._tcpx")]
#[derive(Clone, Debug)]
pub(crate) struct Closing(Arc<Background<Result<(), Error>>>);

impl Closing {
    pub(crate) fn start(
        name: &str,
        close: impl FnOnce() -> Result<(), Error> + Send + 'static,
    ) -> PyResult<Self> {
        Background::start(name, close).map(Self)
    }

    /// Of what was closed before.
    pub(crate) fn ended() -> Self {
        Self(Arc::new(Background::ended(Some(Ok(())))))
    }

    /// Waits for the end.
    pub(crate) fn wait(&self, py: Python<'_>) -> PyResult<()> {
        wait_for(py, None, |limit| self.within(py, limit)).map(drop)
    }

    /// Whether it is closed within `limit`.
    fn within(&self, py: Python<'_>, limit: Duration) -> PyResult<Option<bool>> {
        let outcome =
            crate::held::detached(py, || self.0.take_outcome(limit, |outcome| outcome.clone()));
        outcome
            .map(|closed| check(closed).map(|()| true))
            .transpose()
    }
}

#[pymethods]
impl Closing {
    fn poll_once(&self, py: Python<'_>, _completions: &Completions) -> PyResult<Option<bool>> {
        self.within(py, Duration::ZERO)
    }

    fn watch(
        &self,
        py: Python<'_>,
        completions: &Completions,
        token: u64,
    ) -> PyResult<Option<bool>> {
        self.0.tasks.add(completions, token);
        self.poll_once(py, completions)
    }

    fn unwatch(&self, completions: &Completions, token: u64) {
        self.0.tasks.remove(completions, token);
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("tcpx._loop")?;
        module.call_method1("closed", (slf,))
    }
}
