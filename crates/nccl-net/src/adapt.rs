//! One set of calls over the tables of every version.
//!
//! What differs (int or `size_t` sizes, profiler handles, contexts, configs, device handles) ends
//! in this file. The calls are as unsafe as the table itself.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use crate::constants::TRAFFIC_CLASS_UNDEFINED;
use crate::device::RawDeviceHandle;
use crate::finalize::Finalize;
use crate::logger::plugin_logger;
use crate::properties::Properties;
use crate::raw_properties::{
    RawProperties, RawPropertiesV6, RawPropertiesV7, RawPropertiesV8, RawPropertiesV9,
    RawPropertiesV11, RawPropertiesV12,
};
use crate::result::{RawResult, ResultCode};
use crate::tables::*;

type Void = *mut c_void;

/// The forms that a call has had. Its name also tells whose entry an exported function is.
macro_rules! forms {
    ($($call:ident { $($form:ident($signature:ty)),* })*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) enum $call { $($form($signature)),* }

        $(impl From<$signature> for $call {
            fn from(call: $signature) -> Self {
                Self::$form(call)
            }
        })*
    )*};
}

forms! {
    Init { V5(InitV5), V10(InitV10), V11(InitV11) }
    GetProperties {
        V6(GetPropertiesFn<RawPropertiesV6>),
        V7(GetPropertiesFn<RawPropertiesV7>),
        V8(GetPropertiesFn<RawPropertiesV8>),
        V9(GetPropertiesFn<RawPropertiesV9>),
        V11(GetPropertiesFn<RawPropertiesV11>),
        V12(GetPropertiesFn<RawPropertiesV12>)
    }
    Listen { V5(ListenV5), V11(ListenV11) }
    Connect { V5(ConnectV5), V7(ConnectV7), V10(ConnectV10), V11(ConnectV11) }
    Accept { V5(AcceptV5), V7(AcceptV7) }
    RegMr { V5(RegMrV5), V8(RegMrV8) }
    Isend { V5(IsendV5), V9(IsendV9), V10(IsendV10) }
    Irecv { V5(IrecvV5), V9(IrecvV9), V10(IrecvV10) }
}

/// What a table must hold before `init`: everything else may be filled in by it.
pub(crate) struct Start {
    name: *const c_char,
    init: Init,
    /// Kept for ever: a plugin may keep the pointer.
    pub(crate) config: *mut CommConfig,
}

/// The calls of one table, read once its `init` has returned.
pub(crate) struct Calls {
    pub(crate) name: *const c_char,
    pub(crate) devices: DevicesFn,
    pub(crate) get_properties: GetProperties,
    pub(crate) listen: Listen,
    pub(crate) connect: Connect,
    pub(crate) accept: Accept,
    pub(crate) reg_mr: RegMr,
    pub(crate) dereg_mr: DeregMrFn,
    pub(crate) isend: Isend,
    pub(crate) irecv: Irecv,
    pub(crate) test: TestFn,
    pub(crate) close_send: CloseFn,
    pub(crate) close_recv: CloseFn,
    pub(crate) close_listen: CloseFn,
    pub(crate) irecv_consumed: Option<IrecvConsumedFn>,
    pub(crate) finalize: Option<FinalizeFn>,
    /// Context of v11 and later.
    pub(crate) context: Void,
    /// That of [`Start`].
    pub(crate) config: *mut CommConfig,
}

/// A table of one version; an error is the name of a missing function.
pub(crate) trait ReadTable {
    /// What it holds before `init`.
    fn start(&self) -> Result<Start, &'static str>;
    /// What it holds after it.
    fn calls(&self, start: &Start, context: Void) -> Result<Calls, &'static str>;
    /// Functions that are null.
    fn missing(&self) -> Vec<&'static str>;
}

/// Plugins of v10 and later may call the profiler without looking; this one keeps nothing.
unsafe extern "C" fn no_profiler(
    _event: *mut Void,
    _kind: c_int,
    _parent: Void,
    _plugin: i64,
    _data: Void,
) -> RawResult {
    0
}

/// Sizes beyond an `int` cannot reach these versions.
fn int(bytes: usize) -> Result<c_int, RawResult> {
    c_int::try_from(bytes).map_err(|_| ResultCode::InvalidArgument.to_raw())
}

/// # Safety
/// A string of a plugin that lives as long as its table, or NULL.
unsafe fn table_name(name: *const c_char) -> String {
    if name.is_null() {
        return String::from("(unnamed)");
    }
    // SAFETY: forwarded.
    let name = unsafe { CStr::from_ptr(name) };
    name.to_string_lossy().into_owned()
}

/// Functions of a table that are null now, as the C interface names them.
///
/// # Safety
/// A table of that version lies at `address`.
pub(crate) unsafe fn missing_functions(version: AbiVersion, address: usize) -> Vec<String> {
    // SAFETY: forwarded.
    let table = unsafe { read_table(version, address) };
    table.missing().into_iter().map(camel_case).collect()
}

