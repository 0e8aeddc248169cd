//! A driver in this process's memory, for hosts without a GPU: device addresses are CPU addresses, and a
//! stream does its next few pieces of work only when somebody looks at an event on it. Whatever is reused
//! too early therefore shows as wrong bytes.

pub(crate) mod device_memory;
mod launch;
mod memory;
mod streams;

use std::alloc::Layout;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use launch::{Done, FUNCTIONS, List, launched, tcpx_crc32c_host, tcpx_crc32c_prepare_host};
use memory::{allocate, describe, release};
pub(crate) use streams::{keep_default_streams, with_a_legacy_stream_alone};

use tcpx_wire::Descriptor;

use super::api::Api;
use super::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};
use crate::bounce::UnpackMethod;
use crate::cpu;

const OK: i32 = 0;
const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const INVALID_CONTEXT: i32 = 201;
const NOT_READY: i32 = 600;
const CAPTURE_UNSUPPORTED: i32 = 900;
const UNKNOWN: i32 = 999;

/// Copies from or to here are refused.
pub(crate) const BAD_ADDRESS: u64 = 0xBAD_0000;

/// Pieces of work that a stream does each time somebody looks.
const AT_A_LOOK: usize = 16;

/// The fake's one context.
pub(crate) const CONTEXT: usize = 0x1000;

enum Operation {
    Copy {
        to: usize,
        from: usize,
        len: usize,
    },
    Unpack {
        pool: usize,
        to: usize,
        list: List,
        done: Option<Done>,
    },
    Checksum {
        tables: usize,
        blocks: Vec<Range<u64>>,
        bytes: Range<u64>,
        sums: usize,
        done: Option<Done>,
    },
    Prepare(usize),
    /// An event, and which of its recordings.
    Mark(usize, u64),
    Gate(Arc<AtomicBool>),
    /// A word, and what it must say before the stream goes on, or what is written to it.
    Wait(usize, u32),
    Write(usize, u32),
}

/// Which call fails for a stream's events.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Record,
    Query,
}

#[derive(Default)]
struct World {
    streams: HashMap<usize, VecDeque<Operation>>,
    /// Those that synchronise with the default ones.
    blocking: HashSet<usize>,
    /// An event's last recording, and the stream it waits for.
    events: HashMap<usize, (u64, Option<usize>)>,
    memory: HashMap<usize, Layout>,
    freed: VecDeque<(usize, Layout)>,
    /// Destinations that no launch may write to.
    refused: HashSet<u64>,
    /// Pools of launches by stream, and those whose stream went before it had passed its work.
    pools: HashMap<usize, HashSet<usize>>,
    hasty: HashSet<usize>,
    /// Memory whose copies cannot be followed, and streams that have such a copy.
    untraceable: HashMap<usize, Fault>,
    lost: HashMap<usize, Fault>,
    /// Looks at unfinished events, by the stream that they wait for.
    looks: HashMap<usize, usize>,
    /// Launches of the unpack kernel by the pool's address.
    launches: HashMap<usize, usize>,
    next: usize,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static CAPTURE_MODE: Cell<c_uint> = const { Cell::new(0) };
}

/// Graph captures under way, in the mode that concerns every thread, and how often one was broken.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);
static BROKEN_CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Captures a graph while `run` runs; `false` if a call of any thread has broken a capture.
pub(crate) fn capture(run: impl FnOnce()) -> bool {
    let broken = BROKEN_CAPTURES.load(Ordering::SeqCst);
    CAPTURES.fetch_add(1, Ordering::SeqCst);
    run();
    CAPTURES.fetch_sub(1, Ordering::SeqCst);
    BROKEN_CAPTURES.load(Ordering::SeqCst) == broken
}

/// The calling thread's capture mode.
pub(crate) fn capture_mode() -> c_uint {
    CAPTURE_MODE.get()
}

/// As `inside`, for calls that the driver refuses while another thread captures.
fn outside_captures(call: impl FnOnce(&mut World) -> i32) -> i32 {
    if CAPTURES.load(Ordering::SeqCst) > 0 && CAPTURE_MODE.get() == 0 {
        BROKEN_CAPTURES.fetch_add(1, Ordering::SeqCst);
        return CAPTURE_UNSUPPORTED;
    }
    inside(call)
}

