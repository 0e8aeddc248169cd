//! Memory of a GPU of both kinds.

use std::sync::Arc;

use cudarc::driver::sys;
use tcpx::{Gpu, Region};

use crate::{Outcome, text};

/// As PyTorch's expandable segments.
const SEGMENT: usize = 20 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of `cuMemAlloc`.
    Plain,
    /// Mapped by physical segments.
    Segments,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Plain, Self::Segments];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Segments => "segments",
        }
    }

    pub(crate) fn named(name: &str) -> Outcome<Self> {
        let found = Self::ALL.into_iter().find(|one| one.name() == name);
        found.ok_or_else(|| format!("no memory is {name}"))
    }
}

pub(crate) struct Memory {
    pub(crate) region: Region,
}

fn check(call: &str, result: sys::CUresult) -> Outcome<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(format!("{call}: {error:?}")),
    }
}

/// Segments, which are given back with the last user.
struct Segments {
    gpu: Gpu,
    at: u64,
    len: usize,
}

impl Drop for Segments {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: mapped below, whole.
            unsafe {
                sys::cuMemUnmap(self.at, self.len);
                sys::cuMemAddressFree(self.at, self.len);
            }
        }
    }
}

impl Memory {
    pub(crate) fn new(gpu: &Gpu, kind: Kind, bytes: usize) -> Outcome<Self> {
        let region = match kind {
            Kind::Plain => Region::cuda(gpu, bytes).map_err(text)?,
            Kind::Segments => segments(gpu, bytes)?,
        };
        Ok(Self { region })
    }
}

fn segments(gpu: &Gpu, bytes: usize) -> Outcome<Region> {
    let _current = gpu.enter().map_err(text)?;
    let len = bytes.next_multiple_of(SEGMENT);
    let mut at = 0;
    // SAFETY: the pointer is valid for one address.
    check("cuMemAddressReserve", unsafe {
        sys::cuMemAddressReserve(&raw mut at, len, 0, 0, 0)
    })?;
    let location = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };
    // SAFETY: a structure of integers, which may be 0.
    let mut wish: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    wish.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    wish.requestedHandleTypes =
        sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    wish.location = location;
    for offset in (0..len).step_by(SEGMENT) {
        let mut handle = 0;
        // SAFETY: the pointers are valid, and the range is reserved.
        unsafe {
            check(
                "cuMemCreate",
                sys::cuMemCreate(&raw mut handle, SEGMENT, &raw const wish, 0),
            )?;
            let mapped = sys::cuMemMap(at + offset as u64, SEGMENT, 0, handle, 0);
            check("cuMemMap", mapped)?;
            check("cuMemRelease", sys::cuMemRelease(handle))?;
        }
    }
    let access = sys::CUmemAccessDesc {
        location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: all of it is mapped.
    check("cuMemSetAccess", unsafe {
        sys::cuMemSetAccess(at, len, &raw const access, 1)
    })?;
    let owner = Arc::new(Segments {
        gpu: gpu.clone(),
        at,
        len,
    });
    // SAFETY: mapped until the owner is dropped.
    Ok(unsafe { Region::from_cuda_raw(gpu, at, bytes, owner) })
}

/// Bytes of the GPU that nobody has.
pub(crate) fn free_bytes(gpu: &Gpu) -> Outcome<u64> {
    let _current = gpu.enter().map_err(text)?;
    let (mut free, mut all) = (0, 0);
    // SAFETY: the pointers are valid for one size each.
    check("cuMemGetInfo", unsafe {
        sys::cuMemGetInfo_v2(&raw mut free, &raw mut all)
    })?;
    Ok(free as u64)
}
