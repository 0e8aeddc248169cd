//! Copy workers: the threads that move bytes.

pub(crate) mod blocking;
mod cuda;
mod host;
mod park_gate;
mod queue;
pub(crate) mod reaper;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use cuda::WORKER_BYTES;
#[cfg(feature = "simulation")]
pub use host::{FAILS, HOST_ROOM};

use queue::{JobQueue, ROOM, Ticket};

use crate::bounce::UnpackMethod;
use crate::error::{CudaError, MemoryError};
use crate::gpu::Gpu;
use crate::job::{Job, SubmitError, Work};
use crate::kind::MemoryKind;
use crate::lock;
use crate::pinned::{PinnedPool, Slots};
use crate::slice::RegionSlice;
use tcpx_wire::Descriptors;

/// The thread that moves bytes for one GPU, or for the host.
///
/// After set-up only this thread calls the CUDA driver for transfers. It never waits for a stream,
/// so a kernel that spins until a transfer completes does not stop it. A GPU's worker lives as long
/// as the process, and keeps what it has made: to give that back would hold the program's copies up
/// for as long as its kernels run. Dropping the last reference to the host's ends the thread once
/// its jobs have ended; those that still wait for their fence end with
/// [`MemoryError::WorkerStopped`].
pub struct CopyWorker {
    queue: Arc<JobQueue>,
    /// Those of the GPU, or of the host.
    slots: Arc<Slots>,
    pool: PinnedPool,
    gpu: Option<Gpu>,
    /// Why the GPU cannot run the unpack kernel, if it cannot.
    no_kernel: Option<CudaError>,
}

impl CopyWorker {
    /// The worker for host memory. The process has one at a time, shared by all callers.
    ///
    /// Its pinned pool is ordinary memory.
    ///
    /// # Errors
    /// [`MemoryError::Thread`], [`MemoryError::Allocation`].
    pub fn host() -> Result<Arc<Self>, MemoryError> {
        static SHARED: Mutex<Weak<CopyWorker>> = Mutex::new(Weak::new());
        let mut shared = lock(&SHARED);
        if let Some(worker) = shared.upgrade() {
            return Ok(worker);
        }
        #[cfg(feature = "simulation")]
        let room = HOST_ROOM.get().copied().unwrap_or(ROOM);
        #[cfg(not(feature = "simulation"))]
        let room = ROOM;
        let worker = Arc::new(Self::start_host(room)?);
        *shared = Arc::downgrade(&worker);
        Ok(worker)
    }

    fn start_host(room: usize) -> Result<Self, MemoryError> {
        let queue = Arc::new(JobQueue::new(MemoryKind::Host, room));
        let slots = Slots::of_host()?;
        let thread_queue = Arc::clone(&queue);
        spawn("tcpx-copy", move || {
            thread_queue.serve(|| host::run(&thread_queue));
        })?;
        Ok(Self {
            queue,
            pool: slots.to_receive(slots.len()),
            slots,
            gpu: None,
            no_kernel: None,
        })
    }

    /// The worker of a GPU. The process has one per context, shared by all callers.
    ///
    /// The first call pins all memory, loads all kernels and runs each once, for this and all later
    /// connections on the GPU; copies of the process may wait for some tens of milliseconds
    /// meanwhile.
    ///
    /// # Errors
    /// The driver's refusal of streams, events or pinned memory.
    pub fn for_gpu(gpu: &Gpu) -> Result<Arc<Self>, MemoryError> {
        cuda::worker(gpu)
    }

    /// Begins what [`for_gpu`](Self::for_gpu) does where nobody has done it yet, on a thread of its
    /// own: for whoever will need the worker soon, and has other things to do before.
    pub fn prepare(gpu: &Gpu) {
        cuda::prepare(gpu);
    }

    /// Hands over a job: however many wait, it is taken.
    ///
    /// The job's memory is leased until the job has ended, except where a slice rides on a lease or
    /// a pinned slot already.
    ///
    /// # Errors
    /// The job comes back with the reason: memory in use, lengths, bounds, a method or a GPU that
    /// does not fit.
    pub fn submit(&self, job: Job) -> Result<(), SubmitError> {
        self.queue.push(self.admit(job)?)
    }

    /// As [`submit`](Self::submit) for a job that can wait while `most` others do, or 4,096: it
    /// does not delay those that hold a slot of a network meanwhile.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit), and [`MemoryError::QueueFull`].
    pub fn submit_deferrable(&self, job: Job, most: usize) -> Result<(), SubmitError> {
        self.queue.push_deferrable(self.admit(job)?, most)
    }

