//! Contexts: one per GPU, and none left behind on the program's threads.

use std::ptr;
use std::thread;

use cudarc::driver::sys::{self, CUcontext};
use tcpx_memory::{CudaError, Gpu};

use crate::support::{Bench, Outcome, text};
use crate::user::check;

/// Opening twice gives one GPU, and no call leaves a context on the program's thread.
pub(crate) fn contexts(bench: &Bench) -> Outcome {
    let again = Gpu::open(bench.gpu.ordinal()).map_err(text)?;
    if !again.is_same(&bench.gpu) {
        return Err("opening twice gave two GPUs".to_owned());
    }
    let fresh = thread::spawn(Gpu::current)
        .join()
        .map_err(|_| "panicked".to_owned())?;
    if !matches!(fresh, Err(CudaError::NoCurrentContext)) {
        return Err(format!("on a thread without a context: {fresh:?}"));
    }
    let user = bench.user()?;
    let current = user.inside(|| Gpu::current().map_err(text))?;
    if !current.is_same(&bench.gpu) {
        return Err("the current GPU is another one".to_owned());
    }
    let region = bench.region_of(bench.gpu.kind(), &[1, 2, 3])?;
    let checksum = region.checksum(..).map_err(text)?;
    drop(region);
    let mut left: CUcontext = ptr::null_mut();
    // SAFETY: the pointer is valid for one handle.
    check("cuCtxGetCurrent", unsafe {
        sys::cuCtxGetCurrent(&raw mut left)
    })?;
    if !left.is_null() {
        return Err("a context was left on this thread".to_owned());
    }
    Ok(format!(
        "one context, {}; a checksum is {checksum:08x}",
        bench.gpu.info().pci
    ))
}
