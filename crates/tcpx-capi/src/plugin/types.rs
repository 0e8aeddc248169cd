//! Types of the header.
#![expect(non_camel_case_types, reason = "these are the names in C")]

use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;

/// Registration: host memory.
pub const TCPX_PTR_HOST: c_int = 1;
/// Registration: CUDA device memory, or the host memory that a plugin takes for it.
pub const TCPX_PTR_CUDA: c_int = 2;
/// Bytes of a connection handle.
pub const TCPX_HANDLE_BYTES: usize = 128;
/// A size that the plugin did not tell.
pub const TCPX_SIZE_UNKNOWN: i64 = -1;
/// Most requests in flight, and most receives not consumed, on one comm.
pub const TCPX_MAX_REQUESTS: usize = 16;

/// A listening comm: good for one accept.
#[derive(Debug)]
pub struct tcpx_listen_comm(());
/// The sending end of a connection.
#[derive(Debug)]
pub struct tcpx_send_comm(());
/// The receiving end of a connection.
#[derive(Debug)]
pub struct tcpx_recv_comm(());
/// Memory registered on one comm.
#[derive(Debug)]
pub struct tcpx_memory(());
/// A send or receive under way.
#[derive(Debug)]
pub struct tcpx_request(());

/// What tcpx_listen writes and the peer's tcpx_connect_v5 reads. Carry the bytes as they are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_handle {
    /// Opaque.
    pub bytes: [u8; TCPX_HANDLE_BYTES],
}

/// Properties of a device of the plugin. Strings are valid for ever.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_net_properties {
    /// Name, usually of the interface. Never NULL.
    pub name: *const c_char,
    /// Path of the PCI device in sysfs; NULL if there is none.
    pub pci_path: *const c_char,
    /// Identity of the NIC.
    pub guid: u64,
    /// TCPX_PTR_HOST and TCPX_PTR_CUDA, as bits.
    pub ptr_support: c_int,
    /// Megabits a second.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Microseconds.
    pub latency: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives in one tcpx_irecv that the plugin would take; this library takes 1.
    pub max_recvs: c_int,
    /// 0: receives land flat. 1: receives into device memory leave descriptors.
    pub net_device_type: c_int,
    /// Version of the device queue's layout; 7 is the one in use.
    pub net_device_version: c_int,
}

/// The plugin's device queue of a receive comm, for code that reads it on the GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_device_handle {
    /// 1: the queue with descriptors.
    pub net_device_type: c_int,
    /// Version of its layout.
    pub net_device_version: c_int,
    /// Device address of the plugin's structure.
    pub handle: *mut c_void,
    /// Bytes there.
    pub size: usize,
    /// Not 0: tests must go on for the queue to advance.
    pub needs_proxy_progress: c_int,
}

/// One piece of a received message: `len` bytes from `src_off` in the pool to `dst_off` in the
/// posted buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct tcpx_descriptor {
    /// Offset in the pool, in bytes.
    pub src_off: u32,
    /// Bytes; at least 1.
    pub len: u32,
    /// Offset in the posted buffer, in bytes.
    pub dst_off: u64,
}

/// What became of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct tcpx_completion {
    /// Bytes received or sent. TCPX_SIZE_UNKNOWN for a receive in place whose plugin does not say
    /// (Google's never does): the peer must have told you.
    pub size: i64,
    /// Pieces to move from the pool to the posted buffer; NULL when the bytes lie in place or there
    /// are none. Valid until tcpx_irecv_consumed or the close of the comm.
    ///
    /// They are checked: inside the pool and inside the posted buffer, without overlap, `size`
    /// bytes together, neighbours merged, in the order of `dst_off`.
    pub descriptors: *const tcpx_descriptor,
    /// How many.
    pub count: usize,
    /// First byte of the pool, in device memory or in the host memory that stands in for it; NULL
    /// beside no descriptors.
    pub pool: *const c_void,
    /// Bytes of the pool.
    pub pool_bytes: usize,
}

const _: () = assert!(size_of::<tcpx_descriptor>() == size_of::<tcpx_wire::Descriptor>());
const _: () = assert!(size_of::<tcpx_device_handle>() == 32 && size_of::<tcpx_handle>() == 128);
