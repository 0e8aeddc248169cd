//! The queue between submitters and a worker's thread.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, Thread};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

use super::park_gate::ParkGate;
use crate::error::{CudaError, MemoryError};
use crate::fence::Fence;
use crate::job::{CompletionSink, Job, SubmitError, Work};
use crate::kind::MemoryKind;
use crate::lease;
use crate::lock;

/// Jobs that wait for a worker without a lock and without new memory.
pub(super) const ROOM: usize = 4096;

/// A job that was checked and holds its memory.
///
/// A ticket that is lost, because the worker's loop panicked, reports that to its sink and keeps
/// its memory for ever: something may still touch it.
pub(super) struct Ticket {
    held: ManuallyDrop<Held>,
    answer: Answer,
}

/// What a job uses.
struct Held {
    work: Work,
    fence: Option<Fence>,
    /// Keep others away from the bytes.
    _holds: [Option<lease::Held>; 2],
}

/// The sink; called exactly once.
struct Answer {
    sink: Arc<dyn CompletionSink>,
    token: u64,
    told: bool,
}

impl Ticket {
    /// Checks the job and takes its leases.
    pub(super) fn admit(job: Job) -> Result<Self, SubmitError> {
        match job.work.check().and_then(|()| job.work.hold()) {
            Ok(holds) => Ok(Self {
                held: ManuallyDrop::new(Held {
                    work: job.work,
                    fence: job.fence,
                    _holds: holds,
                }),
                answer: Answer {
                    sink: job.sink,
                    token: job.token,
                    told: false,
                },
            }),
            Err(error) => Err(SubmitError {
                job: Box::new(job),
                error,
            }),
        }
    }

    /// The job again, without its leases.
    fn into_refused(self, error: MemoryError) -> SubmitError {
        let Self { held, mut answer } = self;
        answer.told = true;
        let Held { work, fence, .. } = ManuallyDrop::into_inner(held);
        let job = Box::new(Job {
            work,
            fence,
            sink: Arc::clone(&answer.sink),
            token: answer.token,
        });
        SubmitError { job, error }
    }

    pub(super) fn work(&self) -> &Work {
        &self.held.work
    }

    /// Whether the caller's earlier GPU work has ended; the GPU's context must be current.
    pub(super) fn is_fence_reached(&self) -> Result<bool, CudaError> {
        let fence = self.held.fence.as_ref();
        fence.map_or(Ok(true), Fence::is_reached_in_context)
    }

    /// Reports an error to the sink and keeps the memory for good, because something may still
    /// touch it.
    pub(super) fn abandon(self, error: MemoryError) {
        let Self { held: _, answer } = self;
        let source = Box::new(error);
        answer.report_end(Err(MemoryError::EndUnknown { source }));
    }

    /// Releases the memory, then calls the sink.
    pub(super) fn finish(self, result: Result<u64, MemoryError>) {
        let Self { held, answer } = self;
        let let_go = AssertUnwindSafe(|| drop(ManuallyDrop::into_inner(held)));
        if catch_unwind(let_go).is_err() {
            tracing::error!(token = answer.token, "the owner of a job's memory panicked");
        }
        answer.report_end(result);
    }
}

impl Answer {
    fn report_end(mut self, result: Result<u64, MemoryError>) {
        self.told = true;
        self.pass_on(result);
        // This may be the last reference, and what the sink owns is not ours.
        let let_go = AssertUnwindSafe(|| drop(self));
        if catch_unwind(let_go).is_err() {
            tracing::error!("a completion sink panicked when it was let go of");
        }
    }

    fn pass_on(&self, result: Result<u64, MemoryError>) {
        // A sink that panics has lost its own job; the worker must not lose those of the others.
        let told = AssertUnwindSafe(|| self.sink.complete(self.token, result));
        if catch_unwind(told).is_err() {
            tracing::error!(token = self.token, "a completion sink panicked");
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.told {
            self.pass_on(Err(MemoryError::WorkerFailed));
        }
    }
}

/// Submitters push, one thread pops and sleeps.
///
/// A job that holds a slot of a network cannot be refused, as nobody would try it again. There are
/// as many of those as the windows and slots of all connections allow, for which the room suffices
/// as a rule; the rest waits beside it.
pub(super) struct JobQueue {
    tickets: ArrayQueue<Ticket>,
    /// What came when `tickets` was full, and behind that, until all of it has begun.
    further: Mutex<VecDeque<Ticket>>,
    /// How many those are; changed under their lock.
    further_count: AtomicUsize,
    park_gate: ParkGate,
    stopping: AtomicBool,
    /// The thread sleeps, or is about to, as nothing is in flight.
    resting: AtomicBool,
    thread: OnceLock<Thread>,
    worker: MemoryKind,
}

impl JobQueue {
    /// With so much room.
    pub(super) fn new(worker: MemoryKind, room: usize) -> Self {
        Self {
            tickets: ArrayQueue::new(room),
            further: Mutex::default(),
            further_count: AtomicUsize::new(0),
            park_gate: ParkGate::new(),
            stopping: AtomicBool::new(false),
            resting: AtomicBool::new(false),
            thread: OnceLock::new(),
            worker,
        }
    }

