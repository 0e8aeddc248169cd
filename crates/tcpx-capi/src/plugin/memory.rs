//! Registering memory on a comm.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use nccl_net::{MemoryHandle, MemoryType};

use crate::engine::text::needed;
use crate::error::{Failure, Outcome, guard};
use crate::handles::{self, Handle, Object};
use crate::plugin::end::{End, Piece};
use crate::plugin::types::{TCPX_PTR_CUDA, TCPX_PTR_HOST, tcpx_memory};

/// A registration.
#[derive(Debug)]
pub(crate) struct Registered {
    start: usize,
    bytes: usize,
    pub(crate) kind: MemoryType,
    pub(crate) memory: MemoryHandle,
}

impl Registered {
    /// The piece at an address that C gave.
    pub(crate) fn piece(
        self: &Arc<Self>,
        handle: Handle,
        data: *const c_void,
        size: c_int,
        tag: c_int,
    ) -> Outcome<Piece> {
        let bytes = usize::try_from(size).map_err(|_| {
            Failure::argument(format!("a size of {size} bytes: it must not be negative"))
        })?;
        let offset = match data.addr().checked_sub(self.start) {
            // Nothing is moved: where from is no matter.
            _ if bytes == 0 => 0,
            Some(offset) if offset <= self.bytes && bytes <= self.bytes - offset => offset,
            _ => {
                return Err(Failure::argument(format!(
                    "{bytes} bytes at {:#x} do not lie in the registered memory of {} bytes at \
                     {:#x}: pass the handle of the memory that they lie in",
                    data.addr(),
                    self.bytes,
                    self.start
                )));
            }
        };
        Ok(Piece {
            handle,
            memory: Arc::clone(self),
            offset,
            bytes,
            tag,
        })
    }
}

/// Registers `size` bytes at `data` on a send or receive comm. `type` is TCPX_PTR_HOST or
/// TCPX_PTR_CUDA; CUDA memory must start at a multiple of 4096 bytes, with its context current.
/// A comm that is not connected yet is waited for, up to 10 seconds; then TCPX_TIMEOUT: call again
/// to go on waiting, or close the comm.
///
/// The memory must stay as it is until tcpx_dereg_mr or the close of the comm has returned.
/// While a request is in flight nobody may write what it sends, or touch what it receives into.
///
/// # Safety
/// As said; `mhandle` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    r#type: c_int,
    mhandle: *mut *mut tcpx_memory,
) -> c_int {
    guard("tcpx_reg_mr", || {
        let end: Arc<End> = handles::either_end(comm)?;
        needed("mhandle", mhandle)?;
        needed("data", data)?;
        let kind = match r#type {
            TCPX_PTR_HOST => MemoryType::Host,
            TCPX_PTR_CUDA => MemoryType::Cuda,
            other => {
                return Err(Failure::argument(format!(
                    "type is {other}: pass TCPX_PTR_HOST or TCPX_PTR_CUDA"
                )));
            }
        };
        let enter = |memory| {
            handles::insert(Object::Memory(Arc::new(Registered {
                start: data.addr(),
                bytes: size,
                kind,
                memory,
            })))
        };
        // SAFETY: the caller vouches for the memory until it is deregistered or its comm closed;
        // both wait until the plugin has let go of it.
        let handle = unsafe { end.register(data.cast(), size, kind, enter) }?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { mhandle.write(handle.to_pointer()) };
        Ok(())
    })
}

/// Ends a registration. TCPX_INVALID_USAGE while a request needs the memory: one in flight, or a
/// receive that is not consumed. Closing the comm ends all its registrations.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_dereg_mr(comm: *mut c_void, mhandle: *mut tcpx_memory) -> c_int {
    guard("tcpx_dereg_mr", || {
        let end = handles::either_end(comm)?;
        let (handle, memory) = handles::memory(mhandle)?;
        end.deregister(handle, || {
            // The last two holders: the plugin is told when the second goes, here.
            handles::remove([handle]);
            drop(memory);
        })
    })
}
