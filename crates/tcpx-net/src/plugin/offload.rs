//! A plugin's device queue and bounce pool, as the device handle of a receive comm names them.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use nccl_net::device::UnpackNetDeviceHandle;
use nccl_net::{LoadMeta, QueueError, QueueSlot, RecvComm, UnpackQueue};
use tcpx_memory::{Access, BouncePool, Gpu, Region};

use super::PluginMemory;

/// Where received fragments are listed and where they lie.
#[derive(Debug)]
pub struct Offload {
    queue: UnpackQueue,
    pool: Arc<BouncePool>,
}

impl Offload {
    /// The queue of a receive comm whose memory is not known: of the GPU whose context is current
    /// on the calling thread if the queue is there, else in host memory that stands in for one.
    ///
    /// # Errors
    /// In words: the queue is in neither, or of another layout.
    pub fn discover(comm: &RecvComm) -> Result<Option<Self>, String> {
        let Some(handle) = comm.device_handle() else {
            return Ok(None);
        };
        let memory = match Gpu::current() {
            Ok(gpu) if gpu.pointer(handle.address.get() as u64).is_ok() => PluginMemory::Gpu(gpu),
            _ => PluginMemory::StandIn,
        };
        Self::of(comm, &memory)
    }

    /// Reads the device handle of a receive comm; `None` if the plugin gave none.
    pub(super) fn of(comm: &RecvComm, memory: &PluginMemory) -> Result<Option<Self>, String> {
        let Some(handle) = comm.device_handle() else {
            return Ok(None);
        };
        let expected = size_of::<UnpackNetDeviceHandle>();
        if handle.size != expected {
            return Err(format!(
                "expected a device handle of {expected} bytes, the plugin's has {}; use a plugin with device-unpack version 7",
                handle.size
            ));
        }
        match memory {
            PluginMemory::Host => Ok(None),
            PluginMemory::StandIn => Self::in_host_memory(handle.address.get()).map(Some),
            PluginMemory::Gpu(gpu) => Self::in_gpu_memory(gpu, handle.address.get()).map(Some),
        }
    }

    /// Everything lies in host memory of this process.
    fn in_host_memory(address: usize) -> Result<Self, String> {
        let size = size_of::<UnpackNetDeviceHandle>();
        let mapped = mapped_from(address, false)?;
        if mapped < size || !address.is_multiple_of(align_of::<UnpackNetDeviceHandle>()) {
            return Err("the device handle is not in this process's memory".to_owned());
        }
        let handle: *const UnpackNetDeviceHandle = std::ptr::with_exposed_provenance(address);
        // SAFETY: mapped, aligned, and written by the plugin before its accept succeeded.
        let handle = unsafe { handle.read() };
        let meta = handle.meta.expose_provenance();
        let queue = queue_at(meta, mapped_from(meta, true)?)?;
        let bounce = there(handle.bounce_buf.expose_provenance())?;
        let len = mapped_from(bounce, false)?;
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(());
        // SAFETY: the plugin's pool, mapped to its end and alive as long as the comm, which the
        // channel closes only after the last unpack. Offsets are checked against this length.
        let region = unsafe {
            Region::from_host_raw(std::ptr::with_exposed_provenance_mut(bounce), len, keep)
        };
        Self::new(queue, &region)
    }

    /// The handle lies in device memory, the queue in host memory mapped to the device.
    fn in_gpu_memory(gpu: &Gpu, address: usize) -> Result<Self, String> {
        let words = |error: tcpx_memory::CudaError| error.to_string();
        let size = size_of::<UnpackNetDeviceHandle>();
        let known = gpu.pointer(address as u64).map_err(words)?;
        if known.len_from(address as u64).is_none_or(|len| len < size) {
            return Err("the device handle does not fit its allocation".to_owned());
        }
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(());
        // SAFETY: device memory of the plugin, checked above to reach that far, alive with the
        // comm.
        let region = unsafe { Region::from_cuda_raw(gpu, address as u64, size, keep) };
        let mut bytes = [0u8; size_of::<UnpackNetDeviceHandle>()];
        region
            .read_to(0, &mut bytes)
            .map_err(|error| error.to_string())?;
        let ([meta, bounce, _head], _) = bytes.as_chunks::<8>() else {
            return Err("the device handle has not three words".to_owned());
        };
        let (meta, bounce) = (u64::from_ne_bytes(*meta), u64::from_ne_bytes(*bounce));
        let known = gpu.pointer(meta).map_err(words)?;
        let host = known
            .host
            .ok_or("the device queue is not in host memory that the CPU can read")?;
        let queue = queue_at(host, known.len_from(meta).unwrap_or(0))?;
        let bounce = there(bounce)?;
        let known = gpu.pointer(bounce).map_err(words)?;
        let len = known
            .len_from(bounce)
            .ok_or("the bounce pool is outside of its allocation")?;
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(());
        // SAFETY: the plugin's pool to the end of its allocation, alive as long as the comm, which
        // the channel closes only after the last unpack. Mapped host memory has a device address
        // too.
        let region = unsafe { Region::from_cuda_raw(gpu, bounce, len, keep) };
        Self::new(queue, &region)
    }

