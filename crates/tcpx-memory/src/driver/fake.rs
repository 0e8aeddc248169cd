//! A driver in this process's memory, for hosts without a GPU: device addresses are CPU addresses,
//! and a stream does its next few pieces of work only when an event on it is queried. Whatever is
//! reused too early therefore shows as wrong bytes.

mod captures;
pub(crate) mod device_memory;
mod launch;
mod memory;
mod persistent;
pub(crate) mod sharing;
mod streams;
mod teardown;
mod world;

#[cfg(feature = "fake-driver")]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicI32, Ordering};

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr;

#[cfg(any(test, feature = "fake-driver"))]
pub(crate) use captures::{Mode, begin_capture, end_capture};
#[cfg(test)]
pub(crate) use captures::{after_stream, capture_mode};
use captures::{outside_captures, unless_captured};
use launch::{FUNCTIONS, launched};
#[cfg(feature = "fake-driver")]
pub(crate) use memory::adopt;
#[cfg(test)]
pub(crate) use memory::mapped;
use memory::{Place, allocate, describe, register, release};
#[cfg(test)]
pub(crate) use persistent::{
    Launches, desert, fill_gpu, hurry, lose_persistent, requests_done, set_launches,
};
#[cfg(test)]
pub(crate) use streams::{keep_busy, keep_default_streams, with_a_legacy_stream_alone};
#[cfg(feature = "fake-driver")]
pub(crate) use world::costly_calls;
pub(crate) use world::lose_streams_of;
use world::{CURRENT, Fault, Operation, World, costly, inside, pointer};
#[cfg(test)]
pub(crate) use world::{
    all_launches, contexts_on_this_thread, gated_stream, hide_streams_of, launches, looks,
    new_context, refuse_launches_to,
};

use tcpx_wire::Descriptor;

use super::api::Api;
use super::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};

/// Whether the process's driver is this one.
#[cfg(feature = "fake-driver")]
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// The process's driver is this one from now on, with so many GPUs.
#[cfg(feature = "fake-driver")]
pub(crate) fn install(gpus: i32) {
    GPUS.store(gpus, Ordering::SeqCst);
    if !INSTALLED.swap(true, Ordering::SeqCst) {
        teardown::at_exit();
    }
}

#[cfg(feature = "fake-driver")]
pub(super) fn installed() -> Option<&'static Api> {
    INSTALLED.load(Ordering::SeqCst).then_some(&API)
}

/// Makes the fake's context current on the calling thread, as a program does.
#[cfg(feature = "fake-driver")]
pub(crate) fn make_current() {
    CURRENT.with_borrow_mut(|stack| stack.push(CONTEXT));
}

/// Takes it back.
#[cfg(feature = "fake-driver")]
pub(crate) fn leave_context() {
    CURRENT.with_borrow_mut(Vec::pop);
}

/// A function of the fake by the driver's name, as code that is not of this crate looks it up.
#[cfg(feature = "fake-driver")]
pub(crate) fn function(name: &CStr) -> *const c_void {
    match name.to_bytes() {
        b"cuCtxGetCurrent" => API.cuCtxGetCurrent as *const c_void,
        b"cuCtxPushCurrent_v2" => API.cuCtxPushCurrent as *const c_void,
        b"cuCtxPopCurrent_v2" => API.cuCtxPopCurrent as *const c_void,
        b"cuMemAlloc_v2" => API.cuMemAlloc as *const c_void,
        b"cuMemHostAlloc" => memory::HOST_ALLOC as *const c_void,
        b"cuMemcpyAsync" => API.cuMemcpyAsync as *const c_void,
        b"cuStreamCreate" => API.cuStreamCreate as *const c_void,
        b"cuEventCreate" => API.cuEventCreate as *const c_void,
        b"cuEventRecord" => API.cuEventRecord as *const c_void,
        b"cuEventQuery" => API.cuEventQuery as *const c_void,
        _ => ptr::null(),
    }
}

const OK: i32 = 0;
const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const INVALID_CONTEXT: i32 = 201;
const NOT_READY: i32 = 600;
const UNKNOWN: i32 = 999;

/// Copies from or to here are refused.
pub(crate) const BAD_ADDRESS: u64 = 0xBAD_0000;

/// Pieces of work that a stream does at each query.
const AT_A_LOOK: usize = 16;

/// The primary context of the fake's first GPU; those of others follow.
pub(crate) const CONTEXT: usize = 0x1000;

static GPUS: AtomicI32 = AtomicI32::new(1);

fn primary_context(device: CUdevice) -> usize {
    CONTEXT * (1 + usize::try_from(device).unwrap_or_default())
}

/// The GPU that a context is on: the first, but for the primary contexts of others.
fn device_of(context: usize) -> CUdevice {
    let gpus = 1..GPUS.load(Ordering::SeqCst);
    gpus.rev()
        .find(|gpu| primary_context(*gpu) == context)
        .unwrap_or(0)
}

