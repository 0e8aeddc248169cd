//! Host memory as a dma-buf, through `/dev/udmabuf`.

use std::ffi::c_void;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::DmaBufError;
use crate::region::Region;

/// `UDMABUF_CREATE` of linux/udmabuf.h.
const CREATE: libc::Ioctl = 0x4018_7542;
/// The descriptor closes on exec.
const CLOEXEC: u32 = 1;
/// Says how much one dma-buf may have, in MiB.
const LIMIT: &str = "/sys/module/udmabuf/parameters/size_limit_mb";

/// `struct udmabuf_create` of linux/udmabuf.h.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// A shared mapping, unmapped with its last user.
struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and only `drop` touches it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the region that lay in the mapping has had its last user.
        if let Err(error) = unsafe { munmap(self.base, self.len) } {
            tracing::warn!(%error, "cannot unmap a dma-buf's memory");
        }
    }
}

pub(super) fn create(len: usize) -> Result<(OwnedFd, Region), DmaBufError> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/udmabuf")
        .map_err(|error| DmaBufError::NoUdmabuf {
            why: error.to_string(),
        })?;
    let fail = |call, why: String| DmaBufError::Host { call, len, why };
    let whole = len
        .max(1)
        .checked_next_multiple_of(rustix::param::page_size())
        .ok_or_else(|| fail("rounding up to pages", "too many bytes".to_owned()))?;
    if let Some(limit) = limit()
        && whole as u64 > limit
    {
        return Err(DmaBufError::TooLong { len, limit });
    }
    let memory = memfd_create("tcpx-pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|error| fail("memfd_create", error.to_string()))?;
    ftruncate(&memory, whole as u64).map_err(|error| fail("ftruncate", error.to_string()))?;
    // The kernel exports only memory that cannot shrink under it.
    fcntl_add_seals(&memory, SealFlags::SHRINK)
        .map_err(|error| fail("sealing the memory", error.to_string()))?;
    let fd = export(&device, &memory, whole)
        .map_err(|error| fail("UDMABUF_CREATE", error.to_string()))?;
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { mmap(ptr::null_mut(), whole, protection, flags, &memory, 0) }
        .map_err(|error| fail("mmap", error.to_string()))?;
    let owner = Arc::new(Mapping { base, len: whole });
    // SAFETY: the mapping lives in the owner, is zero at first, and only devices that the dma-buf
    // was given to touch it besides, under the pool's lease.
    let region = unsafe { Region::from_host_raw(base.cast(), whole, owner) };
    Ok((fd, region))
}

fn export(device: &File, memory: &OwnedFd, len: usize) -> std::io::Result<OwnedFd> {
    let request = Create {
        memfd: memory.as_raw_fd().cast_unsigned(),
        flags: CLOEXEC,
        offset: 0,
        size: len as u64,
    };
    // SAFETY: the request is the structure that this ioctl reads, and lives through the call.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), CREATE, &raw const request) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: a success is a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Most bytes of one dma-buf, where the kernel says so.
fn limit() -> Option<u64> {
    let text = fs::read_to_string(LIMIT).ok()?;
    text.trim().parse::<u64>().ok()?.checked_mul(1 << 20)
}
