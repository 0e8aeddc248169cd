//! Why memory could not be exported.

use crate::error::{CudaError, MemoryError};
use crate::kind::MemoryKind;

/// Why there is no dma-buf.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaBufError {
    /// Host memory cannot be exported here.
    #[error(
        "cannot open /dev/udmabuf: {why}; it needs a kernel with CONFIG_UDMABUF (modprobe udmabuf) and root, or the group that owns the file"
    )]
    NoUdmabuf {
        /// The system's reason.
        why: String,
    },
    /// More host memory than the kernel's module allows in one dma-buf.
    #[error(
        "{len} bytes are more than the {limit} that /dev/udmabuf exports; ask for less, or raise /sys/module/udmabuf/parameters/size_limit_mb"
    )]
    TooLong {
        /// Bytes asked for.
        len: usize,
        /// Bytes allowed.
        limit: u64,
    },
    /// A step of the export of host memory failed.
    #[error("{call} for a dma-buf of {len} bytes failed: {why}; ask for less or free some memory")]
    Host {
        /// The system call.
        call: &'static str,
        /// Bytes asked for.
        len: usize,
        /// The system's reason.
        why: String,
    },
    /// Only whole pages can be exported.
    #[error(
        "{len} bytes at {address:#x} are not whole pages of {page}; export memory whose address and length are multiples of that"
    )]
    NotWholePages {
        /// The memory's address.
        address: u64,
        /// Its bytes.
        len: usize,
        /// The host's page size.
        page: usize,
    },
    /// This memory belongs to no GPU.
    #[error(
        "{kind} cannot be exported after it was made; allocate it as an exportable buffer from the start"
    )]
    NotExportable {
        /// Where the bytes are.
        kind: MemoryKind,
    },
    /// The GPU's driver says that it cannot export.
    #[error(
        "GPU {device} ({name}) cannot export memory as a dma-buf; use NVIDIA's open kernel modules on Linux 5.12 or later, or a pool in host memory"
    )]
    Unsupported {
        /// The device's ordinal.
        device: u32,
        /// Its name.
        name: String,
    },
    /// The driver gave a descriptor that cannot be one.
    #[error("the CUDA driver exported memory as descriptor {arrived}; update NVIDIA's driver")]
    BadDescriptor {
        /// What it gave.
        arrived: i32,
    },
    /// The memory layer refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<CudaError> for DmaBufError {
    fn from(error: CudaError) -> Self {
        Self::Memory(error.into())
    }
}
