//! The double of Google's plugin: where it is, and what it counted.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nccl_net::{LoadOptions, Plugin};

use crate::plugin_file;

/// Path of the shared object.
pub fn path() -> &'static Path {
    Path::new(env!("TCPX_DOUBLE_SO"))
}

/// Bytes of a bounce pool unless a test sets others.
pub const DEFAULT_POOL_BYTES: usize = 2 << 20;

/// One test at a time: the counters and the pool size are the process's. Resets the pool size and
/// all misbehaviour.
pub fn serial() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    let guard = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    set_pool_bytes(DEFAULT_POOL_BYTES);
    set_pool_place(PoolPlace::Host);
    set_lie(0);
    set_fault(0, 0, 0);
    show_requests(false);
    guard
}

/// The double, started: it starts once in a process.
pub fn plugin() -> &'static Plugin {
    static PLUGIN: OnceLock<Plugin> = OnceLock::new();
    PLUGIN.get_or_init(|| {
        let plugin = Plugin::load(LoadOptions::new(path())).expect("the double loads");
        plugin.init().expect("the double starts");
        plugin
    })
}

/// What the double counted, over all comms of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Receives that were consumed.
    pub consumes: u64,
    /// Most requests that one comm held at once.
    pub max_in_flight: u64,
    /// Fewest free pages that one pool had.
    pub pool_low_water: u64,
    /// Times that reception stalled for want of a page.
    pub pool_waits: u64,
    /// Second accepts on a listen comm.
    pub second_accepts: u64,
    /// Comms that are open, listen comms included.
    pub open_comms: u64,
    /// Registrations that are alive.
    pub registrations: u64,
}

fn symbol(name: &CStr) -> *mut c_void {
    plugin_file::symbol_of(path(), name)
}

/// Calls a function of the double that takes a number.
fn set(name: &CStr, value: i32) {
    // SAFETY: the symbol is a function of this signature.
    let function: extern "C" fn(i32) = unsafe { std::mem::transmute(symbol(name)) };
    function(value);
}

/// The counters now.
pub fn stats() -> Stats {
    let counters: *const AtomicU64 = symbol(c"tcpx_double_stats").cast();
    // SAFETY: the symbol is an array of seven atomic counters, for ever.
    let read = |index: usize| unsafe { (*counters.add(index)).load(Ordering::SeqCst) };
    Stats {
        consumes: read(0),
        max_in_flight: read(1),
        pool_low_water: read(2),
        pool_waits: read(3),
        second_accepts: read(4),
        open_comms: read(5),
        registrations: read(6),
    }
}

/// Sets the bytes of the bounce pools of receive comms that are accepted from now on.
pub fn set_pool_bytes(bytes: usize) {
    let function = symbol(c"tcpx_double_set_pool_bytes");
    // SAFETY: the symbol is a function of this signature.
    let function: extern "C" fn(usize) = unsafe { std::mem::transmute(function) };
    function(bytes);
}

/// Where bounce pools lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum PoolPlace {
    /// In host memory, which stands in for a GPU's.
    Host = 1,
    /// In host memory that the GPU reads.
    Pinned,
    /// In the GPU's memory.
    Gpu,
}

/// Sets where the bounce pools of receive comms lie that are accepted from now on, and whether
/// senders read a GPU's memory.
pub fn set_pool_place(place: PoolPlace) {
    set(c"tcpx_double_set_pool_place", place as i32);
}

/// Finds a function of a CUDA driver by its name.
pub type FindFunction = unsafe extern "C" fn(*const c_char) -> *const c_void;

/// Has the double call this driver instead of the system's.
pub fn set_driver(find: FindFunction) {
    let function = symbol(c"tcpx_double_set_driver");
    // SAFETY: the symbol is a function of this signature.
    let function: extern "C" fn(FindFunction) = unsafe { std::mem::transmute(function) };
    function(find);
}

/// Where the bounce pools of the double of another process lie: `pinned` or `gpu`.
pub const POOL_VARIABLE: &str = "TCPX_DOUBLE_POOL";

