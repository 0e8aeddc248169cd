//! The handle of an operation.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tcpx_wire::session::OperationId;

use crate::connection::Handle;
use crate::error::Error;
use crate::report::{Progress, Report};
use crate::wait::deadline;

/// How often a waiting thread makes sure that the engine lives.
const LIVENESS_CHECK: Duration = Duration::from_secs(1);

/// A running send or receive.
///
/// Dropping it cancels the operation; the memory stays in use until nothing points at it.
pub struct Transfer {
    pub(crate) state: Arc<TransferState>,
    pub(crate) operation: OperationId,
    pub(crate) connection: Arc<Handle>,
}

/// What the engine and the handle share.
#[derive(Debug)]
pub(crate) struct TransferState {
    inner: Mutex<Inner>,
    ended: Condvar,
    /// There is an outcome; for looking without the lock.
    has_ended: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    /// Threads that sleep until the end.
    sleeping: usize,
    outcome: Option<Result<Report, Error>>,
    progress: Progress,
    /// The task that polled last.
    waker: Option<Waker>,
}

impl TransferState {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(Inner {
                sleeping: 0,
                outcome: None,
                progress: Progress {
                    bytes_done: 0,
                    bytes_total: total,
                },
                waker: None,
            }),
            ended: Condvar::new(),
            has_ended: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the operation; only the first outcome counts.
    pub(crate) fn end(&self, outcome: Result<Report, Error>) {
        let mut inner = self.lock();
        if inner.outcome.is_none() {
            inner.outcome = Some(outcome);
        }
        self.has_ended.store(true, Ordering::Release);
        if inner.sleeping > 0 {
            self.ended.notify_all();
        }
        let waker = inner.waker.take();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    pub(crate) fn set_total(&self, total: u64) {
        self.lock().progress.bytes_total = total;
    }

    pub(crate) fn add_done(&self, bytes: u64) {
        self.lock().progress.bytes_done += bytes;
    }

    fn outcome(&self) -> Option<Result<Report, Error>> {
        self.lock().outcome.clone()
    }
}

impl Transfer {
    /// The outcome, or `None` while the operation runs. Never blocks.
    pub fn test(&self) -> Option<Result<Report, Error>> {
        if let Err(error) = self.connection.0.check_process() {
            return Some(Err(error));
        }
        self.state.outcome().or_else(|| {
            self.connection.0.watches_from_afar();
            // Whose end had been left for later has been told by that.
            self.state.outcome()
        })
    }

    /// Waits for the end, which the operation's deadlines bound.
    ///
    /// # Errors
    /// How the operation failed. [`Error::EngineStuck`] if the engine hangs inside the network's
    /// library, so that no deadline can fire.
    pub fn wait(self) -> Result<Report, Error> {
        loop {
            if let Some(outcome) = self.wait_timeout(LIVENESS_CHECK) {
                return outcome;
            }
        }
    }

    /// Waits at most `timeout`; `None` if the operation still runs.
    ///
    /// # Errors
    /// As [`Transfer::wait`].
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<Report, Error>> {
        if let Err(error) = self.connection.0.check_process() {
            return Some(Err(error));
        }
        // Without a look at the clock, which takes longer than this.
        if self.state.has_ended()
            && let Some(outcome) = self.state.outcome()
        {
            return Some(outcome);
        }
        let started = Instant::now();
        let has_ended = || self.state.has_ended();
        if self
            .connection
            .0
            .drive(has_ended, deadline(started, timeout))
            && let Some(outcome) = self.state.outcome()
        {
            return Some(outcome);
        }
        let _sleeper = self.connection.0.about_to_sleep();
        let mut inner = self.state.lock();
        loop {
            if let Some(outcome) = &inner.outcome {
                self.connection.0.driving.was_short(started.elapsed());
                return Some(outcome.clone());
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return self.connection.0.stuck().map(Err);
            }
            inner.sleeping += 1;
            inner = self
                .state
                .ended
                .wait_timeout(inner, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            inner.sleeping -= 1;
        }
    }

    /// Asks for an early end. The operation still ends exactly once: with
    /// [`Error::Cancelled`], or with its result if that came first.
    ///
    /// A message that the peer sends to a receive at this very moment ends with it: its send fails, and says why.
    pub fn cancel(&self) {
        self.connection.0.cancel(self.operation);
    }

    /// The outcome, or [`Poll::Pending`] after noting the task that is woken at the end; that of
    /// the last call counts.
    pub fn poll_outcome(&self, context: &mut Context<'_>) -> Poll<Result<Report, Error>> {
        if let Some(outcome) = self.test() {
            return Poll::Ready(outcome);
        }
        let mut inner = self.state.lock();
        if let Some(outcome) = &inner.outcome {
            return Poll::Ready(outcome.clone());
        }
        inner.waker = Some(context.waker().clone());
        Poll::Pending
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        if self.connection.0.is_inherited() {
            return Progress::default();
        }
        self.state.lock().progress
    }
}

impl Future for Transfer {
    type Output = Result<Report, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_outcome(context)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.state.has_ended() {
            self.cancel();
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("operation", &self.operation)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}