    fn new(queue: UnpackQueue, pool: &Region) -> Result<Self, String> {
        // The plugin fills one part while others are unpacked, so the pool as a whole is held.
        let lease = pool
            .lease_as(.., Access::Write, "the plugin's bounce pool")
            .map_err(|error| error.to_string())?;
        Ok(Self {
            queue,
            pool: Arc::new(BouncePool::new(lease.all())),
        })
    }

    /// The pool that fragments lie in.
    pub fn pool(&self) -> &Arc<BouncePool> {
        &self.pool
    }

    /// Whether somebody may still read the pool: an unpack that runs, or who holds a received
    /// payload.
    pub(super) fn is_read(&self) -> bool {
        // Of the pool's region we hold the slice and the lease that it rides on.
        const OURS: usize = 2;
        Arc::strong_count(&self.pool) > 1 || self.pool.slice().region().shares() > OURS
    }

    /// Takes the fragments of a finished receive, as the plugin lists them, out of the queue.
    ///
    /// # Errors
    /// More than a slot can hold.
    pub fn take(&self, slot: QueueSlot, into: &mut Vec<LoadMeta>) -> Result<(), QueueError> {
        self.queue.take_into(slot, into).map(|_| ())
    }
}

/// Address of the bounce pool: a plugin that serves host memory alone may have none.
fn there<T: Default + PartialEq>(pool: T) -> Result<T, String> {
    if pool == T::default() {
        return Err("it has no bounce pool".to_owned());
    }
    Ok(pool)
}

fn queue_at(address: usize, mapped: usize) -> Result<UnpackQueue, String> {
    let needed = size_of::<nccl_net::device::NetUnpackMeta>();
    if mapped < needed || !address.is_multiple_of(16) {
        return Err(format!(
            "the device queue needs {needed} writable bytes at a multiple of 16, there are {mapped} at {address:#x}"
        ));
    }
    let meta = NonNull::new(std::ptr::with_exposed_provenance_mut(address))
        .ok_or("the device queue's address is 0")?;
    // SAFETY: aligned, writable for its whole length, alive as long as the comm of the channel.
    Ok(unsafe { UnpackQueue::new(meta) })
}

/// Bytes from `address` to the end of the mapping (or run of adjacent mappings) that contains it.
///
/// A stand-in plugin names its pool by address only; this bounds what its offsets may reach.
fn mapped_from(address: usize, writable: bool) -> Result<usize, String> {
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(|error| error.to_string())?;
    let mut end = None;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(rights)) = (fields.next(), fields.next()) else {
            continue;
        };
        let Some((low, high)) = range.split_once('-') else {
            continue;
        };
        let (Ok(low), Ok(high)) = (
            usize::from_str_radix(low, 16),
            usize::from_str_radix(high, 16),
        ) else {
            continue;
        };
        let readable = rights.starts_with(if writable { "rw" } else { "r" });
        match end {
            None if readable && (low..high).contains(&address) => end = Some(high),
            Some(until) if low == until && readable => end = Some(high),
            Some(_) => break,
            None => {}
        }
    }
    end.map(|end| end - address)
        .ok_or_else(|| format!("{address:#x} is not in this process's memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_by_its_mapping() {
        let bytes = vec![0u8; 1 << 20];
        let mapped = mapped_from(bytes.as_ptr().expose_provenance(), true).expect("it is mapped");
        assert!(mapped >= bytes.len());
        assert!(mapped_from(16, false).is_err());
        let code = mapped_from as *const () as usize;
        assert!(mapped_from(code, false).is_ok() && mapped_from(code, true).is_err());
    }

    #[test]
    fn a_pool_is_read_as_long_as_anybody_else_can() {
        let meta = Region::host(size_of::<nccl_net::device::NetUnpackMeta>()).expect("memory");
        let address = meta.all().address() as usize;
        let pool = Region::host(4096).expect("memory");
        let offload = Offload::new(queue_at(address, meta.len()).expect("aligned"), &pool)
            .expect("nobody holds the pool");
        drop(pool);
        assert!(!offload.is_read());
        let payload = Arc::clone(offload.pool());
        assert!(offload.is_read());
        let job = BouncePool::clone(&payload);
        drop(payload);
        assert!(offload.is_read());
        drop(job);
        assert!(!offload.is_read());
    }
}
