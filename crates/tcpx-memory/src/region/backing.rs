//! What a region's bytes are made of, and how they are given back.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::gathered::Gathered;
use crate::error::MemoryError;
use crate::gpu::{Gpu, MappedHost, device_alloc, device_free};
use crate::kind::MemoryKind;
use crate::worker::reaper;

/// Where regions of no bytes start.
const NO_BYTES: *mut u8 = std::ptr::without_provenance_mut(4096);

/// A region's bytes.
pub(super) enum Backing {
    /// Nothing, at an aligned address.
    Empty,
    /// An anonymous mapping.
    Mapped { base: NonNull<u8>, len: usize },
    /// Page-locked memory, and its GPU and length where it is given back to the driver.
    Pinned(MappedHost, Option<(Gpu, usize)>),
    /// Device memory.
    Cuda(Arc<CudaMemory>),
    /// Somebody else's host memory.
    ForeignHost {
        base: *mut u8,
        _owner: Arc<dyn Any + Send + Sync>,
    },
    /// Pieces of other regions.
    Gathered(Gathered),
}

pub(super) struct CudaMemory {
    gpu: Gpu,
    base: u64,
    /// Until it is given back.
    owner: Option<Owner>,
}

/// Bytes of a page, and those from which on the driver's own memory starts at one.
const PAGE: usize = 4096;
const LONG: usize = 2 << 20;

/// To whom device memory goes when the last reference is gone.
enum Owner {
    /// By the address that it gave.
    Driver(u64),
    Foreign {
        _owner: Arc<dyn Any + Send + Sync>,
    },
}

// SAFETY: the pointers are to memory that this value owns, or that its owner keeps. Reads and
// writes through them are kept apart by leases.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    pub(super) fn mapped(len: usize) -> Result<Self, MemoryError> {
        if len == 0 {
            return Ok(Self::Empty);
        }
        let base = map(MemoryKind::Host, len)?;
        Ok(Self::Mapped { base, len })
    }

    pub(super) fn pinned(gpu: &Gpu, len: usize) -> Result<Self, MemoryError> {
        let memory = reaper::retry(|| MappedHost::pin(gpu, len))?;
        Ok(Self::Pinned(memory, Some((gpu.clone(), len))))
    }

    pub(super) fn cuda(gpu: &Gpu, len: usize) -> Result<Self, MemoryError> {
        // The driver's short memory starts anywhere, and Google's plugin registers none that does
        // not start at a page.
        let spare = if len < LONG { PAGE } else { 0 };
        let given = reaper::retry(|| Ok(device_alloc(gpu, len + spare)?))?;
        let base = given.next_multiple_of(PAGE as u64);
        Ok(Self::cuda_by(gpu, base, Owner::Driver(given)))
    }

    fn cuda_by(gpu: &Gpu, base: u64, owner: Owner) -> Self {
        Self::Cuda(Arc::new(CudaMemory {
            gpu: gpu.clone(),
            base,
            owner: Some(owner),
        }))
    }

    pub(super) fn foreign_host(base: *mut u8, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self::ForeignHost {
            base,
            _owner: owner,
        }
    }

    pub(super) fn foreign_cuda(gpu: &Gpu, base: u64, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self::cuda_by(gpu, base, Owner::Foreign { _owner: owner })
    }

    pub(super) fn cuda_memory(&self) -> Option<Arc<CudaMemory>> {
        match self {
            Self::Cuda(memory) => Some(Arc::clone(memory)),
            _ => None,
        }
    }

    pub(super) fn gpu(&self) -> Option<&Gpu> {
        match self {
            Self::Pinned(_, owner) => owner.as_ref().map(|(gpu, _)| gpu),
            Self::Cuda(memory) => Some(&memory.gpu),
            Self::Gathered(gathered) => gathered.gpu(),
            Self::Empty | Self::Mapped { .. } | Self::ForeignHost { .. } => None,
        }
    }

    pub(super) fn host_base(&self) -> Option<*mut u8> {
        match self {
            Self::Empty => Some(NO_BYTES),
            Self::Mapped { base, .. } => Some(base.as_ptr()),
            Self::Pinned(memory, _) => Some(memory.host.as_ptr()),
            // Slices of no bytes must not start at address 0 either.
            Self::ForeignHost { base, .. } if base.is_null() => Some(NO_BYTES),
            Self::ForeignHost { base, .. } => Some(*base),
            Self::Cuda(_) | Self::Gathered(_) => None,
        }
    }

    pub(super) fn device_base(&self) -> Option<u64> {
        match self {
            Self::Pinned(memory, _) => Some(memory.device),
            Self::Cuda(memory) => Some(memory.base),
            Self::Empty | Self::Mapped { .. } | Self::ForeignHost { .. } | Self::Gathered(_) => {
                None
            }
        }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        match self {
            // SAFETY: the last reference is gone, and the mapping is ours and whole.
            Self::Mapped { base, len } => unsafe { unmap(*base, *len) },
            Self::Pinned(memory, owner) => {
                if let Some((gpu, len)) = owner.take() {
                    let memory = *memory;
                    // SAFETY: pinned with that length; the last reference is gone.
                    reaper::run(move || unsafe { memory.free(&gpu, len) });
                }
            }
            Self::Empty | Self::ForeignHost { .. } | Self::Cuda(_) | Self::Gathered(_) => {}
        }
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let (gpu, owner) = (self.gpu.clone(), self.owner.take());
        reaper::run(move || {
            if let Some(Owner::Driver(given)) = owner {
                // SAFETY: allocated by `device_alloc`; the last reference is gone.
                unsafe { device_free(&gpu, given) };
            }
        });
    }
}

/// Maps `len` zeroed bytes at a page.
pub(crate) fn map(kind: MemoryKind, len: usize) -> Result<NonNull<u8>, MemoryError> {
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags) };
    let why = match mapped.map(|base| NonNull::new(base.cast())) {
        Ok(Some(base)) => return Ok(base),
        Ok(None) => "the mapping lies at address 0".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(MemoryError::Allocation { kind, len, why })
}

/// Takes back what [`map`] gave.
///
/// # Safety
/// It is whole, and nothing uses it any more.
pub(crate) unsafe fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: the caller's promise.
    if let Err(error) = unsafe { munmap(base.as_ptr().cast(), len) } {
        tracing::warn!(%error, "cannot unmap host memory");
    }
}
