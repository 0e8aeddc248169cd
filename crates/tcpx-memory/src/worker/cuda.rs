//! The worker of a GPU.

mod copies;
mod cut;
mod device;
mod engine;
mod feed;
mod host_unpack;
mod kernel;
mod kernel_jobs;
mod launch;
mod pipe;
mod slots;
#[cfg(test)]
mod tests;
mod unpack;

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use device::Device;
use engine::Engine;
use kernel::Kernels;
use kernel_jobs::KernelJobs;
use slots::LaunchSlots;

use super::queue::{JobQueue, ROOM};
use super::{CopyWorker, spawn};
use crate::ending;
use crate::error::{CudaError, MemoryError};
use crate::gpu::Gpu;
use crate::lock;

/// Bytes of its own pinned memory, for bytes on their way to or from pageable memory.
const STAGING: usize = 8 << 20;
/// Bytes of pinned memory that a worker takes: for staging, and for the lists and flags of its
/// kernels.
pub(crate) const WORKER_BYTES: usize = STAGING + LaunchSlots::BYTES.next_multiple_of(4096);
/// The pause between looks at workers that are waited for.
const PAUSE: Duration = Duration::from_millis(1);

/// The workers of this process. Each lives as long as the process.
static WORKERS: Mutex<Vec<Arc<CopyWorker>>> = Mutex::new(Vec::new());

/// The process's worker of this context, started if there is none. Those of several GPUs start at a
/// time.
pub(super) fn worker(gpu: &Gpu) -> Result<Arc<CopyWorker>, MemoryError> {
    let _starting = gpu.starting();
    if let Some(worker) = started(gpu) {
        return Ok(worker);
    }
    let worker = Arc::new(start(gpu)?);
    lock(&WORKERS).push(Arc::clone(&worker));
    Ok(worker)
}

fn started(gpu: &Gpu) -> Option<Arc<CopyWorker>> {
    let mut workers = lock(&WORKERS);
    // One that panicked does no jobs any more.
    workers.retain(|worker| !worker.queue.is_closed());
    let is_its = |worker: &&Arc<CopyWorker>| worker.gpu().is_some_and(|own| own.is_same(gpu));
    workers.iter().find(is_its).cloned()
}

/// Starts it on a thread of its own, where there is none.
pub(super) fn prepare(gpu: &Gpu) {
    if started(gpu).is_none() {
        let gpu = gpu.clone();
        // Without a thread, or after an error, whoever needs the worker starts it.
        let _ = spawn("tcpx-gpu", move || drop(worker(&gpu)));
    }
}

/// Waits until no worker has anything to do, or `limit` has passed; whether none has.
pub(super) fn wait_until_idle(limit: Duration) -> bool {
    let start = Instant::now();
    let workers = lock(&WORKERS).clone();
    workers.iter().all(|worker| {
        while !worker.queue.is_at_rest() {
            if start.elapsed() > limit {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    })
}

/// What the thread reports when it starts: why there is no kernel, if there is none.
type Started = Result<Option<CudaError>, MemoryError>;

fn start(gpu: &Gpu) -> Result<CopyWorker, MemoryError> {
    let queue = Arc::new(JobQueue::new(gpu.kind(), ROOM));
    let (sender, started) = mpsc::sync_channel::<Started>(1);
    let (thread_gpu, thread_queue) = (gpu.clone(), Arc::clone(&queue));
    spawn(&format!("tcpx-copy-{}", gpu.ordinal()), move || {
        thread_queue.serve(|| match set_up(&thread_gpu, &thread_queue) {
            Ok(engine) => {
                // If the starter is gone, the queue is stopped or will be.
                sender.send(Ok(engine.no_kernel())).ok();
                engine.run();
            }
            Err(error) => {
                sender.send(Err(error)).ok();
            }
        });
    })?;
    // The thread answers or drops its sender; every wait of its own is bounded.
    let no_kernel = started.recv().unwrap_or_else(|_| {
        Err(CudaError::NoDriver {
            why: "the copy worker's thread ended while it started".to_owned(),
        }
        .into())
    })?;
    worker_of(gpu, queue, no_kernel)
}

fn worker_of(
    gpu: &Gpu,
    queue: Arc<JobQueue>,
    no_kernel: Option<CudaError>,
) -> Result<CopyWorker, MemoryError> {
    let slots = Arc::clone(gpu.kept()?.slots());
    Ok(CopyWorker {
        pool: slots.to_receive(slots.len()),
        slots,
        queue,
        gpu: Some(gpu.clone()),
        no_kernel,
    })
}

/// What does the jobs of a queue, on the thread that calls this. All that it makes stays until the
/// process ends.
fn set_up(gpu: &Gpu, queue: &Arc<JobQueue>) -> Result<Engine, MemoryError> {
    let _inside = ending::enter().ok_or(CudaError::ProcessEnds)?;
    let memory = gpu.worker_memory()?;
    let lists = memory.at(STAGING);
    let device = Device::create(gpu)?;
    device.warm_up(memory)?;
    // Without kernels the worker has its other methods.
    let kernels = match Kernels::load(gpu) {
        Ok(kernels) => Ok(KernelJobs::create(gpu, kernels, lists)?),
        Err(error) => Err(error),
    };
    Ok(Engine::new(device, memory, kernels, Arc::clone(queue)))
}
