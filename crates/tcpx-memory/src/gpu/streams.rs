//! Streams of ours, and bounded waits for what is on them.

use std::thread;
use std::time::{Duration, Instant};

use super::Gpu;
use crate::driver::{Api, sys};
use crate::error::CudaError;
use crate::fence::NOT_READY;

/// Longest wait for first work at set-up, and for what the program has on its default streams.
const LIMIT: Duration = Duration::from_secs(60);
/// After this long a wait yields its core between polls.
const SPIN: Duration = Duration::from_micros(50);

/// Creates a stream that does not synchronise with the default one; the context must be current.
/// Its kernels, which are short, come before those of the program that wait for room.
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

impl Gpu {
    /// Polls until `ready`, first without a pause, then with short ones.
    ///
    /// # Errors
    /// That of `ready`, or [`CudaError::TimedOut`].
    pub(crate) fn wait_until(
        &self,
        what: &'static str,
        mut ready: impl FnMut() -> Result<bool, CudaError>,
    ) -> Result<(), CudaError> {
        let start = Instant::now();
        while !ready()? {
            let waited = start.elapsed();
            if waited > LIMIT {
                return Err(CudaError::TimedOut {
                    device: self.ordinal(),
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
}
