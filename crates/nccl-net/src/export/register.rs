//! C entries for memory registration. A memory handle of the host is a boxed `P::Memory`.

use std::ffi::{c_int, c_void};

use super::comm::{CommBox, checked_ptr};
use super::entries::write_out;
use super::error::NetError;
use super::traits::{Exported, MemoryRegion};
use crate::constants::{PTR_CUDA, PTR_DMABUF, PTR_HOST};
use crate::result::RawResult;

fn region(data: *mut c_void, len: usize, kind: c_int) -> Result<MemoryRegion, NetError> {
    // NCCL adds the dma-buf bit to CUDA in some versions.
    let cuda = match kind & !PTR_DMABUF {
        PTR_HOST => false,
        PTR_CUDA => true,
        _ => {
            return Err(NetError::invalid_argument(format!(
                "memory type {kind} is neither host (1) nor CUDA (2)"
            )));
        }
    };
    if data.is_null() && len > 0 {
        return Err(NetError::invalid_argument("the data pointer is NULL"));
    }
    Ok(MemoryRegion {
        data: data.cast(),
        len,
        cuda,
    })
}

pub(crate) unsafe extern "C" fn reg_mr_v8<P: Exported>(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    handle: *mut *mut c_void,
) -> RawResult {
    P::cell().guard("regMr", || {
        // SAFETY: pointers of the host: an out pointer and a comm of ours.
        let comm = unsafe {
            write_out(handle, std::ptr::null_mut(), "memory handle")?;
            CommBox::<P>::from_ptr(comm)?
        };
        let memory = comm.transfer_comm()?.register(region(data, size, kind)?)?;
        let memory: *mut P::Memory = Box::into_raw(Box::new(memory));
        // SAFETY: as above.
        unsafe { write_out(handle, memory.cast(), "memory handle") }
    })
}

pub(crate) unsafe extern "C" fn reg_mr_v5<P: Exported>(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    kind: c_int,
    handle: *mut *mut c_void,
) -> RawResult {
    match usize::try_from(size) {
        // SAFETY: forwarded.
        Ok(size) => unsafe { reg_mr_v8::<P>(comm, data, size, kind, handle) },
        Err(_) => P::cell().guard("regMr", || {
            Err(NetError::invalid_argument(format!(
                "size {size} is negative"
            )))
        }),
    }
}

/// Offered by no plugin: hosts ask the properties first.
pub(crate) unsafe extern "C" fn reg_mr_dma_buf<P: Exported>(
    _comm: *mut c_void,
    _data: *mut c_void,
    _size: usize,
    _kind: c_int,
    _offset: u64,
    _fd: c_int,
    handle: *mut *mut c_void,
) -> RawResult {
    P::cell().guard("regMrDmaBuf", || {
        // SAFETY: an out pointer of the host.
        unsafe { write_out(handle, std::ptr::null_mut(), "memory handle") }?;
        Err(NetError::invalid_usage(
            "dma-buf registration is not offered: register the memory by address",
        ))
    })
}

pub(crate) unsafe extern "C" fn dereg_mr<P: Exported>(
    comm: *mut c_void,
    handle: *mut c_void,
) -> RawResult {
    P::cell().guard("deregMr", || {
        // SAFETY: the host passes a comm of ours.
        let comm = unsafe { CommBox::<P>::from_ptr(comm) }?.transfer_comm()?;
        let handle = checked_ptr::<P::Memory>(handle, "memory handle")?;
        // SAFETY: it came from a registration above and the host does not use it again.
        let memory = unsafe { Box::from_raw(handle.as_ptr()) };
        comm.deregister(*memory)
    })
}

/// The registration behind a memory handle.
///
/// # Safety
/// `handle` is NULL or a memory handle that was not deregistered.
pub(super) unsafe fn memory<'a, P: Exported>(
    handle: *mut c_void,
) -> Result<&'a P::Memory, NetError> {
    let handle = checked_ptr::<P::Memory>(handle, "memory handle")?;
    // SAFETY: it came from `Box::into_raw` and lives until `deregMr`.
    Ok(unsafe { handle.as_ref() })
}
