//! GPU memory that the program reads and writes as it waits: its copy worker does that, after what
//! the default streams have to do.

use std::hint;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::CopyWorker;
use crate::cpu;
use crate::error::{CudaError, MemoryError};
use crate::fence::{After, Fence};
use crate::gpu::Gpu;
use crate::job::{CompletionSink, Job, Work};
use crate::lock;
use crate::region::Region;
use crate::slice::RegionSlice;

/// Bytes moved at a time.
const PIECE: usize = 1 << 20;
/// Longest wait for one of them, which goes on after that.
const LIMIT: Duration = Duration::from_secs(60);

/// How long a wait polls before it sleeps: most copies are over before a thread is awake again.
const SPIN: Duration = Duration::from_micros(50);

/// Where a job's end arrives.
#[derive(Default)]
struct End(Mutex<Option<Result<u64, MemoryError>>>, Condvar);

impl CompletionSink for End {
    fn complete(&self, _token: u64, result: Result<u64, MemoryError>) {
        *lock(&self.0) = Some(result);
        self.1.notify_all();
    }
}

/// As [`CopyWorker::run`].
pub(super) fn run(worker: &CopyWorker, work: Work, limit: Duration) -> Result<u64, MemoryError> {
    let end = Arc::new(End::default());
    let sink: Arc<End> = Arc::clone(&end);
    let (start, fence, token) = (Instant::now(), None, 0);
    worker.submit(Job {
        work,
        fence,
        sink,
        token,
    })?;
    while start.elapsed() < SPIN.min(limit) {
        if let Some(result) = lock(&end.0).take() {
            return result;
        }
        hint::spin_loop();
    }
    let waited = end
        .1
        .wait_timeout_while(lock(&end.0), limit, |end| end.is_none());
    let (mut ended, _) = waited.unwrap_or_else(PoisonError::into_inner);
    ended.take().unwrap_or_else(|| {
        Err(MemoryError::from(CudaError::TimedOut {
            device: worker.gpu().map_or(0, Gpu::ordinal),
            what: "a copy or an unpack",
            after: limit,
        }))
    })
}

/// Hands on the bytes of GPU memory, a piece after the other.
pub(crate) fn read(from: &RegionSlice, mut each: impl FnMut(&[u8])) -> Result<(), MemoryError> {
    let buffer = Region::host(from.len().min(PIECE))?;
    for part in from.pieces(PIECE) {
        let (len, to) = (part.len(), buffer.slice(..part.len())?);
        in_turn(Work::Copy { from: part, to })?;
        buffer.with_bytes(..len, &mut each)?;
    }
    Ok(())
}

/// Writes all of GPU memory.
pub(crate) fn write(to: &RegionSlice, bytes: &[u8]) -> Result<(), MemoryError> {
    let buffer = Region::host(bytes.len().min(PIECE))?;
    for (part, bytes) in to.pieces(PIECE).zip(bytes.chunks(PIECE)) {
        buffer.write_from(0, bytes)?;
        let from = buffer.slice(..bytes.len())?;
        in_turn(Work::Copy { from, to: part })?;
    }
    Ok(())
}

/// Does work about GPU memory, once the default streams have done theirs.
pub(crate) fn in_turn(work: Work) -> Result<u64, MemoryError> {
    let (from, to) = work.ends();
    let Some(gpu) = from.region().gpu().or_else(|| to?.region().gpu()).cloned() else {
        return cpu::run(&work);
    };
    let fence = Fence::take(&gpu, After::DefaultStreams)?;
    gpu.wait_until("the work on the default streams", || fence.is_reached())?;
    run(&*CopyWorker::for_gpu(&gpu)?, work, LIMIT)
}
