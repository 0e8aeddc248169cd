//! `ncclNetProperties` as each version lays it out.
//!
//! Every size and offset is checked when this file is compiled.

use std::ffi::{c_char, c_int};
use std::mem::{offset_of, size_of};

/// `ncclNetVDeviceProps` of v9 to v11.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawVDeviceProps4 {
    /// Devices in use.
    pub ndevs: c_int,
    /// Their indices.
    pub devs: [c_int; 4],
}

/// `ncclNetVDeviceProps` of v12.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawVDeviceProps8 {
    /// Devices in use.
    pub ndevs: c_int,
    /// Their indices.
    pub devs: [c_int; 8],
}

const _: () = assert!(size_of::<RawVDeviceProps4>() == 20);
const _: () = assert!(size_of::<RawVDeviceProps8>() == 36);

/// An all-zero value of a properties struct, the form in which a host hands it to the plugin.
///
/// # Safety
/// Implement it only for `repr(C)` structs for which all-zero bytes are a value.
pub(crate) unsafe trait Zeroed: Sized {
    fn zeroed() -> Self {
        // SAFETY: the implementor promises that all-zero bytes are a value of the type.
        unsafe { std::mem::zeroed() }
    }
}

/// Properties of ncclNet v5 and v6.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawPropertiesV6 {
    /// Name for logs.
    pub name: *const c_char,
    /// sysfs path of the PCI device; may be NULL.
    pub pci_path: *const c_char,
    /// Identity of the NIC chip.
    pub guid: u64,
    /// `PTR_*` bits.
    pub ptr_support: c_int,
    /// Port speed in Mb/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives grouped in one call.
    pub max_recvs: c_int,
}

const _: () = assert!(size_of::<RawPropertiesV6>() == 48);
const _: () = assert!(
    offset_of!(RawPropertiesV6, name) == 0
        && offset_of!(RawPropertiesV6, pci_path) == 8
        && offset_of!(RawPropertiesV6, guid) == 16
        && offset_of!(RawPropertiesV6, ptr_support) == 24
        && offset_of!(RawPropertiesV6, speed) == 28
        && offset_of!(RawPropertiesV6, port) == 32
        && offset_of!(RawPropertiesV6, latency) == 36
        && offset_of!(RawPropertiesV6, max_comms) == 40
        && offset_of!(RawPropertiesV6, max_recvs) == 44
);
// SAFETY: integers, floats and nullable raw pointers only.
unsafe impl Zeroed for RawPropertiesV6 {}

/// Properties of ncclNet v7.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawPropertiesV7 {
    /// Name for logs.
    pub name: *const c_char,
    /// sysfs path of the PCI device; may be NULL.
    pub pci_path: *const c_char,
    /// Identity of the NIC chip.
    pub guid: u64,
    /// `PTR_*` bits.
    pub ptr_support: c_int,
    /// Port speed in Mb/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives grouped in one call.
    pub max_recvs: c_int,
    /// `NET_DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of the device layouts.
    pub net_device_version: c_int,
}

const _: () = assert!(size_of::<RawPropertiesV7>() == 56);
const _: () = assert!(
    offset_of!(RawPropertiesV7, name) == 0
        && offset_of!(RawPropertiesV7, pci_path) == 8
        && offset_of!(RawPropertiesV7, guid) == 16
        && offset_of!(RawPropertiesV7, ptr_support) == 24
        && offset_of!(RawPropertiesV7, speed) == 28
        && offset_of!(RawPropertiesV7, port) == 32
        && offset_of!(RawPropertiesV7, latency) == 36
        && offset_of!(RawPropertiesV7, max_comms) == 40
        && offset_of!(RawPropertiesV7, max_recvs) == 44
        && offset_of!(RawPropertiesV7, net_device_type) == 48
        && offset_of!(RawPropertiesV7, net_device_version) == 52
);
// SAFETY: integers, floats and nullable raw pointers only.
unsafe impl Zeroed for RawPropertiesV7 {}

