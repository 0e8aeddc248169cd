//! The CUDA driver, found at run time.
//!
//! Every function is looked up by name once and its absence is a typed error, so a host without the
//! driver, or with an old one, costs nothing but an answer.

mod api;
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "tests of this crate use more of it")
)]
#[expect(clippy::unwrap_used, reason = "as in tests")]
#[cfg(any(test, feature = "fake-driver"))]
pub(crate) mod fake;

use std::ffi::{CStr, c_char};
use std::fmt;

pub(crate) use api::{Api, OUT_OF_MEMORY, sys};

use crate::error::CudaError;

/// What this host offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverStatus {
    /// A driver that answers.
    Present {
        /// The newest CUDA version the driver supports.
        version: CudaVersion,
        /// The devices this process sees, by ordinal; may be empty.
        devices: Vec<DeviceInfo>,
    },
    /// No usable driver.
    Missing {
        /// Why, with what to do.
        why: CudaError,
    },
}

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// For example 13 of 13.0.
    pub major: u32,
    /// For example 0 of 13.0.
    pub minor: u32,
}

impl CudaVersion {
    /// From the driver's number, 1000 x major + 10 x minor.
    fn from_number(number: i32) -> Self {
        let number = u32::try_from(number).unwrap_or_default();
        Self {
            major: number / 1000,
            minor: number % 1000 / 10,
        }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A CUDA device as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's number in this process.
    pub ordinal: u32,
    /// The product's name.
    pub name: String,
    /// The PCI address as sysfs writes it, for example `0000:1b:00.0`.
    pub pci: String,
    /// Bytes of memory.
    pub memory: u64,
    /// The NUMA node the device hangs off, where the kernel knows it.
    pub numa: Option<u32>,
    /// Compute capability, for example (9, 0).
    pub capability: (u32, u32),
    /// Whether the driver can export this device's memory as a dma-buf.
    pub dma_buf: bool,
}

/// Looks for the driver and its devices. Creates no context.
pub fn probe() -> DriverStatus {
    match probe_inner() {
        Ok(status) => status,
        Err(why) => DriverStatus::Missing { why },
    }
}

fn probe_inner() -> Result<DriverStatus, CudaError> {
    let api = load()?;
    let mut number = 0;
    // SAFETY: the pointer is valid for one int.
    api.check("cuDriverGetVersion", unsafe {
        (api.cuDriverGetVersion)(&raw mut number)
    })?;
    let devices = (0..device_count(api)?)
        .map(|ordinal| describe(api, ordinal))
        .collect::<Result<_, _>>()?;
    Ok(DriverStatus::Present {
        version: CudaVersion::from_number(number),
        devices,
    })
}

/// Devices this process sees.
pub(crate) fn device_count(api: &Api) -> Result<u32, CudaError> {
    let mut count = 0;
    // SAFETY: the pointer is valid for one int.
    api.check("cuDeviceGetCount", unsafe {
        (api.cuDeviceGetCount)(&raw mut count)
    })?;
    Ok(u32::try_from(count).unwrap_or_default())
}

/// The driver's handle of a device.
pub(crate) fn device(api: &Api, ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let count = device_count(api)?;
    let index = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
    let Some(index) = index else {
        return Err(CudaError::NoSuchDevice { ordinal, count });
    };
    let mut device = 0;
    // SAFETY: the pointer is valid for one handle.
    api.check("cuDeviceGet", unsafe {
        (api.cuDeviceGet)(&raw mut device, index)
    })?;
    Ok(device)
}

/// One of the driver's numbers about a device.
pub(crate) fn attribute(
    api: &Api,
    device: sys::CUdevice,
    attribute: sys::CUdevice_attribute,
) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: the pointer is valid for one int; the attribute goes over as its number.
    let code = unsafe { (api.cuDeviceGetAttribute)(&raw mut value, attribute as i32, device) };
    api.check("cuDeviceGetAttribute", code)?;
    Ok(value)
}

/// Everything about one device.
pub(crate) fn describe(api: &Api, ordinal: u32) -> Result<DeviceInfo, CudaError> {
    use sys::CUdevice_attribute as A;
    let handle = device(api, ordinal)?;
    let name = text(|buffer, len| {
        // SAFETY: `text` passes a buffer of that length.
        api.check("cuDeviceGetName", unsafe {
            (api.cuDeviceGetName)(buffer, len, handle)
        })
    })?;
    let pci = text(|buffer, len| {
        // SAFETY: `text` passes a buffer of that length.
        api.check("cuDeviceGetPCIBusId", unsafe {
            (api.cuDeviceGetPCIBusId)(buffer, len, handle)
        })
    })?
    .to_ascii_lowercase();
    let mut memory = 0;
    // SAFETY: the pointer is valid for one size.
    api.check("cuDeviceTotalMem", unsafe {
        (api.cuDeviceTotalMem)(&raw mut memory, handle)
    })?;
    let number =
        |of| attribute(api, handle, of).map(|value| u32::try_from(value).unwrap_or_default());
    Ok(DeviceInfo {
        ordinal,
        name,
        numa: numa_node(&pci),
        pci,
        memory: memory as u64,
        capability: (
            number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        // An old driver does not know the attribute; then the answer is no.
        dma_buf: number(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED).is_ok_and(|value| value == 1),
    })
}

fn text(fill: impl FnOnce(*mut c_char, i32) -> Result<(), CudaError>) -> Result<String, CudaError> {
    let mut buffer = [0_u8; 256];
    // One byte less than there is, so that the text ends in a zero whatever the driver writes.
    fill(buffer.as_mut_ptr().cast(), 255)?;
    let text = CStr::from_bytes_until_nul(&buffer)
        .map(CStr::to_string_lossy)
        .unwrap_or_default();
    Ok(text.into_owned())
}

/// The kernel writes -1 where it does not know.
fn numa_node(pci: &str) -> Option<u32> {
    let is_address = pci
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
    if !is_address {
        return None;
    }
    std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node"))
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// The driver, initialised.
pub(crate) fn load() -> Result<&'static Api, CudaError> {
    #[cfg(feature = "fake-driver")]
    if let Some(api) = fake::installed() {
        return Ok(api);
    }
    api::initialized()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_answers_on_every_host() {
        match probe() {
            DriverStatus::Present { version, devices } => {
                assert!(
                    version
                        >= CudaVersion {
                            major: 11,
                            minor: 0
                        },
                    "{version}"
                );
                for (index, info) in devices.iter().enumerate() {
                    assert_eq!(info.ordinal as usize, index);
                    assert!(info.memory > 0 && !info.name.is_empty());
                }
            }
            DriverStatus::Missing { why } => {
                let text = why.to_string();
                assert!(text.contains("driver"), "{text}");
            }
        }
    }

    #[test]
    fn versions_print_as_nvidia_writes_them() {
        assert_eq!(CudaVersion::from_number(13_000).to_string(), "13.0");
        assert_eq!(CudaVersion::from_number(12_080).to_string(), "12.8");
        assert_eq!(CudaVersion::from_number(-1).to_string(), "0.0");
    }
}
