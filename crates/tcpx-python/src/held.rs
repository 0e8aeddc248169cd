//! Python objects that memory of a transfer belongs to.
//!
//! The last reference to a region may end on a thread of the engine, which must not take the
//! interpreter's lock. So the objects come to a list, and the interpreter is asked to let go of
//! them from its own main thread (`Py_AddPendingCall`). A thread that is in [`detached`] lets go of
//! them when it has the lock again. An interpreter that ends is not asked any more, and what was
//! asked of it before is left: objects that the peer used until then end with the process.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use pyo3::prelude::*;

use crate::lock;

static RELEASED: Mutex<Released> = Mutex::new(Released {
    objects: Vec::new(),
    asked: false,
    ends: false,
});

struct Released {
    /// Those that nobody needs any more.
    objects: Vec<Held>,
    /// The interpreter was asked, and has not answered.
    asked: bool,
    /// It may be gone at any moment.
    ends: bool,
}

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
        let mut released = lock(&RELEASED);
        released.objects.push(held);
        if !DETACHED.get() && !released.asked && !released.ends {
            // SAFETY: may be called from any thread without the interpreter's lock, while there is
            // an interpreter: its end waits for this list, in `stop_releasing`. `release_pending`
            // needs no argument, and as part of this module it is never unloaded.
            let queued = unsafe {
                pyo3::ffi::Py_AddPendingCall(Some(release_pending), std::ptr::null_mut())
            };
            // Where the interpreter's list is full the next wait lets go.
            released.asked = queued == 0;
        }
    }
}

/// The engine's threads ask nothing of the interpreter any more. Python calls it before it ends.
#[pyfunction]
pub(crate) fn stop_releasing() {
    lock(&RELEASED).ends = true;
}

/// Whether Python has said that it ends.
pub(crate) fn interpreter_ends() -> bool {
    lock(&RELEASED).ends
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
    let objects = std::mem::take(&mut lock(&RELEASED).objects);
    // Outside of the list's lock: an object's end may run any Python code.
    drop(objects);
}

extern "C" fn release_pending(_: *mut c_void) -> c_int {
    lock(&RELEASED).asked = false;
    // An interpreter that ends runs what it was asked before, at a time when nobody may attach to
    // it any more.
    let _ = Python::try_attach(release);
    0
}
