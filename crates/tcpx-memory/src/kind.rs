//! Where a region's bytes live.

use std::fmt;

/// Where a region's bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Ordinary pageable memory of this host.
    Host,
    /// Page-locked host memory that CUDA devices can address.
    Pinned,
    /// Memory of one CUDA device.
    Cuda {
        /// The device's ordinal in this process.
        device: u32,
    },
}

impl MemoryKind {
    /// Whether the CPU can read and write the bytes through a pointer.
    pub const fn is_cpu_accessible(self) -> bool {
        matches!(self, Self::Host | Self::Pinned)
    }

    /// Whether a CUDA copy engine or kernel can read and write the bytes.
    pub const fn is_device_accessible(self) -> bool {
        matches!(self, Self::Pinned | Self::Cuda { .. })
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host memory"),
            Self::Pinned => f.write_str("pinned host memory"),
            Self::Cuda { device } => write!(f, "GPU {device}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_print_as_people_say_them() {
        assert_eq!(MemoryKind::Host.to_string(), "host memory");
        assert_eq!(MemoryKind::Pinned.to_string(), "pinned host memory");
        assert_eq!(MemoryKind::Cuda { device: 3 }.to_string(), "GPU 3");
    }
}