/// `irecv_consumed` as `irecvConsumed`.
fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |mut name, word| {
        let mut letters = word.chars();
        name.extend(letters.next().map(|letter| letter.to_ascii_uppercase()));
        name.push_str(letters.as_str());
        name
    })
}

impl Start {
    /// # Safety
    /// A table of that version lies at `address`.
    pub(crate) unsafe fn read(version: AbiVersion, address: usize) -> Result<Self, &'static str> {
        // SAFETY: forwarded.
        unsafe { read_table(version, address) }.start()
    }

    /// Of a table with this name and `init`.
    pub(crate) fn new(name: *const c_char, init: Init) -> Self {
        let config = CommConfig {
            traffic_class: TRAFFIC_CLASS_UNDEFINED,
        };
        Self {
            name,
            init,
            config: Box::into_raw(Box::new(config)),
        }
    }

    /// # Safety
    /// The table's name is a static string.
    pub(crate) unsafe fn name(&self) -> String {
        // SAFETY: forwarded.
        unsafe { table_name(self.name) }
    }

    /// Whether one process may hold several initialised contexts.
    pub(crate) fn has_context(&self) -> bool {
        matches!(self.init, Init::V11(_))
    }

    /// Calls `init`; the context is that of v11 and later.
    ///
    /// # Safety
    /// The plugin's calling order is kept.
    pub(crate) unsafe fn init(&self, communicator: u64) -> (RawResult, Void) {
        let logger = Some(plugin_logger());
        let mut context = ptr::null_mut();
        // SAFETY: forwarded; the config outlives the plugin's use.
        let rc = unsafe {
            match self.init {
                Init::V5(init) => init(logger),
                Init::V10(init) => init(logger, Some(no_profiler)),
                Init::V11(init) => init(
                    &raw mut context,
                    communicator,
                    self.config,
                    logger,
                    Some(no_profiler),
                ),
            }
        };
        (rc, context)
    }
}

