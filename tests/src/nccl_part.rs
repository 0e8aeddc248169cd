//! NCCL's part: the calls that NCCL makes of a network plugin, through the bare table of any
//! version.

#![expect(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "tests pass what the plugin gave them, each used within its life"
)]

use std::ffi::{c_int, c_void};
use std::ptr;

use nccl_net::device::RawDeviceHandle;
use nccl_net::tables::{
    CommAttr, CommConfig, NetAttr, NetV6, NetV7, NetV8, NetV9, NetV10, NetV11, NetV12,
};

use crate::plugin_file;

/// What an opaque pointer of the plugin is to NCCL.
pub type Opaque = *mut c_void;

/// The calls whose form is the same in every version, or made so.
pub trait Calls {
    /// Starts the plugin for one communicator and gives its context.
    fn init(&self) -> (c_int, Opaque);
    /// Number of devices.
    fn devices(&self) -> (c_int, c_int);
    /// Properties of a device.
    fn properties(&self, dev: c_int) -> (c_int, Facts);
    /// Listens; fills the handle.
    fn listen(&self, context: Opaque, handle: &mut [u8; 128]) -> (c_int, Opaque);
    /// Polls a connect with the handle's buffer.
    fn connect(&self, context: Opaque, handle: &mut [u8; 128]) -> (c_int, Opaque);
    /// Polls an accept; asks for no device queue.
    fn accept(&self, listen: Opaque) -> (c_int, Opaque);
    /// Registers memory of type `kind`.
    fn reg_mr(&self, comm: Opaque, data: &mut [u8], kind: c_int) -> (c_int, Opaque);
    /// Registers by dma-buf.
    fn reg_mr_dma_buf(&self, comm: Opaque, data: &mut [u8], fd: c_int) -> (c_int, Opaque);
    /// Gives a registration back.
    fn dereg_mr(&self, comm: Opaque, memory: Opaque) -> c_int;
    /// Posts a send of the first `len` bytes at `data`.
    fn isend(&self, comm: Opaque, data: *mut u8, len: usize, memory: Opaque) -> (c_int, Opaque);
    /// Posts a receive; `*request` holds `before` when the call is made.
    fn irecv(
        &self,
        comm: Opaque,
        data: *mut u8,
        len: usize,
        memory: Opaque,
        before: Opaque,
    ) -> (c_int, Opaque);
    /// Tests a request: result, done, size.
    fn test(&self, request: Opaque) -> (c_int, c_int, c_int);
    /// The device form of a registration; `None` where the table has no such call.
    fn device_mr(&self, comm: Opaque, memory: Opaque) -> Option<c_int>;
    /// Says that a receive was consumed; `None` where the table has no such call.
    fn consumed(&self, comm: Opaque, request: Opaque) -> Option<c_int>;
    /// Closes a send comm.
    fn close_send(&self, comm: Opaque) -> c_int;
    /// Closes a receive comm.
    fn close_recv(&self, comm: Opaque) -> c_int;
    /// Closes a listen comm.
    fn close_listen(&self, comm: Opaque) -> c_int;
    /// Announces what is to come, then ends the use of a context; 0 where the table has neither.
    fn finalize(&self, context: Opaque) -> c_int;
}

/// What NCCL reads of the properties, with the value it assumes where the version lacks the field.
#[derive(Debug)]
pub struct Facts {
    /// `PTR_*` bits.
    pub pointers: c_int,
    /// Registrations belong to no comm.
    pub global: c_int,
    /// Device receives need a flush.
    pub flush: c_int,
    /// Most receives in a group.
    pub max_recvs: c_int,
    /// Device type and version.
    pub device: (c_int, c_int),
    /// Devices behind this one: number and first.
    pub behind: (c_int, c_int),
    /// Largest transfers, point to point and collective.
    pub largest: (usize, usize),
    /// Most requests in one.
    pub multi: c_int,
    /// Rail and plane.
    pub place: (i16, i16),
}

const ASSUMED: Facts = Facts {
    pointers: 0,
    global: 0,
    flush: 0,
    max_recvs: 0,
    device: (0, 0),
    behind: (1, 0),
    largest: (1 << 30, 1 << 30),
    multi: 1,
    place: (-1, -1),
};

