//! The function tables ncclNet v5 to v12.
//!
//! Every member but `name` is a nullable function pointer, in the order of the ABI. Types that
//! changed over time carry the version that introduced them. The rows at the end are the one list
//! of versions.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::fmt;
use std::mem::{offset_of, size_of};

use crate::adapt::{self, Calls, ReadTable, Start};
use crate::device::RawDeviceHandle;
use crate::export::{Entry, Export, Exported, entries, register, transfer};
use crate::raw_properties::{
    RawPropertiesV6, RawPropertiesV7, RawPropertiesV8, RawPropertiesV9, RawPropertiesV11,
    RawPropertiesV12, RawVDeviceProps4, RawVDeviceProps8,
};
use crate::result::RawResult;

/// The host's logger: level, subsystem bits, file, line, printf format, arguments.
pub type LoggerFn = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);
/// The host's profiler callback: event handle, type, parent handle, plugin id, extra data.
pub type ProfilerFn =
    unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> RawResult;

/// `ncclNetCommConfig` of v10 to v12.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommConfig {
    /// Traffic class for the plugin, or -1.
    pub traffic_class: c_int,
}

/// Peers and flows of one direction, in [`NetAttr`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommAttr {
    /// Most peers at once.
    pub max_concurrent_peers: i32,
    /// Fewest peers at once.
    pub min_concurrent_peers: i32,
    /// Most flows to one peer.
    pub max_flows_per_peer: i32,
    /// Fewest flows to one peer.
    pub min_flows_per_peer: i32,
}

/// `ncclNetAttr` of v11 and v12: what the host is about to do with the network.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetAttr {
    /// Sending.
    pub send: CommAttr,
    /// Receiving.
    pub recv: CommAttr,
    /// Operation, `u32::MAX` when undefined.
    pub op: u32,
    /// Algorithm, `u32::MAX` when undefined.
    pub algo: u32,
    /// Protocol, `u32::MAX` when undefined.
    pub proto: u32,
}

const _: () = assert!(size_of::<CommConfig>() == 4);
const _: () = assert!(size_of::<CommAttr>() == 16);
const _: () = assert!(size_of::<NetAttr>() == 44 && offset_of!(NetAttr, op) == 32);

type Void = *mut c_void;
type VoidOut = *mut *mut c_void;
type DeviceOut = *mut *mut RawDeviceHandle;

/// `init` of v5 to v9: logger.
pub type InitV5 = unsafe extern "C" fn(Option<LoggerFn>) -> RawResult;
/// `init` of v10: logger, profiler.
pub type InitV10 = unsafe extern "C" fn(Option<LoggerFn>, Option<ProfilerFn>) -> RawResult;
/// `init` of v11 and v12: out context, communicator id, config, logger, profiler.
pub type InitV11 = unsafe extern "C" fn(
    VoidOut,
    u64,
    *mut CommConfig,
    Option<LoggerFn>,
    Option<ProfilerFn>,
) -> RawResult;
/// `devices`: out count.
pub type DevicesFn = unsafe extern "C" fn(*mut c_int) -> RawResult;
/// `getProperties`: device, out properties of that version.
pub type GetPropertiesFn<P> = unsafe extern "C" fn(c_int, *mut P) -> RawResult;
/// `listen` of v5 to v10: device, out handle, out listen comm.
pub type ListenV5 = unsafe extern "C" fn(c_int, Void, VoidOut) -> RawResult;
/// `listen` of v11 and v12: with the context first.
pub type ListenV11 = unsafe extern "C" fn(Void, c_int, Void, VoidOut) -> RawResult;
/// `connect` of v5 and v6: device, handle, out send comm.
pub type ConnectV5 = unsafe extern "C" fn(c_int, Void, VoidOut) -> RawResult;
/// `connect` of v7 to v9: and the device handle.
pub type ConnectV7 = unsafe extern "C" fn(c_int, Void, VoidOut, DeviceOut) -> RawResult;
/// `connect` of v10: and the config.
pub type ConnectV10 =
    unsafe extern "C" fn(c_int, *mut CommConfig, Void, VoidOut, DeviceOut) -> RawResult;
