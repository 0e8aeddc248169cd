//! Blocking access to device memory from any thread, through a small pinned buffer.
//!
//! It has a stream of its own, so it waits for nothing but the default streams and itself.

use std::sync::MutexGuard;
use std::thread;
use std::time::{Duration, Instant};

use super::{Current, Gpu, MappedHost};
use crate::driver::{Api, sys};
use crate::error::{CudaError, MemoryError};
use crate::fence::{After, Event, Fence, NOT_READY};
use crate::lock;

/// Bytes moved at a time.
pub(super) const PIECE: usize = 1 << 20;
/// Longest wait for the default streams, and for one piece.
const LIMIT: Duration = Duration::from_secs(60);
/// After this long a wait yields its core between polls.
const SPIN: Duration = Duration::from_micros(50);

/// What blocking access needs.
pub(super) struct SyncPath {
    stream: sys::CUstream,
    event: Event,
    buffer: MappedHost,
}

// SAFETY: handles may be used from any thread, and the buffer belongs to this value.
unsafe impl Send for SyncPath {}

impl SyncPath {
    fn create(gpu: &Gpu) -> Result<Self, MemoryError> {
        let buffer = gpu.blocking_memory()?;
        let _current = Current::enter(gpu)?;
        Ok(Self {
            stream: create_stream(gpu.api())?,
            event: Event::create(gpu.api())?,
            buffer,
        })
    }

    /// Copies between two device addresses, one of them the buffer's, and waits.
    fn copy(&self, gpu: &Gpu, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's region keeps the device bytes alive and `len` is at most the buffer's.
        let code = unsafe { (gpu.api().cuMemcpyAsync)(to, from, len, self.stream) };
        gpu.api().check("cuMemcpyAsync", code)?;
        self.event.record(gpu.api(), self.stream)?;
        wait(gpu, "a copy", || self.event.is_ready(gpu.api()))
    }
}

/// Creates a stream that does not synchronise with the default one; the context must be current. Its kernels, which are
/// short, come before those of the program that wait for room.
pub(crate) fn create_stream(api: &Api) -> Result<sys::CUstream, CudaError> {
    let (mut stream, mut first) = (std::ptr::null_mut(), 0);
    let last = std::ptr::null_mut();
    // SAFETY: the pointer is valid for one number; the other is not wanted.
    api.check("cuCtxGetStreamPriorityRange", unsafe {
        (api.cuCtxGetStreamPriorityRange)(last, &raw mut first)
    })?;
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the pointer is valid for one handle.
    api.check("cuStreamCreateWithPriority", unsafe {
        (api.cuStreamCreateWithPriority)(&raw mut stream, flags, first)
    })?;
    Ok(stream)
}

/// Ends a stream once its work is done, without waiting; for set-up. The context must be current.
pub(super) fn destroy_stream(api: &Api, stream: sys::CUstream) {
    // SAFETY: ours, and given up here.
    api.check_teardown("cuStreamDestroy", unsafe { (api.cuStreamDestroy)(stream) });
}

/// Whether all work of the stream has ended; its context is current.
pub(crate) fn is_at_rest(api: &Api, stream: sys::CUstream) -> Result<bool, CudaError> {
    // SAFETY: the stream is alive.
    match unsafe { (api.cuStreamQuery)(stream) } {
        NOT_READY => Ok(false),
        code => api.check("cuStreamQuery", code).map(|()| true),
    }
}

/// Polls until `ready` or the limit: first without a pause, then with short ones.
fn wait(
    gpu: &Gpu,
    what: &'static str,
    ready: impl Fn() -> Result<bool, CudaError>,
) -> Result<(), CudaError> {
    let start = Instant::now();
    while !ready()? {
        let waited = start.elapsed();
        if waited > LIMIT {
            return Err(CudaError::TimedOut {
                device: gpu.ordinal(),
                what,
                after: LIMIT,
            });
        }
        if waited > SPIN {
            thread::sleep(SPIN);
        }
    }
    Ok(())
}

impl Gpu {
    /// Makes the buffer and stream of blocking access, so that no later call has to.
    pub(crate) fn prepare_sync(&self) -> Result<(), MemoryError> {
        self.sync_path().map(drop)
    }

    fn sync_path(&self) -> Result<MutexGuard<'_, Option<SyncPath>>, MemoryError> {
        let mut path = lock(&self.0.sync);
        if path.is_none() {
            *path = Some(SyncPath::create(self)?);
        }
        Ok(path)
    }

    fn wait_for_default_streams(&self) -> Result<(), CudaError> {
        let fence = Fence::take(self, After::DefaultStreams)?;
        wait(self, "the work on the default streams", || {
            fence.is_reached_in_context()
        })
    }

    /// Reads `len` bytes of device memory at `from`, in order, in pieces.
    pub(crate) fn read_pieces(
        &self,
        from: u64,
        len: usize,
        mut piece: impl FnMut(&[u8]),
    ) -> Result<(), MemoryError> {
        self.blocking(|path| {
            for at in (0..len).step_by(PIECE) {
                let now = PIECE.min(len - at);
                path.copy(self, path.buffer.device, from + at as u64, now)?;
                // SAFETY: the buffer has `now` initialised bytes, and the copy has ended.
                piece(unsafe { std::slice::from_raw_parts(path.buffer.host.as_ptr(), now) });
            }
            Ok(())
        })
    }

    /// Writes bytes to device memory at `to`.
    pub(crate) fn write_bytes(&self, to: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.blocking(|path| {
            let buffer = path.buffer.host.as_ptr();
            for (index, piece) in bytes.chunks(PIECE).enumerate() {
                // SAFETY: the buffer has room for a piece and no copy is in flight.
                unsafe { buffer.copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
                path.copy(
                    self,
                    to + (index * PIECE) as u64,
                    path.buffer.device,
                    piece.len(),
                )?;
            }
            Ok(())
        })
    }

    /// Runs copies in order after the default streams' work.
    fn blocking(
        &self,
        copies: impl FnOnce(&SyncPath) -> Result<(), CudaError>,
    ) -> Result<(), MemoryError> {
        let mut guard = self.sync_path()?;
        let Some(path) = guard.as_ref() else {
            return Ok(());
        };
        let _current = Current::enter(self)?;
        self.wait_for_default_streams()?;
        let result = copies(path);
        if result.is_err() {
            // A copy may still be in flight: neither its buffer nor its stream may be used again, so
            // both stay allocated without an owner.
            *guard = None;
        }
        Ok(result?)
    }
}
