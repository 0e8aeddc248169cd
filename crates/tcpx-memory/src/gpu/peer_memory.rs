//! GPU memory of other processes of this host, to read it.
//!
//! There are two kinds. What `cuMemAlloc` gave has a *legacy handle*, some bytes that any process
//! opens once. What is mapped by physical *segments*, as PyTorch's expandable segments are, goes by
//! a descriptor for each. Either keeps the owner's memory after its free and its death, until the
//! reader has let go: segments in a fraction of a millisecond, a legacy handle once the kernels of
//! this process have ended that run then, which holds up its copies meanwhile. So those are closed
//! by a thread of their own, once the context has no work, or after a while all the same; no other
//! memory waits for it.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::{Current, Gpu};
use crate::driver::sys::{self, CUipcMemHandle, CUpointer_attribute as Attribute};
use crate::error::CudaError;
use crate::lock;
use crate::region::Region;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: memory of another GPU is read where the two reach each
/// other.
const PEER_ACCESS: u32 = 1;

/// Longest time for which a handle that nobody uses waits for a context without work: its memory is
/// its owner's, who may want it back.
const LATEST_CLOSE: Duration = Duration::from_secs(2);
/// Time between two looks at the context.
const LOOK: Duration = Duration::from_millis(1);

/// How another process comes to memory of a GPU.
#[derive(Debug)]
pub enum MemoryHandle {
    /// Of an allocation.
    Legacy([u8; 64]),
    /// Of a physical segment.
    Segment(OwnedFd),
}

/// An allocation or a segment, as another process can open it.
#[derive(Debug)]
pub struct Shareable {
    /// Where it begins in this process.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
    /// How it is opened.
    pub handle: MemoryHandle,
}

/// A call that old drivers do not have.
fn there<F>(call: Option<F>, name: &'static str) -> Result<F, CudaError> {
    call.ok_or(CudaError::MissingSymbol {
        name,
        needs: "11.0",
    })
}

impl Gpu {
    /// The allocation or segment that an address of this GPU's memory lies in, to be opened by
    /// another process.
    ///
    /// # Errors
    /// The driver's refusal: of memory of a pool, or of segments that were not made to be shared.
    pub fn share(&self, address: u64) -> Result<Shareable, CudaError> {
        let _current = Current::enter(self)?;
        let api = self.api();
        let retain = there(
            api.cuMemRetainAllocationHandle,
            "cuMemRetainAllocationHandle",
        )?;
        let mut held = 0;
        // SAFETY: the pointer is valid for one handle; the driver checks the address.
        let code = unsafe {
            retain(
                &raw mut held,
                std::ptr::without_provenance_mut(address as usize),
            )
        };
        if api.check("cuMemRetainAllocationHandle", code).is_ok() {
            let segment = self.segment(address, held);
            self.release(held);
            return segment;
        }
        let start = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)?;
        let len = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)?;
        let get = there(api.cuIpcGetMemHandle, "cuIpcGetMemHandle")?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is valid for one handle.
        api.check("cuIpcGetMemHandle", unsafe { get(&raw mut handle, start) })?;
        Ok(Shareable {
            start,
            len,
            handle: MemoryHandle::Legacy(handle.reserved.map(|byte| byte as u8)),
        })
    }

    fn segment(&self, address: u64, held: u64) -> Result<Shareable, CudaError> {
        let start = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, address)?;
        let len = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE, address)?;
        let api = self.api();
        let export = there(
            api.cuMemExportToShareableHandle,
            "cuMemExportToShareableHandle",
        )?;
        let mut descriptor = -1;
        let place = (&raw mut descriptor).cast::<c_void>();
        // SAFETY: the handle is held, and the pointer is valid for one descriptor.
        let code = unsafe { export(place, held, DESCRIPTOR, 0) };
        api.check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver made it for the caller.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC).ok();
        Ok(Shareable {
            start,
            len,
            handle: MemoryHandle::Segment(descriptor),
        })
    }

    fn release(&self, handle: u64) {
        if let Some(release) = self.api().cuMemRelease {
            // SAFETY: the caller's own reference.
            let code = unsafe { release(handle) };
            self.api().check_teardown("cuMemRelease", code);
        }
    }

    /// The allocation behind another process's legacy handle.
    ///
    /// # Errors
    /// The driver's refusal: of a handle of this process, or of a GPU that this one does not reach.
    pub fn open_legacy(&self, handle: [u8; 64]) -> Result<Region, CudaError> {
        let opened = Legacy::open(self, handle)?;
        let at = opened.at;
        let _current = Current::enter(self)?;
        let len = self.attribute(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, at)?;
        // SAFETY: mapped until the owner is dropped. Its owner alone writes there, and keeps
        // readers of this process away from nothing.
        unsafe {
            let region = Region::from_cuda_raw(self, at, len as usize, opened);
            region.share();
            Ok(region)
        }
    }
}