/// `connect` of v11 and v12: context, device, handle, out send comm, device handle.
pub type ConnectV11 = unsafe extern "C" fn(Void, c_int, Void, VoidOut, DeviceOut) -> RawResult;
/// `accept` of v5 and v6: listen comm, out receive comm.
pub type AcceptV5 = unsafe extern "C" fn(Void, VoidOut) -> RawResult;
/// `accept` of v7 to v12: and the device handle.
pub type AcceptV7 = unsafe extern "C" fn(Void, VoidOut, DeviceOut) -> RawResult;
/// `regMr` of v5 to v7: comm, data, bytes, memory type, out memory handle.
pub type RegMrV5 = unsafe extern "C" fn(Void, Void, c_int, c_int, VoidOut) -> RawResult;
/// `regMr` of v8 to v12.
pub type RegMrV8 = unsafe extern "C" fn(Void, Void, usize, c_int, VoidOut) -> RawResult;
/// `regMrDmaBuf`: comm, data, bytes, memory type, offset, fd, out memory handle.
pub type RegMrDmaBufFn =
    unsafe extern "C" fn(Void, Void, usize, c_int, u64, c_int, VoidOut) -> RawResult;
/// `deregMr`: comm, memory handle.
pub type DeregMrFn = unsafe extern "C" fn(Void, Void) -> RawResult;
/// `isend` of v5 to v8: comm, data, bytes, tag, memory handle, out request.
pub type IsendV5 = unsafe extern "C" fn(Void, Void, c_int, c_int, Void, VoidOut) -> RawResult;
/// `isend` of v9.
pub type IsendV9 = unsafe extern "C" fn(Void, Void, usize, c_int, Void, VoidOut) -> RawResult;
/// `isend` of v10 to v12: with a profiler handle before the request.
pub type IsendV10 =
    unsafe extern "C" fn(Void, Void, usize, c_int, Void, Void, VoidOut) -> RawResult;
/// `irecv` of v5 to v8: comm, n, buffers, sizes, tags, memory handles, out request.
pub type IrecvV5 = unsafe extern "C" fn(
    Void,
    c_int,
    VoidOut,
    *mut c_int,
    *mut c_int,
    VoidOut,
    VoidOut,
) -> RawResult;
/// `irecv` of v9.
pub type IrecvV9 = unsafe extern "C" fn(
    Void,
    c_int,
    VoidOut,
    *mut usize,
    *mut c_int,
    VoidOut,
    VoidOut,
) -> RawResult;
/// `irecv` of v10 to v12: with profiler handles before the request.
pub type IrecvV10 = unsafe extern "C" fn(
    Void,
    c_int,
    VoidOut,
    *mut usize,
    *mut c_int,
    VoidOut,
    VoidOut,
    VoidOut,
) -> RawResult;
/// `iflush`: comm, n, buffers, sizes, memory handles, out request.
pub type IflushFn =
    unsafe extern "C" fn(Void, c_int, VoidOut, *mut c_int, VoidOut, VoidOut) -> RawResult;
/// `test`: request, out done, out sizes.
pub type TestFn = unsafe extern "C" fn(Void, *mut c_int, *mut c_int) -> RawResult;
/// `closeSend`, `closeRecv`, `closeListen`: comm.
pub type CloseFn = unsafe extern "C" fn(Void) -> RawResult;
/// `getDeviceMr`: comm, memory handle, out device pointer.
pub type GetDeviceMrFn = unsafe extern "C" fn(Void, Void, VoidOut) -> RawResult;
/// `irecvConsumed`: comm, n, request.
pub type IrecvConsumedFn = unsafe extern "C" fn(Void, c_int, Void) -> RawResult;
/// `makeVDevice`: out device, properties.
pub type MakeVDeviceFn<P> = unsafe extern "C" fn(*mut c_int, *mut P) -> RawResult;
/// `finalize`: context.
pub type FinalizeFn = unsafe extern "C" fn(Void) -> RawResult;
/// `setNetAttr`: context, attributes.
pub type SetNetAttrFn = unsafe extern "C" fn(Void, *mut NetAttr) -> RawResult;