macro_rules! calls {
    ($table:ident, init $init:tt, context $context:tt, connect $connect:tt, accept $accept:tt,
     register $register:ty, size $size:ty, profiler $profiler:tt, queue $queue:tt,
     end $end:tt, facts { $($fact:ident: |$raw:ident| $value:expr,)* }) => {
        impl Calls for $table {
            fn init(&self) -> (c_int, Opaque) {
                let context = ptr::null_mut();
                let call = self.init.expect("init");
                // SAFETY: out pointers of this frame, no callbacks.
                unsafe { calls!(@init $init, call, context) }
            }
            fn devices(&self) -> (c_int, c_int) {
                let mut count = -7;
                // SAFETY: an out pointer.
                let rc = unsafe { self.devices.expect("devices")(&raw mut count) };
                (rc, count)
            }
            fn properties(&self, dev: c_int) -> (c_int, Facts) {
                // SAFETY: the properties are integers and nullable pointers.
                let mut raw = unsafe { std::mem::zeroed() };
                // SAFETY: an out pointer.
                let rc = unsafe { self.get_properties.expect("getProperties")(dev, &raw mut raw) };
                if rc == 0 {
                    assert!(!raw.name.is_null() && raw.speed > 0 && raw.max_comms > 0);
                }
                let mut facts = ASSUMED;
                facts.pointers = raw.ptr_support;
                facts.max_recvs = raw.max_recvs;
                $(facts.$fact = { let $raw = &raw; $value };)*
                (rc, facts)
            }
            fn listen(&self, context: Opaque, handle: &mut [u8; 128]) -> (c_int, Opaque) {
                let mut comm = ptr::null_mut();
                let handle = handle.as_mut_ptr().cast();
                let call = self.listen.expect("listen");
                // SAFETY: 128 bytes, an out pointer, a context of ours.
                let rc = unsafe { calls!(@listen $context, call, context, handle, comm) };
                (rc, comm)
            }
            fn connect(&self, context: Opaque, handle: &mut [u8; 128]) -> (c_int, Opaque) {
                let mut comm = ptr::null_mut();
                let handle = handle.as_mut_ptr().cast();
                let call = self.connect.expect("connect");
                let _ = context;
                // SAFETY: as for `listen`; NCCL passes the address of a NULL device handle.
                let rc = unsafe { calls!(@connect $connect, call, context, handle, comm) };
                (rc, comm)
            }
            fn accept(&self, listen: Opaque) -> (c_int, Opaque) {
                let mut comm = ptr::null_mut();
                let call = self.accept.expect("accept");
                // SAFETY: a listen comm of ours, out pointers.
                let rc = unsafe { calls!(@accept $accept, call, listen, comm) };
                (rc, comm)
            }
            fn reg_mr(&self, comm: Opaque, data: &mut [u8], kind: c_int) -> (c_int, Opaque) {
                let mut memory = ptr::null_mut();
                let len = <$register>::try_from(data.len()).expect("a size that the table takes");
                let start = data.as_mut_ptr().cast();
                // SAFETY: memory that outlives its registration, by the callers below.
                let rc = unsafe { self.reg_mr.expect("regMr")(comm, start, len, kind, &raw mut memory) };
                (rc, memory)
            }
            fn reg_mr_dma_buf(&self, comm: Opaque, data: &mut [u8], fd: c_int) -> (c_int, Opaque) {
                let mut memory = ptr::null_mut();
                let (start, len) = (data.as_mut_ptr().cast(), data.len());
                let call = self.reg_mr_dma_buf.expect("regMrDmaBuf");
                // SAFETY: as above; the descriptor is open.
                let rc = unsafe { call(comm, start, len, 2, 0, fd, &raw mut memory) };
                (rc, memory)
            }
            fn dereg_mr(&self, comm: Opaque, memory: Opaque) -> c_int {
                // SAFETY: an open comm and a registration that is not used again.
                unsafe { self.dereg_mr.expect("deregMr")(comm, memory) }
            }
            fn isend(&self, comm: Opaque, data: *mut u8, len: usize, memory: Opaque) -> (c_int, Opaque) {
                let mut request = ptr::without_provenance_mut(1);
                let len = <$size>::try_from(len).expect("a size that the table takes");
                let call = self.isend.expect("isend");
                // SAFETY: registered memory, out pointers.
                let rc = unsafe { calls!(@isend $profiler, call, comm, data.cast(), len, memory, request) };
                (rc, request)
            }
            fn irecv(&self, comm: Opaque, data: *mut u8, len: usize, memory: Opaque, before: Opaque) -> (c_int, Opaque) {
                let mut request = before;
                let mut len = <$size>::try_from(len).expect("a size that the table takes");
                let (mut data, mut memory, mut tag): (Opaque, Opaque, c_int) = (data.cast(), memory, 3);
                let call = self.irecv.expect("irecv");
                // SAFETY: arrays of one element, registered memory, out pointers.
                let rc = unsafe { calls!(@irecv $profiler, call, comm, data, len, tag, memory, request) };
                (rc, request)
            }
            fn test(&self, request: Opaque) -> (c_int, c_int, c_int) {
                let (mut done, mut size) = (-7, 0);
                // SAFETY: a request of an open comm, out pointers.
                let rc = unsafe { self.test.expect("test")(request, &raw mut done, &raw mut size) };
                (rc, done, size)
            }
            fn device_mr(&self, comm: Opaque, memory: Opaque) -> Option<c_int> {
                let _ = (comm, memory);
                calls!(@queue $queue, {
                    let mut device = ptr::null_mut();
                    // SAFETY: an open comm and a registration of it.
                    self.get_device_mr.map(|call| unsafe { call(comm, memory, &raw mut device) })
                })
            }
            fn consumed(&self, comm: Opaque, request: Opaque) -> Option<c_int> {
                let _ = (comm, request);
                calls!(@queue $queue, {
                    // SAFETY: an open comm and one of its requests.
                    self.irecv_consumed.map(|call| unsafe { call(comm, 1, request) })
                })
            }
            fn close_send(&self, comm: Opaque) -> c_int {
                // SAFETY: a comm that is not used again.
                unsafe { self.close_send.expect("closeSend")(comm) }
            }
            fn close_recv(&self, comm: Opaque) -> c_int {
                // SAFETY: a comm that is not used again.
                unsafe { self.close_recv.expect("closeRecv")(comm) }
            }
            fn close_listen(&self, comm: Opaque) -> c_int {
                // SAFETY: a comm that is not used again.
                unsafe { self.close_listen.expect("closeListen")(comm) }
            }
            fn finalize(&self, context: Opaque) -> c_int {
                let _ = context;
                calls!(@end $end, self, context)
            }
        }
    };
    (@init plain, $call:ident, $context:ident) => { ($call(None), $context) };
    (@init profiler, $call:ident, $context:ident) => { ($call(None, None), $context) };
    (@init context, $call:ident, $context:ident) => {{
        let mut config = CommConfig { traffic_class: -1 };
        let mut made: Opaque = $context;
        let rc = $call(&raw mut made, 7, &raw mut config, None, None);
        (rc, made)
    }};
    (@listen no, $call:ident, $context:ident, $handle:ident, $comm:ident) => {{
        let _ = $context;
        $call(0, $handle, &raw mut $comm)
    }};
    (@listen yes, $call:ident, $context:ident, $handle:ident, $comm:ident) => {
        $call($context, 0, $handle, &raw mut $comm)
    };
    (@connect plain, $call:ident, $context:ident, $handle:ident, $comm:ident) => {
        $call(0, $handle, &raw mut $comm)
    };
    (@connect device, $call:ident, $context:ident, $handle:ident, $comm:ident) => {{
        let mut device: *mut RawDeviceHandle = ptr::null_mut();
        $call(0, $handle, &raw mut $comm, &raw mut device)
    }};
    (@connect config, $call:ident, $context:ident, $handle:ident, $comm:ident) => {{
        let mut device: *mut RawDeviceHandle = ptr::null_mut();
        let mut config = CommConfig { traffic_class: -1 };
        $call(0, &raw mut config, $handle, &raw mut $comm, &raw mut device)
    }};
    (@connect context, $call:ident, $context:ident, $handle:ident, $comm:ident) => {{
        let mut device: *mut RawDeviceHandle = ptr::null_mut();
        $call($context, 0, $handle, &raw mut $comm, &raw mut device)
    }};
    (@accept plain, $call:ident, $listen:ident, $comm:ident) => { $call($listen, &raw mut $comm) };
    (@accept device, $call:ident, $listen:ident, $comm:ident) => {{
        let mut device: *mut RawDeviceHandle = ptr::null_mut();
        $call($listen, &raw mut $comm, &raw mut device)
    }};
    (@isend no, $call:ident, $comm:expr, $data:expr, $len:expr, $memory:expr, $request:ident) => {
        $call($comm, $data, $len, 3, $memory, &raw mut $request)
    };
    (@isend yes, $call:ident, $comm:expr, $data:expr, $len:expr, $memory:expr, $request:ident) => {
        $call($comm, $data, $len, 3, $memory, ptr::null_mut(), &raw mut $request)
    };
    (@irecv no, $call:ident, $comm:ident, $data:ident, $len:ident, $tag:ident, $memory:ident, $request:ident) => {
        $call($comm, 1, &raw mut $data, &raw mut $len, &raw mut $tag, &raw mut $memory, &raw mut $request)
    };
    (@irecv yes, $call:ident, $comm:ident, $data:ident, $len:ident, $tag:ident, $memory:ident, $request:ident) => {{
        let mut profiler: Opaque = ptr::null_mut();
        $call($comm, 1, &raw mut $data, &raw mut $len, &raw mut $tag, &raw mut $memory, &raw mut profiler, &raw mut $request)
    }};
    (@queue no, $body:expr) => { None };
    (@queue yes, $body:expr) => { $body };
    (@end no, $table:ident, $context:ident) => { 0 };
    (@end yes, $table:ident, $context:ident) => {{
        const PEERS: CommAttr = CommAttr {
            max_concurrent_peers: 1,
            min_concurrent_peers: 1,
            max_flows_per_peer: 2,
            min_flows_per_peer: 1,
        };
        let mut attributes = NetAttr { send: PEERS, recv: PEERS, op: 4, algo: u32::MAX, proto: 2 };
        // SAFETY: a context that init gave and that is not used again.
        unsafe {
            match $table.set_net_attr.expect("setNetAttr")($context, &raw mut attributes) {
                0 => $table.finalize.expect("finalize")($context),
                rc => rc,
            }
        }
    }};
}

