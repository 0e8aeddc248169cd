//! The handle of an operation.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tcpx_lanes::lock;
use tcpx_wire::session::OperationId;

use crate::completion_queue::{Completion, CompletionQueue};
use crate::connection::Handle;
use crate::core::Notice;
use crate::drive::EngineWatch;
use crate::error::Error;
use crate::report::{Progress, Report};
use crate::wait::{LIVENESS_CHECK, deadline};

/// A running send, receive, put, get, or batch.
///
/// Its end can be waited for in three ways: [`wait`](Self::wait) and
/// [`wait_timeout`](Self::wait_timeout) for this one, a [`CompletionQueue`] for several, and as a
/// [`Future`] in any runtime. The first has the shortest latency, because the waiting thread drives
/// the connection by itself.
///
/// As a future it needs no runtime of its own and never blocks; its output is that of `wait`. It
/// has one place for a waker, that of the last poll. If the engine hangs inside the network's
/// library the future stays pending; `wait` returns [`Error::EngineStuck`] then.
///
/// Dropping it cancels the operation; the memory stays in use until nothing points at it.
///
/// ```
/// # use std::pin::pin;
/// # use std::sync::Arc;
/// # use std::task::{Context, Poll, Wake, Waker};
/// # use std::time::Duration;
/// # use tcpx::{Auth, Endpoint, Options, Region};
/// # struct Unpark(std::thread::Thread);
/// # impl Wake for Unpark {
/// #     fn wake(self: Arc<Self>) {
/// #         self.0.unpark();
/// #     }
/// # }
/// # fn block_on<T>(future: impl Future<Output = T>) -> T {
/// #     let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
/// #     let mut future = pin!(future);
/// #     loop {
/// #         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
/// #             Poll::Ready(output) => return output,
/// #             Poll::Pending => std::thread::park(),
/// #         }
/// #     }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let key = tcpx::generate_key()?;
/// # let server = Endpoint::listen("127.0.0.1:0".parse()?, Options::tcp(Auth::Key(key.clone())))?;
/// # let address = server.local_addr();
/// # let client = std::thread::spawn(move || Endpoint::connect(address, &Options::tcp(Auth::Key(key))));
/// # let receiver = server.accept(Duration::from_secs(10))?;
/// # let sender = client.join().expect("the client does not panic")?;
/// let (source, destination) = (Region::host(4096)?, Region::host(4096)?);
/// // `block_on` is that of any runtime.
/// let report = block_on(async {
///     let received = receiver.receive(destination.all(), 7).start()?;
///     sender.send(source.all(), 7).start()?.await?;
///     received.await
/// })?;
/// assert_eq!(report.bytes, 4096);
/// # Ok(())
/// # }
/// ```
pub struct Transfer {
    pub(crate) state: Arc<TransferState>,
    operations: Operations,
    pub(crate) connection: Arc<Handle>,
    /// A queue waits for its end.
    is_queued: AtomicBool,
}

/// What a transfer consists of.
#[derive(Debug, Default)]
pub(crate) struct Operations {
    first: Option<OperationId>,
    others: Vec<OperationId>,
}

