//! Device properties without a version: owned, checked, absent where the ABI had no such field.

use std::ffi::{CStr, c_char, c_int};

use crate::constants::{
    MAX_NET_BYTES, NET_DEVICE_HOST, NET_DEVICE_UNPACK, NET_DEVICE_UNPACK_VERSION, PTR_CUDA,
    PTR_DMABUF, PTR_HOST,
};
use crate::raw_properties::{RawProperties, RawPropertiesV12, RawVDeviceProps8};
use crate::tables::AbiVersion;

/// Longest name or path taken from a plugin, in bytes; the rest is cut.
const MAX_STRING_BYTES: usize = 4096;

/// Which memory a device can send from and receive into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PointerSupport(pub c_int);

impl PointerSupport {
    /// Host memory.
    pub const HOST: Self = Self(PTR_HOST);
    /// Host and CUDA memory.
    pub const HOST_AND_CUDA: Self = Self(PTR_HOST | PTR_CUDA);

    /// Whether host memory is taken.
    pub const fn host(self) -> bool {
        self.0 & PTR_HOST != 0
    }
    /// Whether CUDA memory is taken.
    pub const fn cuda(self) -> bool {
        self.0 & PTR_CUDA != 0
    }
    /// Whether dma-buf registration works.
    pub const fn dma_buf(self) -> bool {
        self.0 & PTR_DMABUF != 0
    }
}

/// What runs on the device for a network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceOffload {
    /// Nothing: data arrives flat.
    #[default]
    None,
    /// Fragments wait in a queue of this layout version; 7 is the one this crate reads.
    Unpack {
        /// Layout version.
        version: c_int,
    },
    /// A kind this crate does not know.
    Other {
        /// `netDeviceType`.
        kind: c_int,
        /// `netDeviceVersion`.
        version: c_int,
    },
}

impl DeviceOffload {
    /// The unpack queue in the version this crate reads and writes.
    pub const UNPACK_V7: Self = Self::Unpack {
        version: NET_DEVICE_UNPACK_VERSION,
    };

    const fn from_raw(kind: c_int, version: c_int) -> Self {
        match kind {
            NET_DEVICE_HOST => Self::None,
            NET_DEVICE_UNPACK => Self::Unpack { version },
            kind => Self::Other { kind, version },
        }
    }

    pub(crate) const fn to_raw(self) -> (c_int, c_int) {
        match self {
            // NCCL compares the version even for HOST; 0 is the value it expects there.
            Self::None => (NET_DEVICE_HOST, 0),
            Self::Unpack { version } => (NET_DEVICE_UNPACK, version),
            Self::Other { kind, version } => (kind, version),
        }
    }
}

/// Properties of one network device. `None` means the plugin's ABI version has no such field
/// (for `pci_path`: the plugin gave none).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Properties {
    /// Name for logs, usually the interface.
    pub name: String,
    /// sysfs path of the PCI device; virtual interfaces have none.
    pub pci_path: Option<String>,
    /// Identity of the NIC chip.
    pub guid: u64,
    /// Kinds of memory that can be registered.
    pub pointer_support: PointerSupport,
    /// Registration is valid on every comm (v8 and later).
    pub reg_is_global: Option<bool>,
    /// Device receives need a flush (v9 and later).
    pub force_flush: Option<bool>,
    /// Port speed, Mb/s.
    pub speed_mbps: c_int,
    /// Port number.
    pub port: c_int,
    /// Latency, microseconds.
    pub latency_us: f32,
    /// Most comms.
    pub max_comms: c_int,
    /// Most receives grouped in one call.
    pub max_recvs: c_int,
    /// What runs on the device; always `None` for v5 and v6.
    pub offload: DeviceOffload,
    /// Physical devices behind this one (v9 and later).
    pub virtual_devices: Option<Vec<c_int>>,
    /// Largest point-to-point transfer, bytes (v9 and later).
    pub max_p2p_bytes: Option<usize>,
    /// Largest collective transfer, bytes (v9 and later).
    pub max_coll_bytes: Option<usize>,
    /// Most requests in one multi-request (v11 and later).
    pub max_multi_request_size: Option<c_int>,
    /// Rail (v12).
    pub rail_id: Option<i16>,
    /// Plane (v12).
    pub plane_id: Option<i16>,
}