calls!(NetV6, init plain, context no, connect plain, accept plain, register c_int, size c_int,
    profiler no, queue no, end no, facts {});
calls!(NetV7, init plain, context no, connect device, accept device, register c_int, size c_int,
profiler no, queue yes, end no, facts {
    device: |raw| (raw.net_device_type, raw.net_device_version),
});
calls!(NetV8, init plain, context no, connect device, accept device, register usize, size c_int,
profiler no, queue yes, end no, facts {
    device: |raw| (raw.net_device_type, raw.net_device_version),
    global: |raw| raw.reg_is_global,
});
calls!(NetV9, init plain, context no, connect device, accept device, register usize, size usize,
profiler no, queue yes, end no, facts {
    device: |raw| (raw.net_device_type, raw.net_device_version),
    global: |raw| raw.reg_is_global,
    flush: |raw| raw.force_flush,
    behind: |raw| (raw.v_props.ndevs, raw.v_props.devs[0]),
    largest: |raw| (raw.max_p2p_bytes, raw.max_coll_bytes),
});
calls!(NetV10, init profiler, context no, connect config, accept device, register usize, size usize,
profiler yes, queue yes, end no, facts {
    device: |raw| (raw.net_device_type, raw.net_device_version),
    global: |raw| raw.reg_is_global,
    flush: |raw| raw.force_flush,
    behind: |raw| (raw.v_props.ndevs, raw.v_props.devs[0]),
    largest: |raw| (raw.max_p2p_bytes, raw.max_coll_bytes),
});
calls!(NetV11, init context, context yes, connect context, accept device, register usize, size usize,
profiler yes, queue yes, end yes, facts {
    device: |raw| (raw.net_device_type, raw.net_device_version),
    global: |raw| raw.reg_is_global,
    flush: |raw| raw.force_flush,
    behind: |raw| (raw.v_props.ndevs, raw.v_props.devs[0]),
    largest: |raw| (raw.max_p2p_bytes, raw.max_coll_bytes),
    multi: |raw| raw.max_multi_request_size,
});
calls!(NetV12, init context, context yes, connect context, accept device, register usize, size usize,
profiler yes, queue yes, end yes, facts {
    device: |raw| (raw.net_device_type, raw.net_device_version),
    global: |raw| raw.reg_is_global,
    flush: |raw| raw.force_flush,
    behind: |raw| (raw.v_props.ndevs, raw.v_props.devs[0]),
    largest: |raw| (raw.max_p2p_bytes, raw.max_coll_bytes),
    multi: |raw| raw.max_multi_request_size,
    place: |raw| (raw.rail_id, raw.plane_id),
});

/// The table of our plugin file for a version between 6 and 12.
pub fn table(version: u32) -> Box<dyn Calls> {
    // SAFETY: each symbol of our plugin is a table of its version.
    unsafe {
        match version {
            6 => Box::new(plugin_file::raw_table_at::<NetV6>(c"ncclNetPlugin_v6")),
            7 => Box::new(plugin_file::raw_table_at::<NetV7>(c"ncclNetPlugin_v7")),
            8 => Box::new(plugin_file::raw_table_at::<NetV8>(c"ncclNetPlugin_v8")),
            9 => Box::new(plugin_file::raw_table_at::<NetV9>(c"ncclNetPlugin_v9")),
            10 => Box::new(plugin_file::raw_table_at::<NetV10>(c"ncclNetPlugin_v10")),
            11 => Box::new(plugin_file::raw_table_at::<NetV11>(c"ncclNetPlugin_v11")),
            12 => Box::new(plugin_file::raw_table_at::<NetV12>(c"ncclNetPlugin_v12")),
            other => panic!("no table v{other}"),
        }
    }
}