    fn admit(&self, job: Job) -> Result<Ticket, SubmitError> {
        if let Err(error) = self.check_reach(&job) {
            let job = Box::new(job);
            return Err(SubmitError { job, error });
        }
        Ticket::admit(job)
    }

    /// Does work that waits for nothing, and waits for its end: the bytes moved, or the checksum.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit) and of the work; [`CudaError::TimedOut`] after `limit`,
    /// and then it goes on.
    pub fn run(&self, work: Work, limit: Duration) -> Result<u64, MemoryError> {
        blocking::run(self, work, limit)
    }

    /// Waits until the workers of all GPUs have done what was asked of them, and memory that nobody
    /// uses any more was given back to the driver; whether that was within `limit`. For the end of
    /// a program: the driver is torn down then, which must not happen while another thread uses it.
    pub fn wait_until_idle(limit: Duration) -> bool {
        let start = Instant::now();
        cuda::wait_until_idle(limit) && reaper::flush(limit.saturating_sub(start.elapsed()))
    }

    /// Slots for receives that all users share.
    pub fn pinned(&self) -> &PinnedPool {
        &self.pool
    }

    /// Slots for one connection's sends, of those that all connections share: at most so many at a
    /// time. No call of the driver.
    pub fn slots_to_send(&self, most: usize) -> PinnedPool {
        self.slots.to_send(most)
    }

    /// As [`slots_to_send`](Self::slots_to_send), for receives.
    pub fn slots_to_receive(&self, most: usize) -> PinnedPool {
        self.slots.to_receive(most)
    }

    /// Bytes of all slots that are taken, whosever they are.
    pub fn pinned_in_use(&self) -> usize {
        self.slots.taken() * PinnedPool::SLOT_BYTES
    }

    /// The GPU this worker serves; `None` for the host's.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// Why this worker cannot unpack with its kernel; `None` when it can. Other methods work.
    pub fn kernel_error(&self) -> Option<&CudaError> {
        self.no_kernel.as_ref()
    }

    /// The fastest unpack method that this worker has for a list between a pair of memories: a few
    /// long copies are the copy engines', all else is the kernel's.
    pub fn unpack_method_for(
        &self,
        pool: MemoryKind,
        destination: MemoryKind,
        list: &Descriptors,
    ) -> UnpackMethod {
        match UnpackMethod::automatic_for(pool, destination, list.len(), list.bytes()) {
            UnpackMethod::Kernel if self.no_kernel.is_some() => UnpackMethod::D2d,
            method => method,
        }
    }

    fn kind(&self) -> MemoryKind {
        self.gpu.as_ref().map_or(MemoryKind::Host, Gpu::kind)
    }

    /// Every GPU end of a job must be of this worker's GPU.
    fn check_reach(&self, job: &Job) -> Result<(), MemoryError> {
        let worker = self.kind();
        if let Some(fence) = &job.fence
            && let Some(gpu) = fence.gpu()
            && !self.gpu.as_ref().is_some_and(|own| own.is_same(gpu))
        {
            return Err(MemoryError::WrongFence {
                worker,
                fence: fence.kind(),
            });
        }
        let (from, to) = job.work.ends();
        if let (
            Work::Unpack {
                with: UnpackMethod::Kernel,
                ..
            },
            Some(error),
        ) = (&job.work, &self.no_kernel)
            && !(from.kind().is_cpu_accessible()
                && to.is_none_or(|to| to.kind().is_cpu_accessible()))
        {
            return Err(error.clone().into());
        }
        let mut ends = [Some(from), to].into_iter().flatten();
        match ends.find(|slice| !self.reaches(slice)) {
            None => Ok(()),
            Some(slice) => Err(MemoryError::WrongWorker {
                worker,
                kind: slice.kind(),
            }),
        }
    }

    /// Whether this worker may touch the bytes: host memory, and its own GPU's.
    fn reaches(&self, slice: &RegionSlice) -> bool {
        match (slice.kind(), &self.gpu, slice.region().gpu()) {
            (MemoryKind::Host | MemoryKind::Pinned, _, _) => true,
            (MemoryKind::Cuda { .. }, Some(own), Some(gpu)) => own.is_same(gpu),
            (MemoryKind::Cuda { .. }, _, _) => false,
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), MemoryError> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(|error| MemoryError::Thread {
        why: error.to_string(),
    })
}

impl Drop for CopyWorker {
    fn drop(&mut self) {
        self.queue.stop();
    }
}

impl fmt::Debug for CopyWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyWorker({})", self.kind())
    }
}
