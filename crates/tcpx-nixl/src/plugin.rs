//! The two functions that NIXL finds, and the table of functions that it calls an engine by.
//!
//! No panic crosses the edge: it becomes `NIXL_ERR_BACKEND`, and a line of the log. Every pointer
//! is NIXL's, valid while the call runs; metadata and handles are boxes of ours, which NIXL hands
//! back once to be freed.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use crate::abi::{
    self, BlobDesc, DescList, EngineBase, InitParams, MetaDesc, NotifList, OptionalArgs, Plugin,
    QueryAnswer, Status, StdMap, StdString, StdVector,
};
use crate::agent::{Agent, RemoteRegion};
use crate::config::Config;
use crate::flight::Flight;
use crate::guard;
use crate::info::{ConnectionInfo, RegionInfo};
use crate::lock;
use crate::logging;
use crate::memory::Registered;
use crate::plan::Plan;

/// The number of NIXL's plugin interface.
const API_VERSION: c_int = 1;

static PLUGIN: Plugin = Plugin {
    api_version: API_VERSION,
    create_engine,
    destroy_engine,
    name,
    version,
    options,
    memories,
};

/// What NIXL calls first: the plugin's description, or null where this NIXL is not one that the
/// file was made for.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_init() -> *const c_void {
    let started = catch_unwind(|| {
        logging::start();
        guard::check()
    });
    match started {
        Ok(Ok(())) => (&raw const PLUGIN).cast(),
        Ok(Err(unknown)) => {
            tracing::error!("the backend TCPX is not used: {unknown}");
            std::ptr::null()
        }
        Err(_) => std::ptr::null(),
    }
}

/// What NIXL calls last. It may start again afterwards, so there is nothing to end.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_fini() {}

extern "C" fn name() -> *const c_char {
    c"TCPX".as_ptr()
}

extern "C" fn version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

unsafe extern "C" fn options(place: *mut StdMap) -> *mut StdMap {
    // SAFETY: the caller of a function that returns a map passes where it is to be made.
    unsafe { StdMap::write(place, &Config::defaults()) };
    place
}

extern "C" fn memories() -> StdVector<c_int> {
    StdVector::of(&[abi::DRAM, abi::VRAM])
}

/// An engine as NIXL sees it, and behind that ours.
#[repr(C)]
struct Engine {
    base: EngineBase,
    agent: Arc<Agent>,
}

/// What NIXL keeps for a piece of memory.
#[derive(Debug)]
enum Metadata {
    Local(Arc<Registered>),
    Remote(RemoteRegion),
}

/// What NIXL keeps for a transfer.
#[derive(Debug)]
struct Request {
    peer: String,
    plan: Arc<Plan>,
    /// The notification that it was made with.
    notice: Option<Vec<u8>>,
    flight: Mutex<Option<Arc<Flight>>>,
}

/// Runs `body`; a panic becomes an error.
fn guarded(body: impl FnOnce() -> Result<Status, Status>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status) | Err(status)) => status,
        Err(_) => {
            tracing::error!("a defect of the backend TCPX; report it with the log");
            Status::BACKEND
        }
    }
}

unsafe extern "C" fn create_engine(init: *const InitParams) -> *mut c_void {
    let made = catch_unwind(|| {
        // SAFETY: NIXL passes its parameters, alive during the call.
        let init = unsafe { init.as_ref()? };
        // SAFETY: the parameters point at a map, or at none.
        let parameters = unsafe { init.custom_params.as_ref() };
        let parameters = parameters.map(StdMap::entries).unwrap_or_default();
        let started = Config::read(&parameters, |name| std::env::var(name).ok())
            .map_err(Into::into)
            .and_then(|config| Agent::start(&init.local_agent.text(), config));
        let agent = match started {
            Ok(agent) => agent,
            Err(error) => {
                tracing::error!("the backend TCPX cannot start: {error}");
                return None;
            }
        };
        let engine = Box::into_raw(Box::<Engine>::new_uninit());
        let engine = engine.cast::<Engine>();
        let table = (&raw const TABLE.slots).cast();
        // SAFETY: fresh memory for an engine, all of whose fields are made in place, where they
        // stay.
        unsafe {
            EngineBase::write(&raw mut (*engine).base, table, init, &parameters);
            (&raw mut (*engine).agent).write(agent);
        }
        Some(engine.cast::<c_void>())
    });
    made.ok().flatten().unwrap_or(std::ptr::null_mut())
}