/// Defines one table, and checks the slot of every member.
macro_rules! table {
    ($(#[$meta:meta])* $table:ident, $bytes:literal {
        $($member:ident: $signature:ty,)*
    }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $table {
            /// Name of the network.
            pub name: *const c_char,
            $(
                #[doc = concat!("The table's `", stringify!($member), "`.")]
                pub $member: Option<$signature>,
            )*
        }

        impl $table {
            /// Functions that are null, in the order of the table, as this structure names them.
            pub fn missing(&self) -> Vec<&'static str> {
                let all = [$((self.$member.is_none(), stringify!($member))),*];
                let missing = all.into_iter().filter(|(missing, _)| *missing);
                missing.map(|(_, name)| name).collect()
            }
        }

        const _: () = assert!(size_of::<$table>() == $bytes);
        const _: () = {
            let members = [offset_of!($table, name), $(offset_of!($table, $member)),*];
            let mut slot = 0;
            while slot < members.len() {
                assert!(members[slot] == 8 * slot);
                slot += 1;
            }
        };

        // SAFETY: a table is immutable once built; its name points to a string that lives as long
        // as the library it stands in.
        unsafe impl Sync for $table {}
        // SAFETY: as above; nothing in it belongs to a thread.
        unsafe impl Send for $table {}
    };
}