/// Properties of ncclNet v8.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawPropertiesV8 {
    /// Name for logs.
    pub name: *const c_char,
    /// sysfs path of the PCI device; may be NULL.
    pub pci_path: *const c_char,
    /// Identity of the NIC chip.
    pub guid: u64,
    /// `PTR_*` bits.
    pub ptr_support: c_int,
    /// Registration is not tied to a comm.
    pub reg_is_global: c_int,
    /// Port speed in Mb/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives grouped in one call.
    pub max_recvs: c_int,
    /// `NET_DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of the device layouts.
    pub net_device_version: c_int,
}

const _: () = assert!(size_of::<RawPropertiesV8>() == 64);
const _: () = assert!(
    offset_of!(RawPropertiesV8, name) == 0
        && offset_of!(RawPropertiesV8, pci_path) == 8
        && offset_of!(RawPropertiesV8, guid) == 16
        && offset_of!(RawPropertiesV8, ptr_support) == 24
        && offset_of!(RawPropertiesV8, reg_is_global) == 28
        && offset_of!(RawPropertiesV8, speed) == 32
        && offset_of!(RawPropertiesV8, port) == 36
        && offset_of!(RawPropertiesV8, latency) == 40
        && offset_of!(RawPropertiesV8, max_comms) == 44
        && offset_of!(RawPropertiesV8, max_recvs) == 48
        && offset_of!(RawPropertiesV8, net_device_type) == 52
        && offset_of!(RawPropertiesV8, net_device_version) == 56
);
// SAFETY: integers, floats and nullable raw pointers only.
unsafe impl Zeroed for RawPropertiesV8 {}

/// Properties of ncclNet v9 and v10.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawPropertiesV9 {
    /// Name for logs.
    pub name: *const c_char,
    /// sysfs path of the PCI device; may be NULL.
    pub pci_path: *const c_char,
    /// Identity of the NIC chip.
    pub guid: u64,
    /// `PTR_*` bits.
    pub ptr_support: c_int,
    /// Registration is not tied to a comm.
    pub reg_is_global: c_int,
    /// A flush is needed after every device receive.
    pub force_flush: c_int,
    /// Port speed in Mb/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives grouped in one call.
    pub max_recvs: c_int,
    /// `NET_DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of the device layouts.
    pub net_device_version: c_int,
    /// Physical devices behind this one.
    pub v_props: RawVDeviceProps4,
    /// Largest point-to-point transfer, bytes.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer, bytes.
    pub max_coll_bytes: usize,
}

const _: () = assert!(size_of::<RawPropertiesV9>() == 104);
const _: () = assert!(
    offset_of!(RawPropertiesV9, name) == 0
        && offset_of!(RawPropertiesV9, pci_path) == 8
        && offset_of!(RawPropertiesV9, guid) == 16
        && offset_of!(RawPropertiesV9, ptr_support) == 24
        && offset_of!(RawPropertiesV9, reg_is_global) == 28
        && offset_of!(RawPropertiesV9, force_flush) == 32
        && offset_of!(RawPropertiesV9, speed) == 36
        && offset_of!(RawPropertiesV9, port) == 40
        && offset_of!(RawPropertiesV9, latency) == 44
        && offset_of!(RawPropertiesV9, max_comms) == 48
        && offset_of!(RawPropertiesV9, max_recvs) == 52
        && offset_of!(RawPropertiesV9, net_device_type) == 56
        && offset_of!(RawPropertiesV9, net_device_version) == 60
        && offset_of!(RawPropertiesV9, v_props) == 64
        && offset_of!(RawPropertiesV9, max_p2p_bytes) == 88
        && offset_of!(RawPropertiesV9, max_coll_bytes) == 96
);
// SAFETY: integers, floats and nullable raw pointers only.
unsafe impl Zeroed for RawPropertiesV9 {}

/// Properties of ncclNet v11.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawPropertiesV11 {
    /// Name for logs.
    pub name: *const c_char,
    /// sysfs path of the PCI device; may be NULL.
    pub pci_path: *const c_char,
    /// Identity of the NIC chip.
    pub guid: u64,
    /// `PTR_*` bits.
    pub ptr_support: c_int,
    /// Registration is not tied to a comm.
    pub reg_is_global: c_int,
    /// A flush is needed after every device receive.
    pub force_flush: c_int,
    /// Port speed in Mb/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives grouped in one call.
    pub max_recvs: c_int,
    /// `NET_DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of the device layouts.
    pub net_device_version: c_int,
    /// Physical devices behind this one.
    pub v_props: RawVDeviceProps4,
    /// Largest point-to-point transfer, bytes.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer, bytes.
    pub max_coll_bytes: usize,
    /// Most requests in one multi-request.
    pub max_multi_request_size: c_int,
}

