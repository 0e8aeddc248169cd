//! A worker's jobs on the caller's own thread.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::{engine, worker_of};
use crate::error::{CudaError, MemoryError};
use crate::gpu::Gpu;
use crate::job::{CompletionSink, Job, Work};
use crate::lock;
use crate::worker::CopyWorker;
use crate::worker::queue::JobQueue;

/// How long a drop waits for work in flight.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Does what a GPU's copy worker does on the thread that waits for it, without a hand-over to another one: the
/// shortest way for a caller that has a thread to spare.
///
/// The GPU's context is current on that thread from then on. What it prepares stays until the process ends: make
/// few, and keep them.
pub struct Unpacker {
    /// Its queue is served here, by no thread of its own.
    worker: CopyWorker,
    /// Taken when this is dropped.
    engine: Option<Engine>,
    landing: Arc<Landing>,
    /// The number of the last job.
    token: u64,
}

/// Where a job's end arrives, with its number.
#[derive(Default)]
struct Landing(Mutex<Option<(u64, Result<u64, MemoryError>)>>);

impl CompletionSink for Landing {
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        *lock(&self.0) = Some((token, result));
    }
}

impl Unpacker {
    /// Loads the kernels and prepares streams and memory; for set-up.
    ///
    /// # Errors
    /// As for [`CopyWorker::for_gpu`].
    pub fn new(gpu: &Gpu) -> Result<Self, MemoryError> {
        let queue = Arc::new(JobQueue::new(gpu.kind()));
        let engine = engine(gpu, &queue)?;
        Ok(Self {
            worker: worker_of(gpu, queue, engine.no_kernel())?,
            engine: Some(engine),
            landing: Arc::default(),
            token: 0,
        })
    }

    /// Does the work and polls without a pause until all of it is visible to everyone: the bytes moved, or the
    /// checksum.
    ///
    /// # Errors
    /// Those of [`CopyWorker::submit`] and of its jobs; [`CudaError::TimedOut`] after `limit`, and then the work
    /// holds its memory until a later call finds its end.
    pub fn run(&mut self, work: Work, limit: Duration) -> Result<u64, MemoryError> {
        self.token += 1;
        let token = self.token;
        let submitted = self.worker.submit(Job {
            work,
            fence: None,
            sink: Arc::<Landing>::clone(&self.landing),
            token,
        });
        submitted.map_err(|refused| refused.error)?;
        let start = Instant::now();
        while start.elapsed() <= limit {
            self.engine.as_mut().map(|engine| engine.round(false));
            let mut ended = lock(&self.landing.0);
            if let Some((_, result)) = ended.take_if(|(of, _)| *of == token) {
                return result;
            }
        }
        Err(CudaError::TimedOut {
            device: self.worker.gpu().map_or(0, Gpu::ordinal),
            what: "the unpack kernel",
            after: limit,
        }
        .into())
    }
}

impl Drop for Unpacker {
    fn drop(&mut self) {
        let Some(mut engine) = self.engine.take() else {
            return;
        };
        let start = Instant::now();
        while (engine.round(true) || !engine.is_idle()) && start.elapsed() < LAST_WAIT {}
        if !engine.is_idle() {
            // What is in flight may use all of it: it stays until the process ends.
            std::mem::forget(engine);
        }
    }
}

impl fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Unpacker({:?})", self.worker)
    }
}
