//! What a CUDA operation must wait for, captured when the operation is submitted.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::driver::{Api, sys};
use crate::error::CudaError;
use crate::gpu::{Current, Gpu, LEGACY};
use crate::kind::MemoryKind;
use crate::lock;

/// Which of the caller's GPU work an operation must wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum After {
    /// Nothing: the caller knows that the bytes are ready.
    Nothing,
    /// All work submitted so far to the context's default streams: the legacy one, and with it every
    /// stream that synchronises with it, which each thread's own does too. Work on other non-blocking
    /// streams is the caller's to name.
    #[default]
    DefaultStreams,
    /// All work submitted so far to this `CUstream`.
    Stream(u64),
    /// This `CUevent`. It must have been recorded, and must be neither destroyed nor recorded again
    /// before the operation has ended.
    Event(u64),
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
    /// It was seen reached: every chunk of a transfer asks, and the driver's answer takes microseconds.
    reached: AtomicBool,
}

/// An event handle.
#[derive(Clone, Copy)]
pub(crate) struct Event(sys::CUevent);

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
        // SAFETY: the event is alive, by ownership or by the promise of `After::Event`.
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
    /// [`CudaError::FencesExhausted`], or the driver's refusal, for example of a stream that belongs
    /// to another context or is being captured.
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
            After::Event(event) => {
                let event = Event(std::ptr::with_exposed_provenance_mut(event as usize));
                return Ok(fence(event, false));
            }
            After::DefaultStreams => LEGACY,
            After::Stream(stream) => stream,
        };
        let _current = Current::enter(gpu)?;
        if after == After::DefaultStreams && gpu.default_streams_rest() {
            return Ok(Self::none());
        }
        let event = gpu.events().take(gpu)?;
        let stream = std::ptr::with_exposed_provenance_mut(stream as usize);
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

    /// Whether it is known to be reached; never calls the driver. What is not known may be reached all the
    /// same: [`Self::is_reached`] finds out.
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

    #[test]
    fn a_fence_on_nothing_is_reached() {
        assert_eq!(Fence::none().is_reached(), Ok(true));
        assert!(Fence::none().was_reached());
        assert!(Fence::none().gpu().is_none());
        assert_eq!(After::default(), After::DefaultStreams);
    }
}