/// Defines what follows from a version of the ABI, for all of them: [`AbiVersion`], the table with
/// the slot of every member checked, what a host reads of it ([`adapt`](crate::adapt)), and what a
/// plugin exports ([`export`](crate::export)).
macro_rules! versions {
    ($(
        $(#[$meta:meta])*
        $version:ident = $number:literal: $table:ident, $bytes:literal bytes {
            $init:ty, $properties:ty, $listen:ty, $connect:ty, $accept:ty, $reg_mr:ty, $isend:ty, $irecv:ty;
            $(dma_buf: $reg_mr_dma_buf:ident: $reg_mr_dma_buf_fn:ty;)?
            $(device_queue: $get_device_mr:ident: $get_device_mr_fn:ty, $irecv_consumed:ident: $irecv_consumed_fn:ty;)?
            $(virtual_devices: $make_v_device:ident: $make_v_device_fn:ty;)?
            $(contexts: $finalize:ident: $finalize_fn:ty, $set_net_attr:ident: $set_net_attr_fn:ty;)?
        }
    )*) => {
        /// A version of the ncclNet ABI that this crate speaks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum AbiVersion {
            $($(#[$meta])* $version = $number,)*
        }

        impl AbiVersion {
            /// All of them, newest first: the order of search.
            pub const ALL: [Self; [$($number),*].len()] = [$(Self::$version),*];

            /// The data symbol of the table.
            pub const fn symbol(self) -> &'static str {
                match self {
                    $(Self::$version => concat!("ncclNetPlugin_v", $number),)*
                }
            }

            /// The number.
            pub const fn number(self) -> u32 {
                self as u32
            }
        }

        /// The table that lies at an address.
        ///
        /// # Safety
        /// It is one of that version.
        pub(crate) unsafe fn read_table(version: AbiVersion, address: usize) -> Box<dyn ReadTable> {
            match version {
                $(AbiVersion::$version => {
                    let table = std::ptr::with_exposed_provenance::<$table>(address);
                    // SAFETY: forwarded. Volatile: a plugin writes to it, and may export it as
                    // such.
                    Box::new(unsafe { table.read_volatile() })
                })*
            }
        }

        /// The table that a plugin exports, for ever.
        #[cfg(test)]
        pub(crate) fn exported<P: Exported>(version: AbiVersion) -> usize {
            match version {
                $(AbiVersion::$version => {
                    let table = Box::leak(Box::new(<$table as Export<P>>::TABLE));
                    (&raw const *table).expose_provenance()
                })*
            }
        }

        $(
        table! { $(#[$meta])* $table, $bytes {
            init: $init,
            devices: DevicesFn,
            get_properties: GetPropertiesFn<$properties>,
            listen: $listen,
            connect: $connect,
            accept: $accept,
            reg_mr: $reg_mr,
            $($reg_mr_dma_buf: $reg_mr_dma_buf_fn,)?
            dereg_mr: DeregMrFn,
            isend: $isend,
            irecv: $irecv,
            iflush: IflushFn,
            test: TestFn,
            close_send: CloseFn,
            close_recv: CloseFn,
            close_listen: CloseFn,
            $($get_device_mr: $get_device_mr_fn, $irecv_consumed: $irecv_consumed_fn,)?
            $($make_v_device: $make_v_device_fn,)?
            $($finalize: $finalize_fn, $set_net_attr: $set_net_attr_fn,)?
        } }

        impl ReadTable for $table {
            fn start(&self) -> Result<Start, &'static str> {
                Ok(Start::new(self.name, self.init.ok_or("init")?.into()))
            }

            fn calls(&self, start: &Start, context: Void) -> Result<Calls, &'static str> {
                Ok(Calls {
                    name: self.name,
                    devices: self.devices.ok_or("devices")?,
                    get_properties: self.get_properties.ok_or("getProperties")?.into(),
                    listen: self.listen.ok_or("listen")?.into(),
                    connect: self.connect.ok_or("connect")?.into(),
                    accept: self.accept.ok_or("accept")?.into(),
                    reg_mr: self.reg_mr.ok_or("regMr")?.into(),
                    dereg_mr: self.dereg_mr.ok_or("deregMr")?,
                    isend: self.isend.ok_or("isend")?.into(),
                    irecv: self.irecv.ok_or("irecv")?.into(),
                    test: self.test.ok_or("test")?,
                    close_send: self.close_send.ok_or("closeSend")?,
                    close_recv: self.close_recv.ok_or("closeRecv")?,
                    close_listen: self.close_listen.ok_or("closeListen")?,
                    irecv_consumed: None$(.or(self.$irecv_consumed))?,
                    finalize: None$(.or(self.$finalize))?,
                    context,
                    config: start.config,
                })
            }

            fn missing(&self) -> Vec<&'static str> {
                $table::missing(self)
            }
        }

        impl<P: Exported> Export<P> for $table {
            const TABLE: Self = Self {
                name: P::NAME.as_ptr(),
                init: Some(<$init as Entry<P, adapt::Init>>::ENTRY),
                devices: Some(entries::devices::<P>),
                get_properties: Some(entries::get_properties::<P, $properties>),
                listen: Some(<$listen as Entry<P, adapt::Listen>>::ENTRY),
                connect: Some(<$connect as Entry<P, adapt::Connect>>::ENTRY),
                accept: Some(<$accept as Entry<P, adapt::Accept>>::ENTRY),
                reg_mr: Some(<$reg_mr as Entry<P, adapt::RegMr>>::ENTRY),
                $($reg_mr_dma_buf: Some(register::$reg_mr_dma_buf::<P>),)?
                dereg_mr: Some(register::dereg_mr::<P>),
                isend: Some(<$isend as Entry<P, adapt::Isend>>::ENTRY),
                irecv: Some(<$irecv as Entry<P, adapt::Irecv>>::ENTRY),
                iflush: Some(transfer::iflush::<P>),
                test: Some(transfer::test::<P>),
                close_send: Some(entries::close_send::<P>),
                close_recv: Some(entries::close_recv::<P>),
                close_listen: Some(entries::close_listen::<P>),
                // Receives lie where they were posted, and no device stands for others.
                $($get_device_mr: None, $irecv_consumed: None,)?
                $($make_v_device: None,)?
                $($finalize: Some(entries::$finalize), $set_net_attr: Some(entries::$set_net_attr),)?
            };
        }
        )*
    };
}

