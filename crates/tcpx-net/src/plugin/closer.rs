//! Closing a plugin's comms on a thread of their connection's own.
//!
//! A close may wait for the peer's, and both ends need the thread of their channels to get there, so
//! that is not the one to close on. All comms of a connection share one thread and are closed one after
//! the other, as NCCL does it: there are plugins whose comms share what only one close may use at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The threads on which comms are closed.
const THREAD: &str = "tcpx-close";

type Job = Box<dyn FnOnce() + Send>;

/// The closes of one connection, in their order.
#[derive(Default)]
pub(super) struct Closer {
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// A thread takes them until there are none.
    running: bool,
}

impl Closer {
    /// Runs `job` after those before it; here and now if no thread can be had.
    pub(super) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.lock();
        queue.waiting.push_back(Box::new(job));
        if queue.running {
            return;
        }
        let closer = Arc::clone(self);
        let thread = std::thread::Builder::new().name(THREAD.to_owned());
        queue.running = true;
        if let Err(error) = thread.spawn(move || closer.work()) {
            drop(queue);
            tracing::warn!(%error, "no thread to close a plugin's comms on");
            self.work();
        }
    }

    fn work(&self) {
        loop {
            let mut queue = self.lock();
            let Some(job) = queue.waiting.pop_front() else {
                queue.running = false;
                return;
            };
            drop(queue);
            // What panics is the program's observer; the rest is closed all the same.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Closer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let waiting = self.lock().waiting.len();
        f.debug_struct("Closer").field("waiting", &waiting).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn jobs_run_one_after_the_other_and_after_one_that_panics() {
        let closer = Arc::new(Closer::default());
        let (tell, told) = mpsc::channel();
        let (let_go, hold) = mpsc::channel::<()>();
        closer.run(move || hold.recv().unwrap());
        closer.run(|| panic!("on purpose"));
        for number in 0..3 {
            let tell = tell.clone();
            closer.run(move || tell.send(number).unwrap());
        }
        assert!(told.try_recv().is_err(), "the first has not ended");
        let_go.send(()).unwrap();
        let order: Vec<_> = (0..3).map(|_| told.recv_timeout(LONG).unwrap()).collect();
        assert_eq!(order, [0, 1, 2]);
        // The thread may have ended; then there is another.
        closer.run(move || tell.send(3).unwrap());
        assert_eq!(told.recv_timeout(LONG), Ok(3));
    }
}
