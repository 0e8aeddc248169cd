//! The persistent copy kernel on the processor: it polls for requests when the thread that launched
//! it queries any stream, or any thread queries the kernel's own.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, ThreadId};

use super::world::world;
use super::{Fault, INVALID_VALUE, OK, Operation, World, pointer};

thread_local! {
    /// What the driver does with launches of this thread.
    static LAUNCHES: Cell<Launches> = const { Cell::new(Launches::Return) };
    /// No launch of this thread starts before this is opened.
    static ROOM: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// How tests steer and observe persistent kernels, by the address of the ring of requests.
#[derive(Default)]
pub(super) struct PersistentKernels {
    deserted: HashSet<u64>,
    hurried: HashSet<u64>,
    done: HashMap<u64, usize>,
}

/// The kernel that polls this address leaves without another poll.
pub(crate) fn desert(requests: u64) {
    world(|world| world.persistent_kernels.deserted.insert(requests));
}

/// The kernel that polls this address serves what is there and leaves, in one step.
pub(crate) fn hurry(requests: u64) {
    world(|world| world.persistent_kernels.hurried.insert(requests));
}

/// How many requests at this address were served.
pub(crate) fn requests_done(requests: u64) -> usize {
    world(|world| world.persistent_kernels.done.get(&requests).copied()).unwrap_or(0)
}

/// The driver fails when asked about the stream of the kernel that polls this address.
pub(crate) fn lose_persistent(requests: u64) {
    world(|world| {
        let is_there = |operation: &Operation| matches!(operation, Operation::Residency(residency) if residency.requests == requests);
        for (stream, queue) in &world.streams {
            if queue.iter().any(is_there) {
                world.lost.insert(*stream, Fault::Query);
            }
        }
    });
}

/// What the driver does with launches of persistent kernels.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Launches {
    Return,
    WaitForTheirEnd,
    Fail,
}

/// For launches of this thread.
pub(crate) fn set_launches(launches: Launches) {
    LAUNCHES.set(launches);
}

/// Keeps persistent kernels that this thread launches from starting until the gate is opened.
pub(crate) fn fill_gpu() -> Arc<AtomicBool> {
    let gate = Arc::new(AtomicBool::new(false));
    ROOM.set(Some(Arc::clone(&gate)));
    gate
}

/// Queues a launch.
pub(super) fn launch(world: &mut World, stream: usize, residency: Residency) -> i32 {
    let launches = LAUNCHES.get();
    let Some(queue) = world.streams.get_mut(&stream) else {
        return INVALID_VALUE;
    };
    if launches == Launches::Fail {
        return INVALID_VALUE;
    }
    queue.push_back(Operation::Residency(residency));
    while launches == Launches::WaitForTheirEnd && world.run_persistent(stream) {}
    OK
}

/// What a poll has found.
#[derive(PartialEq)]
enum Seen {
    Nothing,
    WorkRequest,
    Leave,
}

/// `tcpx_residency` of `kernels/persistent_copy.cu`, and the kernel's progress.
pub(super) struct Residency {
    requests: u64,
    entered: u64,
    left: u64,
    residency: u32,
    number: u32,
    idle_polls: u32,
    most: u32,
    looks: u32,
    spent: u32,
    is_here: bool,
    caller: ThreadId,
    room: Option<Arc<AtomicBool>>,
}

/// A word in the memory of the code under test.
fn word<'a>(at: u64) -> &'a AtomicU32 {
    // SAFETY: the code under test promises an aligned word that stays until the kernel has left.
    unsafe { AtomicU32::from_ptr(pointer(at as usize).cast()) }
}

