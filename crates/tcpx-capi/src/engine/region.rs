//! Memory that transfers read and write.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use tcpx::{Region, RegionSlice};

use super::codes::TCPX_ERR_SYSTEM;
use super::failure::guard;
use super::options::gpu;
use super::releases::Owner;
use super::text::{answer, bytes as bytes_of, needed};
use super::types::{TCPX_MEMORY_CUDA, TCPX_MEMORY_HOST, tcpx_region, tcpx_release_fn};
use crate::error::{Failure, Outcome};
use crate::handles::{self, Object};

/// A piece of a region that C named.
pub(super) fn slice(
    region: *const tcpx_region,
    offset: usize,
    bytes: usize,
) -> Outcome<RegionSlice> {
    let (_, region) = handles::region(region)?;
    let end = offset
        .checked_add(bytes)
        .filter(|end| *end <= region.len())
        .ok_or_else(|| {
            Failure::argument(format!(
                "{bytes} bytes from {offset} on do not lie in the region's {} bytes",
                region.len()
            ))
        })?;
    Ok(region.slice(offset..end)?)
}

/// Enters a region; the answer's place is known to be there.
///
/// # Safety
/// `region` can be written.
unsafe fn enter(made: Region, region: *mut *mut tcpx_region) -> Outcome<()> {
    let handle = handles::insert(Object::Region(made))?;
    // SAFETY: the caller's promise.
    unsafe { region.write(handle.to_pointer()) };
    Ok(())
}

/// Allocates `bytes` bytes of host memory, page-aligned and all zero.
///
/// # Safety
/// `region` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_host(bytes: usize, region: *mut *mut tcpx_region) -> c_int {
    guard("tcpx_region_host", || {
        needed("region", region)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(Region::host(bytes)?, region) }
    })
}

/// Allocates `bytes` bytes of memory on a CUDA device, in its primary context.
///
/// # Safety
/// `region` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_cuda(
    device: u32,
    bytes: usize,
    region: *mut *mut tcpx_region,
) -> c_int {
    guard("tcpx_region_cuda", || {
        needed("region", region)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(Region::cuda(&gpu(device)?, bytes)?, region) }
    })
}

/// Makes a region of `bytes` bytes at `data` that the program has allocated: host memory
/// (TCPX_MEMORY_HOST, `device` is ignored), or memory of a CUDA device (TCPX_MEMORY_CUDA).
///
/// `release` is called with `user`, once, when nothing of the library points at the memory any more:
/// after tcpx_region_release, and after every transfer and window there has ended. It is called on a
/// thread of the library that holds no lock, so it may call this library. NULL: the memory stays for
/// ever. If this call fails, `release` is not called.
///
/// # Safety
/// The memory can be read and written until `release` is called, nobody frees it before, and no other
/// region covers it. `region` is NULL or can be written. `release` may be called on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_wrap(
    data: *mut c_void,
    bytes: usize,
    memory: c_int,
    device: u32,
    release: tcpx_release_fn,
    user: *mut c_void,
    region: *mut *mut tcpx_region,
) -> c_int {
    guard("tcpx_region_wrap", || {
        needed("region", region)?;
        if bytes > 0 {
            needed("data", data)?;
        }
        if data.addr().checked_add(bytes).is_none() || bytes > isize::MAX as usize {
            return Err(Failure::argument(format!(
                "{bytes} bytes at {data:p} reach past the end of all memory"
            )));
        }
        let gpu = match memory {
            TCPX_MEMORY_HOST => None,
            TCPX_MEMORY_CUDA => Some(gpu(device)?),
            other => {
                return Err(Failure::argument(format!(
                    "memory is {other}: pass TCPX_MEMORY_HOST or TCPX_MEMORY_CUDA"
                )));
            }
        };
        let owner = Owner::new(release, user).map_err(|error| {
            Failure::new(
                TCPX_ERR_SYSTEM,
                format!("starting the thread that releases memory: {error}"),
            )
        })?;
        let owner = Arc::new(owner);
        let held = Arc::clone(&owner);
        let made = match &gpu {
            // SAFETY: the caller vouches for the memory until the owner's end calls `release`.
            None => unsafe { Region::from_host_raw(data.cast(), bytes, held) },
            Some(gpu) => {
                // SAFETY: as above; the address is of this device, as the caller says.
                unsafe { Region::from_cuda_raw(gpu, data.addr() as u64, bytes, held) }
            }
        };
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { enter(made, region) }?;
        owner.arm();
        Ok(())
    })
}

/// Where a region lies, and its length: an address of this process for host memory, else of the
/// device. Each may be NULL. The program may use the memory through it whenever no transfer does, and
/// as long as the region is not released.
///
/// # Safety
/// `address` and `bytes` are NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_address(
    region: *mut tcpx_region,
    address: *mut *mut c_void,
    bytes: *mut usize,
) -> c_int {
    guard("tcpx_region_address", || {
        let (_, region) = handles::region(region)?;
        let at = region.all().address();
        // SAFETY: the caller's promise.
        unsafe {
            answer(address, std::ptr::with_exposed_provenance_mut(at as usize));
            answer(bytes, region.len());
        }
        Ok(())
    })
}

/// Copies `bytes` bytes at `source` into the region from `offset` on. TCPX_ERR_MEMORY while a transfer
/// uses these bytes. For CUDA memory it waits for the work on the default streams.
///
/// # Safety
/// The source can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_write(
    region: *mut tcpx_region,
    offset: usize,
    source: *const c_void,
    bytes: usize,
) -> c_int {
    guard("tcpx_region_write", || {
        let slice = slice(region, offset, bytes)?;
        // SAFETY: the caller's promise.
        let source = unsafe { bytes_of("source", source, bytes) }?;
        Ok(slice.write_from(source)?)
    })
}

/// Copies `bytes` bytes from the region's `offset` to `destination`; otherwise as tcpx_region_write.
///
/// # Safety
/// The destination can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_read(
    region: *mut tcpx_region,
    offset: usize,
    destination: *mut c_void,
    bytes: usize,
) -> c_int {
    guard("tcpx_region_read", || {
        let slice = slice(region, offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        needed("destination", destination)?;
        // SAFETY: not NULL, `bytes` bytes that the caller lets us write. They need not be initialised for C, and
        // are only written here: plain bytes have no invalid value.
        let destination = unsafe { std::slice::from_raw_parts_mut(destination.cast(), bytes) };
        Ok(slice.read_to(destination)?)
    })
}

/// Ends the handle. The memory stays until every transfer and window that uses it has ended.
#[unsafe(no_mangle)]
pub extern "C" fn tcpx_region_release(region: *mut tcpx_region) -> c_int {
    guard("tcpx_region_release", || {
        let (handle, region) = handles::region(region)?;
        handles::take(handle)?;
        drop(region);
        Ok(())
    })
}
