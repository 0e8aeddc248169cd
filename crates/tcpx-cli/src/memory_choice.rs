//! Which memory a command uses, and why.

use tcpx::{Gpu, Region};
use tcpx_memory::driver::{self, DriverStatus};

use crate::advice::split;
use crate::args::link::MemoryArgs;
use crate::error::Error;
use crate::sizes::Size;

/// Granularity of the historic buffers, in bytes.
const PAGE: u64 = 4096;

/// The memory that the bytes leave or reach.
#[derive(Clone, Debug)]
pub(crate) struct MemoryChoice {
    pub(crate) gpu: Option<Gpu>,
    name: String,
    why: String,
}

/// What a probe of the driver found; read once, so that one command says one thing.
#[derive(Debug)]
pub(crate) struct Devices(DriverStatus);

impl Devices {
    pub(crate) fn probe() -> Self {
        Self(driver::probe())
    }

    /// How many GPUs there are; 0 without a driver.
    pub(crate) fn count(&self) -> usize {
        match &self.0 {
            DriverStatus::Present { devices, .. } => devices.len(),
            DriverStatus::Missing { .. } => 0,
        }
    }

    /// Whether `args` will end at host memory.
    pub(crate) fn means_host(&self, args: &MemoryArgs) -> bool {
        args.host || (args.gpu.is_none() && self.count() == 0)
    }

    /// Opens what `args` ask for; without a wish GPU `preferred`, if the host has it, else GPU 0,
    /// else host memory.
    pub(crate) fn choose(&self, args: &MemoryArgs, preferred: u32) -> Result<MemoryChoice, Error> {
        if args.host {
            return Ok(MemoryChoice::host("as asked for"));
        }
        let devices = match &self.0 {
            DriverStatus::Missing { why } => {
                return match args.gpu {
                    None => Ok(MemoryChoice::host(&format!(
                        "in place of GPU memory ({})",
                        split(&why.to_string()).0
                    ))),
                    Some(number) => Err(Error::gpu(
                        format!("GPU {number} cannot be used: {why}"),
                        "install the NVIDIA driver, or say --host (`perf`: host) to use host memory",
                    )),
                };
            }
            DriverStatus::Present { devices, .. } => devices,
        };
        if devices.is_empty() && args.gpu.is_none() {
            return Ok(MemoryChoice::host(
                "in place of GPU memory (the driver is there but shows no GPU)",
            ));
        }
        let fallback = if devices.iter().any(|device| device.ordinal == preferred) {
            preferred
        } else {
            0
        };
        let number = args.gpu.unwrap_or(fallback);
        let Some(found) = devices.iter().find(|device| device.ordinal == number) else {
            return Err(Error::gpu(
                format!(
                    "there is no GPU {number}: the driver shows {}",
                    devices.len()
                ),
                "`tcpx devices` lists them; --host uses host memory",
            ));
        };
        let gpu = Gpu::open(number).map_err(|error| {
            Error::gpu(
                format!("GPU {number} cannot be opened: {error}"),
                "`nvidia-smi` shows whether the GPU is healthy and free; --host uses host memory",
            )
        })?;
        Ok(MemoryChoice {
            gpu: Some(gpu),
            name: format!("GPU {number} ({}, PCI {})", found.name, found.pci),
            why: if args.gpu.is_some() {
                "as asked for"
            } else {
                "because a CUDA driver is present"
            }
            .into(),
        })
    }
}

/// A memory's name, short, for a table: `GPU 0` or `host`.
pub(crate) fn short(name: &str) -> &str {
    let name = name.split(" (").next().unwrap_or(name);
    name.strip_suffix(" memory").unwrap_or(name)
}

impl MemoryChoice {
    pub(crate) fn host(why: &str) -> Self {
        Self {
            gpu: None,
            name: "host memory".into(),
            why: why.into(),
        }
    }

    /// For a person: which memory.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// For a person: which memory, and why.
    pub(crate) fn describe(&self) -> String {
        format!("{} {}", self.name, self.why)
    }

    /// A zeroed region of `bytes`.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<Region, Error> {
        let length = usize::try_from(bytes).map_err(|_| {
            Error::usage(
                format!("{bytes} bytes do not fit in this host's addresses"),
                "give a smaller size",
            )
        })?;
        if self.gpu.is_none() {
            fits_in_host_memory(bytes)?;
        }
        match &self.gpu {
            Some(gpu) => Region::cuda(gpu, length),
            None => Region::host(length),
        }
        .map_err(Error::memory("allocate memory"))
    }

    /// A region of whole 4 KiB pages, at least one, that holds `bytes`.
    pub(crate) fn allocate_pages(&self, bytes: u64) -> Result<Region, Error> {
        self.allocate(
            bytes
                .checked_next_multiple_of(PAGE)
                .unwrap_or(u64::MAX)
                .max(PAGE),
        )
    }
}

/// The kernel promises more than it has, and ends a process that takes it at its word; a peer may
/// ask for any size.
fn fits_in_host_memory(bytes: u64) -> Result<(), Error> {
    let Some(available) = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .as_deref()
        .and_then(available)
    else {
        return Ok(());
    };
    if bytes <= available {
        return Ok(());
    }
    Err(Error::failed(
        format!(
            "{} of host memory were asked for, and {} are available",
            Size(bytes),
            Size(available)
        ),
        "give a smaller size, or free memory on this host",
    ))
}

/// Bytes that `/proc/meminfo` calls available.
fn available(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Reads the first `bytes` of `region`, at most `most` of them.
pub(crate) fn head(region: &Region, bytes: u64, most: usize) -> Result<Vec<u8>, Error> {
    let mut out = vec![
        0;
        usize::try_from(bytes)
            .unwrap_or(usize::MAX)
            .min(most)
            .min(region.len())
    ];
    region
        .read_to(0, &mut out)
        .map_err(Error::memory("read memory back"))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_the_kernels_text() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(available(text), Some(20_000_000 * 1024));
        assert_eq!(available("MemTotal: 5 kB\n"), None);
        assert_eq!(available("MemAvailable: lots\n"), None);
    }

    #[test]
    fn more_than_the_host_has_is_an_error_before_it_is_touched() {
        let memory = MemoryChoice::host("as asked for");
        let error = memory.allocate_pages(1 << 60).expect_err("an exbibyte");
        assert!(error.to_string().contains("are available"), "{error}");
        assert!(memory.allocate_pages(u64::MAX).is_err());
    }
}
