//! Closing a plugin's comms on a thread of their connection's own.
//!
//! A close may wait for the peer's, and both ends need the thread of their channels to get there,
//! so that is not the one to close on. All comms of a connection share one thread and are closed
//! one after the other, as NCCL does it: there are plugins whose comms share what only one close
//! may use at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tcpx_lanes::lock;

use crate::channel::PendingClose;

/// A close that takes longer is reported; the comm's memory is the plugin's until it has returned.
pub const LONG_CLOSE: Duration = Duration::from_secs(5);

/// The threads on which comms are closed.
const THREAD: &str = "tcpx-close";

type Job = Box<dyn FnOnce() + Send>;

/// Closes comms one after the other: those of one connection.
#[derive(Default)]
pub struct Closer {
    queue: Mutex<Queue>,
}

/// A close that was asked for.
#[derive(Clone, Debug)]
pub struct Closing {
    pending: PendingClose,
    end: Arc<End>,
}

#[derive(Debug, Default)]
struct End {
    come: Mutex<bool>,
    changed: Condvar,
}

/// Notifies of the end of a close, however that came.
struct Ended(Arc<End>);

impl Drop for Ended {
    fn drop(&mut self) {
        *lock(&self.0.come) = true;
        self.0.changed.notify_all();
    }
}

impl Closing {
    /// Which call it is, and since when.
    pub fn pending(&self) -> PendingClose {
        self.pending
    }

    /// Whether it has returned, and holds nothing any more.
    pub fn ended(&self) -> bool {
        *lock(&self.end.come)
    }

    /// Waits at most so long for its end; whether it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        let come = lock(&self.end.come);
        let waited = self
            .end
            .changed
            .wait_timeout_while(come, limit, |come| !*come);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// A thread takes them until there are none.
    running: bool,
}

impl Closer {
    /// Runs `job`, which makes `call`, after those before it; here and now if no thread can be had.
    pub fn run(
        self: &Arc<Self>,
        call: &'static str,
        job: impl FnOnce() + Send + 'static,
    ) -> Closing {
        let since = Instant::now();
        let closing = Closing {
            pending: PendingClose { call, since },
            end: Arc::default(),
        };
        let ended = Ended(Arc::clone(&closing.end));
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(Box::new(move || {
            let _ended = ended;
            job();
        }));
        if queue.running {
            return closing;
        }
        let closer = Arc::clone(self);
        let thread = std::thread::Builder::new().name(THREAD.to_owned());
        queue.running = true;
        if let Err(error) = thread.spawn(move || closer.work()) {
            drop(queue);
            tracing::warn!(%error, "no thread to close a plugin's comms on");
            self.work();
        }
        closing
    }

    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let Some(job) = queue.waiting.pop_front() else {
                queue.running = false;
                return;
            };
            drop(queue);
            // What panics is the program's observer; the rest is closed all the same.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }
}

impl std::fmt::Debug for Closer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let waiting = lock(&self.queue).waiting.len();
        f.debug_struct("Closer").field("waiting", &waiting).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn jobs_run_one_after_the_other_and_after_one_that_panics() {
        let closer = Arc::new(Closer::default());
        let (tell, told) = mpsc::channel();
        let (let_go, hold) = mpsc::channel::<()>();
        let first = closer.run("first", move || hold.recv().unwrap());
        let panics = closer.run("panics", || panic!("on purpose"));
        for number in 0..3 {
            let tell = tell.clone();
            closer.run("tells", move || tell.send(number).unwrap());
        }
        assert!(told.try_recv().is_err(), "the first has not ended");
        assert!(!first.ended() && !first.wait(Duration::from_millis(1)));
        assert_eq!(first.pending().call, "first");
        let_go.send(()).unwrap();
        assert!(first.wait(LONG) && panics.wait(LONG) && panics.ended());
        let order: Vec<_> = (0..3).map(|_| told.recv_timeout(LONG).unwrap()).collect();
        assert_eq!(order, [0, 1, 2]);
        // The thread may have ended; then there is another.
        let last = closer.run("last", move || tell.send(3).unwrap());
        assert_eq!(told.recv_timeout(LONG), Ok(3));
        assert!(last.wait(LONG));
    }
}
