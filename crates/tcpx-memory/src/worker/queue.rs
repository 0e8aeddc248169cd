//! The bounded queue between submitters and a worker's thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::{self, Thread};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

use crate::error::{CudaError, MemoryError};
use crate::fence::Fence;
use crate::job::{CompletionSink, Job, SubmitError, Work};
use crate::kind::MemoryKind;
use crate::lease::Hold;

/// Jobs that may wait for a worker.
pub(super) const CAPACITY: usize = 4096;

/// A job that was checked and holds its memory.
pub(super) struct Ticket {
    pub(super) job: Job,
    holds: [Option<Hold>; 2],
}

impl Ticket {
    /// Checks the job and takes its leases.
    pub(super) fn admit(job: Job) -> Result<Self, SubmitError> {
        match job.work.check().and_then(|()| job.work.hold()) {
            Ok(holds) => Ok(Self { job, holds }),
            Err(error) => Err(SubmitError {
                job: Box::new(job),
                error,
            }),
        }
    }

    pub(super) fn work(&self) -> &Work {
        &self.job.work
    }

    /// Whether the caller's earlier GPU work has ended; the GPU's context must be current.
    pub(super) fn is_fence_reached(&self) -> Result<bool, CudaError> {
        self.job
            .fence
            .as_ref()
            .map_or(Ok(true), Fence::is_reached_in_context)
    }

    /// Tells the sink of an error and keeps the memory for ever, because something may still touch it.
    pub(super) fn abandon(self, error: MemoryError) {
        let Self {
            job:
                Job {
                    work,
                    fence,
                    sink,
                    token,
                },
            holds,
        } = self;
        std::mem::forget((holds, work, fence));
        tell(&*sink, token, Err(error));
    }

    /// Lets go of the memory, then tells the sink.
    pub(super) fn finish(self, result: Result<u64, MemoryError>) {
        let Self {
            job:
                Job {
                    work,
                    fence,
                    sink,
                    token,
                },
            holds,
        } = self;
        drop((holds, work, fence));
        tell(&*sink, token, result);
    }
}

fn tell(sink: &dyn CompletionSink, token: u64, result: Result<u64, MemoryError>) {
    // A sink that panics has lost its own job; the worker must not lose those of the others.
    if catch_unwind(AssertUnwindSafe(|| sink.complete(token, result))).is_err() {
        tracing::error!(token, "a completion sink panicked");
    }
}

/// Submitters push, one thread pops and sleeps.
pub(super) struct JobQueue {
    tickets: ArrayQueue<Ticket>,
    sleeping: AtomicBool,
    stopping: AtomicBool,
    thread: OnceLock<Thread>,
    worker: MemoryKind,
}

impl JobQueue {
    pub(super) fn new(worker: MemoryKind) -> Self {
        Self {
            tickets: ArrayQueue::new(CAPACITY),
            sleeping: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            thread: OnceLock::new(),
            worker,
        }
    }

    /// Names the calling thread as the one to wake.
    pub(super) fn attach(&self) {
        self.thread.get_or_init(thread::current);
    }

    pub(super) fn push(&self, ticket: Ticket) -> Result<(), SubmitError> {
        if let Err(ticket) = self.tickets.push(ticket) {
            let error = MemoryError::QueueFull {
                worker: self.worker,
                capacity: CAPACITY,
            };
            return Err(SubmitError {
                job: Box::new(ticket.job),
                error,
            });
        }
        self.wake();
        Ok(())
    }

    pub(super) fn pop(&self) -> Option<Ticket> {
        self.tickets.pop()
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Asks the thread to end.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Sleeps until there is a job, the worker stops, or `limit` has passed; may return sooner.
    pub(super) fn sleep(&self, limit: Option<Duration>) {
        self.sleeping.store(true, Ordering::SeqCst);
        // Pairs with the fence in `wake`: either this thread sees the job, or the submitter sees
        // that it sleeps.
        fence(Ordering::SeqCst);
        if self.tickets.is_empty() && !self.is_stopping() {
            match limit {
                Some(limit) => thread::park_timeout(limit),
                None => thread::park(),
            }
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }

    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}
