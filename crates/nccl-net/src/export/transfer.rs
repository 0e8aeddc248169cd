//! C entries for sends, receives and their completion.

use std::ffi::{c_int, c_void};

use super::comm::{CommBox, RequestSlot, checked_ptr};
use super::entries::{Void, VoidOut, forwards, write_out};
use super::error::NetError;
use super::register::memory;
use super::traits::{Buffer, Exported, NetRecv, NetSend};
use crate::result::RawResult;

fn buffer(data: *mut c_void, len: usize) -> Result<Buffer, NetError> {
    if data.is_null() && len > 0 {
        return Err(NetError::invalid_argument("the data pointer is NULL"));
    }
    if c_int::try_from(len).is_err() {
        // `test` could not say how many bytes moved.
        return Err(NetError::invalid_argument(format!(
            "a request of {len} bytes: at most {} are told of by test; cut it",
            c_int::MAX
        )));
    }
    Ok(Buffer {
        data: data.cast(),
        len,
    })
}

fn int_bytes(size: c_int) -> Result<usize, NetError> {
    usize::try_from(size)
        .map_err(|_| NetError::invalid_argument(format!("size {size} is negative")))
}

unsafe fn isend<P: Exported>(
    comm: *mut c_void,
    data: *mut c_void,
    size: Result<usize, NetError>,
    tag: c_int,
    handle: *mut c_void,
    request: *mut *mut c_void,
) -> RawResult {
    P::cell().guard("isend", || {
        // SAFETY: pointers of the host: an out pointer, a comm of ours, a registration of ours.
        let (comm, memory) = unsafe {
            write_out(request, std::ptr::null_mut(), "request")?;
            (CommBox::<P>::from_ptr(comm)?, memory::<P>(handle)?)
        };
        let posted = comm.sender()?.isend(buffer(data, size?)?, tag, memory)?;
        let Some(id) = posted else { return Ok(()) };
        let pointer = comm.post(id)?;
        // SAFETY: as above.
        unsafe { write_out(request, pointer, "request") }
    })
}

forwards! {
    isend_v5(comm: Void, data: Void, size: c_int, tag: c_int, handle: Void, request: VoidOut)
        => isend(comm, data, int_bytes(size), tag, handle, request);
    isend_v9(comm: Void, data: Void, size: usize, tag: c_int, handle: Void, request: VoidOut)
        => isend(comm, data, Ok(size), tag, handle, request);
    isend_v10(comm: Void, data: Void, size: usize, tag: c_int, handle: Void, _profiler: Void, request: VoidOut)
        => isend(comm, data, Ok(size), tag, handle, request);
}

/// The pointers of a grouped call, of which only groups of one are taken.
struct Group {
    n: c_int,
    data: *mut *mut c_void,
    handles: *mut *mut c_void,
}

impl Group {
    /// # Safety
    /// The arrays are NULL or hold `n` elements.
    unsafe fn single(&self) -> Result<(*mut c_void, *mut c_void), NetError> {
        if self.n != 1 {
            return Err(NetError::invalid_argument(format!(
                "a group of {} receives: this plugin takes groups of 1 (maxRecvs)",
                self.n
            )));
        }
        // SAFETY: non-NULL, aligned, and one element by the caller's promise.
        unsafe {
            Ok((
                checked_ptr::<*mut c_void>(self.data.cast(), "data array")?.read(),
                checked_ptr::<*mut c_void>(self.handles.cast(), "memory handle array")?.read(),
            ))
        }
    }
}

unsafe fn irecv<P: Exported>(
    comm: *mut c_void,
    group: &Group,
    size: impl FnOnce() -> Result<usize, NetError>,
    tags: *mut c_int,
    request: *mut *mut c_void,
) -> RawResult {
    P::cell().guard("irecv", || {
        // SAFETY: pointers of the host: an out pointer, a comm and registrations of ours, arrays
        // of `n` elements.
        let (comm, data, memory, tag) = unsafe {
            // NCCL may leave a sentinel in `*request`; it never survives this call.
            write_out(request, std::ptr::null_mut(), "request")?;
            let (data, handle) = group.single()?;
            let tag = tags.as_ref().copied().unwrap_or(0);
            (
                CommBox::<P>::from_ptr(comm)?,
                data,
                memory::<P>(handle)?,
                tag,
            )
        };
        let posted = comm
            .receiver()?
            .irecv(buffer(data, size()?)?, tag, memory)?;
        let Some(id) = posted else { return Ok(()) };
        let pointer = comm.post(id)?;
        // SAFETY: as above.
        unsafe { write_out(request, pointer, "request") }
    })
}

unsafe fn first_int(sizes: *mut c_int) -> Result<usize, NetError> {
    // SAFETY: NULL or at least one element by the caller's promise.
    int_bytes(unsafe { checked_ptr::<c_int>(sizes.cast(), "size array")?.read() })
}

unsafe fn first_size(sizes: *mut usize) -> Result<usize, NetError> {
    // SAFETY: NULL or at least one element by the caller's promise.
    Ok(unsafe { checked_ptr::<usize>(sizes.cast(), "size array")?.read() })
}

forwards! {
    // Sizes are read only after the group was found to be one receive.
    irecv_v5(
        comm: Void, n: c_int, data: VoidOut, sizes: *mut c_int, tags: *mut c_int, handles: VoidOut, request: VoidOut
    ) => irecv(comm, &Group { n, data, handles }, || first_int(sizes), tags, request);
    irecv_v9(
        comm: Void, n: c_int, data: VoidOut, sizes: *mut usize, tags: *mut c_int, handles: VoidOut, request: VoidOut
    ) => irecv(comm, &Group { n, data, handles }, || first_size(sizes), tags, request);
    irecv_v10(
        comm: Void, n: c_int, data: VoidOut, sizes: *mut usize, tags: *mut c_int, handles: VoidOut,
        _profiler: VoidOut, request: VoidOut
    ) => irecv_v9(comm, n, data, sizes, tags, handles, request);
}

/// What has been received is visible: there is nothing to wait for.
pub(crate) unsafe extern "C" fn iflush<P: Exported>(
    _comm: *mut c_void,
    _n: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> RawResult {
    P::cell().guard("iflush", || {
        // SAFETY: an out pointer of the host.
        unsafe { write_out(request, std::ptr::null_mut(), "request") }
    })
}

pub(crate) unsafe extern "C" fn test<P: Exported>(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> RawResult {
    P::cell().guard("test", || {
        // SAFETY: pointers of the host: an out pointer and a request of ours.
        let slot = unsafe {
            write_out(done, 0, "done")?;
            RequestSlot::<P>::from_ptr(request)?
        };
        let Some(bytes) = slot.test()? else {
            return Ok(());
        };
        // SAFETY: out pointers of the host; `sizes` may be NULL.
        unsafe {
            if !sizes.is_null() {
                let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
                write_out(sizes, bytes, "size array")?;
            }
            write_out(done, 1, "done")
        }
    })
}