/// # Safety
/// For every method: the pointers are what the ncclNet ABI demands of that call, and the plugin's
/// calling order is kept.
impl Calls {
    /// Reads the table again, as `init` may have filled it.
    ///
    /// # Safety
    /// The table that `start` was read from lies at `address`, and its `init` gave `context`.
    pub(crate) unsafe fn read(
        version: AbiVersion,
        address: usize,
        start: &Start,
        context: Void,
    ) -> Result<Self, &'static str> {
        // SAFETY: forwarded.
        unsafe { read_table(version, address) }.calls(start, context)
    }

    pub(crate) unsafe fn name(&self) -> String {
        // SAFETY: a static string of the plugin.
        unsafe { table_name(self.name) }
    }

    pub(crate) fn has_consume(&self) -> bool {
        self.irecv_consumed.is_some()
    }

    /// The last call, if the table has one.
    pub(crate) fn finalize(&self) -> Option<Finalize> {
        self.finalize.map(|call| Finalize {
            call,
            context: self.context,
        })
    }

    pub(crate) unsafe fn devices(&self, count: &mut c_int) -> RawResult {
        // SAFETY: forwarded.
        unsafe { (self.devices)(count) }
    }

    pub(crate) unsafe fn properties(&self, dev: c_int) -> (RawResult, Properties) {
        unsafe fn read<R: RawProperties>(
            call: GetPropertiesFn<R>,
            dev: c_int,
        ) -> (RawResult, Properties) {
            let mut raw = R::zeroed();
            // SAFETY: forwarded; the strings stay good for as long as the plugin is loaded.
            unsafe {
                match call(dev, &raw mut raw) {
                    0 => (0, Properties::from_raw(&raw)),
                    rc => (rc, Properties::default()),
                }
            }
        }
        // SAFETY: forwarded.
        unsafe {
            match self.get_properties {
                GetProperties::V6(call) => read(call, dev),
                GetProperties::V7(call) => read(call, dev),
                GetProperties::V8(call) => read(call, dev),
                GetProperties::V9(call) => read(call, dev),
                GetProperties::V11(call) => read(call, dev),
                GetProperties::V12(call) => read(call, dev),
            }
        }
    }

    pub(crate) unsafe fn listen(&self, dev: c_int, handle: Void, comm: &mut Void) -> RawResult {
        // SAFETY: forwarded.
        unsafe {
            match self.listen {
                Listen::V5(listen) => listen(dev, handle, comm),
                Listen::V11(listen) => listen(self.context, dev, handle, comm),
            }
        }
    }

    pub(crate) unsafe fn connect(&self, dev: c_int, handle: Void, comm: &mut Void) -> RawResult {
        // A sender asks for no offload: the inner pointer is NULL, the outer one real.
        let mut device: *mut RawDeviceHandle = ptr::null_mut();
        // SAFETY: forwarded.
        unsafe {
            match self.connect {
                Connect::V5(connect) => connect(dev, handle, comm),
                Connect::V7(connect) => connect(dev, handle, comm, &raw mut device),
                Connect::V10(connect) => connect(dev, self.config, handle, comm, &raw mut device),
                Connect::V11(connect) => connect(self.context, dev, handle, comm, &raw mut device),
            }
        }
    }

    pub(crate) unsafe fn accept(
        &self,
        listen_comm: Void,
        comm: &mut Void,
        device: &mut *mut RawDeviceHandle,
    ) -> RawResult {
        // SAFETY: forwarded.
        unsafe {
            match self.accept {
                Accept::V5(accept) => accept(listen_comm, comm),
                Accept::V7(accept) => accept(listen_comm, comm, device),
            }
        }
    }

    pub(crate) unsafe fn reg_mr(
        &self,
        comm: Void,
        data: Void,
        bytes: usize,
        kind: c_int,
        handle: &mut Void,
    ) -> RawResult {
        match self.reg_mr {
            RegMr::V5(reg_mr) => match int(bytes) {
                // SAFETY: forwarded.
                Ok(bytes) => unsafe { reg_mr(comm, data, bytes, kind, handle) },
                Err(rc) => rc,
            },
            // SAFETY: forwarded.
            RegMr::V8(reg_mr) => unsafe { reg_mr(comm, data, bytes, kind, handle) },
        }
    }

    pub(crate) unsafe fn dereg_mr(&self, comm: Void, handle: Void) -> RawResult {
        // SAFETY: forwarded.
        unsafe { (self.dereg_mr)(comm, handle) }
    }

    pub(crate) unsafe fn isend(
        &self,
        comm: Void,
        data: Void,
        bytes: usize,
        tag: c_int,
        handle: Void,
        request: &mut Void,
    ) -> RawResult {
        // SAFETY: forwarded.
        unsafe {
            match self.isend {
                Isend::V5(isend) => match int(bytes) {
                    Ok(bytes) => isend(comm, data, bytes, tag, handle, request),
                    Err(rc) => rc,
                },
                Isend::V9(isend) => isend(comm, data, bytes, tag, handle, request),
                Isend::V10(isend) => {
                    isend(comm, data, bytes, tag, handle, ptr::null_mut(), request)
                }
            }
        }
    }

    pub(crate) unsafe fn irecv(
        &self,
        comm: Void,
        mut data: Void,
        mut bytes: usize,
        mut tag: c_int,
        mut handle: Void,
        request: &mut Void,
    ) -> RawResult {
        let (data, tags, handles) = (&raw mut data, &raw mut tag, &raw mut handle);
        // SAFETY: forwarded; arrays of one element, read during the call only.
        unsafe {
            match self.irecv {
                Irecv::V5(irecv) => match int(bytes) {
                    Ok(mut bytes) => irecv(comm, 1, data, &raw mut bytes, tags, handles, request),
                    Err(rc) => rc,
                },
                Irecv::V9(irecv) => irecv(comm, 1, data, &raw mut bytes, tags, handles, request),
                Irecv::V10(irecv) => {
                    let mut profiler: Void = ptr::null_mut();
                    let profilers = &raw mut profiler;
                    irecv(
                        comm,
                        1,
                        data,
                        &raw mut bytes,
                        tags,
                        handles,
                        profilers,
                        request,
                    )
                }
            }
        }
    }

    /// `sizes` has room for more than one entry, for plugins that write a group's worth.
    pub(crate) unsafe fn test(
        &self,
        request: Void,
        done: &mut c_int,
        sizes: &mut [c_int; 8],
    ) -> RawResult {
        // SAFETY: forwarded.
        unsafe { (self.test)(request, done, sizes.as_mut_ptr()) }
    }

    pub(crate) unsafe fn irecv_consumed(&self, comm: Void, request: Void) -> RawResult {
        match self.irecv_consumed {
            // SAFETY: forwarded.
            Some(consumed) => unsafe { consumed(comm, 1, request) },
            None => 0,
        }
    }

    pub(crate) unsafe fn close_send(&self, comm: Void) -> RawResult {
        // SAFETY: forwarded.
        unsafe { (self.close_send)(comm) }
    }

    pub(crate) unsafe fn close_recv(&self, comm: Void) -> RawResult {
        // SAFETY: forwarded.
        unsafe { (self.close_recv)(comm) }
    }

    pub(crate) unsafe fn close_listen(&self, comm: Void) -> RawResult {
        // SAFETY: forwarded.
        unsafe { (self.close_listen)(comm) }
    }
}

// SAFETY: function pointers, a static string and a config, and the plugin's own context, which is
// only handed back to it; threads are the caller's business.
unsafe impl Send for Calls {}
// SAFETY: as above.
unsafe impl Sync for Calls {}
// SAFETY: as above.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}
