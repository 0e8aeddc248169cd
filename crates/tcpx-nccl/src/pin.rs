//! Keeps this file loaded.

use std::ffi::c_void;
use std::sync::Once;

/// Keeps the file that holds this code mapped until the process ends.
///
/// NCCL closes the plugin with its last communicator. A GPU's copy worker goes on, and the
/// destructors of thread-local storage of *NCCL's* threads are code of this file too, and run
/// when those threads end.
pub(crate) fn keep_loaded() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let here: fn() = keep_loaded;
        // SAFETY: plain old data; an all-zero Dl_info is a valid one.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: an address inside this file, an out pointer of this frame.
        let known = unsafe { libc::dladdr(here as *const c_void, &raw mut info) };
        if known == 0 || info.dli_fname.is_null() {
            return;
        }
        // SAFETY: the name comes from the loader. The file is loaded already, so no initialiser
        // runs; a program that this code is linked into answers NULL, and needs nothing.
        unsafe {
            libc::dlopen(
                info.dli_fname,
                libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE,
            )
        };
    });
}