fn world<R>(call: impl FnOnce(&mut World) -> R) -> R {
    call(WORLD.lock().unwrap().get_or_insert_with(World::default))
}

/// As `world`, for calls that need a current context.
fn inside(call: impl FnOnce(&mut World) -> i32) -> i32 {
    let current = CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0));
    if current == CONTEXT {
        world(call)
    } else {
        INVALID_CONTEXT
    }
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

/// Whether the stream of a launch for the pool at this address went before it had passed all its work.
pub(crate) fn ended_hastily(pool: u64) -> bool {
    world(|world| world.hasty.contains(&(pool as usize)))
}

/// How often somebody looked at unfinished events on this stream.
pub(crate) fn looks(stream: u64) -> usize {
    let looks = |world: &mut World| world.looks.get(&(stream as usize)).copied();
    world(looks).unwrap_or(0)
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
    fn handle(&mut self) -> usize {
        self.next += 0x10;
        0x10_0000 + self.next
    }

    /// Does the stream's next piece of work; whether there was any.
    fn advance(&mut self, stream: usize) -> bool {
        let Some(queue) = self.streams.get_mut(&stream) else {
            return false;
        };
        if streams::is_held(queue.front()) {
            return false;
        }
        match queue.pop_front() {
            Some(Operation::Copy { to, from, len }) => {
                // SAFETY: the code under test promises that the memory is there when the stream gets
                // here; freed memory is poisoned and never unmapped.
                unsafe { pointer(to).copy_from(pointer(from), len) };
            }
            Some(Operation::Unpack {
                pool,
                to,
                list,
                done,
            }) => {
                let list = list.read();
                // SAFETY: as above.
                unsafe { cpu::unpack(UnpackMethod::Kernel, pointer(pool), pointer(to), &list) };
                done.iter().for_each(Done::tell);
            }
            Some(Operation::Checksum {
                tables,
                blocks,
                bytes,
                sums,
                done,
            }) => {
                for (index, block) in blocks.iter().enumerate() {
                    // SAFETY: as above; only the bytes are read.
                    unsafe {
                        let sum = tcpx_crc32c_host(
                            pointer(tables).cast(),
                            block.start as usize,
                            block.end as usize,
                            bytes.start as usize,
                            bytes.end as usize,
                        );
                        pointer(sums).cast::<u32>().add(index).write(sum);
                    }
                }
                done.iter().for_each(Done::tell);
            }
            // SAFETY: as above; the tables are as large as the kernel's.
            Some(Operation::Prepare(tables)) => unsafe {
                tcpx_crc32c_prepare_host(pointer(tables).cast());
            },
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
            Some(Operation::Gate(_) | Operation::Wait(..)) => {}
            None => return false,
        }
        true
    }
}

fn pointer(address: usize) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address)
}

macro_rules! call {
    (|$($name:ident: $type:ty),*| $body:expr) => {{
        unsafe extern "C" fn call($($name: $type),*) -> i32 { $body }
        call
    }};
}

/// Writes an answer where the caller wants it.
fn answer<T>(place: *mut T, value: T) -> i32 {
    // SAFETY: every caller passes a valid place.
    unsafe { place.write(value) };
    OK
}

fn handle<T>(place: *mut *mut T, value: usize) -> i32 {
    answer(place, ptr::with_exposed_provenance_mut(value))
}

fn name(buffer: *mut c_char, text: &CStr) -> i32 {
    // SAFETY: every caller passes at least 255 bytes.
    unsafe { buffer.copy_from(text.as_ptr(), text.count_bytes() + 1) };
    OK
}

