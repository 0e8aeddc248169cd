//! The ways to move fragments, each from the call to the bytes in place.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tcpx_memory::{
    BouncePool, CompletionSink, CopyWorker, Descriptors, Gpu, Job, MemoryError, RegionSlice,
    UnpackMethod, Unpacker, Work,
};

use super::Result;
use super::yardstick::Yardstick;

/// Longest wait for one call.
const LIMIT: Duration = Duration::from_secs(20);

/// A way to move bytes, or to sum them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The unpack kernel, launched by the thread that polls.
    Kernel,
    /// The unpack kernel through the copy worker.
    WorkerKernel,
    /// One copy per descriptor, issued by the thread that polls.
    D2d,
    /// One copy per descriptor, through the copy worker.
    WorkerD2d,
    /// A straightforward kernel.
    Plain,
    /// One copy per descriptor.
    Each,
    /// `cuMemcpyBatchAsync`.
    Batch,
    /// One copy of the same size.
    Copy,
    /// The checksum kernel, launched by the thread that polls.
    Checksum,
    /// The checksum kernel through the copy worker.
    WorkerChecksum,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "unpacker, kernel",
            Self::WorkerKernel => "worker, kernel",
            Self::D2d => "unpacker, d2d",
            Self::WorkerD2d => "worker, d2d",
            Self::Plain => "plain kernel",
            Self::Each => "a copy per fragment",
            Self::Batch => "cuMemcpyBatchAsync",
            Self::Copy => "one copy",
            Self::Checksum => "unpacker, checksum",
            Self::WorkerChecksum => "worker, checksum",
        }
    }

    /// Whether it takes milliseconds where the others take microseconds.
    pub(crate) fn is_slow(self) -> bool {
        matches!(self, Self::Each | Self::Batch)
    }
}

/// Fragments in a pool and where they belong.
#[derive(Clone)]
pub(crate) struct Set {
    pub(crate) pool: BouncePool,
    pub(crate) list: Arc<Descriptors>,
    pub(crate) to: RegionSlice,
}

/// Everything that moves bytes.
pub(crate) struct Movers {
    unpacker: Unpacker,
    worker: Arc<CopyWorker>,
    yardstick: Yardstick,
    landing: Arc<Landing>,
}

/// Where the worker's results arrive: the jobs' number in the upper half, so that no old one is taken.
#[derive(Default)]
struct Landing {
    ended: AtomicU64,
    result: AtomicU64,
    failed: Mutex<Option<MemoryError>>,
}

impl CompletionSink for Landing {
    fn complete(&self, token: u64, result: std::result::Result<u64, MemoryError>) {
        match result {
            Ok(value) => self.result.store(value, Ordering::Relaxed),
            Err(error) => {
                let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
                *failed = Some(error);
            }
        }
        self.ended.store(token, Ordering::Release);
    }
}

impl Movers {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self {
            unpacker: Unpacker::new(gpu)?,
            worker: CopyWorker::for_gpu(gpu)?,
            yardstick: Yardstick::new(gpu)?,
            landing: Arc::default(),
        })
    }

    pub(crate) fn has(&self, way: Way) -> bool {
        way != Way::Batch || self.yardstick.has_batch()
    }

    /// Moves once and waits; the checksum, or the number of bytes.
    pub(crate) fn go(&mut self, way: Way, set: &Set) -> Result<u64> {
        let Set { pool, list, to } = set;
        let unpack = |with| Work::Unpack {
            pool: pool.clone(),
            descriptors: Arc::clone(list),
            to: to.clone(),
            with,
        };
        let sum = || Work::Checksum {
            of: pool.slice().clone(),
        };
        let bytes = list.bytes();
        match way {
            Way::Kernel => return Ok(self.unpacker.run(unpack(UnpackMethod::Kernel), LIMIT)?),
            Way::D2d => return Ok(self.unpacker.run(unpack(UnpackMethod::D2d), LIMIT)?),
            Way::Checksum => return Ok(self.unpacker.run(sum(), LIMIT)?),
            Way::WorkerKernel => return Ok(self.by_worker(unpack(UnpackMethod::Kernel))?),
            Way::WorkerD2d => return Ok(self.by_worker(unpack(UnpackMethod::D2d))?),
            Way::WorkerChecksum => return Ok(self.by_worker(sum())?),
            Way::Plain => self.yardstick.gather(pool, list, to)?,
            Way::Each => self.yardstick.copy_each(pool, list, to)?,
            Way::Batch => self.yardstick.copy_batch(pool, list, to)?,
            Way::Copy => self.yardstick.copy(pool.slice(), to)?,
        }
        Ok(bytes)
    }

    fn by_worker(&self, work: Work) -> std::result::Result<u64, MemoryError> {
        let token = self.landing.ended.load(Ordering::Relaxed) + 1;
        let sink = Arc::<Landing>::clone(&self.landing);
        self.worker.submit(Job {
            work,
            fence: None,
            sink,
            token,
        })?;
        let start = Instant::now();
        while self.landing.ended.load(Ordering::Acquire) != token {
            if start.elapsed() > LIMIT {
                return Err(MemoryError::WorkerStopped);
            }
        }
        let mut failed = self
            .landing
            .failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match failed.take() {
            Some(error) => Err(error),
            None => Ok(self.landing.result.load(Ordering::Relaxed)),
        }
    }
}
