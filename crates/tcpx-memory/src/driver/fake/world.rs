//! What the fake driver has: streams with their work, events, memory, and what tests make of them.

use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::captures::Captures;
use super::launch::{Done, List};
use super::memory::Memory;
use super::persistent::{PersistentKernels, Residency};
use super::sharing::Sharing;
use super::teardown;
use super::{INVALID_CONTEXT, streams};
use tcpx_wire::Descriptor;

use crate::bounce::UnpackMethod;
use crate::cpu;

/// A piece of a stream's work.
pub(super) enum Operation {
    Copy {
        to: usize,
        from: usize,
        len: usize,
    },
    Unpack {
        pool: usize,
        to: usize,
        /// From `to` to the pool.
        packs: bool,
        list: List,
        done: Option<Done>,
    },
    /// An event, and which of its recordings.
    Mark(usize, u64),
    Gate(Arc<AtomicBool>),
    /// A word, and what it must say before the stream goes on, or what is written to it.
    Wait(usize, u32),
    Write(usize, u32),
    /// It goes on for several looks.
    Residency(Residency),
}

/// Which call fails for a stream's events.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Fault {
    Record,
    Query,
}

#[derive(Default)]
pub(super) struct World {
    pub(super) streams: HashMap<usize, VecDeque<Operation>>,
    /// Those that synchronise with the default ones, with their context.
    pub(super) blocking: HashMap<usize, usize>,
    pub(super) captures: Captures,
    /// An event's last recording, and the stream it waits for.
    pub(super) events: HashMap<usize, (u64, Option<usize>)>,
    pub(super) memory: HashMap<usize, Memory>,
    /// The parts of memory that is mapped in parts.
    pub(super) mapped: HashMap<usize, Vec<(Range<usize>, bool)>>,
    pub(super) freed: VecDeque<(usize, Layout)>,
    /// Destinations that no launch may write to.
    pub(super) refused: HashSet<u64>,
    /// Memory whose copies cannot be followed, and streams that have such a copy.
    pub(super) untraceable: HashMap<usize, Fault>,
    pub(super) lost: HashMap<usize, Fault>,
    /// Looks at unfinished events, by the stream that they wait for.
    pub(super) looks: HashMap<usize, usize>,
    /// Launches of the unpack kernel by the pool's address.
    pub(super) launches: HashMap<usize, usize>,
    pub(super) persistent_kernels: PersistentKernels,
    pub(super) sharing: Sharing,
    pub(super) next: usize,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

thread_local! {
    pub(super) static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Calls so far that wait for kernels, or hold up copies of the process.
static COSTLY: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Notes a call that a driver may not be asked for while the program's kernels run.
pub(super) fn costly(call: &'static str) {
    COSTLY.lock().unwrap().push(call);
}

/// The calls so far that wait for the program's kernels (frees), or hold up copies of the process
/// (allocations, pinning, loading of modules).
#[cfg(feature = "fake-driver")]
pub(crate) fn costly_calls() -> Vec<&'static str> {
    COSTLY.lock().unwrap().clone()
}

pub(super) fn world<R>(call: impl FnOnce(&mut World) -> R) -> R {
    call(WORLD.lock().unwrap().get_or_insert_with(World::default))
}

/// As `world`, for calls that need a current context.
pub(super) fn inside(call: impl FnOnce(&mut World) -> i32) -> i32 {
    let _inside = teardown::Call::begin();
    if context() == super::primary_context(super::device_of(context())) || context() >= FURTHER {
        world(call)
    } else {
        INVALID_CONTEXT
    }
}

/// The context that is current on the calling thread.
pub(super) fn context() -> usize {
    CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// Contexts beside the primary one begin here.
const FURTHER: usize = 1 << 40;

/// A context that nobody else has, so that the default streams of one test are not those of
/// another.
pub(crate) fn new_context() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(FURTHER);
    NEXT.fetch_add(0x1000, Ordering::Relaxed)
}

/// Puts a gate into a stream of the caller's: nothing behind it runs before it is opened.
pub(crate) fn gated_stream() -> (u64, Arc<AtomicBool>) {
    let gate = Arc::new(AtomicBool::new(false));
    let stream = world(|world| {
        let stream = world.handle();
        world
            .streams
            .insert(stream, VecDeque::from([Operation::Gate(Arc::clone(&gate))]));
        stream
    });
    (stream as u64, gate)
}

/// From a copy from or to this address on, no event can be recorded on that copy's stream.
pub(crate) fn lose_streams_of(address: u64) {
    world(|world| world.untraceable.insert(address as usize, Fault::Record));
}

/// As `lose_streams_of`, but it is the look at an event that fails.
pub(crate) fn hide_streams_of(address: u64) {
    world(|world| world.untraceable.insert(address as usize, Fault::Query));
}

/// No launch that writes to this address is accepted.
pub(crate) fn refuse_launches_to(address: u64) {
    world(|world| world.refused.insert(address));
}

/// How often somebody looked at unfinished events on this stream.
pub(crate) fn looks(stream: u64) -> usize {
    let looks = |world: &mut World| world.looks.get(&(stream as usize)).copied();
    world(looks).unwrap_or(0)
}

/// How often the unpack kernel was launched, whatever it read.
#[cfg(test)]
pub(crate) fn all_launches() -> usize {
    world(|world| world.launches.values().sum())
}

/// How often the unpack kernel was launched for the pool at this address.
pub(crate) fn launches(pool: u64) -> usize {
    let launches = |world: &mut World| world.launches.get(&(pool as usize)).copied();
    world(launches).unwrap_or(0)
}

/// How many contexts are stacked on the calling thread.
pub(crate) fn contexts_on_this_thread() -> usize {
    CURRENT.with_borrow(Vec::len)
}

impl World {
    pub(super) fn handle(&mut self) -> usize {
        self.next += 0x10;
        0x10_0000 + self.next
    }

