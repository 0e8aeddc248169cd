//! Owned, reference-counted memory.

mod access;
mod backing;
mod gathered;

use std::any::Any;
use std::fmt;
use std::ops::{Range, RangeBounds};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

pub(crate) use access::append_in_pieces;
use backing::{Backing, CudaMemory};
pub(crate) use backing::{map, unmap};
pub use gathered::{DeviceParts, Gather, HostParts};

use crate::error::MemoryError;
use crate::gpu::{Gpu, MappedHost, check_host_memory};
use crate::kind::MemoryKind;
use crate::lease::{Access, Lease, LeaseTable};
use crate::lock;
use crate::slice::{RegionSlice, resolve};
use crate::worker::reaper;

/// Names a region within this process; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(u64);

impl RegionId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {}", self.0)
    }
}

/// Owned memory of one kind. A clone is another reference to the same bytes; they are freed with
/// the last reference, slice and lease.
///
/// GPU and pinned memory is freed on a thread of its own, because the driver may wait for the GPU
/// to free it, and the last reference may end on a thread that must not wait. As with every free of
/// GPU memory, do not drop the last reference while a kernel of yours waits for a transfer.
#[derive(Clone)]
pub struct Region(Arc<Inner>);

struct Inner {
    // First: before the memory is given back.
    watches: Watches,
    kind: MemoryKind,
    len: usize,
    leases: LeaseTable,
    backing: Backing,
}

/// Is told of the end of regions that it watches.
pub trait RegionWatch: Send + Sync {
    /// The last reference is gone, and the memory is given back with `kept`; on the thread that
    /// dropped it. Must not block.
    fn ended(&self, region: RegionId, kept: KeptMemory);
}

/// Keeps memory of a GPU whose region has ended from being given back: who was told of the end
/// still has others read it.
#[derive(Clone)]
pub struct KeptMemory {
    _memory: Option<Arc<CudaMemory>>,
}

impl fmt::Debug for KeptMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeptMemory")
    }
}

/// Who is told of a region's end, with its memory.
struct Watches(RegionId, Mutex<Vec<(Weak<dyn RegionWatch>, KeptMemory)>>);

impl Drop for Watches {
    fn drop(&mut self) {
        for (watch, kept) in lock(&self.1).drain(..) {
            if let Some(watch) = watch.upgrade() {
                watch.ended(self.0, kept);
            }
        }
    }
}

impl Region {
    /// Page-aligned memory of this process, all zero. `len` is in bytes and may be 0.
    ///
    /// # Errors
    /// [`MemoryError::Allocation`].
    pub fn host(len: usize) -> Result<Self, MemoryError> {
        Ok(Self::new(MemoryKind::Host, len, Backing::mapped(len)?))
    }

    /// Page-locked memory of this process that every CUDA device can address, all zero.
    ///
    /// To pin it holds up copies of the process for milliseconds, and to free it, on a thread of
    /// its own, for as long as the kernels take that run: where kernels of the program matter, keep
    /// what was allocated before them.
    ///
    /// # Errors
    /// [`crate::CudaError::OutOfMemory`] or the driver's refusal.
    pub fn pinned(gpu: &Gpu, len: usize) -> Result<Self, MemoryError> {
        Ok(Self::new(
            MemoryKind::Pinned,
            len,
            Backing::pinned(gpu, len)?,
        ))
    }

    /// Page-aligned memory of a CUDA device. Its bytes are whatever was there.
    ///
    /// To free it, on a thread of its own, holds up copies of the process for as long as the
    /// kernels take that run: where kernels of the program matter, keep it until they are done.
    ///
    /// # Errors
    /// [`crate::CudaError::OutOfMemory`] or the driver's refusal.
    pub fn cuda(gpu: &Gpu, len: usize) -> Result<Self, MemoryError> {
        Ok(Self::new(gpu.kind(), len, Backing::cuda(gpu, len)?))
    }

    /// Page-locked memory that nobody ever frees.
    ///
    /// # Safety
    /// It has so many initialised bytes, and nobody else uses them.
    pub(crate) unsafe fn pinned_for_good(memory: MappedHost, len: usize) -> Self {
        Self::new(MemoryKind::Pinned, len, Backing::Pinned(memory, None))
    }

    /// Host memory that other code allocated; `owner` is dropped with the last reference.
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `len` initialised bytes for as long as `owner`
    /// lives, and from now on nobody may touch the bytes except through the region, or while
    /// holding a fitting [`Lease`] on them.
    pub unsafe fn from_host_raw(
        ptr: *mut u8,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::new(MemoryKind::Host, len, Backing::foreign_host(ptr, owner))
    }

