//! Device properties without a version: owned, checked, absent where the ABI had no such field.

use std::ffi::{CStr, c_char, c_int};

use crate::constants::{
    MAX_NET_BYTES, NET_DEVICE_HOST, NET_DEVICE_UNPACK, NET_DEVICE_UNPACK_VERSION, PTR_CUDA,
    PTR_DMABUF, PTR_HOST,
};
use crate::raw_properties::{
    RawPropertiesV6, RawPropertiesV7, RawPropertiesV8, RawPropertiesV9, RawPropertiesV11,
    RawPropertiesV12, RawVDeviceProps4, RawVDeviceProps8,
};

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

fn device_list(ndevs: c_int, devs: &[c_int]) -> Vec<c_int> {
    let count = usize::try_from(ndevs).unwrap_or(0).min(devs.len());
    devs[..count].to_vec()
}

/// Fills the fields that every version has.
macro_rules! common {
    ($raw:expr) => {
        Self {
            // SAFETY: forwarded to the caller of `from_raw`.
            name: unsafe { owned_string($raw.name) }.unwrap_or_default(),
            // SAFETY: as above.
            pci_path: unsafe { owned_string($raw.pci_path) },
            guid: $raw.guid,
            pointer_support: PointerSupport($raw.ptr_support),
            speed_mbps: $raw.speed,
            port: $raw.port,
            latency_us: $raw.latency,
            max_comms: $raw.max_comms,
            max_recvs: $raw.max_recvs,
            ..Self::default()
        }
    };
}

impl Properties {
    /// # Safety
    /// The strings of `raw` are NULL or NUL-terminated; the same holds for its siblings below.
    pub(crate) unsafe fn from_v6(raw: &RawPropertiesV6) -> Self {
        common!(raw)
    }

    /// # Safety
    /// See [`Self::from_v6`].
    pub(crate) unsafe fn from_v7(raw: &RawPropertiesV7) -> Self {
        Self {
            offload: DeviceOffload::from_raw(raw.net_device_type, raw.net_device_version),
            ..common!(raw)
        }
    }

    /// # Safety
    /// See [`Self::from_v6`].
    pub(crate) unsafe fn from_v8(raw: &RawPropertiesV8) -> Self {
        Self {
            reg_is_global: Some(raw.reg_is_global != 0),
            offload: DeviceOffload::from_raw(raw.net_device_type, raw.net_device_version),
            ..common!(raw)
        }
    }

    /// # Safety
    /// See [`Self::from_v6`].
    pub(crate) unsafe fn from_v9(raw: &RawPropertiesV9) -> Self {
        Self {
            reg_is_global: Some(raw.reg_is_global != 0),
            force_flush: Some(raw.force_flush != 0),
            offload: DeviceOffload::from_raw(raw.net_device_type, raw.net_device_version),
            virtual_devices: Some(device_list(raw.v_props.ndevs, &raw.v_props.devs)),
            max_p2p_bytes: Some(raw.max_p2p_bytes),
            max_coll_bytes: Some(raw.max_coll_bytes),
            ..common!(raw)
        }
    }

    /// # Safety
    /// See [`Self::from_v6`].
    pub(crate) unsafe fn from_v11(raw: &RawPropertiesV11) -> Self {
        Self {
            reg_is_global: Some(raw.reg_is_global != 0),
            force_flush: Some(raw.force_flush != 0),
            offload: DeviceOffload::from_raw(raw.net_device_type, raw.net_device_version),
            virtual_devices: Some(device_list(raw.v_props.ndevs, &raw.v_props.devs)),
            max_p2p_bytes: Some(raw.max_p2p_bytes),
            max_coll_bytes: Some(raw.max_coll_bytes),
            max_multi_request_size: Some(raw.max_multi_request_size),
            ..common!(raw)
        }
    }

    /// # Safety
    /// See [`Self::from_v6`].
    pub(crate) unsafe fn from_v12(raw: &RawPropertiesV12) -> Self {
        Self {
            reg_is_global: Some(raw.reg_is_global != 0),
            force_flush: Some(raw.force_flush != 0),
            offload: DeviceOffload::from_raw(raw.net_device_type, raw.net_device_version),
            virtual_devices: Some(device_list(raw.v_props.ndevs, &raw.v_props.devs)),
            max_p2p_bytes: Some(raw.max_p2p_bytes),
            max_coll_bytes: Some(raw.max_coll_bytes),
            max_multi_request_size: Some(raw.max_multi_request_size),
            rail_id: Some(raw.rail_id),
            plane_id: Some(raw.plane_id),
            ..common!(raw)
        }
    }
}

/// Strings whose addresses a host may keep for ever.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StaticStrings {
    pub(crate) name: &'static CStr,
    pub(crate) pci_path: Option<&'static CStr>,
}

impl StaticStrings {
    fn pci_path_ptr(self) -> *const c_char {
        self.pci_path.map_or(std::ptr::null(), CStr::as_ptr)
    }
}

/// The way out: properties of an exported plugin, written in the layout of each version.
impl Properties {
    fn v_props4(&self, dev: c_int) -> RawVDeviceProps4 {
        let mut raw = RawVDeviceProps4 {
            ndevs: 0,
            devs: [0; 4],
        };
        raw.ndevs = fill_devices(&mut raw.devs, self.virtual_devices.as_deref(), dev);
        raw
    }

