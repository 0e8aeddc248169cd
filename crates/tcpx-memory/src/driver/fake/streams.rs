//! The default streams, streams that others may ask about, and words that streams wait for and
//! write.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_uint;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::super::sys::{CUdeviceptr, CUstream};
use super::captures::{of_stream, unless_captured};
use super::world::{context, costly, gated_stream, inside};
use super::{
    AT_A_LOOK, Fault, INVALID_VALUE, NOT_READY, OK, Operation, UNKNOWN, World, handle, pointer,
};

/// The driver's names for the default streams are this and the number below it.
const PER_THREAD: usize = 2;

thread_local! {
    /// The stream that is this thread's idea of the default ones; without one they are at rest.
    static DEFAULT: Cell<Option<usize>> = const { Cell::new(None) };
    /// Asked about the legacy stream, the driver answers for that alone.
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Keeps the calling thread's default streams busy until the gate is opened.
pub(crate) fn keep_default_streams() -> Arc<AtomicBool> {
    let (stream, gate) = gated_stream();
    DEFAULT.set(Some(stream as usize));
    gate
}

/// Keeps a stream of a context busy that synchronises with its default ones, until the gate is
/// opened.
#[cfg(test)]
pub(crate) fn keep_busy(context: usize) -> Arc<AtomicBool> {
    let (stream, gate) = gated_stream();
    super::world::world(|world| world.blocking.insert(stream as usize, context));
    gate
}

/// Runs `run` with a driver that does not count other streams where it is asked about the legacy
/// one.
pub(crate) fn with_a_legacy_stream_alone<R>(run: impl FnOnce() -> R) -> R {
    ALONE.set(true);
    let result = run();
    ALONE.set(false);
    result
}

/// Which stream's work an event waits for that is recorded on this one.
pub(super) fn behind(stream: CUstream) -> Option<usize> {
    if stream.addr() > PER_THREAD {
        return Some(stream.addr());
    }
    DEFAULT.get()
}

pub(super) unsafe extern "C" fn create(stream: *mut CUstream, flags: c_uint) -> i32 {
    costly("cuStreamCreate");
    inside(|world| {
        let new = world.handle();
        if flags == 0 {
            world.blocking.insert(new, context());
        }
        world.streams.insert(new, VecDeque::new());
        handle(stream, new)
    })
}

/// The crate's own: none of them may wait behind the program's.
pub(super) unsafe extern "C" fn create_first(
    stream: *mut CUstream,
    flags: c_uint,
    priority: i32,
) -> i32 {
    if priority != -5 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise.
    unsafe { create(stream, flags) }
}

pub(super) unsafe extern "C" fn query(stream: CUstream) -> i32 {
    of_stream(stream, |world| {
        if stream.addr() <= PER_THREAD && !ALONE.get() && world.has_blocking_work() {
            return NOT_READY;
        }
        behind(stream).map_or(OK, |stream| world.query(stream))
    })
}

pub(super) unsafe extern "C" fn wait_value(
    stream: CUstream,
    word: CUdeviceptr,
    value: u32,
    _flags: c_uint,
) -> i32 {
    unless_captured(stream, |world| {
        world.push(stream, Operation::Wait(word as usize, value))
    })
}

pub(super) unsafe extern "C" fn write_value(
    stream: CUstream,
    word: CUdeviceptr,
    value: u32,
    _flags: c_uint,
) -> i32 {
    unless_captured(stream, |world| match world.lost.get(&stream.addr()) {
        Some(Fault::Record) => UNKNOWN,
        _ => world.push(stream, Operation::Write(word as usize, value)),
    })
}

/// A word that a stream waits for, or writes.
pub(super) fn word<'a>(address: usize) -> &'a AtomicU32 {
    // SAFETY: the code under test promises an aligned word that is there when the stream gets to
    // it, and that is only touched atomically.
    unsafe { AtomicU32::from_ptr(pointer(address).cast()) }
}

/// Whether a stream with this work next cannot go on.
pub(super) fn is_held(next: Option<&Operation>) -> bool {
    match next {
        Some(Operation::Gate(gate)) => !gate.load(Ordering::SeqCst),
        Some(Operation::Wait(at, value)) => word(*at).load(Ordering::Acquire) != *value,
        _ => false,
    }
}

impl World {
    fn push(&mut self, stream: CUstream, operation: Operation) -> i32 {
        let queue = self.streams.get_mut(&stream.addr());
        queue.map_or(INVALID_VALUE, |queue| {
            queue.push_back(operation);
            OK
        })
    }

    /// Whether a stream that synchronises with the legacy one has work.
    fn has_blocking_work(&self) -> bool {
        let own = self.blocking.iter().filter(|one| *one.1 == context());
        let queues = own.filter_map(|one| self.streams.get(one.0));
        queues.into_iter().any(|queue| !queue.is_empty())
    }

    fn query(&mut self, stream: usize) -> i32 {
        self.run_persistent_kernels();
        match self.streams.get(&stream).map(VecDeque::is_empty) {
            None => INVALID_VALUE,
            Some(_) if self.lost.contains_key(&stream) => UNKNOWN,
            Some(true) => OK,
            Some(false) => {
                (0..AT_A_LOOK).all(|_| self.advance(stream));
                NOT_READY
            }
        }
    }
}