pub(crate) static API: Api = Api {
    cuInit: call!(|_flags: c_uint| OK),
    cuDriverGetVersion: call!(|version: *mut i32| answer(version, 13_000)),
    cuGetErrorName: call!(|_code: i32, text: *mut *const c_char| answer(text, c"FAKE".as_ptr())),
    cuDeviceGetCount: call!(|count: *mut i32| answer(count, 1)),
    cuDeviceGet: call!(|device: *mut CUdevice, ordinal: i32| answer(device, ordinal)),
    cuDeviceGetName: call!(|buffer: *mut c_char, _len: i32, _device: CUdevice| name(
        buffer, c"Fake"
    )),
    cuDeviceGetPCIBusId: call!(|buffer: *mut c_char, _len: i32, _device: CUdevice| {
        name(buffer, c"ffff:ff:1f.7")
    }),
    cuDeviceTotalMem: call!(|bytes: *mut usize, _device: CUdevice| answer(bytes, 1 << 30)),
    cuDeviceGetAttribute: device_memory::attribute,
    cuDevicePrimaryCtxRetain: call!(|context: *mut CUcontext, _device: CUdevice| handle(
        context, CONTEXT
    )),
    cuDevicePrimaryCtxRelease: call!(|_device: CUdevice| OK),
    cuDevicePrimaryCtxGetState: call!(|_device: CUdevice,
                                       _flags: *mut c_uint,
                                       active: *mut i32| {
        answer(active, 1)
    }),
    cuCtxGetCurrent: call!(|context: *mut CUcontext| {
        handle(
            context,
            CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0)),
        )
    }),
    cuCtxSetCurrent: call!(|context: CUcontext| {
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(context.addr());
        });
        OK
    }),
    cuCtxPushCurrent: call!(|context: CUcontext| {
        CURRENT.with_borrow_mut(|stack| stack.push(context.addr()));
        OK
    }),
    cuCtxPopCurrent: call!(|context: *mut CUcontext| {
        match CURRENT.with_borrow_mut(Vec::pop) {
            Some(popped) => handle(context, popped),
            None => INVALID_CONTEXT,
        }
    }),
    cuCtxGetDevice: call!(|device: *mut CUdevice| answer(device, 0)),
    cuMemAlloc: call!(|address: *mut CUdeviceptr, len: usize| {
        outside_captures(|world| match allocate(world, len) {
            Some(memory) => answer(address, memory as u64),
            None => OUT_OF_MEMORY,
        })
    }),
    cuMemFree: call!(|address: CUdeviceptr| outside_captures(|world| release(
        world,
        address as usize
    ))),
    cuMemHostAlloc: call!(|address: *mut *mut c_void, len: usize, _flags: c_uint| {
        outside_captures(|world| match allocate(world, len) {
            Some(memory) => handle(address, memory),
            None => OUT_OF_MEMORY,
        })
    }),
    cuMemFreeHost: call!(|address: *mut c_void| outside_captures(|world| release(
        world,
        address.addr()
    ))),
    cuMemHostGetDevicePointer: call!(|device: *mut CUdeviceptr,
                                      host: *mut c_void,
                                      _flags: c_uint| {
        answer(device, host.addr() as u64)
    }),
    cuPointerGetAttribute: call!(|value: *mut c_void, attribute: i32, address: CUdeviceptr| {
        inside(|world| describe(world, value, attribute, address as usize))
    }),
    cuMemcpyAsync: call!(
        |to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream| {
            inside(|world| {
                if to == BAD_ADDRESS || from == BAD_ADDRESS {
                    return INVALID_VALUE;
                }
                let copy = Operation::Copy {
                    to: to as usize,
                    from: from as usize,
                    len,
                };
                for end in [to, from] {
                    if let Some(fault) = world.untraceable.get(&(end as usize)) {
                        world.lost.insert(stream.addr(), *fault);
                    }
                }
                world
                    .streams
                    .get_mut(&stream.addr())
                    .map_or(INVALID_VALUE, |queue| {
                        queue.push_back(copy);
                        OK
                    })
            })
        }
    ),
    cuMemcpyPeerAsync: device_memory::copy_to_peer,
    cuStreamCreate: call!(|stream: *mut CUstream, flags: c_uint| {
        inside(|world| {
            let new = world.handle();
            if flags == 0 {
                world.blocking.insert(new);
            }
            world.streams.insert(new, VecDeque::new());
            handle(stream, new)
        })
    }),
    cuStreamDestroy: call!(|stream: CUstream| {
        inside(|world| {
            let left = world.streams.remove(&stream.addr());
            let pools = world.pools.remove(&stream.addr()).unwrap_or_default();
            if left.as_ref().is_some_and(|left| !left.is_empty()) {
                world.hasty.extend(pools);
            }
            left.map_or(INVALID_VALUE, |_| OK)
        })
    }),
    cuStreamQuery: streams::query,
    cuThreadExchangeStreamCaptureMode: call!(|mode: *mut c_uint| {
        // SAFETY: every caller passes a valid place.
        answer(mode, CAPTURE_MODE.replace(unsafe { mode.read() }))
    }),
    cuEventCreate: call!(|event: *mut CUevent, _flags: c_uint| {
        inside(|world| {
            let new = world.handle();
            world.events.insert(new, (0, None));
            handle(event, new)
        })
    }),
    cuEventDestroy: call!(|event: CUevent| {
        inside(|world| {
            world
                .events
                .remove(&event.addr())
                .map_or(INVALID_VALUE, |_| OK)
        })
    }),
    cuEventRecord: call!(|event: CUevent, stream: CUstream| {
        inside(|world| {
            if world.lost.get(&stream.addr()) == Some(&Fault::Record) {
                return UNKNOWN;
            }
            let waits_for = streams::behind(stream);
            let Some(state) = world.events.get_mut(&event.addr()) else {
                return INVALID_VALUE;
            };
            *state = (state.0 + 1, waits_for);
            let mark = Operation::Mark(event.addr(), state.0);
            let Some(stream) = waits_for else { return OK };
            world
                .streams
                .get_mut(&stream)
                .map_or(INVALID_VALUE, |queue| {
                    queue.push_back(mark);
                    OK
                })
        })
    }),
    cuEventQuery: call!(|event: CUevent| {
        outside_captures(|world| match world.events.get(&event.addr()) {
            None => INVALID_VALUE,
            Some((_, None)) => OK,
            Some((_, Some(stream))) if world.lost.get(stream) == Some(&Fault::Query) => UNKNOWN,
            Some(&(_, Some(stream))) => {
                *world.looks.entry(stream).or_default() += 1;
                (0..AT_A_LOOK).all(|_| world.advance(stream));
                NOT_READY
            }
        })
    }),
    cuModuleLoadData: call!(|module: *mut CUmodule, _image: *const c_void| handle(module, 0x50)),
    cuModuleUnload: call!(|_module: CUmodule| OK),
    cuModuleGetFunction: call!(|function: *mut CUfunction,
                                _module: CUmodule,
                                name: *const c_char| {
        // SAFETY: the caller's name ends in a zero.
        let name = unsafe { CStr::from_ptr(name) };
        let known = FUNCTIONS.iter().position(|known| *known == name);
        known.map_or(INVALID_VALUE, |index| handle(function, 0x61 + index))
    }),
    cuLaunchKernel: call!(|function: CUfunction,
                           x: c_uint,
                           _y: c_uint,
                           _z: c_uint,
                           _bx: c_uint,
                           _by: c_uint,
                           _bz: c_uint,
                           _shared: c_uint,
                           stream: CUstream,
                           parameters: *mut *mut c_void,
                           _extra: *mut *mut c_void| {
        // SAFETY: the parameters are those of the kernels' sources.
        let operation = unsafe { launched(FUNCTIONS[function.addr() - 0x61], x, parameters) };
        if let Operation::Checksum { bytes, .. } = &operation
            && bytes.start == BAD_ADDRESS
        {
            return INVALID_VALUE;
        }
        inside(|world| {
            if let Operation::Unpack { pool, to, list, .. } = &operation {
                let ends = |one: Descriptor| *to as u64 + one.destination_offset;
                if !world.refused.is_empty()
                    && list
                        .read()
                        .into_iter()
                        .map(ends)
                        .any(|end| world.refused.contains(&end))
                {
                    return INVALID_VALUE;
                }
                *world.launches.entry(*pool).or_default() += 1;
                world.pools.entry(stream.addr()).or_default().insert(*pool);
            }
            world
                .streams
                .get_mut(&stream.addr())
                .map_or(INVALID_VALUE, |queue| {
                    queue.push_back(operation);
                    OK
                })
        })
    }),
    cuMemGetHandleForAddressRange: Some(device_memory::export),
    cuFlushGPUDirectRDMAWrites: Some(device_memory::flush),
    cuStreamWaitValue32_v2: Some(streams::wait_value),
    cuStreamWriteValue32_v2: Some(streams::write_value),
};
