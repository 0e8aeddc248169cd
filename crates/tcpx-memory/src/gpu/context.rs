//! Calls that need a current context, and memory in it.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use super::Gpu;
use crate::driver::{Api, OUT_OF_MEMORY, sys};
use crate::ending::{self, Inside};
use crate::error::CudaError;
use crate::kind::MemoryKind;

/// Makes a context current on this thread until dropped; what was current before comes back. Where
/// it is current already nothing is pushed, which is far cheaper.
///
/// Meanwhile a graph capture of the program is none of this thread's business, see
/// [`ignore_captures`]. Where an [`InContext`] sees to all that, only a look is left to do.
pub(crate) struct Current(Option<Entered>);

/// What is undone at the end.
struct Entered {
    _inside: Option<Inside>,
    api: &'static Api,
    pushed: bool,
    capture_mode: u32,
}

/// Keeps a GPU's context current on this thread, so that each call of this crate saves the three
/// driver calls that do it; what was current before comes back with the drop. As little as possible
/// of the program's own code may run meanwhile: the owner of memory that is released, the receiver
/// of the log. If that makes another context current, later calls make theirs current again.
#[must_use]
pub struct InContext {
    before: sys::CUcontext,
    _current: Current,
    /// Keeps the context alive.
    _gpu: Gpu,
    // Contexts are current on threads: it must be dropped where it was made.
    _of_this_thread: PhantomData<*const ()>,
}

thread_local! {
    /// The context of this thread's [`InContext`].
    static KEPT: Cell<sys::CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

impl InContext {
    /// Makes the context of `gpu` current until this is dropped.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn enter(gpu: &Gpu) -> Result<Self, CudaError> {
        Ok(Self::made_current(gpu, Current::enter(gpu)?))
    }

    fn made_current(gpu: &Gpu, current: Current) -> Self {
        Self {
            before: KEPT.replace(gpu.raw_context()),
            _current: current,
            _gpu: gpu.clone(),
            _of_this_thread: PhantomData,
        }
    }
}

impl Gpu {
    /// As [`InContext::enter`], also where the context is current: for code that works on the
    /// current context and may change what that is, such as a network plugin.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn enter(&self) -> Result<InContext, CudaError> {
        let current = Current::push(self.api(), self.raw_context())?;
        Ok(InContext::made_current(self, current))
    }
}

impl Drop for InContext {
    fn drop(&mut self) {
        KEPT.set(self.before);
    }
}

impl fmt::Debug for InContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InContext")
    }
}

/// Declares that calls of this thread belong to no graph capture, and gives what was declared
/// before.
///
/// While any thread captures in the default mode, the driver refuses others the query of an event,
/// an allocation or a free, and breaks the capture: a copy in flight would look failed, and the
/// program would lose its graph. None of our calls can get into a graph, so the ban has nothing to
/// protect.
pub(crate) fn ignore_captures(api: &Api) -> Result<u32, CudaError> {
    exchange_capture_mode(
        api,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32,
    )
}

/// Refuses a stream on which nothing can be recorded, because it is being captured, or because it
/// is the legacy one and waits for one that is. Its context is current. Whatever the answer, the
/// capture goes on.
pub(crate) fn refuse_captured(gpu: &Gpu, stream: sys::CUstream) -> Result<(), CudaError> {
    const IMPLICIT: i32 = 906;
    let (mut status, device) = (0, gpu.ordinal());
    // SAFETY: the stream is alive, and the pointer is valid for one status.
    let code = unsafe { (gpu.api().cuStreamIsCapturing)(stream, &raw mut status) };
    if code == IMPLICIT {
        return Err(CudaError::DefaultStreamsCaptured { device });
    }
    gpu.api().check("cuStreamIsCapturing", code)?;
    match status {
        0 => Ok(()),
        _ => Err(CudaError::StreamCaptured { device }),
    }
}

