//! Graph captures, which the calls break that break real ones, and no others.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_uint;
use std::thread::{self, ThreadId};

use super::super::sys::{CUevent, CUstream};
use super::world::{World, context, inside, world};
use super::{INVALID_VALUE, OK, answer};

/// The call is not allowed meanwhile, and has broken the capture.
const UNSUPPORTED: i32 = 900;
/// The capture is broken.
const INVALIDATED: i32 = 901;
/// The call would have come before or after the captured stream's work.
const IMPLICIT: i32 = 906;
/// The event was last recorded in a capture.
const CAPTURED_EVENT: i32 = 907;

/// Whose calls a capture forbids that allocate, free or ask: the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

struct Capture {
    mode: Mode,
    thread: ThreadId,
    broken: bool,
}

#[derive(Default)]
pub(super) struct Captures {
    running: HashMap<usize, Capture>,
    /// Recorded in a capture, with the stream.
    events: HashMap<usize, usize>,
}

thread_local! {
    static THREADS_MODE: Cell<c_uint> = const { Cell::new(Mode::Global as c_uint) };
}

/// Begins a capture of a new stream of the current context; `blocking` streams synchronise with the
/// legacy one.
pub(crate) fn begin_capture(blocking: bool, mode: Mode) -> u64 {
    world(|world| {
        let stream = world.handle();
        world.streams.insert(stream, VecDeque::new());
        if blocking {
            world.blocking.insert(stream, context());
        }
        let capture = Capture {
            mode,
            thread: thread::current().id(),
            broken: false,
        };
        world.captures.running.insert(stream, capture);
        stream as u64
    })
}

/// Ends it; whether it has survived.
pub(crate) fn end_capture(stream: u64) -> bool {
    let ended = world(|world| world.captures.running.remove(&(stream as usize)));
    ended.is_some_and(|capture| !capture.broken)
}

/// A program's stream of this fake, which keeps them all.
#[cfg(test)]
pub(crate) fn after_stream(stream: u64) -> crate::After {
    // SAFETY: they are never destroyed unless the program does.
    unsafe { crate::After::stream(stream) }
}

/// The calling thread's mode.
#[cfg(test)]
pub(crate) fn capture_mode() -> c_uint {
    THREADS_MODE.get()
}

pub(super) unsafe extern "C" fn exchange_mode(mode: *mut c_uint) -> i32 {
    // SAFETY: every caller passes a valid place.
    answer(mode, THREADS_MODE.replace(unsafe { mode.read() }))
}

pub(super) unsafe extern "C" fn is_capturing(stream: CUstream, status: *mut i32) -> i32 {
    inside(|world| {
        if is_legacy(stream) && !world.conflicting(stream).is_empty() {
            return IMPLICIT;
        }
        let status_now = match world.captures.running.get(&stream.addr()) {
            None => 0,
            Some(capture) if capture.broken => 2,
            Some(_) => 1,
        };
        answer(status, status_now)
    })
}

fn is_legacy(stream: CUstream) -> bool {
    stream.addr() <= 1
}

impl World {
    /// The captured streams that a call on this one concerns.
    fn conflicting(&self, stream: CUstream) -> Vec<usize> {
        let captured = self.captures.running.keys().copied();
        let conflicts = |one: &usize| {
            *one == stream.addr() || is_legacy(stream) && self.blocking.get(one) == Some(&context())
        };
        captured.filter(conflicts).collect()
    }

    fn break_captures(&mut self, streams: &[usize]) {
        for stream in streams {
            if let Some(capture) = self.captures.running.get_mut(stream) {
                capture.broken = true;
            }
        }
    }
}

/// As `inside`, for calls that allocate, free or ask: the driver forbids them by the modes of
/// threads and captures.
pub(super) fn outside_captures(call: impl FnOnce(&mut World) -> i32) -> i32 {
    inside(|world| {
        let (thread, mode) = (thread::current().id(), THREADS_MODE.get());
        let forbids = |capture: &Capture| match mode {
            0 => match capture.mode {
                Mode::Global => true,
                Mode::ThreadLocal => capture.thread == thread,
                Mode::Relaxed => false,
            },
            1 => capture.mode != Mode::Relaxed && capture.thread == thread,
            _ => false,
        };
        let captures = world.captures.running.iter();
        let broken: Vec<_> = captures
            .filter(|(_, capture)| forbids(capture))
            .map(|(stream, _)| *stream)
            .collect();
        if broken.is_empty() {
            return call(world);
        }
        world.break_captures(&broken);
        UNSUPPORTED
    })
}

/// As `inside`, for work that is submitted to a stream: of a captured one it would become a part of
/// the graph, which nothing here submits on purpose; the legacy stream would wait for captured
/// ones.
pub(super) fn unless_captured(stream: CUstream, call: impl FnOnce(&mut World) -> i32) -> i32 {
    inside(|world| {
        let broken = world.conflicting(stream);
        if broken.is_empty() {
            return call(world);
        }
        world.break_captures(&broken);
        if is_legacy(stream) {
            IMPLICIT
        } else {
            UNSUPPORTED
        }
    })
}

/// As `outside_captures`, for questions about a stream.
pub(super) fn of_stream(stream: CUstream, call: impl FnOnce(&mut World) -> i32) -> i32 {
    let refused = unless_captured(stream, |_| OK);
    if refused != OK {
        return refused;
    }
    outside_captures(call)
}

/// Records an event; on a captured stream that succeeds, and the event is a part of the graph.
pub(super) fn recording(
    event: CUevent,
    stream: CUstream,
    call: impl FnOnce(&mut World) -> i32,
) -> i32 {
    let captured = inside(|world| match world.captures.running.get(&stream.addr()) {
        None => {
            world.captures.events.remove(&event.addr());
            INVALID_VALUE
        }
        Some(capture) if capture.broken => INVALIDATED,
        Some(_) => {
            world.captures.events.insert(event.addr(), stream.addr());
            OK
        }
    });
    match captured {
        INVALID_VALUE => unless_captured(stream, call),
        answer => answer,
    }
}

/// Asks about an event; one of a graph has no answer, and the question breaks what is captured.
pub(super) fn asking(event: CUevent, call: impl FnOnce(&mut World) -> i32) -> i32 {
    let captured = inside(|world| {
        let Some(stream) = world.captures.events.get(&event.addr()).copied() else {
            return OK;
        };
        world.break_captures(&[stream]);
        CAPTURED_EVENT
    });
    match captured {
        OK => outside_captures(call),
        refused => refused,
    }
}