unsafe extern "C" fn destroy_engine(engine: *mut c_void) {
    if engine.is_null() {
        return;
    }
    guarded(|| {
        let engine = engine.cast::<Engine>();
        // SAFETY: NIXL hands back an engine of `create_engine`, once, and does not use it any more.
        unsafe {
            (*engine).agent.stop();
            EngineBase::destroy(&raw mut (*engine).base);
            std::ptr::drop_in_place(&raw mut (*engine).agent);
            drop(Box::from_raw(
                engine.cast::<std::mem::MaybeUninit<Engine>>(),
            ));
        }
        Ok(Status::SUCCESS)
    });
}

/// The table of functions of `nixlBackendEngine`, with what C++ has in front of it: the offset to
/// the whole object, and the type, which NIXL asks nothing about.
#[repr(C)]
struct Table {
    offset: isize,
    kind: *const c_void,
    slots: [*const c_void; guard::SLOTS],
}

// SAFETY: addresses of functions, which never change.
unsafe impl Sync for Table {}

static TABLE: Table = Table {
    offset: 0,
    kind: std::ptr::null(),
    slots: [
        destroy_in_place as *const c_void,
        destroy_engine as *const c_void,
        yes as *const c_void,
        yes as *const c_void,
        yes as *const c_void,
        supported_memories as *const c_void,
        register_memory as *const c_void,
        deregister_memory as *const c_void,
        connect as *const c_void,
        disconnect as *const c_void,
        unload as *const c_void,
        prepare as *const c_void,
        post as *const c_void,
        check as *const c_void,
        release as *const c_void,
        no_memory_view as *const c_void,
        no_memory_view as *const c_void,
        release_memory_view as *const c_void,
        public_data as *const c_void,
        connection_info as *const c_void,
        load_connection_info as *const c_void,
        load_remote as *const c_void,
        load_local as *const c_void,
        notifications as *const c_void,
        notify as *const c_void,
        query as *const c_void,
        estimate as *const c_void,
    ],
};

/// C++ destroys an engine in place only as a part of another object, which ours never is.
extern "C" fn destroy_in_place(_engine: *mut Engine) {}

extern "C" fn yes(_engine: *const Engine) -> bool {
    true
}

extern "C" fn supported_memories(_engine: *const Engine) -> StdVector<c_int> {
    memories()
}

/// A reference out of a pointer of NIXL's.
///
/// # Safety
/// The pointer is null, or valid for the call that it was passed in.
unsafe fn argument<'a, T>(pointer: *const T) -> Result<&'a T, Status> {
    // SAFETY: as the caller says.
    unsafe { pointer.as_ref() }.ok_or(Status::INVALID_PARAM)
}

/// The agent of an engine.
///
/// # Safety
/// The pointer is null, or an engine of [`create_engine`] that was not destroyed.
unsafe fn agent<'a>(engine: *const Engine) -> Result<&'a Arc<Agent>, Status> {
    // SAFETY: as the caller says.
    Ok(unsafe { &argument(engine)?.agent })
}

/// Gives NIXL a box of ours.
///
/// # Safety
/// `place` is null, or valid for a write.
unsafe fn give<T>(place: *mut *mut T, value: T) -> Result<Status, Status> {
    if place.is_null() {
        return Err(Status::INVALID_PARAM);
    }
    // SAFETY: as the caller says.
    unsafe { place.write(Box::into_raw(Box::new(value))) };
    Ok(Status::SUCCESS)
}

unsafe extern "C" fn register_memory(
    engine: *mut Engine,
    desc: *const BlobDesc,
    kind: *const c_int,
    place: *mut *mut Metadata,
) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        let desc = argument(desc)?;
        let gpu = match *argument(kind)? {
            abi::DRAM => None,
            abi::VRAM => Some(desc.basic.device),
            _ => return Err(Status::NOT_SUPPORTED),
        };
        let memory = agent(engine)?.register(desc.basic.address, desc.basic.len, gpu)?;
        give(place, Metadata::Local(memory))
    })
}

unsafe extern "C" fn deregister_memory(engine: *mut Engine, metadata: *mut Metadata) -> Status {
    // SAFETY: the engine is an argument of this call; NIXL hands back metadata of ours, once.
    guarded(|| unsafe {
        let agent = agent(engine)?;
        argument(metadata)?;
        match *Box::from_raw(metadata) {
            Metadata::Local(memory) => Ok(agent.deregister(&memory)),
            Metadata::Remote(_) => Err(Status::INVALID_PARAM),
        }
    })
}

unsafe extern "C" fn unload(_engine: *mut Engine, metadata: *mut Metadata) -> Status {
    // SAFETY: NIXL hands back metadata of ours, once.
    guarded(|| unsafe {
        argument(metadata)?;
        drop(Box::from_raw(metadata));
        Ok(Status::SUCCESS)
    })
}

