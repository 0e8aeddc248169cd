//! For tests of other crates: a CUDA driver in memory, with GPUs whose memory is the process's own.
//!
//! Streams do their work only when somebody asks about them, so that what is used too early shows
//! as wrong bytes.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_void};

use crate::driver::fake;
use crate::fence::After;

/// The process's driver is the fake from now on, with one GPU.
pub fn install() {
    fake::install(1);
}

/// As [`install`], with two GPUs.
pub fn install_two() {
    fake::install(2);
}

/// Makes the fake's context current on the calling thread, as a program does that uses the GPU.
pub fn make_current() {
    fake::make_current();
}

/// The calls so far that wait for the program's kernels (frees), or hold up copies of the process
/// meanwhile (allocations, pinning, loading of modules).
pub fn costly_calls() -> Vec<&'static str> {
    fake::costly_calls()
}

/// Memory of the program's that is the GPU's from now on, until other such memory lies there.
pub fn adopt(memory: &[u8]) {
    fake::adopt(memory.as_ptr().expose_provenance(), memory.len());
}

/// Memory of the GPU that is mapped by segments of these lengths, which other processes can open.
pub fn segments(gpu: &crate::Gpu, lengths: &[usize]) -> u64 {
    fake::sharing::segments(gpu, lengths)
}

/// What this process has open of other processes' memory: legacy handles, and ranges of segments.
pub fn opened() -> [usize; 2] {
    fake::sharing::opened()
}

/// Names of the threads that have closed legacy handles, and of those that have unmapped segments.
pub fn closers() -> [BTreeSet<String>; 2] {
    fake::sharing::closers()
}

/// Runs `run` while a stream of the primary context is captured as a graph, in the mode that
/// forbids most; whether the capture has survived. `blocking` streams synchronise with the default
/// ones.
pub fn while_capturing(blocking: bool, run: impl FnOnce(After)) -> bool {
    make_current();
    let stream = fake::begin_capture(blocking, fake::Mode::Global);
    fake::leave_context();
    // SAFETY: the fake keeps its streams.
    run(unsafe { After::stream(stream) });
    fake::end_capture(stream)
}

/// From a copy from or to this memory of the GPU on, nobody learns the end of what is on its
/// stream.
pub fn lose_streams_of(memory: &crate::RegionSlice) {
    if let Some(address) = memory.device_address() {
        fake::lose_streams_of(address);
    }
}

/// A function of the fake by the driver's name for it; null for one that has none here. A test
/// gives this to a plugin.
///
/// # Safety
/// `name` ends in a zero.
pub unsafe extern "C" fn function(name: *const c_char) -> *const c_void {
    // SAFETY: the caller's promise.
    fake::function(unsafe { CStr::from_ptr(name) })
}