    /// Runs the worker's loop on the calling thread. Even if that panics, every accepted job is
    /// told its end, and none is accepted any more.
    pub(super) fn serve(&self, run: impl FnOnce()) {
        self.thread.get_or_init(thread::current);
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            tracing::error!(worker = %self.worker, "the copy worker panicked");
        }
        self.park_gate.close();
        self.refuse_rest();
    }

    /// Whether the thread is through with all jobs and with the driver.
    pub(super) fn is_closed(&self) -> bool {
        self.park_gate.is_closed()
    }

    /// Queues a ticket.
    pub(super) fn push(&self, ticket: Ticket) -> Result<(), SubmitError> {
        if self.is_closed() {
            return Err(ticket.into_refused(MemoryError::WorkerFailed));
        }
        self.add(ticket);
        self.wake();
        if self.is_closed() {
            self.refuse_rest();
        }
        Ok(())
    }

    /// Queues a ticket, if fewer than `most` wait and there is room.
    pub(super) fn push_deferrable(&self, ticket: Ticket, most: usize) -> Result<(), SubmitError> {
        let most = most.min(self.tickets.capacity());
        if self.tickets.len() + self.further_count.load(Ordering::SeqCst) >= most {
            return Err(ticket.into_refused(MemoryError::QueueFull {
                worker: self.worker,
                jobs: most,
            }));
        }
        self.push(ticket)
    }

    fn add(&self, ticket: Ticket) {
        let mut ticket = ticket;
        if self.further_count.load(Ordering::SeqCst) == 0 {
            match self.tickets.push(ticket) {
                Ok(()) => return,
                Err(refused) => ticket = refused,
            }
        }
        let mut further = lock(&self.further);
        further.push_back(ticket);
        self.further_count.store(further.len(), Ordering::SeqCst);
    }

    /// Ends what was never begun.
    fn refuse_rest(&self) {
        while let Some(ticket) = self.pop() {
            ticket.finish(Err(MemoryError::WorkerFailed));
        }
    }

    pub(super) fn pop(&self) -> Option<Ticket> {
        self.tickets.pop().or_else(|| {
            if self.further_count.load(Ordering::SeqCst) == 0 {
                return None;
            }
            let mut further = lock(&self.further);
            let ticket = further.pop_front();
            self.further_count.store(further.len(), Ordering::SeqCst);
            ticket
        })
    }

    fn is_empty(&self) -> bool {
        self.tickets.is_empty() && self.further_count.load(Ordering::SeqCst) == 0
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Asks the thread to end.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Whether nothing waits and nothing is in flight.
    pub(super) fn is_at_rest(&self) -> bool {
        let rests = self.resting.load(Ordering::SeqCst) || self.is_closed();
        rests && self.is_empty()
    }

    /// Sleeps until there is a job, the worker stops, or `limit` has passed, without which nothing
    /// is in flight; may return sooner.
    pub(super) fn sleep(&self, limit: Option<Duration>) {
        self.resting.store(limit.is_none(), Ordering::SeqCst);
        let has_work = || !self.is_empty() || self.is_stopping();
        self.park_gate.sleep(has_work, || match limit {
            Some(limit) => thread::park_timeout(limit),
            None => thread::park(),
        });
        self.resting.store(false, Ordering::SeqCst);
    }

    /// Wakes the thread if it sleeps.
    fn wake(&self) {
        if self.park_gate.must_wake()
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Sender};

    use super::*;
    use crate::lease::Access;
    use crate::region::Region;

    struct Channel(Sender<(u64, Result<u64, MemoryError>)>);

    impl CompletionSink for Channel {
        fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
            self.0.send((token, result)).ok();
        }
    }

    #[test]
    fn a_panic_fails_every_job_and_keeps_started_memory() {
        let queue = JobQueue::new(MemoryKind::Host, ROOM);
        let (sender, ended) = mpsc::channel();
        let sink = Arc::new(Channel(sender));
        let regions: Vec<_> = (0..3).map(|_| Region::host(10).unwrap()).collect();
        let ticket = |token: usize| {
            let sink = Arc::<Channel>::clone(&sink);
            let of = regions[token].all();
            Ticket::admit(Job {
                work: Work::checksum(of),
                fence: None,
                sink,
                token: token as u64,
            })
        };
        queue.push(ticket(0).unwrap()).unwrap();
        queue.push(ticket(1).unwrap()).unwrap();
        let is_free = |region: &Region| region.lease(.., Access::Write).is_ok();
        queue.serve(|| {
            let _begun = queue.pop();
            panic!("as a fault in the loop would");
        });
        for token in 0..2 {
            assert_eq!(
                ended.try_recv(),
                Ok((token, Err(MemoryError::WorkerFailed)))
            );
        }
        assert!(!is_free(&regions[0]) && is_free(&regions[1]));
        let refused = queue.push(ticket(2).unwrap()).unwrap_err();
        assert_eq!(
            (refused.job.token, refused.error),
            (2, MemoryError::WorkerFailed)
        );
        drop(refused.job);
        assert!(ended.try_recv().is_err() && is_free(&regions[2]));
    }
}
