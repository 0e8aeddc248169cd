//! Memory that a device can be given: dma-bufs of host memory and of GPU memory.

mod cuda;
mod error;
mod host;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

pub use error::DmaBufError;

use crate::bounce::BouncePool;
use crate::error::MemoryError;
use crate::gpu::Gpu;
use crate::kind::MemoryKind;
use crate::lease::Access;
use crate::region::Region;
use crate::slice::RegionSlice;

/// A region exported as a dma-buf. Cheap to clone; the region lives as long as any clone, and the
/// kernel keeps the memory for as long as a device uses it.
#[derive(Clone)]
pub struct DmaBuf(Arc<Inner>);

struct Inner {
    // Closed before the memory may go.
    fd: OwnedFd,
    region: Region,
}

impl DmaBuf {
    /// Host memory (udmabuf), all zero, that the CPU reads through the region. `len` in bytes is
    /// rounded up to whole pages.
    ///
    /// # Errors
    /// No `/dev/udmabuf` or no right to open it, more bytes than the kernel allows, or no memory.
    pub fn host(len: usize) -> Result<Self, DmaBufError> {
        let (fd, region) = host::create(len)?;
        Ok(Self(Arc::new(Inner { fd, region })))
    }

    /// Memory of a GPU. `len` in bytes is rounded up to the driver's own granularity, 2 MiB.
    ///
    /// # Errors
    /// The GPU or its driver cannot export memory, or there is none left.
    pub fn cuda(gpu: &Gpu, len: usize) -> Result<Self, DmaBufError> {
        let region = cuda::allocate(gpu, len)?;
        Self::export(&region)
    }

    /// Exports a region of GPU memory as a whole. Its address and length must be whole pages.
    ///
    /// # Errors
    /// As [`Self::cuda`]; [`DmaBufError::NotWholePages`]; [`DmaBufError::NotExportable`] for host
    /// memory, which [`Self::host`] makes exportable from the start.
    pub fn export(region: &Region) -> Result<Self, DmaBufError> {
        Ok(Self(Arc::new(Inner {
            fd: cuda::export(region)?,
            region: region.clone(),
        })))
    }

    /// A dma-buf that somebody else exported.
    ///
    /// # Safety
    /// `region` is the memory behind it, from its start: a device writes there what it is told to
    /// write to the region.
    pub unsafe fn from_fd(fd: OwnedFd, region: Region) -> Self {
        Self(Arc::new(Inner { fd, region }))
    }

    /// The memory.
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    /// Where the memory lives.
    pub fn kind(&self) -> MemoryKind {
        self.0.region.kind()
    }

    /// Bytes in the dma-buf.
    pub fn len(&self) -> usize {
        self.0.region.len()
    }

    /// Whether there are no bytes in it; there always are.
    pub fn is_empty(&self) -> bool {
        self.0.region.is_empty()
    }

    /// A bounce pool over all of it. It holds the bytes for writing: no second pool can be made
    /// while slices of the first live.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] when anything else uses the bytes.
    pub fn bounce_pool(&self) -> Result<BouncePool, MemoryError> {
        let lease = self
            .0
            .region
            .lease_as(.., Access::Write, "a device-memory receive queue")?;
        Ok(BouncePool::written_by_card(lease.all()))
    }

    /// Where a slice lies in the dma-buf, in bytes from its start; `None` for slices of other
    /// regions.
    pub fn offset_of(&self, slice: &RegionSlice) -> Option<u64> {
        (slice.region().id() == self.0.region.id()).then_some(slice.offset() as u64)
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl fmt::Debug for DmaBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaBuf")
            .field("fd", &self.0.fd)
            .field("kind", &self.kind())
            .field("len", &self.len())
            .finish()
    }
}

#[cfg(test)]
mod tests;
