//! What a CUDA operation must wait for, captured when the operation is submitted.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::{Api, sys};
use crate::error::CudaError;
use crate::gpu::{Current, Gpu, legacy, refuse_captured};
use crate::kind::MemoryKind;
use crate::lock;

/// Which of the caller's GPU work an operation must wait for.
///
/// An operation is no part of a graph. On a stream that is being captured it is refused before
/// anything is recorded ([`CudaError::StreamCaptured`]), and so is one after the default streams
/// while a stream is captured that synchronises with them ([`CudaError::DefaultStreamsCaptured`]);
/// the capture goes on. Only one that another thread begins between the driver's answer and the
/// call after it is broken, as by any use of the legacy stream; operations after a non-blocking
/// stream, or after nothing, never touch a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum After {
    /// Nothing: the caller knows that the bytes are ready.
    Nothing,
    /// All work submitted so far to the context's default streams: the legacy one, and with it
    /// every stream that synchronises with it, which each thread's own does too. Work on other
    /// non-blocking streams is the caller's to name.
    #[default]
    DefaultStreams,
    /// All work submitted so far to a stream of the program: [`After::stream`].
    Stream(Stream),
    /// An event of the program: [`After::event`].
    Event(Event),
}

/// A stream of the program, which outlives this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(sys::CUstream);

// SAFETY: streams may be used from any thread; the handle is only a number to us.
unsafe impl Send for Stream {}
// SAFETY: as above; every driver call is itself thread-safe.
unsafe impl Sync for Stream {}

impl After {
    /// All work submitted so far to this `CUstream`; the driver's own names for the default
    /// streams, 0 to 2, are [`After::DefaultStreams`].
    ///
    /// # Safety
    /// It is a stream that is not destroyed before the last operation has started that this was
    /// given to.
    pub unsafe fn stream(handle: u64) -> Self {
        match handle {
            0..=2 => Self::DefaultStreams,
            _ => Self::Stream(Stream(std::ptr::with_exposed_provenance_mut(
                handle as usize,
            ))),
        }
    }

    /// The work before this `CUevent`.
    ///
    /// # Safety
    /// It is an event that has been recorded, outside of a capture, and is neither destroyed nor
    /// recorded again before the last operation has ended that this was given to.
    pub unsafe fn event(handle: u64) -> Self {
        Self::Event(Event(std::ptr::with_exposed_provenance_mut(
            handle as usize,
        )))
    }
}

/// Fences start with this many events and grow when more operations wait at a time.
const PREPARED: usize = 256;
/// The most events a GPU's fences may use at a time.
const LIMIT: usize = 16_384;

/// The driver's answer as long as work is left.
pub(crate) const NOT_READY: i32 = 600;

/// A point in the caller's GPU work. Taken on the caller's thread when an operation is submitted;
/// cheap to clone. The copy worker starts a job once its fence is reached, and until then goes on
/// with other jobs.
#[derive(Clone)]
pub struct Fence(Option<Arc<Inner>>);

struct Inner {
    gpu: Gpu,
    event: Event,
    /// The event came from the pool and returns there; else it is the caller's own.
    pooled: bool,
    /// It was seen reached: every chunk of a transfer asks, and the driver's answer takes
    /// microseconds.
    reached: AtomicBool,
}

/// An event, of the program or of ours, which outlives this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(sys::CUevent);

// SAFETY: events may be used from any thread; the handle is only a number to us.
unsafe impl Send for Event {}
// SAFETY: as above; every driver call is itself thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event for ordering only. The GPU's context must be current.
    pub(crate) fn create(api: &Api) -> Result<Self, CudaError> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the pointer is valid for one handle.
        api.check("cuEventCreate", unsafe {
            (api.cuEventCreate)(&raw mut event, flags)
        })?;
        Ok(Self(event))
    }

    /// Marks the end of the work submitted so far to a stream.
    pub(crate) fn record(self, api: &Api, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event is alive; a stream of the wrong context is refused by the driver.
        api.check("cuEventRecord", unsafe {
            (api.cuEventRecord)(self.0, stream)
        })
    }

    /// Whether the work before the event has ended.
    pub(crate) fn is_ready(self, api: &Api) -> Result<bool, CudaError> {
        // SAFETY: the event is alive, by ownership or by the promise of `After::event`.
        match unsafe { (api.cuEventQuery)(self.0) } {
            NOT_READY => Ok(false),
            code => api.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Fence {
    /// A fence that is always reached.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Captures what `after` names, on the calling thread.
    ///
    /// # Errors
    /// [`CudaError::StreamCaptured`], [`CudaError::DefaultStreamsCaptured`],
    /// [`CudaError::FencesExhausted`], or the driver's refusal, for example of a stream that
    /// belongs to another context.
    pub fn take(gpu: &Gpu, after: After) -> Result<Self, CudaError> {
        let fence = |event, pooled| {
            Self(Some(Arc::new(Inner {
                gpu: gpu.clone(),
                event,
                pooled,
                reached: AtomicBool::new(false),
            })))
        };
        let stream = match after {
            After::Nothing => return Ok(Self::none()),
            After::Event(event) => return Ok(fence(event, false)),
            After::DefaultStreams => legacy(),
            After::Stream(Stream(stream)) => stream,
        };
        let _current = Current::enter(gpu)?;
        if after == After::DefaultStreams && gpu.default_streams_rest() {
            return Ok(Self::none());
        }
        refuse_captured(gpu, stream)?;
        let event = gpu.events().take(gpu)?;
        match event.record(gpu.api(), stream) {
            Ok(()) => Ok(fence(event, true)),
            Err(error) => {
                gpu.events().give_back(event);
                Err(error)
            }
        }
    }

    /// Whether the work has ended.
    ///
    /// # Errors
    /// The driver's, for example when a kernel has broken the context.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        match &self.0 {
            Some(inner) if !self.was_reached() => {
                let _current = Current::enter(&inner.gpu)?;
                self.is_reached_in_context()
            }
            _ => Ok(true),
        }
    }

    /// As [`Self::is_reached`], with the GPU's context already current.
    pub(crate) fn is_reached_in_context(&self) -> Result<bool, CudaError> {
        let Some(inner) = &self.0 else {
            return Ok(true);
        };
        if inner.reached.load(Ordering::Acquire) {
            return Ok(true);
        }
        let reached = inner.event.is_ready(inner.gpu.api())?;
        if reached {
            inner.reached.store(true, Ordering::Release);
        }
        Ok(reached)
    }

    /// Whether it is known to be reached; never calls the driver. What is not known may be reached
    /// all the same: [`Self::is_reached`] finds out.
    pub fn was_reached(&self) -> bool {
        let inner = self.0.as_ref();
        inner.is_none_or(|inner| inner.reached.load(Ordering::Acquire))
    }

    /// The GPU the fence was taken on; `None` if it waits for nothing.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.0.as_ref().map(|inner| &inner.gpu)
    }

    /// Where the fence belongs, for messages.
    pub(crate) fn kind(&self) -> MemoryKind {
        self.gpu().map_or(MemoryKind::Host, Gpu::kind)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.pooled {
            self.gpu.events().give_back(self.event);
        }
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("Fence(nothing)"),
            Some(inner) => write!(f, "Fence({:?})", inner.gpu),
        }
    }
}