const _: () = assert!(size_of::<RawPropertiesV11>() == 112);
const _: () = assert!(
    offset_of!(RawPropertiesV11, name) == 0
        && offset_of!(RawPropertiesV11, pci_path) == 8
        && offset_of!(RawPropertiesV11, guid) == 16
        && offset_of!(RawPropertiesV11, ptr_support) == 24
        && offset_of!(RawPropertiesV11, reg_is_global) == 28
        && offset_of!(RawPropertiesV11, force_flush) == 32
        && offset_of!(RawPropertiesV11, speed) == 36
        && offset_of!(RawPropertiesV11, port) == 40
        && offset_of!(RawPropertiesV11, latency) == 44
        && offset_of!(RawPropertiesV11, max_comms) == 48
        && offset_of!(RawPropertiesV11, max_recvs) == 52
        && offset_of!(RawPropertiesV11, net_device_type) == 56
        && offset_of!(RawPropertiesV11, net_device_version) == 60
        && offset_of!(RawPropertiesV11, v_props) == 64
        && offset_of!(RawPropertiesV11, max_p2p_bytes) == 88
        && offset_of!(RawPropertiesV11, max_coll_bytes) == 96
        && offset_of!(RawPropertiesV11, max_multi_request_size) == 104
);
// SAFETY: integers, floats and nullable raw pointers only.
unsafe impl Zeroed for RawPropertiesV11 {}

/// Properties of ncclNet v12.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawPropertiesV12 {
    /// Name for logs.
    pub name: *const c_char,
    /// sysfs path of the PCI device; may be NULL.
    pub pci_path: *const c_char,
    /// Identity of the NIC chip.
    pub guid: u64,
    /// `PTR_*` bits.
    pub ptr_support: c_int,
    /// Registration is not tied to a comm.
    pub reg_is_global: c_int,
    /// A flush is needed after every device receive.
    pub force_flush: c_int,
    /// Port speed in Mb/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Latency in microseconds.
    pub latency: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives grouped in one call.
    pub max_recvs: c_int,
    /// `NET_DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of the device layouts.
    pub net_device_version: c_int,
    /// Physical devices behind this one.
    pub v_props: RawVDeviceProps8,
    /// Largest point-to-point transfer, bytes.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer, bytes.
    pub max_coll_bytes: usize,
    /// Most requests in one multi-request.
    pub max_multi_request_size: c_int,
    /// Rail, -1 when unknown.
    pub rail_id: i16,
    /// Plane, -1 when unknown.
    pub plane_id: i16,
}

const _: () = assert!(size_of::<RawPropertiesV12>() == 128);
const _: () = assert!(
    offset_of!(RawPropertiesV12, name) == 0
        && offset_of!(RawPropertiesV12, pci_path) == 8
        && offset_of!(RawPropertiesV12, guid) == 16
        && offset_of!(RawPropertiesV12, ptr_support) == 24
        && offset_of!(RawPropertiesV12, reg_is_global) == 28
        && offset_of!(RawPropertiesV12, force_flush) == 32
        && offset_of!(RawPropertiesV12, speed) == 36
        && offset_of!(RawPropertiesV12, port) == 40
        && offset_of!(RawPropertiesV12, latency) == 44
        && offset_of!(RawPropertiesV12, max_comms) == 48
        && offset_of!(RawPropertiesV12, max_recvs) == 52
        && offset_of!(RawPropertiesV12, net_device_type) == 56
        && offset_of!(RawPropertiesV12, net_device_version) == 60
        && offset_of!(RawPropertiesV12, v_props) == 64
        && offset_of!(RawPropertiesV12, max_p2p_bytes) == 104
        && offset_of!(RawPropertiesV12, max_coll_bytes) == 112
        && offset_of!(RawPropertiesV12, max_multi_request_size) == 120
        && offset_of!(RawPropertiesV12, rail_id) == 124
        && offset_of!(RawPropertiesV12, plane_id) == 126
);
// SAFETY: integers, floats and nullable raw pointers only.
unsafe impl Zeroed for RawPropertiesV12 {}