    fn v_props8(&self, dev: c_int) -> RawVDeviceProps8 {
        let mut raw = RawVDeviceProps8 {
            ndevs: 0,
            devs: [0; 8],
        };
        raw.ndevs = fill_devices(&mut raw.devs, self.virtual_devices.as_deref(), dev);
        raw
    }
}

/// A device that joins no others lists itself.
fn fill_devices(out: &mut [c_int], listed: Option<&[c_int]>, dev: c_int) -> c_int {
    let own = [dev];
    let listed = listed.filter(|list| !list.is_empty()).unwrap_or(&own);
    let mut count = 0;
    for (slot, device) in out.iter_mut().zip(listed) {
        *slot = *device;
        count += 1;
    }
    count
}

/// One writer a version: the common fields, then what that version adds.
macro_rules! writer {
    ($function:ident -> $raw:ident { $($extra:ident: $value:expr,)* }) => {
        pub(crate) fn $function(&self, dev: c_int, strings: StaticStrings) -> $raw {
            let (net_device_type, net_device_version) = self.offload.to_raw();
            let _writer = Writer { properties: self, dev, net_device_type, net_device_version };
            $raw {
                name: strings.name.as_ptr(),
                pci_path: strings.pci_path_ptr(),
                guid: self.guid,
                ptr_support: self.pointer_support.0,
                speed: self.speed_mbps,
                port: self.port,
                latency: self.latency_us,
                max_comms: self.max_comms,
                max_recvs: self.max_recvs,
                $($extra: $value(&_writer),)*
            }
        }
    };
}

struct Writer<'a> {
    properties: &'a Properties,
    dev: c_int,
    net_device_type: c_int,
    net_device_version: c_int,
}

impl Writer<'_> {
    fn device_type(&self) -> c_int {
        self.net_device_type
    }
    fn device_version(&self) -> c_int {
        self.net_device_version
    }
    fn reg_is_global(&self) -> c_int {
        c_int::from(self.properties.reg_is_global.unwrap_or(false))
    }
    fn force_flush(&self) -> c_int {
        c_int::from(self.properties.force_flush.unwrap_or(false))
    }
    fn v_props4(&self) -> RawVDeviceProps4 {
        self.properties.v_props4(self.dev)
    }
    fn v_props8(&self) -> RawVDeviceProps8 {
        self.properties.v_props8(self.dev)
    }
    fn max_p2p(&self) -> usize {
        self.properties.max_p2p_bytes.unwrap_or(MAX_NET_BYTES)
    }
    fn max_coll(&self) -> usize {
        self.properties.max_coll_bytes.unwrap_or(MAX_NET_BYTES)
    }
    fn max_multi(&self) -> c_int {
        self.properties.max_multi_request_size.unwrap_or(1)
    }
    fn rail(&self) -> i16 {
        self.properties.rail_id.unwrap_or(-1)
    }
    fn plane(&self) -> i16 {
        self.properties.plane_id.unwrap_or(-1)
    }
}

impl Properties {
    writer!(v6 -> RawPropertiesV6 {});

    /// Before v7 a host can ask for no device queue: a plugin that receives device memory only
    /// through one offers host memory alone.
    pub(crate) fn to_v6(&self, dev: c_int, strings: StaticStrings) -> RawPropertiesV6 {
        let mut raw = self.v6(dev, strings);
        if self.offload != DeviceOffload::None {
            raw.ptr_support &= PTR_HOST;
        }
        raw
    }

    writer!(to_v7 -> RawPropertiesV7 {
        net_device_type: Writer::device_type,
        net_device_version: Writer::device_version,
    });
    writer!(to_v8 -> RawPropertiesV8 {
        reg_is_global: Writer::reg_is_global,
        net_device_type: Writer::device_type,
        net_device_version: Writer::device_version,
    });
    writer!(to_v9 -> RawPropertiesV9 {
        reg_is_global: Writer::reg_is_global,
        force_flush: Writer::force_flush,
        net_device_type: Writer::device_type,
        net_device_version: Writer::device_version,
        v_props: Writer::v_props4,
        max_p2p_bytes: Writer::max_p2p,
        max_coll_bytes: Writer::max_coll,
    });
    writer!(to_v11 -> RawPropertiesV11 {
        reg_is_global: Writer::reg_is_global,
        force_flush: Writer::force_flush,
        net_device_type: Writer::device_type,
        net_device_version: Writer::device_version,
        v_props: Writer::v_props4,
        max_p2p_bytes: Writer::max_p2p,
        max_coll_bytes: Writer::max_coll,
        max_multi_request_size: Writer::max_multi,
    });
    writer!(to_v12 -> RawPropertiesV12 {
        reg_is_global: Writer::reg_is_global,
        force_flush: Writer::force_flush,
        net_device_type: Writer::device_type,
        net_device_version: Writer::device_version,
        v_props: Writer::v_props8,
        max_p2p_bytes: Writer::max_p2p,
        max_coll_bytes: Writer::max_coll,
        max_multi_request_size: Writer::max_multi,
        rail_id: Writer::rail,
        plane_id: Writer::plane,
    });
}