/// The events of a GPU's fences.
#[derive(Default)]
pub(crate) struct EventPool(Mutex<(usize, Vec<Event>)>);

impl EventPool {
    /// Creates the first events.
    pub(crate) fn fill(&self, gpu: &Gpu) -> Result<(), CudaError> {
        let _current = Current::enter(gpu)?;
        let mut pool = lock(&self.0);
        while pool.0 < PREPARED {
            let event = Event::create(gpu.api())?;
            pool.0 += 1;
            pool.1.push(event);
        }
        Ok(())
    }

    fn take(&self, gpu: &Gpu) -> Result<Event, CudaError> {
        let mut pool = lock(&self.0);
        if let Some(event) = pool.1.pop() {
            return Ok(event);
        }
        if pool.0 == LIMIT {
            return Err(CudaError::FencesExhausted {
                device: gpu.ordinal(),
                limit: LIMIT,
            });
        }
        let event = Event::create(gpu.api())?;
        pool.0 += 1;
        Ok(event)
    }

    fn give_back(&self, event: Event) {
        lock(&self.0).1.push(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;
    use crate::driver::fake::{self, Mode};

    #[test]
    fn a_fence_on_nothing_is_reached() {
        assert_eq!(Fence::none().is_reached(), Ok(true));
        assert!(Fence::none().was_reached());
        assert!(Fence::none().gpu().is_none());
        assert_eq!(After::default(), After::DefaultStreams);
    }

    /// Of every kind of stream, in every mode, by the thread itself and by another.
    fn in_each_capture(run: impl Fn(&Gpu, bool, u64)) {
        for mode in [Mode::Global, Mode::ThreadLocal, Mode::Relaxed] {
            for blocking in [true, false] {
                for by_itself in [true, false] {
                    let gpu = Gpu::fake();
                    let begin = || {
                        let _current = gpu.enter().unwrap();
                        fake::begin_capture(blocking, mode)
                    };
                    let stream = match by_itself {
                        true => begin(),
                        false => std::thread::scope(|scope| scope.spawn(begin).join().unwrap()),
                    };
                    run(&gpu, blocking, stream);
                    let kind = if blocking { "blocking" } else { "non-blocking" };
                    assert!(fake::end_capture(stream), "{mode:?}, {kind}, {by_itself}");
                }
            }
        }
    }

    #[test]
    fn a_captured_stream_is_refused_and_goes_on() {
        in_each_capture(|gpu, blocking, stream| {
            let device = 0;
            let taken = Fence::take(gpu, fake::after_stream(stream));
            let refused = CudaError::StreamCaptured { device };
            assert_eq!(taken.map(drop), Err(refused));
            let taken = Fence::take(gpu, After::DefaultStreams);
            let refused = CudaError::DefaultStreamsCaptured { device };
            match blocking {
                true => assert_eq!(taken.map(drop), Err(refused)),
                false => assert_eq!(taken.unwrap().is_reached(), Ok(true)),
            }
            let (other, open) = fake::gated_stream();
            let fence = Fence::take(gpu, fake::after_stream(other)).unwrap();
            assert_eq!(fence.is_reached(), Ok(false));
            open.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn set_up_and_blocking_access_break_no_capture() {
        in_each_capture(|gpu, blocking, _| {
            let again = Gpu::fake_in(gpu.context() as usize);
            let region = Region::cuda(&again, 100).unwrap();
            let read = region.read_to(0, &mut [0; 100]);
            assert_eq!(read.is_err(), blocking, "{read:?}");
        });
    }
}