/// Copies a C string of a plugin; NULL gives `None`.
///
/// # Safety
/// `text` is NULL or points to a NUL-terminated string.
unsafe fn owned_string(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller vouches for the terminator.
    let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
    let bytes = &bytes[..bytes.len().min(MAX_STRING_BYTES)];
    Some(String::from_utf8_lossy(bytes).into_owned())
}

/// Strings whose addresses a host may keep for ever.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StaticStrings {
    pub(crate) name: &'static CStr,
    pub(crate) pci_path: Option<&'static CStr>,
}

impl Properties {
    /// What a plugin answered in its version's layout.
    ///
    /// # Safety
    /// The strings of `raw` are NULL or NUL-terminated.
    pub(crate) unsafe fn from_raw<R: RawProperties>(raw: &R) -> Self {
        let raw = raw.to_newest();
        let has = |first: AbiVersion| R::SINCE >= first;
        let devices = &raw.v_props.devs;
        let count = usize::try_from(raw.v_props.ndevs).unwrap_or(0);
        Self {
            // SAFETY: forwarded.
            name: unsafe { owned_string(raw.name) }.unwrap_or_default(),
            // SAFETY: forwarded.
            pci_path: unsafe { owned_string(raw.pci_path) },
            guid: raw.guid,
            pointer_support: PointerSupport(raw.ptr_support),
            reg_is_global: has(AbiVersion::V8).then_some(raw.reg_is_global != 0),
            force_flush: has(AbiVersion::V9).then_some(raw.force_flush != 0),
            speed_mbps: raw.speed,
            port: raw.port,
            latency_us: raw.latency,
            max_comms: raw.max_comms,
            max_recvs: raw.max_recvs,
            offload: DeviceOffload::from_raw(raw.net_device_type, raw.net_device_version),
            virtual_devices: has(AbiVersion::V9)
                .then(|| devices[..count.min(devices.len())].to_vec()),
            max_p2p_bytes: has(AbiVersion::V9).then_some(raw.max_p2p_bytes),
            max_coll_bytes: has(AbiVersion::V9).then_some(raw.max_coll_bytes),
            max_multi_request_size: has(AbiVersion::V11).then_some(raw.max_multi_request_size),
            rail_id: has(AbiVersion::V12).then_some(raw.rail_id),
            plane_id: has(AbiVersion::V12).then_some(raw.plane_id),
        }
    }

    /// What an exported plugin answers for its device `dev`, in the layout of a version.
    pub(crate) fn to_raw<R: RawProperties>(&self, dev: c_int, strings: StaticStrings) -> R {
        let (net_device_type, net_device_version) = self.offload.to_raw();
        let mut ptr_support = self.pointer_support.0;
        if R::SINCE < AbiVersion::V7 && self.offload != DeviceOffload::None {
            // Such a host can ask for no device queue: a plugin that receives device memory only
            // through one offers host memory alone.
            ptr_support &= PTR_HOST;
        }
        R::from_newest(&RawPropertiesV12 {
            name: strings.name.as_ptr(),
            pci_path: strings.pci_path.map_or(std::ptr::null(), CStr::as_ptr),
            guid: self.guid,
            ptr_support,
            reg_is_global: c_int::from(self.reg_is_global.unwrap_or(false)),
            force_flush: c_int::from(self.force_flush.unwrap_or(false)),
            speed: self.speed_mbps,
            port: self.port,
            latency: self.latency_us,
            max_comms: self.max_comms,
            max_recvs: self.max_recvs,
            net_device_type,
            net_device_version,
            v_props: self.devices_behind(dev),
            max_p2p_bytes: self.max_p2p_bytes.unwrap_or(MAX_NET_BYTES),
            max_coll_bytes: self.max_coll_bytes.unwrap_or(MAX_NET_BYTES),
            max_multi_request_size: self.max_multi_request_size.unwrap_or(1),
            rail_id: self.rail_id.unwrap_or(-1),
            plane_id: self.plane_id.unwrap_or(-1),
        })
    }

    /// A device that joins no others lists itself.
    fn devices_behind(&self, dev: c_int) -> RawVDeviceProps8 {
        let own = [dev];
        let listed = self.virtual_devices.as_deref();
        let listed = listed.filter(|list| !list.is_empty()).unwrap_or(&own);
        let mut raw = RawVDeviceProps8 {
            ndevs: 0,
            devs: [0; 8],
        };
        for (slot, device) in raw.devs.iter_mut().zip(listed) {
            *slot = *device;
            raw.ndevs += 1;
        }
        raw
    }
}
