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

/// Allocates `bytes` bytes of host memory, page-aligned and all zero.
///
/// # Safety
/// `region` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_region_host(bytes: usize, region: *mut *mut tcpx_region) -> c_int {
    guard("tcpx_region_host", || {
        needed("region", region)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { handles::enter(Object::Region(Region::host(bytes)?), region) }
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
        let made = Region::cuda(&gpu(device)?, bytes)?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { handles::enter(Object::Region(made), region) }
    })
}

/// Makes a region of `bytes` bytes at `data` that the program has allocated: host memory
/// (TCPX_MEMORY_HOST, `device` is ignored), or memory of a CUDA device (TCPX_MEMORY_CUDA), managed
/// memory and memory that is mapped in parts among it. Pinned host memory is host memory.
/// TCPX_ERR_MEMORY if that is not so: the driver is asked, and of host memory the kernel.
///
/// `release` is called with `user`, once, when nothing of the library points at the memory any
/// more: after tcpx_region_release, and after every transfer and window there has ended. It is
/// called on a thread of the library that holds no lock, so it may call this library. NULL: the
/// memory stays for ever. If this call fails, `release` is not called.
///
/// # Safety
/// The memory can be read and written until `release` is called, nobody frees it before, and no
/// other region covers it. `region` is NULL or can be written. `release` may be called on any
/// thread.
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
        let address = data.expose_provenance();
        // SAFETY: the caller vouches for the memory until the owner's end calls `release`.
        let made = unsafe { Region::from_address(gpu.as_ref(), address, bytes, held) }?;
        // SAFETY: not NULL, and the caller lets us write there.
        unsafe { handles::enter(Object::Region(made), region) }?;
        owner.arm();
        Ok(())
    })
}

/// Where a region lies, and its length: an address of this process for host memory, else of the
/// device. Each may be NULL. The program may use the memory through it whenever no transfer does,
/// and as long as the region is not released.
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

/// Copies `bytes` bytes at `source` into the region from `offset` on. TCPX_ERR_MEMORY while a
/// transfer uses these bytes. For CUDA memory it waits for the work on the default streams.
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

/// Copies `bytes` bytes from the region's `offset` to `destination`; otherwise as
/// tcpx_region_write.
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
        // SAFETY: not NULL, `bytes` bytes that the caller lets us write. They need not be
        // initialised for C, and are only written here: plain bytes have no invalid value.
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

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::time::Duration;

    use tcpx::Gpu;
    use tcpx_memory::fake_driver;

    use super::*;
    use crate::engine::codes::{TCPX_ERR_MEMORY, TCPX_OK};

    fn wrap(address: usize, bytes: usize, memory: c_int) -> c_int {
        let mut region = ptr::null_mut();
        let data = ptr::with_exposed_provenance_mut(address);
        // SAFETY: the memory is there and stays, or the call says that it is not.
        unsafe {
            tcpx_region_wrap(
                data,
                bytes,
                memory,
                0,
                None,
                ptr::null_mut(),
                &raw mut region,
            )
        }
    }

    #[test]
    fn memory_that_is_not_there_is_refused() {
        fake_driver::install();
        let gpu = Gpu::open(0).unwrap();
        let of_gpu = Region::cuda(&gpu, 4096).unwrap();
        let freed = Region::cuda(&gpu, 4096).unwrap().all().address() as usize;
        assert!(Region::wait_for_frees(Duration::from_secs(60)));
        let pinned = Region::pinned(&gpu, 4096).unwrap();
        let host = Region::host(4096).unwrap();
        let at = |region: &Region| region.all().address() as usize;
        let there = [
            (at(&of_gpu), 4096, TCPX_MEMORY_CUDA),
            (at(&host), 4096, TCPX_MEMORY_HOST),
            (at(&pinned), 4096, TCPX_MEMORY_HOST),
            (0, 0, TCPX_MEMORY_HOST),
        ];
        for (address, bytes, memory) in there {
            assert_eq!(
                wrap(address, bytes, memory),
                TCPX_OK,
                "{bytes} at {address:#x}"
            );
        }
        let not_there = [
            (0x1_2345_6000, 4096, TCPX_MEMORY_CUDA),
            (0x1_2345_6000, 4096, TCPX_MEMORY_HOST),
            (freed, 4096, TCPX_MEMORY_CUDA),
            (at(&of_gpu), 1 << 30, TCPX_MEMORY_CUDA),
            (at(&host), 4096, TCPX_MEMORY_CUDA),
            (at(&pinned), 4096, TCPX_MEMORY_CUDA),
            (at(&host), usize::MAX, TCPX_MEMORY_HOST),
        ];
        for (address, bytes, memory) in not_there {
            let answer = wrap(address, bytes, memory);
            assert_eq!(answer, TCPX_ERR_MEMORY, "{bytes} at {address:#x}");
        }
    }
}
