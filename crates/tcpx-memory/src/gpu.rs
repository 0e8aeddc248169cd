//! A CUDA device and the context that memory and work on it live in.

mod context;
mod default_streams;
mod kept;
mod mapped_host;
mod module;
mod peer_memory;
mod persistent_kernels;
mod pointer;
mod rdma;
mod streams;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

pub use peer_memory::{MemoryHandle, SegmentRow, Shareable, peer_mappings};
pub use pointer::PointerInfo;
pub(crate) use pointer::check_host_memory;

pub use context::InContext;
pub(crate) use context::{Current, device_alloc, device_free, ignore_captures, refuse_captured};
pub(crate) use default_streams::legacy;
pub(crate) use mapped_host::MappedHost;
pub(crate) use module::{Function, Module, parameter};
pub(crate) use persistent_kernels::PLACES;
pub(crate) use streams::{create_stream, is_at_rest};

use crate::driver::{self, Api, DeviceInfo, sys};
use crate::ending;
use crate::error::CudaError;
use crate::fence::EventPool;
use crate::kind::MemoryKind;
use crate::lock;
use crate::small_copies::SmallCopies;

/// A CUDA device that the caller named. Clones share one context; contexts on other devices are
/// never created.
///
/// What was opened once stays open until the process ends, with its context and all that was made
/// for it: to give that back to the driver would hold the program's copies up for as long as its
/// kernels run.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    api: &'static Api,
    info: DeviceInfo,
    context: ContextHandle,
    multiprocessors: u32,
    events: EventPool,
    /// See [`default_streams`]; unknown during set-up.
    legacy_answers_for_all: OnceLock<bool>,
    /// All kernels, loaded once.
    module: OnceLock<Result<Module, CudaError>>,
    persistent_kernels: persistent_kernels::PersistentKernels,
    kept: OnceLock<kept::PinnedOfGpu>,
    preparing: Mutex<()>,
    /// Held while its copy worker starts.
    starting: Mutex<()>,
    /// Of connections that have ended, for the next ones.
    small_copies: Mutex<Vec<SmallCopies>>,
}

/// A context, and whether we retained it.
struct ContextHandle {
    context: sys::CUcontext,
    retained: bool,
}

// SAFETY: CUDA contexts may be used from any thread; the handle is only a number to us.
unsafe impl Send for ContextHandle {}
// SAFETY: as above; every driver call is itself thread-safe.
unsafe impl Sync for ContextHandle {}

