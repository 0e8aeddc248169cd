//! Whether a context's default streams are idle, with one driver call.
//!
//! An event recorded on the legacy default stream follows all streams that synchronise with it. A
//! query of that stream itself covers those streams too, in a fraction of the time. No document
//! promises that, so it is tried once for each context, and not used where the trial fails.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::streams::destroy_stream;
use super::{Current, Gpu, MappedHost, is_at_rest, refuse_captured};
use crate::driver::sys;
use crate::error::CudaError;

/// Longest wait for the stream of the trial: work that the program starts meanwhile may delay it.
const LIMIT: Duration = Duration::from_millis(100);
/// Longest time for which the trial holds its stream up.
const HOLD: Duration = Duration::from_millis(20);
/// What the stream of the trial waits for.
const OPEN: u32 = 1;

/// `CU_STREAM_LEGACY`, the driver's name for the default stream that waits for all others that are
/// not non-blocking, those of the threads included.
pub(crate) fn legacy() -> sys::CUstream {
    std::ptr::without_provenance_mut(1)
}

impl Gpu {
    /// Whether all work on the default streams, and on those that synchronise with them, is known
    /// to have ended. The context is current.
    pub(crate) fn default_streams_rest(&self) -> bool {
        // The event that is recorded instead reports an error.
        self.0.legacy_answers_for_all.get() == Some(&true) && self.legacy_rests() == Ok(true)
    }

    /// Whether the legacy stream has no work. To ask it would break the capture of a stream that it
    /// waits for.
    fn legacy_rests(&self) -> Result<bool, CudaError> {
        refuse_captured(self, legacy())?;
        is_at_rest(self.api(), legacy())
    }

    /// Tries what [`default_streams_rest`](Self::default_streams_rest) relies on, with a word of
    /// pinned memory that is this trial's for good; for set-up.
    pub(super) fn try_legacy_stream(&self, word: MappedHost) {
        let sees = Current::enter(self).and_then(|_current| self.try_with(word));
        if let Err(error) = &sees {
            tracing::debug!(%error, "the legacy default stream is not asked");
        }
        // Set once, at set-up.
        let _ = self.0.legacy_answers_for_all.set(sees == Ok(Some(true)));
    }

    /// Blocks a stream for a moment; whether the driver reports the legacy stream as busy
    /// meanwhile. `None` if the stream may still read the word.
    fn try_with(&self, word: MappedHost) -> Result<Option<bool>, CudaError> {
        let api = self.api();
        let Some(wait) = api.cuStreamWaitValue32_v2 else {
            return Ok(Some(false));
        };
        if self.legacy_rests() != Ok(true) {
            // It is busy, or captured, by itself, and the trial would wait for that.
            return Ok(Some(false));
        }
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle; flags of 0 make it synchronise with the
        // legacy one.
        let made = unsafe { (api.cuStreamCreate)(&raw mut stream, 0) };
        api.check("cuStreamCreate", made)?;
        // SAFETY: pinned and aligned, and it stays until the thread below has ended; nobody else
        // knows of it.
        let opened = unsafe { AtomicU32::from_ptr(word.host.as_ptr().cast()) };
        let busy = thread::scope(|scope| {
            let (ask, asked) = mpsc::channel::<()>();
            // A thread of its own opens it, asked or not: while a stream is held up, a call of
            // another thread of the program may wait for that stream with the lock that our next
            // call needs.
            let open = move || {
                let _ = asked.recv_timeout(HOLD);
                opened.store(OPEN, Ordering::Release);
            };
            let opener = thread::Builder::new().name("tcpx-trial".into());
            opener.spawn_scoped(scope, open).ok()?;
            let equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
            // SAFETY: the word is pinned, aligned and stays until the stream has passed; the GPU
            // only reads it.
            let held = unsafe { wait(stream, word.device, OPEN, equal) };
            let busy = (held == 0).then(|| self.legacy_rests() == Ok(false));
            drop(ask);
            busy
        });
        let Some(busy) = busy else {
            tracing::debug!("no stream here waits for words");
            destroy_stream(api, stream);
            return Ok(Some(false));
        };
        let start = Instant::now();
        while is_at_rest(api, stream) != Ok(true) {
            if start.elapsed() > LIMIT {
                tracing::debug!("a stream of the trial stays behind the program's work");
                return Ok(None);
            }
            thread::yield_now();
        }
        destroy_stream(api, stream);
        // Busy because of that stream alone, not of work that the program started meanwhile.
        let rests = self.legacy_rests();
        Ok(Some(busy && rests == Ok(true)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::fake;
    use crate::fence::{After, Fence};

    const LONG: Duration = Duration::from_secs(60);

    fn taken(gpu: &Gpu) -> Fence {
        Fence::take(gpu, After::DefaultStreams).unwrap()
    }

    #[test]
    fn a_fence_of_streams_at_rest_waits_for_nothing() {
        let start = Instant::now();
        // Another test's trial may hold a stream up for a moment.
        while taken(&Gpu::fake()).gpu().is_some() {
            assert!(start.elapsed() < LONG);
        }
    }

    #[test]
    fn synchronising_streams_count_as_default_streams() {
        let gpu = Gpu::fake();
        let open = fake::keep_default_streams();
        let fence = taken(&gpu);
        assert_eq!(fence.is_reached(), Ok(false));
        open.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while fence.is_reached() != Ok(true) {
            assert!(start.elapsed() < LONG);
        }
    }

    #[test]
    fn a_driver_that_fails_the_trial_is_not_used() {
        let gpu = fake::with_a_legacy_stream_alone(Gpu::fake);
        let _open = fake::keep_default_streams();
        assert!(!gpu.default_streams_rest());
        assert_eq!(taken(&gpu).is_reached(), Ok(false));
    }

    #[test]
    fn a_program_that_is_busy_at_set_up_is_not_waited_for() {
        let _open = fake::keep_default_streams();
        let gpu = Gpu::fake();
        assert!(!gpu.default_streams_rest());
    }
}