unsafe extern "C" fn connect(engine: *mut Engine, name: *const StdString) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe { Ok(agent(engine)?.connect(&argument(name)?.text())) })
}

unsafe extern "C" fn disconnect(engine: *mut Engine, name: *const StdString) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        agent(engine)?.forget(&argument(name)?.text());
        Ok(Status::SUCCESS)
    })
}

unsafe extern "C" fn public_data(
    engine: *const Engine,
    metadata: *const Metadata,
    place: *mut StdString,
) -> Status {
    // SAFETY: all pointers are arguments of this call; the metadata is ours.
    guarded(|| unsafe {
        let Metadata::Local(memory) = argument(metadata)? else {
            return Err(Status::INVALID_PARAM);
        };
        argument(place)?;
        StdString::assign(place, &agent(engine)?.region_info(memory).to_bytes());
        Ok(Status::SUCCESS)
    })
}

unsafe extern "C" fn connection_info(engine: *const Engine, place: *mut StdString) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        argument(place)?;
        StdString::assign(place, &agent(engine)?.info());
        Ok(Status::SUCCESS)
    })
}

unsafe extern "C" fn load_connection_info(
    engine: *mut Engine,
    name: *const StdString,
    info: *const StdString,
) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        let name = argument(name)?.text();
        let info = ConnectionInfo::from_bytes(argument(info)?.bytes()).map_err(|why| {
            tracing::error!("the metadata of agent {name} cannot be used: {why}");
            Status::MISMATCH
        })?;
        agent(engine)?.load(&name, info);
        Ok(Status::SUCCESS)
    })
}

unsafe extern "C" fn load_remote(
    _engine: *mut Engine,
    desc: *const BlobDesc,
    _kind: *const c_int,
    _name: *const StdString,
    place: *mut *mut Metadata,
) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        let desc = argument(desc)?;
        let info = RegionInfo::from_bytes(desc.blob.bytes()).ok_or(Status::MISMATCH)?;
        let address = desc.basic.address;
        give(place, Metadata::Remote(RemoteRegion { address, info }))
    })
}

unsafe extern "C" fn load_local(
    engine: *mut Engine,
    metadata: *const Metadata,
    place: *mut *mut Metadata,
) -> Status {
    // SAFETY: all pointers are arguments of this call; the metadata is ours.
    guarded(|| unsafe {
        let Metadata::Local(memory) = argument(metadata)? else {
            return Err(Status::INVALID_PARAM);
        };
        let (address, info) = (memory.address, agent(engine)?.region_info(memory));
        give(place, Metadata::Remote(RemoteRegion { address, info }))
    })
}

/// The notification that the arguments bring, `None` where they bring none.
///
/// # Safety
/// The pointer is null, or valid for the call that it was passed in.
unsafe fn notice(arguments: *const OptionalArgs) -> Option<Vec<u8>> {
    // SAFETY: as the caller says.
    let arguments = unsafe { arguments.as_ref()? };
    arguments
        .has_notification
        .then(|| arguments.notification.bytes().to_vec())
}

unsafe extern "C" fn prepare(
    _engine: *const Engine,
    operation: *const c_int,
    local: *const DescList<MetaDesc>,
    remote: *const DescList<MetaDesc>,
    name: *const StdString,
    place: *mut *mut Request,
    arguments: *const OptionalArgs,
) -> Status {
    // SAFETY: all pointers are arguments of this call; the metadata in the lists is ours.
    guarded(|| unsafe {
        let is_write = match *argument(operation)? {
            abi::READ => false,
            abi::WRITE => true,
            _ => return Err(Status::INVALID_PARAM),
        };
        let (local, remote) = (argument(local)?.items(), argument(remote)?.items());
        let metadata = |desc: &MetaDesc| desc.metadata.cast::<Metadata>().as_ref();
        let local = local.iter().map(|desc| match metadata(desc)? {
            Metadata::Local(memory) => {
                Some((Arc::clone(memory), desc.basic.address, desc.basic.len))
            }
            Metadata::Remote(_) => None,
        });
        let remote = remote.iter().map(|desc| match metadata(desc)? {
            Metadata::Remote(region) => Some((*region, desc.basic.address, desc.basic.len)),
            Metadata::Local(_) => None,
        });
        let request = Request {
            peer: argument(name)?.text(),
            plan: Arc::new(Plan::new(is_write, local, remote)?),
            notice: notice(arguments),
            flight: Mutex::default(),
        };
        give(place, request)
    })
}