impl Gpu {
    /// Opens a device by its ordinal and retains its primary context, which is the one that the
    /// CUDA runtime and PyTorch use.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::MissingSymbol`], [`CudaError::NoSuchDevice`], or the
    /// driver's refusal.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let api = driver::load()?;
        let device = driver::device(api, ordinal)?;
        let context = retain_primary(api, device)?;
        Self::shared(api, ordinal, device, context)
    }

    /// The GPU whose context is current on the calling thread. Creates no context, so a plugin can
    /// call it inside its host application.
    ///
    /// # Errors
    /// [`CudaError::NoCurrentContext`], [`CudaError::NoDriver`], or the driver's refusal.
    pub fn current() -> Result<Self, CudaError> {
        let api = driver::load()?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle.
        api.check("cuCtxGetCurrent", unsafe {
            (api.cuCtxGetCurrent)(&raw mut context)
        })?;
        if context.is_null() {
            return Err(CudaError::NoCurrentContext);
        }
        let mut device = 0;
        // SAFETY: the pointer is valid for one handle.
        api.check("cuCtxGetDevice", unsafe {
            (api.cuCtxGetDevice)(&raw mut device)
        })?;
        let count = driver::device_count(api)?;
        let ordinal = (0..count).find(|&ordinal| driver::device(api, ordinal) == Ok(device));
        let ordinal = ordinal.ok_or_else(|| CudaError::NoSuchDevice {
            ordinal: device.unsigned_abs(),
            count,
        })?;
        let handle = match primary_if_active(api, device)? {
            Some(primary) if primary.context == context => primary,
            other => {
                if let Some(primary) = other {
                    release_primary(api, device, &primary);
                }
                ContextHandle {
                    context,
                    retained: false,
                }
            }
        };
        Self::shared(api, ordinal, device, handle)
    }

    /// The one [`Gpu`] of a context, so that its workers and pools are shared in the process.
    fn shared(
        api: &'static Api,
        ordinal: u32,
        device: sys::CUdevice,
        context: ContextHandle,
    ) -> Result<Self, CudaError> {
        static OPEN: Mutex<BTreeMap<(usize, u64), Gpu>> = Mutex::new(BTreeMap::new());
        let mut open = lock(&OPEN);
        // A context that was destroyed may have a successor at its address.
        let key = (context.context.addr(), context_id(api, &context));
        if let Some(gpu) = open.get(&key) {
            release_primary(api, device, &context);
            return Ok(gpu.clone());
        }
        let gpu = Self::new(api, ordinal, device, context)?;
        open.insert(key, gpu.clone());
        Ok(gpu)
    }

    fn new(
        api: &'static Api,
        ordinal: u32,
        device: sys::CUdevice,
        context: ContextHandle,
    ) -> Result<Self, CudaError> {
        let described = driver::describe(api, ordinal).and_then(|info| {
            let multiprocessors = driver::attribute(
                api,
                device,
                sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )?;
            Ok((info, u32::try_from(multiprocessors).unwrap_or(1).max(1)))
        });
        let (info, multiprocessors) =
            described.inspect_err(|_| release_primary(api, device, &context))?;
        let inner = Arc::new(Inner {
            api,
            info,
            context,
            multiprocessors,
            events: EventPool::default(),
            legacy_answers_for_all: OnceLock::new(),
            module: OnceLock::new(),
            persistent_kernels: persistent_kernels::PersistentKernels::default(),
            kept: OnceLock::new(),
            preparing: Mutex::default(),
            starting: Mutex::default(),
            small_copies: Mutex::default(),
        });
        ending::watch();
        let gpu = Self(inner);
        gpu.0.events.fill(&gpu)?;
        Ok(gpu)
    }

    /// A GPU in memory.
    #[cfg(test)]
    pub(crate) fn fake() -> Self {
        Self::fake_in(driver::fake::new_context())
    }

    /// Another one, set up anew, in a context that is there.
    #[cfg(test)]
    pub(crate) fn fake_in(context: usize) -> Self {
        let api = &driver::fake::API;
        let context = ContextHandle {
            context: std::ptr::without_provenance_mut(context),
            retained: false,
        };
        let gpu = Self::new(api, 0, 0, context).unwrap();
        gpu.kept().unwrap();
        gpu
    }

    /// The device's number in this process.
    pub fn ordinal(&self) -> u32 {
        self.0.info.ordinal
    }

    /// The device's memory as a kind.
    pub fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda {
            device: self.ordinal(),
        }
    }

    /// Name, PCI address, memory and NUMA node.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Whether both are the same context of the same device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The `CUcontext` as a number, for callers that speak to the driver themselves.
    pub fn context(&self) -> u64 {
        self.0.context.context.addr() as u64
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.0.api
    }

    pub(crate) fn raw_context(&self) -> sys::CUcontext {
        self.0.context.context
    }

    pub(crate) fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// Keeps others from starting its copy worker.
    pub(crate) fn starting(&self) -> MutexGuard<'_, ()> {
        lock(&self.0.starting)
    }

    pub(crate) fn events(&self) -> &EventPool {
        &self.0.events
    }

    /// What copied small messages of connections that have ended.
    pub(crate) fn resting_small_copies(&self) -> MutexGuard<'_, Vec<SmallCopies>> {
        lock(&self.0.small_copies)
    }
}

fn retain_primary(api: &Api, device: sys::CUdevice) -> Result<ContextHandle, CudaError> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is valid for one handle.
    let code = unsafe { (api.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
    api.check("cuDevicePrimaryCtxRetain", code)?;
    Ok(ContextHandle {
        context,
        retained: true,
    })
}

fn primary_if_active(api: &Api, device: sys::CUdevice) -> Result<Option<ContextHandle>, CudaError> {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: both pointers are valid for one integer.
    let code = unsafe { (api.cuDevicePrimaryCtxGetState)(device, &raw mut flags, &raw mut active) };
    api.check("cuDevicePrimaryCtxGetState", code)?;
    if active == 0 {
        Ok(None)
    } else {
        retain_primary(api, device).map(Some)
    }
}

fn release_primary(api: &Api, device: sys::CUdevice, context: &ContextHandle) {
    if context.retained {
        // SAFETY: pairs with the retain that made this handle.
        let code = unsafe { (api.cuDevicePrimaryCtxRelease)(device) };
        api.check_teardown("cuDevicePrimaryCtxRelease", code);
    }
}

/// The driver's number of a context, which no other context gets; 0 where it has none.
fn context_id(api: &Api, context: &ContextHandle) -> u64 {
    let mut id = 0;
    let Some(get) = api.cuCtxGetId else {
        return 0;
    };
    // SAFETY: the context is alive, and the pointer is valid for one number.
    match unsafe { get(context.context, &raw mut id) } {
        0 => id,
        _ => 0,
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.ordinal(), self.0.info.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_opening_a_gpu_says_so() {
        match Gpu::open(0) {
            Err(CudaError::NoDriver { why }) => assert!(!why.is_empty()),
            Err(CudaError::NoSuchDevice { count, .. }) => assert_eq!(count, 0),
            Err(other) => panic!("{other}"),
            Ok(gpu) => assert_eq!(gpu.ordinal(), 0),
        }
    }

    #[test]
    fn without_a_context_there_is_no_current_gpu() {
        match Gpu::current() {
            Err(CudaError::NoDriver { .. } | CudaError::NoCurrentContext) => {}
            other => panic!("{other:?}"),
        }
    }
}
