//! The double of Google's plugin: where it is, and what it counted.

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nccl_net::tables::NetV7;
use nccl_net::{LoadOptions, Plugin};

/// Path of the shared object.
pub fn path() -> &'static Path {
    Path::new(env!("TCPX_DOUBLE_SO"))
}

/// Bytes of a bounce pool unless a test sets others.
pub const DEFAULT_POOL_BYTES: usize = 2 << 20;

/// One test at a time: the counters and the pool size are the process's. Resets the pool size.
pub fn serial() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    let guard = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    set_pool_bytes(DEFAULT_POOL_BYTES);
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
    /// Times that reception stood still for want of a page.
    pub pool_waits: u64,
    /// Second accepts on a listen comm.
    pub second_accepts: u64,
    /// Comms that are open, listen comms included.
    pub open_comms: u64,
    /// Registrations that are alive.
    pub registrations: u64,
}

/// Address of a symbol of the double.
fn symbol(name: &CStr) -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let path = CString::new(env!("TCPX_DOUBLE_SO")).expect("a path has no NUL");
        // SAFETY: the double's constructors do nothing; the library is never unloaded.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "the double does not load");
        library.expose_provenance()
    });
    // SAFETY: an open library and a NUL-terminated name.
    let address = unsafe {
        libc::dlsym(
            std::ptr::with_exposed_provenance_mut(*library),
            name.as_ptr(),
        )
    };
    assert!(!address.is_null(), "the double has no {name:?}");
    address
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

/// Has the next receive through a device queue claim more fragments than a slot holds.
pub fn misreport_next() {
    let function = symbol(c"tcpx_double_misreport_next");
    // SAFETY: the symbol is a function of this signature.
    let function: extern "C" fn() = unsafe { std::mem::transmute(function) };
    function();
}

/// The bare table, for calls that the safe API makes impossible.
pub fn raw_table() -> NetV7 {
    let table: *const NetV7 = symbol(c"ncclNetPlugin_v7").cast();
    // SAFETY: the symbol is a v7 table, for ever; the double exports it as a volatile object.
    unsafe { table.read_volatile() }
}
