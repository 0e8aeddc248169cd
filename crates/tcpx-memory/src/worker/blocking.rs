//! GPU memory that the program reads and writes as it waits: its copy worker does that, after what the default streams
//! have to do.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::CopyWorker;
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

/// Where a job's end arrives.
#[derive(Default)]
struct End(Mutex<Option<Result<u64, MemoryError>>>, Condvar);

impl CompletionSink for End {
    fn complete(&self, _token: u64, result: Result<u64, MemoryError>) {
        *lock(&self.0) = Some(result);
        self.1.notify_all();
    }
}

/// Hands on the bytes of GPU memory, a piece after the other.
pub(crate) fn read(from: &RegionSlice, mut each: impl FnMut(&[u8])) -> Result<(), MemoryError> {
    let buffer = Region::host(from.len().min(PIECE))?;
    for part in from.pieces(PIECE) {
        let (len, to) = (part.len(), buffer.slice(..part.len())?);
        run(Work::Copy { from: part, to })?;
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
        run(Work::Copy { from, to: part })?;
    }
    Ok(())
}

/// Does work about GPU memory.
pub(crate) fn run(work: Work) -> Result<u64, MemoryError> {
    let (from, to) = work.ends();
    let Some(gpu) = from.region().gpu().or_else(|| to?.region().gpu()).cloned() else {
        return crate::cpu::run(&work);
    };
    let fence = Fence::take(&gpu, After::DefaultStreams)?;
    gpu.wait_until("the work on the default streams", || fence.is_reached())?;
    let end = Arc::new(End::default());
    let sink: Arc<End> = Arc::clone(&end);
    let (fence, token) = (None, 0);
    CopyWorker::for_gpu(&gpu)?.submit(Job {
        work,
        fence,
        sink,
        token,
    })?;
    let waited = end
        .1
        .wait_timeout_while(lock(&end.0), LIMIT, |end| end.is_none());
    let (mut ended, _) = waited.unwrap_or_else(PoisonError::into_inner);
    ended.take().unwrap_or_else(|| Err(timed_out(&gpu).into()))
}

fn timed_out(gpu: &Gpu) -> CudaError {
    CudaError::TimedOut {
        device: gpu.ordinal(),
        what: "a copy",
        after: LIMIT,
    }
}
