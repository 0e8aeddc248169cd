//! What concerns other devices: exporting memory to them, and their writes.

use std::ffi::c_void;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{INVALID_VALUE, OK, answer, inside};
use crate::driver::sys::{CUdevice, CUdeviceptr};

/// The fake's GPU has 4 of everything that is not a matter of yes or no.
pub(super) unsafe extern "C" fn attribute(value: *mut i32, which: i32, _device: CUdevice) -> i32 {
    const DMA_BUF_SUPPORTED: i32 = 124;
    answer(value, if which == DMA_BUF_SUPPORTED { 1 } else { 4 })
}

/// A descriptor that stands for the memory; nothing can be read through it.
pub(super) unsafe extern "C" fn export(
    handle: *mut c_void,
    address: CUdeviceptr,
    len: usize,
    kind: i32,
    flags: u64,
) -> i32 {
    let start = address as usize;
    inside(|world| {
        let inside = world
            .memory
            .iter()
            .any(|(&base, memory)| base <= start && start + len <= base + memory.layout.size());
        let file = std::fs::File::open("/dev/null");
        match file {
            Ok(file) if inside && kind == 1 && flags == 0 => {
                // SAFETY: the caller asked for a handle of this kind, which is an int.
                unsafe { handle.cast::<i32>().write(file.into_raw_fd()) };
                OK
            }
            _ => INVALID_VALUE,
        }
    })
}

/// Flushes that copy workers asked for.
static WORKERS_FLUSHES: AtomicUsize = AtomicUsize::new(0);

/// How often copy workers have asked for other devices' writes.
pub(crate) fn workers_flushes() -> usize {
    WORKERS_FLUSHES.load(Ordering::SeqCst)
}

pub(super) unsafe extern "C" fn flush(target: i32, scope: i32) -> i32 {
    let thread = std::thread::current();
    if thread
        .name()
        .is_some_and(|name| name.starts_with("tcpx-copy"))
    {
        WORKERS_FLUSHES.fetch_add(1, Ordering::SeqCst);
    }
    inside(|_| {
        if (target, scope) == (0, 100) {
            OK
        } else {
            INVALID_VALUE
        }
    })
}
