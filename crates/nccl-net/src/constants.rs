//! Numbers of the ncclNet ABI that both sides of it must agree on.

use std::ffi::{c_int, c_ulong};

/// Bytes of the opaque handle that `listen` fills and `connect` reads.
pub const HANDLE_BYTES: usize = 128;

/// `ptrSupport` and registration type: host memory.
pub const PTR_HOST: c_int = 1;
/// `ptrSupport` and registration type: CUDA device memory.
pub const PTR_CUDA: c_int = 2;
/// `ptrSupport`: memory named by a dma-buf file descriptor.
pub const PTR_DMABUF: c_int = 4;

/// `netDeviceType`: data arrives flat, nothing runs on the device.
pub const NET_DEVICE_HOST: c_int = 0;
/// `netDeviceType`: received fragments wait in a queue and the device gathers them.
pub const NET_DEVICE_UNPACK: c_int = 1;
/// The one version of the device-unpack layouts in use.
pub const NET_DEVICE_UNPACK_VERSION: c_int = 7;

/// Queue slots of a device-unpack queue; a receive takes one, in order.
pub const UNPACK_QUEUE_DEPTH: usize = 16;
/// Fragments that one queue slot can hold.
pub const UNPACK_SLOT_ENTRIES: usize = 2048;
/// Most bytes that one receive of a device-unpack plugin may carry.
pub const UNPACK_MAX_RECEIVE_BYTES: usize = 4 << 20;

/// Requests that Google's plugin holds per comm; one more is an error, not a "not now".
pub const MAX_REQUESTS_PER_COMM: usize = 16;
/// Requests per comm that a current NCCL may keep in flight.
pub const NCCL_MAX_REQUESTS: usize = 32;

/// Largest single message that NCCL hands to a plugin of version 8 or older, in bytes.
pub const MAX_NET_BYTES: usize = 1 << 30;

/// `trafficClass` when none was asked for.
pub const TRAFFIC_CLASS_UNDEFINED: c_int = -1;

/// Logger levels.
pub mod level {
    use super::c_int;
    /// Nothing is logged.
    pub const NONE: c_int = 0;
    /// Version banner.
    pub const VERSION: c_int = 1;
    /// Warnings and errors.
    pub const WARN: c_int = 2;
    /// Information.
    pub const INFO: c_int = 3;
    /// Last words before an abort.
    pub const ABORT: c_int = 4;
    /// Traces.
    pub const TRACE: c_int = 5;
}

/// Logger subsystem bits.
pub mod subsystem {
    use super::c_ulong;
    /// Initialisation.
    pub const INIT: c_ulong = 1;
    /// Choices of algorithms.
    pub const TUNING: c_ulong = 64;
    /// Networks.
    pub const NET: c_ulong = 16;
    /// Every subsystem.
    pub const ALL: c_ulong = c_ulong::MAX;
}