/// Has the double of another process hand out requests that can be looked into.
pub const SHOW_VARIABLE: &str = "TCPX_DOUBLE_SHOW_REQUESTS";

/// Has requests be the addresses of the private structure, as the real plugin's are, or of nothing.
pub fn show_requests(show: bool) {
    set(c"tcpx_double_show_requests", show.into());
}

/// Something untrue that the double says of one receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Lie {
    /// One fragment more than a slot holds.
    CountBeyond = 1,
    /// All bits of the count set.
    CountHuge,
    /// No fragments for a message that is not empty; they may come later.
    CountZero,
    /// A fragment that reads behind the pool.
    OutsidePool,
    /// A fragment that wraps around the address space.
    OutsideTarget,
    /// A byte too few.
    SumShort,
    /// A byte too many.
    SumLong,
    /// A byte twice, another never.
    Overlap,
    /// Done before anything is here, as if the completion before it came twice.
    DoneEarly,
    /// A size below the posted one.
    SizeShort,
    /// A size above it.
    SizeLong,
    /// A size below 0.
    SizeNegative,
}

impl Lie {
    /// Those that need a receive through the device queue.
    pub const IN_QUEUE: [Self; 8] = [
        Self::CountBeyond,
        Self::CountHuge,
        Self::CountZero,
        Self::OutsidePool,
        Self::OutsideTarget,
        Self::SumShort,
        Self::SumLong,
        Self::Overlap,
    ];
    /// Those in the size that `test` writes.
    pub const IN_SIZE: [Self; 3] = [Self::SizeShort, Self::SizeLong, Self::SizeNegative];
}

/// Has the next receive that the lie can be told of misreported, once.
pub fn lie_next(lie: Lie) {
    set_lie(lie as i32);
}

fn set_lie(lie: i32) {
    set(c"tcpx_double_lie_next", lie);
}

/// A call of the plugin's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[expect(missing_docs, reason = "the names of the table")]
pub enum Call {
    Devices = 1,
    Properties,
    Listen,
    Connect,
    Accept,
    RegMr,
    DeregMr,
    Isend,
    Irecv,
    Test,
    Consumed,
    CloseSend,
    CloseRecv,
    CloseListen,
    Init,
}

/// Has the double of another process lie: a number of [`Lie`].
pub const LIE_VARIABLE: &str = "TCPX_DOUBLE_LIE";
/// Has a call of the double of another process fail or hang: see [`fault_value`].
pub const FAULT_VARIABLE: &str = "TCPX_DOUBLE_FAULT";
/// The value of [`FAULT_VARIABLE`] for which loading the file hangs.
pub const LOADING_HANGS: &str = "0=-1";

/// The value of [`FAULT_VARIABLE`] for which, after `after` more of them, every `call` returns
/// `code`, or hangs for -1.
pub fn fault_value(call: Call, code: i32, after: u32) -> String {
    format!("{}={code}@{after}", call as i32)
}

/// A call that fails or hangs as long as this lives.
#[derive(Debug)]
#[must_use = "the call works again when this is dropped"]
pub struct Fault(());

impl Fault {
    /// After `after` more of them, every such call returns `code`.
    pub fn returns(call: Call, code: i32, after: u32) -> Self {
        set_fault(call as i32, code, after);
        Self(())
    }

    /// After `after` more of them, every such call hangs; those that hang go on in the end.
    pub fn hangs(call: Call, after: u32) -> Self {
        set_fault(call as i32, -1, after);
        Self(())
    }

    /// Whether a call hangs now.
    pub fn is_hanging(&self) -> bool {
        let function = symbol(c"tcpx_double_hangs");
        // SAFETY: the symbol is a function of this signature.
        let function: extern "C" fn() -> i32 = unsafe { std::mem::transmute(function) };
        function() != 0
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        set_fault(0, 0, 0);
    }
}

fn set_fault(call: i32, code: i32, after: u32) {
    let function = symbol(c"tcpx_double_fault");
    // SAFETY: the symbol is a function of this signature.
    let function: extern "C" fn(i32, i32, u32) = unsafe { std::mem::transmute(function) };
    function(call, code, after);
}