    /// Does the stream's next piece of work; whether there was any.
    pub(super) fn advance(&mut self, stream: usize) -> bool {
        let Some(queue) = self.streams.get_mut(&stream) else {
            return false;
        };
        if streams::is_held(queue.front()) {
            return false;
        }
        if let Some(Operation::Residency(_)) = queue.front() {
            return self.run_persistent(stream);
        }
        match queue.pop_front() {
            Some(Operation::Copy { to, from, len }) => {
                // SAFETY: the code under test promises that the memory is there when the stream
                // gets here; freed memory is poisoned and never unmapped.
                unsafe { pointer(to).copy_from(pointer(from), len) };
            }
            Some(Operation::Unpack {
                pool,
                to,
                packs,
                list,
                done,
            }) => {
                let list = list.read();
                // SAFETY: as above.
                unsafe {
                    if packs {
                        pack(pool, to, &list);
                    } else {
                        cpu::unpack(UnpackMethod::Kernel, pointer(pool), pointer(to), &list);
                    }
                }
                done.iter().for_each(Done::signal_completion);
            }
            Some(Operation::Mark(event, recording)) => {
                if let Some(state) = self.events.get_mut(&event)
                    && state.0 == recording
                {
                    state.1 = None;
                }
            }
            Some(Operation::Write(word, value)) => {
                streams::word(word).store(value, Ordering::Release);
            }
            Some(Operation::Gate(_) | Operation::Wait(..) | Operation::Residency(_)) => {}
            None => return false,
        }
        true
    }
}

/// Moves each descriptor's bytes from its destination to its source, as the kernel does.
///
/// # Safety
/// As [`cpu::unpack`], with the ends exchanged.
unsafe fn pack(pool: usize, to: usize, list: &[Descriptor]) {
    for one in list {
        let from = pointer(to + one.destination_offset as usize);
        let into = pointer(pool + one.source_offset as usize);
        let all = Descriptor {
            source_offset: 0,
            destination_offset: 0,
            ..*one
        };
        // SAFETY: the caller's promise.
        unsafe { cpu::unpack(UnpackMethod::Kernel, from, into, &[all]) };
    }
}

pub(super) fn pointer(address: usize) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address)
}
