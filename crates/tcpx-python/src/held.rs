//! Python objects that memory of a transfer belongs to.
//!
//! The last reference to a region may end on a thread of the engine, which must not take the
//! interpreter's lock. So the objects come to a list, and the interpreter is asked to let go of
//! them from its own main thread (`Py_AddPendingCall`). A thread that is in [`detached`] lets go of
//! them when it has the lock again.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::lock;

/// Objects that nobody needs any more.
static RELEASED: Mutex<Vec<Held>> = Mutex::new(Vec::new());
static PENDING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// This thread is in [`detached`].
    static DETACHED: Cell<bool> = const { Cell::new(false) };
}

/// What keeps the memory of a region.
#[derive(Debug)]
#[expect(dead_code, reason = "held for their ends alone")]
pub(crate) enum Held {
    /// A view through the buffer protocol.
    Buffer(pyo3::buffer::PyUntypedBuffer),
    /// The object itself.
    Object(Py<PyAny>),
}

/// The owner of a region's memory: dropping it from any thread is safe and takes no lock of the
/// interpreter.
#[derive(Debug)]
pub(crate) struct Owner(Option<Held>);

impl Owner {
    pub(crate) const fn new(held: Held) -> Self {
        Self(Some(held))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(held) = self.0.take() else { return };
        lock(&RELEASED).push(held);
        if !DETACHED.get() && !PENDING.swap(true, Ordering::AcqRel) {
            // SAFETY: may be called from any thread without the interpreter's lock. `release_pending`
            // needs no argument, and as part of this module it is never unloaded.
            let queued = unsafe {
                pyo3::ffi::Py_AddPendingCall(Some(release_pending), std::ptr::null_mut())
            };
            if queued != 0 {
                // The interpreter's list is full: the next wait lets go.
                PENDING.store(false, Ordering::Release);
            }
        }
    }
}

/// Runs `work` without the interpreter's lock, and lets go of what the engine is done with then.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let outcome = py.detach(|| {
        DETACHED.set(true);
        let outcome = work();
        DETACHED.set(false);
        outcome
    });
    release(py);
    outcome
}

/// Lets go of what the engine is done with.
fn release(_py: Python<'_>) {
    let objects = std::mem::take(&mut *lock(&RELEASED));
    // Outside of the list's lock: an object's end may run any Python code.
    drop(objects);
}

extern "C" fn release_pending(_: *mut c_void) -> c_int {
    PENDING.store(false, Ordering::Release);
    Python::attach(release);
    0
}