impl Residency {
    /// # Safety
    /// The parameter must be a `tcpx_residency`.
    pub(super) unsafe fn new(parameter: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let (longs, shorts) = unsafe {
            let shorts = parameter.add(24).cast::<[u32; 4]>().read();
            (parameter.cast::<[u64; 3]>().read(), shorts)
        };
        let ([requests, entered, left], [residency, number, idle_polls, most]) = (longs, shorts);
        Self {
            requests,
            entered,
            left,
            residency,
            number,
            idle_polls,
            most,
            looks: 0,
            spent: 0,
            is_here: false,
            caller: thread::current().id(),
            room: ROOM.with_borrow(Option::clone),
        }
    }

    /// Enters, polls once, or leaves; whether it stays.
    fn step(&mut self, persistent_kernels: &mut PersistentKernels) -> bool {
        let has_room = |gate: &Arc<AtomicBool>| gate.load(Ordering::SeqCst);
        if !self.room.as_ref().is_none_or(has_room) {
            return true;
        }
        if !self.is_here {
            self.is_here = true;
            word(self.entered).store(self.residency, Ordering::Release);
            return true;
        }
        let leaves = persistent_kernels.deserted.remove(&self.requests)
            || persistent_kernels.hurried.remove(&self.requests) && {
                while self.poll_request(persistent_kernels) == Seen::WorkRequest {}
                true
            }
            || self.looks == self.idle_polls
            || self.spent >= self.most
            || self.poll_request(persistent_kernels) == Seen::Leave;
        if leaves {
            word(self.left).store(self.residency, Ordering::Release);
        }
        !leaves
    }

    /// Serves the next request if it is there.
    fn poll_request(&mut self, persistent_kernels: &mut PersistentKernels) -> Seen {
        self.spent += 1;
        self.looks += 1;
        let line = self.requests + u64::from(self.number % 16 * 128);
        let mut values = [0; 16];
        for (at, value) in values.iter_mut().enumerate() {
            let at = pointer(line as usize + at * 8).cast();
            // SAFETY: as for words.
            let seen = unsafe { AtomicU64::from_ptr(at) }.load(Ordering::Acquire);
            if (seen >> 32) as u32 != self.number {
                return Seen::Nothing;
            }
            *value = seen as u32;
        }
        let [
            from_low,
            from_high,
            to_low,
            to_high,
            length,
            end_low,
            end_high,
            told,
            data @ ..,
        ] = values;
        if length == u32::MAX {
            return Seen::Leave;
        }
        let whole = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let (from, to) = (whole(from_low, from_high), whole(to_low, to_high));
        let source = match from {
            0 => data.as_ptr().cast(),
            from => pointer(from as usize).cast_const(),
        };
        // SAFETY: the code under test promises that both are there until the end is told, or that
        // the data is in the request; freed memory is poisoned and never unmapped.
        unsafe { pointer(to as usize).copy_from(source, length as usize) };
        *persistent_kernels.done.entry(self.requests).or_default() += 1;
        word(whole(end_low, end_high)).store(told, Ordering::Release);
        self.number = self.number.wrapping_add(1);
        self.spent += 1 + length / 4096;
        self.looks = 0;
        Seen::WorkRequest
    }
}

impl World {
    /// Lets every kernel of this thread that is first in its stream do its next step.
    pub(super) fn run_persistent_kernels(&mut self) {
        let caller = thread::current().id();
        let of_this_thread = |queue: &&mut VecDeque<Operation>| matches!(queue.front(), Some(Operation::Residency(residency)) if residency.caller == caller);
        for queue in self.streams.values_mut().filter(of_this_thread) {
            step(queue, &mut self.persistent_kernels);
        }
    }

    /// Lets a kernel that is first in this stream do its next step; whether one was there.
    pub(super) fn run_persistent(&mut self, stream: usize) -> bool {
        let queue = self.streams.get_mut(&stream);
        queue.is_some_and(|queue| step(queue, &mut self.persistent_kernels))
    }
}

fn step(queue: &mut VecDeque<Operation>, persistent_kernels: &mut PersistentKernels) -> bool {
    let Some(Operation::Residency(residency)) = queue.front_mut() else {
        return false;
    };
    if !residency.step(persistent_kernels) {
        queue.pop_front();
    }
    true
}
