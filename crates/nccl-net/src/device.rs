//! Layouts shared with code on the device: the device handle and the unpack queue.

use std::ffi::{c_int, c_void};
use std::mem::{align_of, offset_of, size_of};

use crate::constants::{UNPACK_QUEUE_DEPTH, UNPACK_SLOT_ENTRIES};

/// `ncclNetDeviceHandle` (v7 to v12): what `accept` fills for device offload.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawDeviceHandle {
    /// One of the `NET_DEVICE_*` types.
    pub net_device_type: c_int,
    /// Layout version of what `handle` points to.
    pub net_device_version: c_int,
    /// Device address of the plugin's structure.
    pub handle: *mut c_void,
    /// Bytes at `handle`.
    pub size: usize,
    /// Non-zero when `test` must go on being called for the queue to advance.
    pub needs_proxy_progress: c_int,
}

const _: () = assert!(size_of::<RawDeviceHandle>() == 32);
const _: () = assert!(offset_of!(RawDeviceHandle, net_device_version) == 4);
const _: () = assert!(offset_of!(RawDeviceHandle, handle) == 8);
const _: () = assert!(offset_of!(RawDeviceHandle, size) == 16);
const _: () = assert!(offset_of!(RawDeviceHandle, needs_proxy_progress) == 24);

impl RawDeviceHandle {
    /// An empty handle with type and version filled in, as a host passes it to `accept`.
    pub const fn request(net_device_type: c_int, net_device_version: c_int) -> Self {
        Self {
            net_device_type,
            net_device_version,
            handle: std::ptr::null_mut(),
            size: 0,
            needs_proxy_progress: 0,
        }
    }
}

/// One fragment of a received message: `loadMeta` of the device-unpack ABI.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadMeta {
    /// Offset of the fragment in the bounce buffer, in bytes.
    pub src_off: u32,
    /// Length in bytes.
    pub len: u32,
    /// Offset from the start of the posted buffer, in bytes.
    pub dst_off: u64,
}

const _: () = assert!(size_of::<LoadMeta>() == 16 && align_of::<LoadMeta>() == 16);
const _: () = assert!(offset_of!(LoadMeta, src_off) == 0);
const _: () = assert!(offset_of!(LoadMeta, len) == 4);
const _: () = assert!(offset_of!(LoadMeta, dst_off) == 8);

/// The unpack queue: 16 slots of up to 2048 fragments, then the fragment count of each slot.
///
/// Host and device (and two threads of the host) look at it at once, so it is only reached
/// through [`crate::UnpackQueue`], never by reference.
#[repr(C)]
#[derive(Debug)]
pub struct NetUnpackMeta {
    /// Fragments by slot.
    pub mem: [[LoadMeta; UNPACK_SLOT_ENTRIES]; UNPACK_QUEUE_DEPTH],
    /// Fragments in each slot.
    pub cnt: [u64; UNPACK_QUEUE_DEPTH],
}

const _: () = assert!(size_of::<NetUnpackMeta>() == 524_416);
const _: () = assert!(offset_of!(NetUnpackMeta, mem) == 0);
const _: () = assert!(offset_of!(NetUnpackMeta, cnt) == 524_288);

/// What the handle of an UNPACK device points to, in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UnpackNetDeviceHandle {
    /// Device address of the [`NetUnpackMeta`].
    pub meta: *mut NetUnpackMeta,
    /// Device address of the bounce buffer that `src_off` counts from.
    pub bounce_buf: *mut c_void,
    /// Queue position; starts at `u64::MAX` because the consumer steps before it reads.
    pub head: u64,
}

const _: () = assert!(size_of::<UnpackNetDeviceHandle>() == 24);
const _: () = assert!(offset_of!(UnpackNetDeviceHandle, meta) == 0);
const _: () = assert!(offset_of!(UnpackNetDeviceHandle, bounce_buf) == 8);
const _: () = assert!(offset_of!(UnpackNetDeviceHandle, head) == 16);