impl Operations {
    pub(crate) fn push(&mut self, operation: OperationId) {
        match self.first {
            None => self.first = Some(operation),
            Some(_) => self.others.push(operation),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(crate) fn len(&self) -> usize {
        self.others.len() + usize::from(self.first.is_some())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = OperationId> {
        self.first.into_iter().chain(self.others.iter().copied())
    }
}

impl From<OperationId> for Operations {
    fn from(only: OperationId) -> Self {
        Self {
            first: Some(only),
            others: Vec::new(),
        }
    }
}

/// What the engine and the handle share.
#[derive(Debug)]
pub(crate) struct TransferState {
    inner: Mutex<Inner>,
    ended: Condvar,
    /// Several operations make it up.
    is_batch: bool,
    /// There is an outcome; for looking without the lock.
    has_ended: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    /// Threads that sleep until the end.
    sleeping: usize,
    /// Operations that have not ended, and the reports of those that have.
    running: usize,
    report: Option<Report>,
    /// The first error among them.
    error: Option<Error>,
    /// The last of them, which begins once the others have ended, unless one fails.
    notice: Option<Box<Notice>>,
    outcome: Option<Result<Report, Error>>,
    progress: Progress,
    /// Who is notified of the end, and as long as somebody is to be, what keeps the engine's thread
    /// at it.
    notify: Option<(Notify, EngineWatch)>,
}

#[derive(Debug)]
enum Notify {
    Waker(Waker),
    Queue(CompletionQueue, u64),
}

impl TransferState {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Self::of_parts(total, 1)
    }

    /// Of so many operations, which end together.
    pub(crate) fn of_parts(total: u64, parts: usize) -> Arc<Self> {
        Arc::new(Self {
            is_batch: parts > 1,
            inner: Mutex::new(Inner {
                sleeping: 0,
                running: parts,
                report: None,
                error: None,
                notice: None,
                outcome: None,
                progress: Progress {
                    bytes_done: 0,
                    bytes_total: total,
                },
                notify: None,
            }),
            ended: Condvar::new(),
            has_ended: AtomicBool::new(false),
        })
    }

    /// Ends one of the operations, with a report unless it only follows the others. The transfer
    /// ends with the last of them: then nothing points at its memory. The caller wakes the waker
    /// that this returns when it holds no lock any more: waking runs the program's code.
    #[must_use]
    pub(crate) fn end(&self, outcome: Result<Option<Report>, Error>) -> Option<Waker> {
        let mut inner = lock(&self.inner);
        inner.running = inner.running.saturating_sub(1);
        match outcome {
            Ok(report) => {
                inner.report = match (inner.report.take(), report) {
                    (Some(all), Some(one)) => Some(all.join(one)),
                    (all, one) => all.or(one),
                };
            }
            Err(error) => {
                inner.running -= usize::from(inner.notice.take().is_some());
                let is_held = |error: &Error| matches!(error, Error::MemoryHeld { .. });
                inner.error = Some(match inner.error.take() {
                    // The first one says why, and any says that memory is held.
                    Some(first) if is_held(&error) && !is_held(&first) => Error::MemoryHeld {
                        error: Box::new(first),
                    },
                    Some(first) => first,
                    None => error,
                });
            }
        }
        if inner.running > 0 {
            return None;
        }
        let outcome = match (inner.error.take(), inner.report.take()) {
            (Some(error), _) => Err(error),
            (None, report) => Ok(report?),
        };
        inner.outcome.get_or_insert(outcome);
        self.has_ended.store(true, Ordering::Release);
        if inner.sleeping > 0 {
            self.ended.notify_all();
        }
        let (notify, _watch) = inner.notify.take()?;
        match (notify, inner.outcome.clone()) {
            (Notify::Waker(waker), _) => Some(waker),
            (Notify::Queue(queue, key), outcome) => {
                queue.add(Completion {
                    key,
                    outcome: outcome?,
                });
                None
            }
        }
    }

    /// Has the batch end with this one.
    pub(crate) fn set_notice(&self, notice: Option<Notice>) {
        lock(&self.inner).notice = notice.map(Box::new);
    }

    /// The notification that ends the batch, once all else has ended.
    pub(crate) fn due_notice(&self) -> Option<Notice> {
        let mut inner = self.is_batch.then(|| lock(&self.inner))?;
        let due = (inner.running == 1).then(|| inner.notice.take())?;
        due.map(|notice| *notice)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    pub(crate) fn set_total(&self, total: u64) {
        // That of a batch is known from its start.
        if !self.is_batch {
            lock(&self.inner).progress.bytes_total = total;
        }
    }

    pub(crate) fn add_done(&self, bytes: u64) {
        lock(&self.inner).progress.bytes_done += bytes;
    }

    pub(crate) fn outcome(&self) -> Option<Result<Report, Error>> {
        lock(&self.inner).outcome.clone()
    }

    /// Has `waker` woken at the end, in place of the one before; `false` if the end was there
    /// already.
    fn wake_at_end(&self, waker: &Waker, watch: impl FnOnce() -> EngineWatch) -> bool {
        let mut inner = lock(&self.inner);
        let watch = match inner.notify.take() {
            Some((Notify::Waker(old), watch)) if old.will_wake(waker) => {
                inner.notify = Some((Notify::Waker(old), watch));
                return true;
            }
            Some((old, watch)) => {
                // Dropping a waker runs the program's code.
                drop(inner);
                drop(old);
                watch
            }
            None => {
                drop(inner);
                watch()
            }
        };
        let mut inner = lock(&self.inner);
        if inner.outcome.is_some() {
            return false;
        }
        inner.notify = Some((Notify::Waker(waker.clone()), watch));
        true
    }

    /// Sleeps until the end, at most for `limit`.
    fn sleep(&self, limit: Duration) {
        let mut inner = lock(&self.inner);
        inner.sleeping += 1;
        let runs = |inner: &mut Inner| inner.outcome.is_none();
        let slept = self.ended.wait_timeout_while(inner, limit, runs);
        slept.unwrap_or_else(PoisonError::into_inner).0.sleeping -= 1;
    }
}

impl Transfer {
    pub(crate) fn new(
        state: Arc<TransferState>,
        operations: Operations,
        connection: Arc<Handle>,
    ) -> Self {
        Self {
            state,
            operations,
            connection,
            is_queued: AtomicBool::new(false),
        }
    }

    /// The outcome, or `None` while the operation runs: [`wait_timeout`](Self::wait_timeout)
    /// without a time.
    pub fn test(&self) -> Option<Result<Report, Error>> {
        self.wait_timeout(Duration::ZERO)
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

    /// Waits at most `timeout`; `None` if the operation still runs. Without a time it polls: it
    /// makes what progress there is, and never waits. A program that polls so drives the connection
    /// by itself; it is the engine's thread's again a millisecond after the last look.
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
        if timeout.is_zero() {
            self.connection.0.drive_once(|| self.state.has_ended());
            let outcome = self.state.outcome();
            return outcome.or_else(|| self.connection.0.stuck().map(Err));
        }
        let limit = deadline(Instant::now(), timeout);
        let (has_ended, sleep) = (|| self.state.has_ended(), |left| self.state.sleep(left));
        match self.connection.0.wait(limit, has_ended, sleep) {
            true => self.state.outcome(),
            false => self.connection.0.stuck().map(Err),
        }
    }

    /// Hands the transfer to `queue`, which gets its outcome under `key`, now or when it ends. The
    /// program names its transfers: `key` may be anything, and need not be unique.
    ///
    /// Nobody can cancel it from then on; its deadlines, and the end of its connection, bound it.
    pub fn queue(self, queue: &CompletionQueue, key: u64) {
        self.report_to(queue, key);
    }

    /// As [`queue`](Self::queue), for a handle that is kept: it can still be cancelled and waited
    /// for, and dropping it no longer cancels. Do not poll it as a future: that takes the queue's
    /// place.
    pub fn report_to(&self, queue: &CompletionQueue, key: u64) {
        let watch = self.connection.0.watch();
        let mut inner = lock(&self.state.inner);
        let replaced = match &inner.outcome {
            Some(outcome) => {
                let outcome = outcome.clone();
                queue.add(Completion { key, outcome });
                None
            }
            None => inner
                .notify
                .replace((Notify::Queue(queue.clone(), key), watch)),
        };
        drop(inner);
        drop(replaced);
        self.is_queued.store(true, Ordering::Relaxed);
    }

    /// Asks for an early end. The operation still ends exactly once: with
    /// [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled), or with its result if that came
    /// first.
    ///
    /// A message that has begun to come to a receive ends with it: its send fails, and says why.
    /// One that is on its way waits for a receive of its tag that is started later.
    pub fn cancel(&self) {
        self.connection.0.cancel(self.operations.iter());
    }

    /// The outcome, or [`Poll::Pending`] after noting the task that is woken at the end; that of
    /// the last call counts. What [`Future::poll`] does, for handles that are shared.
    pub fn poll_outcome(&self, context: &mut Context<'_>) -> Poll<Result<Report, Error>> {
        let (state, shared) = (&self.state, &self.connection.0);
        if let Err(error) = shared.check_process() {
            return Poll::Ready(Err(error));
        }
        if !state.has_ended() && state.wake_at_end(context.waker(), || shared.watch()) {
            return Poll::Pending;
        }
        state.outcome().map_or(Poll::Pending, Poll::Ready)
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        if self.connection.0.is_inherited() {
            return Progress::default();
        }
        lock(&self.state.inner).progress
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
        if !self.state.has_ended() && !self.is_queued.load(Ordering::Relaxed) {
            self.cancel();
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("operations", &self.operations)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_says_that_memory_of_a_part_is_held() {
        let peer = ([127, 0, 0, 1], 1).into();
        let closed = || Error::Closed { peer };
        let held = || Error::MemoryHeld {
            error: Box::new(closed()),
        };
        for errors in [[closed(), held()], [held(), closed()]] {
            let state = TransferState::of_parts(0, 2);
            for error in errors {
                assert!(state.end(Err(error)).is_none(), "nobody is to be woken");
            }
            assert_eq!(state.outcome(), Some(Err(held())));
        }
    }
}