fn exchange_capture_mode(api: &Api, mut mode: u32) -> Result<u32, CudaError> {
    // SAFETY: the pointer is valid for one mode, which the driver exchanges.
    let code = unsafe { (api.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
    api.check("cuThreadExchangeStreamCaptureMode", code)?;
    Ok(mode)
}

impl Current {
    pub(crate) fn enter(gpu: &Gpu) -> Result<Self, CudaError> {
        Self::enter_raw(gpu.api(), gpu.raw_context())
    }

    pub(crate) fn enter_raw(api: &'static Api, context: sys::CUcontext) -> Result<Self, CudaError> {
        let is_kept = !context.is_null() && KEPT.get() == context;
        let inside = match is_kept {
            true => None,
            false => Some(ending::enter().ok_or(CudaError::ProcessEnds)?),
        };
        let mut now = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle.
        let known = unsafe { (api.cuCtxGetCurrent)(&raw mut now) } == 0;
        if known && now == context {
            if is_kept {
                return Ok(Self(None));
            }
            return Ok(Self(Some(Entered {
                _inside: inside,
                api,
                pushed: false,
                capture_mode: ignore_captures(api)?,
            })));
        }
        Self::push(api, context)
    }

    /// As [`Self::enter_raw`], also where the context is current: for code that may change what is.
    pub(crate) fn push(api: &'static Api, context: sys::CUcontext) -> Result<Self, CudaError> {
        let inside = ending::enter().ok_or(CudaError::ProcessEnds)?;
        let capture_mode = ignore_captures(api)?;
        // SAFETY: the context is alive: the `Gpu` retains it, or its owner keeps it for us.
        let pushed = api.check("cuCtxPushCurrent", unsafe {
            (api.cuCtxPushCurrent)(context)
        });
        if let Err(error) = pushed {
            restore_capture_mode(api, capture_mode);
            return Err(error);
        }
        Ok(Self(Some(Entered {
            _inside: Some(inside),
            api,
            pushed: true,
            capture_mode,
        })))
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let Some(entered) = &self.0 else {
            return;
        };
        if entered.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: the pointer is valid for one handle; the guard pushed exactly one context.
            let code = unsafe { (entered.api.cuCtxPopCurrent)(&raw mut popped) };
            entered.api.check_teardown("cuCtxPopCurrent", code);
        }
        restore_capture_mode(entered.api, entered.capture_mode);
    }
}

fn restore_capture_mode(api: &Api, mode: u32) {
    if let Err(error) = exchange_capture_mode(api, mode) {
        tracing::debug!(%error, "this thread keeps ignoring graph captures");
    }
}

/// Allocates device memory; its content is whatever was there.
pub(crate) fn device_alloc(gpu: &Gpu, len: usize) -> Result<u64, CudaError> {
    let _current = Current::enter(gpu)?;
    let mut address = 0;
    // SAFETY: the pointer is valid for one address.
    let code = unsafe { (gpu.api().cuMemAlloc)(&raw mut address, len.max(1)) };
    gpu.check_memory_left(code, len, gpu.kind())?;
    gpu.api().check("cuMemAlloc", code)?;
    Ok(address)
}

/// Frees what [`device_alloc`] gave.
///
/// # Safety
/// Nothing may use the memory any more.
pub(crate) unsafe fn device_free(gpu: &Gpu, address: u64) {
    match Current::enter(gpu) {
        Ok(_current) => {
            // SAFETY: the caller's promise.
            let code = unsafe { (gpu.api().cuMemFree)(address) };
            gpu.api().check_teardown("cuMemFree", code);
        }
        Err(error) => tracing::debug!(%error, "device memory stays until the process ends"),
    }
}

impl Gpu {
    /// Tells an answer of the driver apart that says that there is no memory left.
    pub(super) fn check_memory_left(
        &self,
        code: i32,
        bytes: usize,
        what: MemoryKind,
    ) -> Result<(), CudaError> {
        let device = self.ordinal();
        match code {
            OUT_OF_MEMORY => Err(CudaError::OutOfMemory {
                device,
                bytes,
                what,
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_current(gpu: &Gpu, context: sys::CUcontext) {
        // SAFETY: the fake driver takes any handle.
        let code = unsafe { (gpu.api().cuCtxSetCurrent)(context) };
        gpu.api().check("cuCtxSetCurrent", code).unwrap();
    }

    fn current_context(gpu: &Gpu) -> sys::CUcontext {
        let mut now = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle.
        let code = unsafe { (gpu.api().cuCtxGetCurrent)(&raw mut now) };
        gpu.api().check("cuCtxGetCurrent", code).unwrap();
        now
    }

    #[test]
    fn a_kept_context_is_entered_and_restored() {
        let gpu = Gpu::fake();
        let others = std::ptr::without_provenance_mut(0x2000);
        let before = current_context(&gpu);
        let kept = InContext::enter(&gpu).unwrap();
        let again = InContext::enter(&gpu).unwrap();
        drop(again);
        assert!(Current::enter(&gpu).unwrap().0.is_none());
        let other = Current::enter_raw(gpu.api(), others).unwrap();
        assert!(other.0.is_some());
        assert_eq!(current_context(&gpu), others);
        drop(other);
        assert_eq!(current_context(&gpu), gpu.raw_context());
        drop(kept);
        assert_eq!(current_context(&gpu), before);
        assert!(Current::enter(&gpu).unwrap().0.is_some());
    }

    #[test]
    fn a_kept_context_is_entered_after_a_change() {
        let gpu = Gpu::fake();
        let kept = InContext::enter(&gpu).unwrap();
        // As the owner of memory might, when its last reference is dropped.
        let others = std::ptr::without_provenance_mut(0x2000);
        make_current(&gpu, others);
        let entered = Current::enter(&gpu).unwrap();
        assert_eq!(current_context(&gpu), gpu.raw_context());
        drop(entered);
        assert_eq!(current_context(&gpu), others);
        make_current(&gpu, gpu.raw_context());
        assert!(Current::enter(&gpu).unwrap().0.is_none());
        drop(kept);
    }
}