unsafe extern "C" fn post(
    engine: *const Engine,
    _operation: *const c_int,
    _local: *const DescList<MetaDesc>,
    _remote: *const DescList<MetaDesc>,
    _name: *const StdString,
    handle: *const *mut Request,
    arguments: *const OptionalArgs,
) -> Status {
    // SAFETY: all pointers are arguments of this call; the handle is ours.
    guarded(|| unsafe {
        let request = argument(*argument(handle)?)?;
        // Arguments without a notification take away the one that the handle was made with.
        let notice = match arguments.is_null() {
            true => request.notice.clone(),
            false => notice(arguments),
        };
        let mut flight = lock(&request.flight);
        if flight.as_ref().is_some_and(|flight| !flight.is_over()) {
            return Err(Status::REPOST_ACTIVE);
        }
        let started = agent(engine)?.post(&request.peer, &request.plan, notice)?;
        let status = started.status();
        *flight = Some(started);
        Ok(status)
    })
}

unsafe extern "C" fn check(_engine: *const Engine, handle: *const Request) -> Status {
    // SAFETY: the handle is ours.
    guarded(|| unsafe {
        let request = argument(handle)?;
        let flight = lock(&request.flight);
        match &*flight {
            Some(flight) => {
                let status = flight.check();
                if status == Status::IN_PROGRESS {
                    // Callers ask again at once, and the threads that move the bytes may need this
                    // core.
                    std::thread::yield_now();
                }
                Ok(status)
            }
            None => Err(Status::INVALID_PARAM),
        }
    })
}

unsafe extern "C" fn release(_engine: *const Engine, handle: *mut Request) -> Status {
    // SAFETY: the handle is ours, and NIXL hands it back until it was taken.
    guarded(|| unsafe {
        let request = argument(handle)?;
        let flight = lock(&request.flight);
        if let Some(flight) = &*flight {
            if flight.check() == Status::IN_PROGRESS {
                flight.end(Status::CANCELED);
            }
            // What is read may still arrive for a moment: the memory is not the caller's again
            // before.
            if !flight.plan.is_write && flight.status() != Status::SUCCESS && flight.memory_in_use()
            {
                return Err(Status::REPOST_ACTIVE);
            }
        }
        drop(flight);
        drop(Box::from_raw(handle));
        Ok(Status::SUCCESS)
    })
}

extern "C" fn no_memory_view() -> Status {
    Status::NOT_SUPPORTED
}

extern "C" fn release_memory_view() {}

unsafe extern "C" fn notifications(engine: *mut Engine, list: *mut NotifList) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        let list = list.as_mut().ok_or(Status::INVALID_PARAM)?;
        let mut any = false;
        agent(engine)?.take_notices(|from, message| {
            any = true;
            list.push(from, message);
        });
        if !any {
            // As in `check`.
            std::thread::yield_now();
        }
        Ok(Status::SUCCESS)
    })
}

unsafe extern "C" fn notify(
    engine: *const Engine,
    name: *const StdString,
    message: *const StdString,
) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        Ok(agent(engine)?.notify(&argument(name)?.text(), argument(message)?.bytes()))
    })
}

unsafe extern "C" fn query(
    engine: *const Engine,
    list: *const DescList<BlobDesc>,
    answers: *mut StdVector<QueryAnswer>,
) -> Status {
    // SAFETY: all pointers are arguments of this call.
    guarded(|| unsafe {
        let answers = answers.as_mut().ok_or(Status::INVALID_PARAM)?;
        if !answers.is_empty() {
            return Err(Status::INVALID_PARAM);
        }
        let agent = agent(engine)?;
        for desc in argument(list)?.items() {
            answers.answer(agent.is_registered(desc.basic.address, desc.basic.len));
        }
        Ok(Status::SUCCESS)
    })
}

unsafe extern "C" fn estimate(
    engine: *const Engine,
    _operation: *const c_int,
    _local: *const DescList<MetaDesc>,
    _remote: *const DescList<MetaDesc>,
    _name: *const StdString,
    handle: *const *mut Request,
    duration: *mut i64,
    margin: *mut i64,
    method: *mut c_int,
    _arguments: *const OptionalArgs,
) -> Status {
    // SAFETY: all pointers are arguments of this call; the handle is ours.
    guarded(|| unsafe {
        let request = argument(*argument(handle)?)?;
        if duration.is_null() || margin.is_null() || method.is_null() {
            return Err(Status::INVALID_PARAM);
        }
        let microseconds = agent(engine)?.estimate(request.plan.bytes);
        duration.write(microseconds);
        margin.write(microseconds / 2);
        // ANALYTICAL_BACKEND, the only one.
        method.write(0);
        Ok(Status::SUCCESS)
    })
}