/// That of the current context.
fn own_device() -> Place {
    Place::Device(device_of(world::context()).unsigned_abs().into())
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
    cuDeviceGetCount: call!(|count: *mut i32| answer(count, GPUS.load(Ordering::SeqCst))),
    cuDeviceGet: call!(|device: *mut CUdevice, ordinal: i32| answer(device, ordinal)),
    cuDeviceGetName: call!(|buffer: *mut c_char, _len: i32, _device: CUdevice| name(
        buffer, c"Fake"
    )),
    cuDeviceGetPCIBusId: call!(|buffer: *mut c_char, _len: i32, _device: CUdevice| {
        name(buffer, c"ffff:ff:1f.7")
    }),
    cuDeviceTotalMem: call!(|bytes: *mut usize, _device: CUdevice| answer(bytes, 1 << 30)),
    cuDeviceGetAttribute: device_memory::attribute,
    cuDevicePrimaryCtxRetain: call!(|context: *mut CUcontext, device: CUdevice| handle(
        context,
        primary_context(device)
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
    cuCtxGetDevice: call!(|device: *mut CUdevice| answer(device, device_of(world::context()))),
    cuMemAlloc: call!(|address: *mut CUdeviceptr, len: usize| {
        costly("cuMemAlloc");
        outside_captures(|world| match allocate(world, len, own_device()) {
            Some(memory) => answer(address, memory as u64),
            None => OUT_OF_MEMORY,
        })
    }),
    cuMemFree: call!(|address: CUdeviceptr| {
        costly("cuMemFree");
        outside_captures(|world| release(world, address as usize))
    }),
    cuMemHostRegister: call!(|address: *mut c_void, len: usize, _flags: c_uint| {
        costly("cuMemHostRegister");
        outside_captures(|world| register(world, address.addr(), len))
    }),
    cuMemHostUnregister: call!(|address: *mut c_void| {
        costly("cuMemHostUnregister");
        outside_captures(|world| match world.memory.remove(&address.addr()) {
            Some(_) => OK,
            None => INVALID_VALUE,
        })
    }),
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
            unless_captured(stream, |world| {
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
    cuStreamCreate: streams::create,
    cuStreamCreateWithPriority: streams::create_first,
    cuCtxGetStreamPriorityRange: call!(|_last: *mut i32, first: *mut i32| answer(first, -5)),
    cuStreamDestroy: call!(|stream: CUstream| {
        inside(|world| {
            let left = world.streams.remove(&stream.addr());
            left.map_or(INVALID_VALUE, |_| OK)
        })
    }),
    cuStreamQuery: streams::query,
    cuStreamIsCapturing: captures::is_capturing,
    cuThreadExchangeStreamCaptureMode: captures::exchange_mode,
    cuEventCreate: call!(|event: *mut CUevent, _flags: c_uint| {
        inside(|world| {
            let new = world.handle();
            world.events.insert(new, (0, None));
            handle(event, new)
        })
    }),
    cuEventRecord: call!(|event: CUevent, stream: CUstream| {
        captures::recording(event, stream, |world| {
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
        captures::asking(event, |world| match world.events.get(&event.addr()) {
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
    cuModuleLoadData: call!(|module: *mut CUmodule, _image: *const c_void| {
        costly("cuModuleLoadData");
        handle(module, 0x50)
    }),
    cuModuleGetFunction: call!(|function: *mut CUfunction,
                                _module: CUmodule,
                                name: *const c_char| {
        // SAFETY: the caller's name ends in a zero.
        let name = unsafe { CStr::from_ptr(name) };
        let known = FUNCTIONS.iter().position(|known| *known == name);
        known.map_or(INVALID_VALUE, |index| handle(function, 0x61 + index))
    }),
    cuLaunchKernel: call!(|function: CUfunction,
                           _x: c_uint,
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
        let operation = unsafe { launched(FUNCTIONS[function.addr() - 0x61], parameters) };
        unless_captured(stream, |world| {
            if let Operation::Residency(stay) = operation {
                return persistent::launch(world, stream.addr(), stay);
            }
            if let Operation::Unpack { pool, to, list, .. } = &operation {
                let ends = |one: Descriptor| *to as u64 + one.destination_offset;
                if !world.untraceable.is_empty() {
                    let mut ends = list.read().into_iter().map(ends);
                    let fault = ends.find_map(|end| world.untraceable.get(&(end as usize)));
                    if let Some(fault) = fault {
                        world.lost.insert(stream.addr(), *fault);
                    }
                }
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
    cuCtxGetId: None,
    cuMemGetHandleForAddressRange: Some(device_memory::export),
    cuFlushGPUDirectRDMAWrites: Some(device_memory::flush),
    cuStreamWaitValue32_v2: Some(streams::wait_value),
    cuStreamWriteValue32_v2: Some(streams::write_value),
    cuIpcGetMemHandle: Some(sharing::handle_of),
    cuIpcOpenMemHandle_v2: Some(sharing::open),
    cuIpcCloseMemHandle: Some(sharing::close),
    cuMemRetainAllocationHandle: Some(sharing::retain),
    cuMemExportToShareableHandle: Some(sharing::export),
    cuMemImportFromShareableHandle: Some(sharing::import),
    cuMemRelease: Some(sharing::release),
    cuMemAddressReserve: Some(sharing::reserve),
    cuMemAddressFree: Some(sharing::unreserve),
    cuMemMap: Some(sharing::map),
    cuMemUnmap: Some(sharing::unmap),
    cuMemSetAccess: Some(sharing::set_access),
};