/// Memory of another process that is open here.
struct Legacy {
    gpu: Gpu,
    handle: [u8; 64],
    at: u64,
}

/// A context's handle.
type Key = (u64, [u8; 64]);

/// The handles of other processes that this one has open.
#[derive(Default)]
struct Handles {
    /// A process opens a handle once: where it lies, also what is still to be closed.
    open: HashMap<Key, (u64, Weak<Legacy>)>,
    /// Those that were let go of, the oldest first, and when.
    unused: VecDeque<(Gpu, Key, Instant)>,
    /// The one that is being closed.
    closing: Option<Key>,
    has_thread: bool,
}

static HANDLES: Mutex<Option<Handles>> = Mutex::new(None);
/// One was closed.
static CLOSED: Condvar = Condvar::new();

static MAPPED: AtomicU64 = AtomicU64::new(0);
static HELD_UP: AtomicU64 = AtomicU64::new(0);

/// Allocations and rows of segments of other processes that are mapped here, and how many IPC
/// handles were closed while the context had work until now, for which the driver waited and held
/// up copies.
pub fn peer_mappings() -> [u64; 2] {
    [&MAPPED, &HELD_UP].map(|count| count.load(Ordering::Relaxed))
}

fn with_handles<R>(run: impl FnOnce(&mut Handles) -> R) -> R {
    run(lock(&HANDLES).get_or_insert_default())
}

impl Legacy {
    fn open(gpu: &Gpu, handle: [u8; 64]) -> Result<Arc<Self>, CudaError> {
        let key = (gpu.context(), handle);
        let is_closing =
            |all: &mut Option<Handles>| all.as_ref().is_some_and(|all| all.closing == Some(key));
        // Whoever wants the very handle that is being closed waits; no other does.
        let mut handles = CLOSED
            .wait_while(lock(&HANDLES), is_closing)
            .unwrap_or_else(PoisonError::into_inner);
        let handles = handles.get_or_insert_default();
        let at = match handles.open.get(&key) {
            Some((at, open)) => match open.upgrade() {
                Some(open) => return Ok(open),
                None => *at,
            },
            None => Self::map(gpu, handle)?,
        };
        let gpu = gpu.clone();
        let open = Arc::new(Self { gpu, handle, at });
        handles.open.insert(key, (at, Arc::downgrade(&open)));
        Ok(open)
    }

    fn map(gpu: &Gpu, handle: [u8; 64]) -> Result<u64, CudaError> {
        let _current = Current::enter(gpu)?;
        let open = there(gpu.api().cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle_v2")?;
        let mut at = 0;
        let reserved = handle.map(|byte| byte as std::ffi::c_char);
        // SAFETY: the pointer is valid for one address; the driver checks the handle.
        let code = unsafe { open(&raw mut at, CUipcMemHandle { reserved }, PEER_ACCESS) };
        gpu.api().check("cuIpcOpenMemHandle", code)?;
        MAPPED.fetch_add(1, Ordering::Relaxed);
        Ok(at)
    }
}

/// Closes what was let go of, until nothing is left.
fn close_unused() {
    let next = || {
        with_handles(|handles| {
            let next = handles.unused.pop_front();
            handles.has_thread = next.is_some();
            next
        })
    };
    while let Some((gpu, key, since)) = next() {
        let Ok(_current) = Current::enter(&gpu) else {
            continue;
        };
        let mut rests = gpu.default_streams_rest();
        while !rests && since.elapsed() < LATEST_CLOSE {
            thread::sleep(LOOK);
            rests = gpu.default_streams_rest();
        }
        // Nobody may have opened it again meanwhile.
        let unused = with_handles(|handles| {
            let found = handles.open.get(&key);
            let (at, _) = found.filter(|(_, open)| open.strong_count() == 0)?;
            handles.closing = Some(key);
            Some(*at)
        });
        let Some((at, close)) = unused.zip(gpu.api().cuIpcCloseMemHandle) else {
            continue;
        };
        // SAFETY: it is open, and its last user is gone.
        let code = unsafe { close(at) };
        gpu.api().check_teardown("cuIpcCloseMemHandle", code);
        MAPPED.fetch_sub(1, Ordering::Relaxed);
        HELD_UP.fetch_add(u64::from(!rests), Ordering::Relaxed);
        with_handles(|handles| {
            handles.open.remove(&key);
            handles.closing = None;
        });
        CLOSED.notify_all();
    }
}

impl Drop for Legacy {
    fn drop(&mut self) {
        let key = (self.gpu.context(), self.handle);
        let gpu = self.gpu.clone();
        let has_thread = with_handles(|handles| {
            handles.unused.push_back((gpu, key, Instant::now()));
            std::mem::replace(&mut handles.has_thread, true)
        });
        let closing = || thread::Builder::new().name("tcpx-close".to_owned());
        if !has_thread && let Err(error) = closing().spawn(close_unused) {
            // The next one that is let go of tries again.
            with_handles(|handles| handles.has_thread = false);
            tracing::warn!(%error, "memory of another process stays open: no thread closes it");
        }
    }
}

/// Segments of another process, one behind the other.
pub struct SegmentRow {
    gpus: Vec<Gpu>,
    at: u64,
    len: usize,
    mapped: usize,
}

impl fmt::Debug for SegmentRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SegmentRow({} of {} bytes)", self.mapped, self.len)
    }
}

