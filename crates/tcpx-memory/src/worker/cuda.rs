//! The worker of a GPU.

mod copies;
mod cut;
mod device;
mod direct;
mod engine;
mod feed;
mod gather;
mod kernel;
mod kernel_jobs;
mod launch;
mod pipe;
mod slots;
mod staging;
#[cfg(test)]
mod tests;
mod unpack;

use std::sync::mpsc;
use std::sync::{Arc, Mutex, Weak};

pub use direct::Unpacker;

use device::Device;
use engine::Engine;
use kernel::Kernels;
use kernel_jobs::KernelJobs;
use staging::Staging;

use super::ending::Ending;
use super::queue::JobQueue;
use super::{CopyWorker, spawn};
use crate::error::{CudaError, MemoryError};
use crate::gpu::Gpu;
use crate::lock;
use crate::pinned::PinnedPool;

/// The process's worker of this context, started if there is none.
pub(super) fn worker(gpu: &Gpu) -> Result<Arc<CopyWorker>, MemoryError> {
    static SHARED: Mutex<Vec<Weak<CopyWorker>>> = Mutex::new(Vec::new());
    let mut shared = lock(&SHARED);
    shared.retain(|worker| worker.strong_count() > 0);
    let is_its = |worker: &Arc<CopyWorker>| worker.gpu().is_some_and(|own| own.is_same(gpu));
    if let Some(worker) = shared.iter().filter_map(Weak::upgrade).find(is_its) {
        return Ok(worker);
    }
    let worker = Arc::new(start(gpu)?);
    shared.push(Arc::downgrade(&worker));
    Ok(worker)
}

/// What the thread reports when it starts: why there is no kernel, if there is none.
type Started = Result<Option<CudaError>, CudaError>;

fn start(gpu: &Gpu) -> Result<CopyWorker, MemoryError> {
    let queue = Arc::new(JobQueue::new(gpu.kind()));
    let (sender, started) = mpsc::sync_channel::<Started>(1);
    let (thread_gpu, thread_queue) = (gpu.clone(), Arc::clone(&queue));
    let ending = Ending::announce();
    spawn(&format!("tcpx-copy-{}", gpu.ordinal()), move || {
        ending.around(move || {
            thread_queue.serve(|| match engine(&thread_gpu, &thread_queue) {
                Ok(engine) => {
                    // If the starter is gone, the queue is stopped or will be.
                    sender.send(Ok(engine.no_kernel())).ok();
                    engine.run();
                }
                Err(error) => {
                    sender.send(Err(error)).ok();
                }
            });
        });
    })?;
    // The thread answers or drops its sender; every wait of its own is bounded.
    let no_kernel = started.recv().unwrap_or_else(|_| {
        Err(CudaError::NoDriver {
            why: "the copy worker's thread ended while it started".to_owned(),
        })
    })?;
    worker_of(gpu, queue, no_kernel)
}

fn worker_of(
    gpu: &Gpu,
    queue: Arc<JobQueue>,
    no_kernel: Option<CudaError>,
) -> Result<CopyWorker, MemoryError> {
    let tally = Arc::default();
    Ok(CopyWorker {
        pool: PinnedPool::shared(Some(gpu), &tally)?,
        queue,
        tally,
        gpu: Some(gpu.clone()),
        no_kernel,
    })
}

/// What does the jobs of a queue, on the thread that calls this.
fn engine(gpu: &Gpu, queue: &Arc<JobQueue>) -> Result<Engine, CudaError> {
    let device = Device::create(gpu)?;
    match Parts::create(&device) {
        Ok(Parts { staging, kernels }) => {
            Ok(Engine::new(device, staging, kernels, Arc::clone(queue)))
        }
        Err(error) => {
            device.destroy();
            Err(error)
        }
    }
}

/// What the engine needs beside the device.
struct Parts {
    staging: Staging,
    kernels: Result<KernelJobs, CudaError>,
}

impl Parts {
    fn create(device: &Device) -> Result<Self, CudaError> {
        let staging = Staging::create(device)?;
        // After an error copies may be in flight, so that the staging memory stays.
        device.warm_up(&staging)?;
        // Without kernels the worker has its other methods.
        let kernels = match Kernels::load(&device.gpu) {
            Ok(kernels) => KernelJobs::create(&device.gpu, kernels).map(Ok),
            Err(error) => Ok(Err(error)),
        };
        match kernels {
            Ok(kernels) => Ok(Self { staging, kernels }),
            Err(error) => {
                staging.destroy(device);
                Err(error)
            }
        }
    }
}
