//! `ncclNetProperties` as each version lays it out.
//!
//! Every size and offset is checked when this file is compiled.

use std::ffi::{c_char, c_int};
use std::mem::{offset_of, size_of};

use crate::tables::AbiVersion;

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

impl From<RawVDeviceProps4> for RawVDeviceProps8 {
    fn from(four: RawVDeviceProps4) -> Self {
        let [a, b, c, d] = four.devs;
        Self {
            ndevs: four.ndevs.min(4),
            devs: [a, b, c, d, 0, 0, 0, 0],
        }
    }
}

impl From<RawVDeviceProps8> for RawVDeviceProps4 {
    fn from(eight: RawVDeviceProps8) -> Self {
        let [a, b, c, d, ..] = eight.devs;
        Self {
            ndevs: eight.ndevs.min(4),
            devs: [a, b, c, d],
        }
    }
}

/// The properties of one version. The newest one has the fields of all.
pub(crate) trait RawProperties: Sized {
    /// The first version that has them.
    const SINCE: AbiVersion;

    /// All zero, the form in which a host hands them to the plugin.
    fn zeroed() -> Self;

    /// With zeros where this version has no such field.
    fn to_newest(&self) -> RawPropertiesV12;

    /// Without what this version has no field for.
    fn from_newest(newest: &RawPropertiesV12) -> Self;
}

/// Defines the structure of one version and checks where its fields lie.
macro_rules! properties {
    ($(#[$meta:meta])* $raw:ident, $since:ident, $bytes:literal bytes {
        $($at:literal $field:ident: $kind:ty,)*
    }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $raw {
            $(
                #[doc = concat!("At byte ", stringify!($at), "; [`Properties`](crate::Properties) says what it means.")]
                pub $field: $kind,
            )*
        }

        const _: () = assert!(size_of::<$raw>() == $bytes);
        $(const _: () = assert!(offset_of!($raw, $field) == $at);)*

        impl RawProperties for $raw {
            const SINCE: AbiVersion = AbiVersion::$since;

            fn zeroed() -> Self {
                // SAFETY: integers, floats and nullable raw pointers only.
                unsafe { std::mem::zeroed() }
            }

            fn to_newest(&self) -> RawPropertiesV12 {
                let mut newest = RawPropertiesV12::zeroed();
                $(newest.$field = self.$field.into();)*
                newest
            }

            fn from_newest(newest: &RawPropertiesV12) -> Self {
                Self { $($field: newest.$field.into(),)* }
            }
        }
    };
}

properties! {
    /// Properties of ncclNet v5 and v6.
    RawPropertiesV6, V5, 48 bytes {
        0 name: *const c_char,
        8 pci_path: *const c_char,
        16 guid: u64,
        24 ptr_support: c_int,
        28 speed: c_int,
        32 port: c_int,
        36 latency: f32,
        40 max_comms: c_int,
        44 max_recvs: c_int,
    }
}

properties! {
    /// Properties of ncclNet v7: adds what runs on the device.
    RawPropertiesV7, V7, 56 bytes {
        0 name: *const c_char,
        8 pci_path: *const c_char,
        16 guid: u64,
        24 ptr_support: c_int,
        28 speed: c_int,
        32 port: c_int,
        36 latency: f32,
        40 max_comms: c_int,
        44 max_recvs: c_int,
        48 net_device_type: c_int,
        52 net_device_version: c_int,
    }
}

properties! {
    /// Properties of ncclNet v8: adds whether registration is tied to a comm.
    RawPropertiesV8, V8, 64 bytes {
        0 name: *const c_char,
        8 pci_path: *const c_char,
        16 guid: u64,
        24 ptr_support: c_int,
        28 reg_is_global: c_int,
        32 speed: c_int,
        36 port: c_int,
        40 latency: f32,
        44 max_comms: c_int,
        48 max_recvs: c_int,
        52 net_device_type: c_int,
        56 net_device_version: c_int,
    }
}

properties! {
    /// Properties of ncclNet v9 and v10: add flushes, devices behind one, and largest transfers.
    RawPropertiesV9, V9, 104 bytes {
        0 name: *const c_char,
        8 pci_path: *const c_char,
        16 guid: u64,
        24 ptr_support: c_int,
        28 reg_is_global: c_int,
        32 force_flush: c_int,
        36 speed: c_int,
        40 port: c_int,
        44 latency: f32,
        48 max_comms: c_int,
        52 max_recvs: c_int,
        56 net_device_type: c_int,
        60 net_device_version: c_int,
        64 v_props: RawVDeviceProps4,
        88 max_p2p_bytes: usize,
        96 max_coll_bytes: usize,
    }
}

properties! {
    /// Properties of ncclNet v11: add multi-requests.
    RawPropertiesV11, V11, 112 bytes {
        0 name: *const c_char,
        8 pci_path: *const c_char,
        16 guid: u64,
        24 ptr_support: c_int,
        28 reg_is_global: c_int,
        32 force_flush: c_int,
        36 speed: c_int,
        40 port: c_int,
        44 latency: f32,
        48 max_comms: c_int,
        52 max_recvs: c_int,
        56 net_device_type: c_int,
        60 net_device_version: c_int,
        64 v_props: RawVDeviceProps4,
        88 max_p2p_bytes: usize,
        96 max_coll_bytes: usize,
        104 max_multi_request_size: c_int,
    }
}

properties! {
    /// Properties of ncclNet v12: add rail and plane, -1 when unknown.
    RawPropertiesV12, V12, 128 bytes {
        0 name: *const c_char,
        8 pci_path: *const c_char,
        16 guid: u64,
        24 ptr_support: c_int,
        28 reg_is_global: c_int,
        32 force_flush: c_int,
        36 speed: c_int,
        40 port: c_int,
        44 latency: f32,
        48 max_comms: c_int,
        52 max_recvs: c_int,
        56 net_device_type: c_int,
        60 net_device_version: c_int,
        64 v_props: RawVDeviceProps8,
        104 max_p2p_bytes: usize,
        112 max_coll_bytes: usize,
        120 max_multi_request_size: c_int,
        124 rail_id: i16,
        126 plane_id: i16,
    }
}