impl SegmentRow {
    /// Room for so many bytes of segments, to be read by these GPUs.
    ///
    /// # Errors
    /// The driver's refusal, or no GPU.
    pub fn new(gpus: &[Gpu], len: usize) -> Result<Self, CudaError> {
        let gpu = gpus.first().ok_or(CudaError::NoCurrentContext)?;
        let _current = Current::enter(gpu)?;
        let reserve = there(gpu.api().cuMemAddressReserve, "cuMemAddressReserve")?;
        let mut at = 0;
        // SAFETY: the pointer is valid for one address.
        let code = unsafe { reserve(&raw mut at, len, 0, 0, 0) };
        gpu.api().check("cuMemAddressReserve", code)?;
        MAPPED.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            gpus: gpus.to_vec(),
            at,
            len,
            mapped: 0,
        })
    }

    /// The GPU whose context the calls are made in: there is one.
    fn gpu(&self) -> &Gpu {
        &self.gpus[0]
    }

    /// Maps the next segment.
    ///
    /// # Errors
    /// The driver's refusal: of what is no segment, or not so long, or does not fit.
    pub fn add(&mut self, segment: &OwnedFd, len: usize) -> Result<(), CudaError> {
        let _current = Current::enter(self.gpu())?;
        let api = self.gpu().api();
        let import = there(
            api.cuMemImportFromShareableHandle,
            "cuMemImportFromShareableHandle",
        )?;
        let map = there(api.cuMemMap, "cuMemMap")?;
        if len > self.len - self.mapped {
            return api.check("cuMemMap", INVALID_VALUE);
        }
        let mut handle = 0;
        let descriptor = std::ptr::without_provenance_mut(segment.as_raw_fd() as usize);
        // SAFETY: the pointer is valid for one handle, and the descriptor is open.
        let code = unsafe { import(&raw mut handle, descriptor, DESCRIPTOR) };
        api.check("cuMemImportFromShareableHandle", code)?;
        // SAFETY: reserved by this, and nothing is mapped there yet.
        let code = unsafe { map(self.at + self.mapped as u64, len, 0, handle, 0) };
        // The mapping has a reference of its own.
        self.gpu().release(handle);
        api.check("cuMemMap", code)?;
        self.mapped += len;
        Ok(())
    }

    /// All of it, as each of the GPUs reads it.
    ///
    /// # Errors
    /// The driver's refusal, for example where one of them does not reach the segments' GPU.
    pub fn finish(self) -> Result<Vec<Region>, CudaError> {
        let current = Current::enter(self.gpu())?;
        let api = self.gpu().api();
        if self.mapped < self.len {
            api.check("cuMemSetAccess", INVALID_VALUE)?;
        }
        let set = there(api.cuMemSetAccess, "cuMemSetAccess")?;
        let access = |gpu: &Gpu| sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: gpu.ordinal() as i32,
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let all: Vec<_> = self.gpus.iter().map(access).collect();
        // SAFETY: the whole range is mapped, and so many descriptions are there.
        let code = unsafe { set(self.at, self.len, all.as_ptr(), all.len()) };
        api.check("cuMemSetAccess", code)?;
        drop(current);
        let (at, len) = (self.at, self.len);
        let row = Arc::new(self);
        let region = |gpu| {
            // SAFETY: as in `Gpu::open_legacy`, for this GPU too.
            unsafe {
                let region = Region::from_cuda_raw(gpu, at, len, Arc::<Self>::clone(&row));
                region.share();
                region
            }
        };
        Ok(row.gpus.iter().map(region).collect())
    }
}

const INVALID_VALUE: i32 = 1;

