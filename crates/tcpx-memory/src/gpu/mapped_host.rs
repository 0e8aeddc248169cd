//! Pinned host memory.
//!
//! It is mapped and touched here, and only then given to the driver: while that pins memory, no
//! thread of the process can copy, for 40 ms where it maps 96 MiB itself (`cuMemHostAlloc`), for 3
//! ms so. Such memory lies in large pages and near the GPU, and stays mapped whatever becomes of
//! the context, so that no thread of ours falls off it.

use std::ptr::NonNull;
use std::thread;

use super::{Current, Gpu};
use crate::driver::sys;
use crate::error::{CudaError, MemoryError};
use crate::kind::MemoryKind;
use crate::region::{map, unmap};

/// Bytes of a large page.
const LARGE: usize = 2 << 20;
/// Threads that touch memory at once: the kernel clears its pages meanwhile.
const TOUCHING: usize = 4;

/// Pinned host memory with both its addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappedHost {
    pub(crate) host: NonNull<u8>,
    pub(crate) device: u64,
}

// SAFETY: two addresses; whoever has a part of the memory keeps others away from it.
unsafe impl Send for MappedHost {}
// SAFETY: as above.
unsafe impl Sync for MappedHost {}

impl MappedHost {
    /// Pins `len` zeroed bytes that every context can address.
    ///
    /// # Errors
    /// There are not as many, or the driver refuses.
    pub(crate) fn pin(gpu: &Gpu, len: usize) -> Result<Self, MemoryError> {
        let len = len.max(1);
        let host = map(MemoryKind::Pinned, len)?;
        advise(host, len, libc::MADV_HUGEPAGE);
        // A child has no part in it.
        advise(host, len, libc::MADV_DONTFORK);
        if let Some(node) = gpu.info().numa {
            prefer_node(host, len, node);
        }
        touch(host, len);
        register(gpu, host, len)
            .map(|device| Self { host, device })
            .inspect_err(|_| {
                // SAFETY: mapped above, and nobody knows of it.
                unsafe { unmap(host, len) };
            })
            .map_err(MemoryError::from)
    }

    /// Gives back so many bytes that [`Self::pin`] gave.
    ///
    /// # Safety
    /// Nothing may use the memory any more.
    pub(crate) unsafe fn free(self, gpu: &Gpu, len: usize) {
        let released = Current::enter(gpu).and_then(|_current| {
            // SAFETY: the caller's promise.
            let code = unsafe { (gpu.api().cuMemHostUnregister)(self.host.as_ptr().cast()) };
            gpu.api().check("cuMemHostUnregister", code)
        });
        match released {
            // SAFETY: the caller's promise; the driver has let go of it.
            Ok(()) => unsafe { unmap(self.host, len.max(1)) },
            Err(error) => tracing::debug!(%error, "pinned memory stays until the process ends"),
        }
    }

    /// The same memory from a byte of it on.
    pub(crate) fn at(self, bytes: usize) -> Self {
        Self {
            host: self.host.map_addr(|start| start.saturating_add(bytes)),
            device: self.device + bytes as u64,
        }
    }
}

/// Pins the memory; where it is for the device.
fn register(gpu: &Gpu, host: NonNull<u8>, len: usize) -> Result<u64, CudaError> {
    let _current = Current::enter(gpu)?;
    let (api, start) = (gpu.api(), host.as_ptr().cast());
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: the memory was mapped just now.
    let code = unsafe { (api.cuMemHostRegister)(start, len, flags) };
    gpu.check_memory_left(code, len, MemoryKind::Pinned)?;
    api.check("cuMemHostRegister", code)?;
    let mut device = 0;
    // SAFETY: the pointers are valid; the host address is that of registered memory.
    let code = unsafe { (api.cuMemHostGetDevicePointer)(&raw mut device, start, 0) };
    api.check("cuMemHostGetDevicePointer", code)?;
    Ok(device)
}

/// Gives advice to the kernel; one that does not know it goes on as it did.
fn advise(host: NonNull<u8>, len: usize, advice: i32) {
    // SAFETY: only advice is given that changes no byte, about memory of ours.
    unsafe { libc::madvise(host.as_ptr().cast(), len, advice) };
}

/// Has the kernel take pages of a NUMA node, while there are some.
fn prefer_node(host: NonNull<u8>, len: usize, node: u32) {
    const PREFERRED: i32 = 1;
    let Some(nodes) = 1_u64.checked_shl(node) else {
        return;
    };
    // SAFETY: the mask has as many bits as are named, of which the kernel reads one less; no byte
    // is changed.
    unsafe {
        let (mask, bits) = (&raw const nodes, u64::BITS + 1);
        libc::syscall(
            libc::SYS_mbind,
            host.as_ptr(),
            len,
            PREFERRED,
            mask,
            bits,
            0,
        );
    }
}

/// Has all pages made, by several threads where there are many. A kernel before 5.14 makes them
/// when the driver asks.
fn touch(host: NonNull<u8>, len: usize) {
    let part = len.div_ceil(TOUCHING).next_multiple_of(LARGE);
    thread::scope(|scope| {
        for at in (part..len).step_by(part) {
            let (start, len) = (host.addr().saturating_add(at), part.min(len - at));
            let touch = move || {
                advise(
                    NonNull::without_provenance(start),
                    len,
                    libc::MADV_POPULATE_WRITE,
                )
            };
            // Without a thread the driver does it.
            let _ = thread::Builder::new().spawn_scoped(scope, touch);
        }
        advise(host, part.min(len), libc::MADV_POPULATE_WRITE);
    });
}
