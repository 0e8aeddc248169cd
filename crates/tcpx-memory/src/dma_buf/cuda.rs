//! GPU memory as a dma-buf, through the CUDA driver.

use std::os::fd::{FromRawFd, OwnedFd};

use super::DmaBufError;
use crate::driver;
use crate::driver::sys::{CUdevice_attribute, CUmemRangeHandleType};
use crate::error::{CudaError, MemoryError};
use crate::gpu::{Current, Gpu};
use crate::region::Region;

/// What the driver allocates device memory in; whole units start on page borders.
const GRANULE: usize = 2 << 20;

pub(super) fn allocate(gpu: &Gpu, len: usize) -> Result<Region, DmaBufError> {
    let whole = len.max(1).checked_next_multiple_of(GRANULE);
    let whole = whole.ok_or_else(|| MemoryError::Allocation {
        kind: gpu.kind(),
        len,
        why: "too many bytes".to_owned(),
    })?;
    Ok(Region::cuda(gpu, whole)?)
}

pub(super) fn export(region: &Region) -> Result<OwnedFd, DmaBufError> {
    let kind = region.kind();
    let gpu = match region.gpu() {
        Some(gpu) if gpu.kind() == kind => gpu,
        _ => return Err(DmaBufError::NotExportable { kind }),
    };
    let api = gpu.api();
    let device = driver::device(api, gpu.ordinal())?;
    let supported = driver::attribute(
        api,
        device,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
    );
    if supported != Ok(1) {
        return Err(DmaBufError::Unsupported {
            device: gpu.ordinal(),
            name: gpu.info().name.clone(),
        });
    }
    let (address, len) = (region.all().address(), region.len());
    let page = rustix::param::page_size();
    if len == 0 || !len.is_multiple_of(page) || !address.is_multiple_of(page as u64) {
        return Err(DmaBufError::NotWholePages { address, len, page });
    }
    let call = api
        .cuMemGetHandleForAddressRange
        .ok_or(CudaError::MissingSymbol {
            name: "cuMemGetHandleForAddressRange",
            needs: "11.7",
        })?;
    let _current = Current::enter(gpu)?;
    let mut fd = -1_i32;
    let what = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as i32;
    // SAFETY: the handle of this type is an int, and the range is an allocation of this context.
    api.check("cuMemGetHandleForAddressRange", unsafe {
        call((&raw mut fd).cast(), address, len, what, 0)
    })?;
    if fd < 0 {
        return Err(DmaBufError::BadDescriptor { arrived: fd });
    }
    // SAFETY: a success is a new descriptor that the caller owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