impl Drop for SegmentRow {
    fn drop(&mut self) {
        MAPPED.fetch_sub(1, Ordering::Relaxed);
        let api = self.gpu().api();
        let Ok(_current) = Current::enter(self.gpu()) else {
            return;
        };
        if let Some(unmap) = api.cuMemUnmap.filter(|_| self.mapped > 0) {
            // SAFETY: mapped by this, whole, and the last user is gone.
            let code = unsafe { unmap(self.at, self.mapped) };
            api.check_teardown("cuMemUnmap", code);
        }
        if let Some(free) = api.cuMemAddressFree {
            // SAFETY: reserved by this.
            let code = unsafe { free(self.at, self.len) };
            api.check_teardown("cuMemAddressFree", code);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::driver::fake::{self, sharing};

    fn content(region: &Region) -> Vec<u8> {
        let mut bytes = vec![0; region.len()];
        region.read_to(0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn segments_are_read_elsewhere_and_nothing_is_left() {
        let gpu = Gpu::fake();
        let lengths = [8192, 4096, 12_288];
        let address = sharing::segments(&gpu, &lengths);
        // SAFETY: mapped above, for good.
        let own = unsafe { Region::from_cuda_raw(&gpu, address, 24_576, Arc::new(())) };
        let bytes: Vec<u8> = (0..24_576).map(|at| (at % 251) as u8).collect();
        own.write_from(0, &bytes).unwrap();
        let mut row = SegmentRow::new(std::slice::from_ref(&gpu), 24_576).unwrap();
        let mut at = address;
        for len in lengths {
            let shareable = gpu.share(at + 5).unwrap();
            assert_eq!((shareable.start, shareable.len), (at, len as u64));
            let MemoryHandle::Segment(segment) = shareable.handle else {
                panic!("it is mapped");
            };
            assert!(row.add(&segment, len + 4096).is_err());
            row.add(&segment, len).unwrap();
            at += len as u64;
        }
        let [read] = row.finish().unwrap().try_into().unwrap();
        assert_ne!(read.all().address(), address);
        assert_eq!(content(&read), bytes);
        let at = read.all().address();
        drop(read);
        assert!(Region::wait_for_frees(Duration::from_secs(60)));
        assert!(!sharing::is_reserved(at));
    }

    /// One whose context is asked whether it has work.
    fn gpu_that_answers() -> Gpu {
        loop {
            let gpu = Gpu::fake();
            // Another test's trial may hold a stream up for a moment.
            let _current = Current::enter(&gpu).unwrap();
            if gpu.default_streams_rest() {
                return gpu.clone();
            }
        }
    }

    #[test]
    fn a_legacy_handle_is_opened_once_and_closed_at_rest_or_late() {
        let gpu = gpu_that_answers();
        let own = Region::cuda(&gpu, 5000).unwrap();
        own.write_from(0, &[7; 5000]).unwrap();
        let shareable = gpu.share(own.all().address() + 4999).unwrap();
        let MemoryHandle::Legacy(handle) = shareable.handle else {
            panic!("it is allocated");
        };
        let offset = (own.all().address() - shareable.start) as usize;
        for is_busy in [false, false, true] {
            let one = gpu.open_legacy(handle).unwrap();
            let other = gpu.open_legacy(handle).unwrap();
            drop(one);
            assert_eq!(content(&other)[offset..offset + 5000], [7; 5000]);
            // Also before what was dropped is closed.
            drop(other);
            let again = gpu.open_legacy(handle).unwrap();
            assert_eq!(content(&again)[offset..offset + 5000], [7; 5000]);
            let [_, before] = peer_mappings();
            let gate = is_busy.then(|| fake::keep_busy(gpu.context() as usize));
            let start = Instant::now();
            drop(again);
            let until = start + Duration::from_secs(60);
            // No other test opens one.
            while with_handles(|handles| !handles.open.is_empty() || handles.closing.is_some()) {
                assert!(Instant::now() < until, "it stays open");
                thread::sleep(Duration::from_millis(1));
            }
            assert!(!sharing::is_open(shareable.start));
            assert_eq!(peer_mappings()[1] - before, u64::from(is_busy));
            assert!(!is_busy || start.elapsed() >= LATEST_CLOSE);
            if let Some(gate) = gate {
                gate.store(true, Ordering::SeqCst);
            }
        }
    }

    #[test]
    fn a_row_that_lacks_a_segment_is_refused() {
        let gpu = Gpu::fake();
        let address = sharing::segments(&gpu, &[4096]);
        let MemoryHandle::Segment(segment) = gpu.share(address).unwrap().handle else {
            panic!("it is mapped");
        };
        let mut row = SegmentRow::new(std::slice::from_ref(&gpu), 8192).unwrap();
        row.add(&segment, 4096).unwrap();
        assert!(row.finish().is_err());
    }
}