    /// Device memory that somebody else allocated; `owner` is dropped with the last reference, on a
    /// thread of its own.
    ///
    /// # Safety
    /// `ptr` must be the device address of `len` bytes that `gpu`'s context can read and write for
    /// as long as `owner` lives. Nobody may touch the bytes while an operation of this crate uses
    /// them.
    pub unsafe fn from_cuda_raw(
        gpu: &Gpu,
        ptr: u64,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::new(gpu.kind(), len, Backing::foreign_cuda(gpu, ptr, owner))
    }

    /// Memory that the program names by its address: of a GPU, or host memory. `owner` is dropped
    /// with the last reference.
    ///
    /// # Errors
    /// As [`check_address`](Self::check_address).
    ///
    /// # Safety
    /// As [`from_cuda_raw`](Self::from_cuda_raw) and [`from_host_raw`](Self::from_host_raw).
    pub unsafe fn from_address(
        gpu: Option<&Gpu>,
        address: usize,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, MemoryError> {
        Self::check_address(gpu, address, len)?;
        let host = std::ptr::with_exposed_provenance_mut(address);
        Ok(match gpu {
            // SAFETY: the caller's promise.
            Some(gpu) => unsafe { Self::from_cuda_raw(gpu, address as u64, len, owner) },
            // SAFETY: as above.
            None => unsafe { Self::from_host_raw(host, len, owner) },
        })
    }

    /// Asks the driver, or the kernel for host memory, whether so many bytes are there.
    ///
    /// # Errors
    /// [`MemoryError::Pointer`] if they are not, or cannot be reached by this GPU.
    pub fn check_address(gpu: Option<&Gpu>, address: usize, len: usize) -> Result<(), MemoryError> {
        match gpu {
            Some(gpu) => gpu.check_memory(address as u64, len),
            None => check_host_memory(address, len),
        }
    }

    /// From now on leases of this region keep nobody away: operations that write the same bytes at
    /// a time all run, and which of them is seen there is not said. For memory of a program that
    /// orders its writers by itself.
    ///
    /// # Safety
    /// Only transfers touch the bytes through the region from now on: nobody borrows them
    /// ([`Region::with_bytes`], [`Region::with_bytes_mut`], [`Region::checksum`]) or copies them
    /// ([`Region::read_to`], [`Region::write_from`]) while a transfer may write them.
    pub unsafe fn share(&self) {
        self.0.leases.share();
    }

    fn new(kind: MemoryKind, len: usize, backing: Backing) -> Self {
        Self(Arc::new(Inner {
            watches: Watches(RegionId::next(), Mutex::default()),
            kind,
            len,
            leases: LeaseTable::default(),
            backing,
        }))
    }

    /// Waits until GPU and pinned memory whose last reference is gone has been given back to the
    /// driver; `false` when `limit` passed before. Allocations do this by themselves when memory is
    /// short.
    pub fn wait_for_frees(limit: Duration) -> bool {
        reaper::flush(limit)
    }

    /// Tells `watch` of the region's end, if it lives then.
    pub fn watch(&self, watch: Weak<dyn RegionWatch>) {
        let _memory = self.0.backing.cuda_memory();
        let mut watches = lock(&self.0.watches.1);
        watches.retain(|(one, _)| one.strong_count() > 0);
        watches.push((watch, KeptMemory { _memory }));
    }

    /// A reference that does not keep it.
    pub fn downgrade(&self) -> WeakRegion {
        WeakRegion(Arc::downgrade(&self.0))
    }

    /// This region's name in the process.
    pub fn id(&self) -> RegionId {
        self.0.watches.0
    }

    /// Where the bytes live.
    pub fn kind(&self) -> MemoryKind {
        self.0.kind
    }

    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The GPU whose context the memory belongs to; `None` for pageable host memory and for pieces
    /// of host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.0.backing.gpu()
    }