// The forms of init, getProperties, listen, connect, accept, regMr, isend and irecv, and what else
// the table has.
versions! {
    /// ncclNet v12: up to 8 devices behind one, rails and planes.
    V12 = 12: NetV12, 176 bytes {
        InitV11, RawPropertiesV12, ListenV11, ConnectV11, AcceptV7, RegMrV8, IsendV10, IrecvV10;
        dma_buf: reg_mr_dma_buf: RegMrDmaBufFn;
        device_queue: get_device_mr: GetDeviceMrFn, irecv_consumed: IrecvConsumedFn;
        virtual_devices: make_v_device: MakeVDeviceFn<RawVDeviceProps8>;
        contexts: finalize: FinalizeFn, set_net_attr: SetNetAttrFn;
    }
    /// ncclNet v11: adds a context per communicator, `finalize` and `setNetAttr`.
    V11 = 11: NetV11, 176 bytes {
        InitV11, RawPropertiesV11, ListenV11, ConnectV11, AcceptV7, RegMrV8, IsendV10, IrecvV10;
        dma_buf: reg_mr_dma_buf: RegMrDmaBufFn;
        device_queue: get_device_mr: GetDeviceMrFn, irecv_consumed: IrecvConsumedFn;
        virtual_devices: make_v_device: MakeVDeviceFn<RawVDeviceProps4>;
        contexts: finalize: FinalizeFn, set_net_attr: SetNetAttrFn;
    }
    /// ncclNet v10: adds profiler handles and a config for `connect`.
    V10 = 10: NetV10, 160 bytes {
        InitV10, RawPropertiesV9, ListenV5, ConnectV10, AcceptV7, RegMrV8, IsendV10, IrecvV10;
        dma_buf: reg_mr_dma_buf: RegMrDmaBufFn;
        device_queue: get_device_mr: GetDeviceMrFn, irecv_consumed: IrecvConsumedFn;
        virtual_devices: make_v_device: MakeVDeviceFn<RawVDeviceProps4>;
    }
    /// ncclNet v9: sends and receives `size_t` bytes, adds `makeVDevice`.
    V9 = 9: NetV9, 160 bytes {
        InitV5, RawPropertiesV9, ListenV5, ConnectV7, AcceptV7, RegMrV8, IsendV9, IrecvV9;
        dma_buf: reg_mr_dma_buf: RegMrDmaBufFn;
        device_queue: get_device_mr: GetDeviceMrFn, irecv_consumed: IrecvConsumedFn;
        virtual_devices: make_v_device: MakeVDeviceFn<RawVDeviceProps4>;
    }
    /// ncclNet v8: registers `size_t` bytes.
    V8 = 8: NetV8, 152 bytes {
        InitV5, RawPropertiesV8, ListenV5, ConnectV7, AcceptV7, RegMrV8, IsendV5, IrecvV5;
        dma_buf: reg_mr_dma_buf: RegMrDmaBufFn;
        device_queue: get_device_mr: GetDeviceMrFn, irecv_consumed: IrecvConsumedFn;
    }
    /// ncclNet v7: adds device handles, `getDeviceMr` and `irecvConsumed`.
    V7 = 7: NetV7, 152 bytes {
        InitV5, RawPropertiesV7, ListenV5, ConnectV7, AcceptV7, RegMrV5, IsendV5, IrecvV5;
        dma_buf: reg_mr_dma_buf: RegMrDmaBufFn;
        device_queue: get_device_mr: GetDeviceMrFn, irecv_consumed: IrecvConsumedFn;
    }
    /// ncclNet v6: adds `regMrDmaBuf`.
    V6 = 6: NetV6, 136 bytes {
        InitV5, RawPropertiesV6, ListenV5, ConnectV5, AcceptV5, RegMrV5, IsendV5, IrecvV5;
        dma_buf: reg_mr_dma_buf: RegMrDmaBufFn;
    }
    /// ncclNet v5: no dma-buf registration.
    V5 = 5: NetV5, 128 bytes {
        InitV5, RawPropertiesV6, ListenV5, ConnectV5, AcceptV5, RegMrV5, IsendV5, IrecvV5;
    }
}

impl fmt::Display for AbiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.number())
    }
}