    /// A part of the region.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<RegionSlice, MemoryError> {
        Ok(RegionSlice::plain(
            self.clone(),
            resolve(range, self.len())?,
        ))
    }

    /// The whole region as a slice.
    pub fn all(&self) -> RegionSlice {
        RegionSlice::plain(self.clone(), 0..self.len())
    }

    /// Takes the right to touch a range, until the lease and all slices made from it are dropped.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`]; [`MemoryError::Busy`] when another lease overlaps and either
    /// of the two is for writing.
    pub fn lease(
        &self,
        range: impl RangeBounds<usize>,
        access: Access,
    ) -> Result<Lease, MemoryError> {
        self.lease_as(range, access, "a transfer")
    }

    /// As [`Self::lease`], with the words that another party's [`MemoryError::Busy`] names the
    /// holder by.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn lease_as(
        &self,
        range: impl RangeBounds<usize>,
        access: Access,
        holder: &'static str,
    ) -> Result<Lease, MemoryError> {
        Lease::take(self, resolve(range, self.len())?, access, holder)
    }

    /// References to these bytes: clones, slices, leases, and copies in progress.
    pub fn shares(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    pub(crate) fn leases(&self) -> &LeaseTable {
        &self.0.leases
    }

    /// The memory of a range in its order: one part, or those of a gathered region. `None` for
    /// memory that the CPU cannot address.
    pub(crate) fn host_parts(&self, range: Range<usize>) -> Option<HostParts<'_>> {
        match &self.0.backing {
            Backing::Gathered(gathered) => gathered.host_parts(range),
            backing => {
                let base = backing.host_base()?;
                Some(HostParts::one(base.wrapping_add(range.start), range.len()))
            }
        }
    }

    /// As [`Self::host_parts`], of memory that CUDA devices can address: where it is for them.
    pub(crate) fn device_parts(&self, range: Range<usize>) -> Option<DeviceParts<'_>> {
        match &self.0.backing {
            Backing::Gathered(gathered) => gathered.device_parts(range),
            backing => {
                let base = backing.device_base()?;
                Some(DeviceParts::one(base + range.start as u64, range.len()))
            }
        }
    }

    /// The regions whose memory it is: itself, or those that its pieces are of.
    pub fn parents(&self) -> impl Iterator<Item = &Self> {
        let (own, gathered) = match &self.0.backing {
            Backing::Gathered(gathered) => (None, Some(gathered.parents())),
            _ => (Some(self), None),
        };
        own.into_iter().chain(gathered.into_iter().flatten())
    }

    /// Whether its bytes are those of pieces of other regions, so that it has no address.
    pub(crate) fn is_in_pieces(&self) -> bool {
        matches!(self.0.backing, Backing::Gathered(_))
    }

    pub(crate) fn host_base(&self) -> Option<*mut u8> {
        self.0.backing.host_base()
    }

    pub(crate) fn device_base(&self) -> Option<u64> {
        self.0.backing.device_base()
    }
}

/// A region that may end meanwhile.
#[derive(Clone)]
pub struct WeakRegion(Weak<Inner>);

impl WeakRegion {
    /// The region, if it has not ended.
    pub fn upgrade(&self) -> Option<Region> {
        self.0.upgrade().map(Region)
    }
}

impl fmt::Debug for WeakRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakRegion")
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Region({}, {} bytes of {})",
            self.id(),
            self.len(),
            self.kind()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_memory_starts_at_a_page_and_goes_back_as_it_came() {
        let gpu = Gpu::fake();
        for len in [1, 100, 4096, 5000, 3 << 20] {
            let regions: Vec<_> = (0..3).map(|_| Region::cuda(&gpu, len).unwrap()).collect();
            assert!(
                regions
                    .iter()
                    .all(|region| region.all().address() % 4096 == 0)
            );
        }
    }

    #[test]
    fn host_memory_is_zero_and_page_aligned() {
        let region = Region::host(10_000).unwrap();
        assert_eq!(region.all().address() % 4096, 0);
        region
            .with_bytes(.., |bytes| assert!(bytes.iter().all(|&byte| byte == 0)))
            .unwrap();
        assert_eq!((region.len(), region.kind()), (10_000, MemoryKind::Host));
    }

    #[test]
    fn no_bytes_are_legal() {
        let region = Region::host(0).unwrap();
        assert!(region.is_empty() && region.all().is_empty());
        region.write_from(0, &[]).unwrap();
        assert_eq!(region.checksum(..), Ok(0));
        assert!(region.slice(0..1).is_err());
    }

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        let refused = Region::host(usize::MAX / 2);
        assert!(
            matches!(refused, Err(MemoryError::Allocation { .. })),
            "{refused:?}"
        );
        assert!(Region::host(usize::MAX).is_err());
    }

    #[test]
    fn regions_have_names_of_their_own() {
        assert_ne!(Region::host(1).unwrap().id(), Region::host(1).unwrap().id());
    }

    #[test]
    fn foreign_memory_of_no_bytes_may_lie_at_address_0() {
        // SAFETY: no bytes, so any address will do; an empty array of another library has this one.
        let region = unsafe { Region::from_host_raw(std::ptr::null_mut(), 0, Arc::new(())) };
        region
            .with_bytes(.., |bytes| assert!(bytes.is_empty()))
            .unwrap();
        region.with_bytes_mut(.., |bytes| bytes.fill(1)).unwrap();
        assert_eq!(region.checksum(..), Ok(0));
        let of = region.all();
        assert_eq!(crate::cpu::run(&crate::Work::checksum(of)), Ok(0));
    }

    #[test]
    fn foreign_memory_is_given_back_with_the_last_reference() {
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
        let mut bytes = vec![7_u8; 64].into_boxed_slice();
        // SAFETY: the box outlives the region in this test and is not touched meanwhile.
        let region = unsafe { Region::from_host_raw(bytes.as_mut_ptr(), 64, Arc::clone(&owner)) };
        let slice = region.slice(8..).unwrap();
        drop(region);
        let mut back = [0; 4];
        slice.read_to(&mut back).unwrap();
        assert_eq!((back, Arc::strong_count(&owner)), ([7; 4], 2));
        drop(slice);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
