//! What the unpackers are measured against: other ways to move the same bytes, through `cudarc`'s bindings. Every call
//! waits, spinning, until its bytes are in place.

use std::ffi::{CStr, c_uint, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUevent, CUfunction, CUmemcpySrcAccessOrder, CUmodule, CUresult,
    CUstream,
};
use tcpx_memory::{BouncePool, Descriptor, Descriptors, Gpu, RegionSlice};

use super::Result;

const PTX: &str = concat!(include_str!("yardstick.ptx"), "\0");
/// Descriptors that a launch carries; `kernels/yardstick.cu`.
const CARRIED: usize = 240;
/// Most descriptors of a list.
const MOST: usize = 131_072;
const LIMIT: Duration = Duration::from_secs(20);

/// `cuMemcpyBatchAsync` as of CUDA 12.8: destinations, sources, sizes, their number, attributes, where each of
/// those begins, their number, the index of a failure, stream.
type Batch = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;

/// Copies and a straightforward gather kernel on a stream of its own.
pub(crate) struct Yardstick {
    gpu: Gpu,
    multiprocessors: c_uint,
    stream: CUstream,
    event: CUevent,
    module: CUmodule,
    carried: CUfunction,
    mapped: CUfunction,
    /// Mapped memory for `MOST` descriptors: as the processor knows it, and as the GPU does.
    list: (*mut Descriptor, u64),
    batch: Option<Batch>,
}

#[repr(C, align(16))]
struct Inline([Descriptor; CARRIED]);

fn check(call: &str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(format!("{call}: {error:?}").into()),
    }
}

impl Yardstick {
    /// Prepares stream, kernel and memory.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let _current = gpu.enter()?;
        let (mut stream, mut event, mut module) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let (mut host, mut device, mut multiprocessors) = (ptr::null_mut(), 0, 0);
        // SAFETY: every pointer is valid for one value of its kind, and the text ends in a zero.
        unsafe {
            check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, 1))?;
            check("cuEventCreate", sys::cuEventCreate(&raw mut event, 2))?;
            let loaded = sys::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast());
            check("cuModuleLoadData", loaded)?;
            let bytes = MOST * size_of::<Descriptor>();
            let mapped = sys::CU_MEMHOSTALLOC_DEVICEMAP;
            check(
                "cuMemHostAlloc",
                sys::cuMemHostAlloc(&raw mut host, bytes, mapped),
            )?;
            let address = sys::cuMemHostGetDevicePointer_v2(&raw mut device, host, 0);
            check("cuMemHostGetDevicePointer", address)?;
            let what = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            let ordinal = i32::try_from(gpu.ordinal())?;
            let asked = sys::cuDeviceGetAttribute(&raw mut multiprocessors, what, ordinal);
            check("cuDeviceGetAttribute", asked)?;
        }
        let function = |name: &CStr| {
            let mut function = ptr::null_mut();
            // SAFETY: the module was loaded just now; the pointer is valid for one handle.
            let found =
                unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
            check("cuModuleGetFunction", found).map(|()| function)
        };
        Ok(Self {
            gpu: gpu.clone(),
            multiprocessors: c_uint::try_from(multiprocessors)?,
            stream,
            event,
            carried: function(c"yardstick_carried")?,
            mapped: function(c"yardstick_mapped")?,
            module,
            list: (host.cast(), device),
            batch: batch_call(),
        })
    }

    /// One copy of as many bytes as the destination has.
    pub(crate) fn copy(&mut self, from: &RegionSlice, to: &RegionSlice) -> Result<()> {
        let (source, destination) = ends(&from.slice(..to.len())?, to)?;
        let _current = self.gpu.enter()?;
        self.issue(destination, source, to.len())?;
        self.wait()
    }

    /// One copy for each descriptor.
    pub(crate) fn copy_each(
        &mut self,
        pool: &BouncePool,
        list: &Descriptors,
        to: &RegionSlice,
    ) -> Result<()> {
        let (source, destination) = fitting_ends(pool, list, to)?;
        let _current = self.gpu.enter()?;
        for one in list.as_slice() {
            let from = source + u64::from(one.source_offset);
            let to = destination + one.destination_offset;
            self.issue(to, from, one.length as usize)?;
        }
        self.wait()
    }

    /// Whether the driver has a call for many copies.
    pub(crate) fn has_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// All descriptors in one `cuMemcpyBatchAsync`; nothing where the driver has none.
    pub(crate) fn copy_batch(
        &mut self,
        pool: &BouncePool,
        list: &Descriptors,
        to: &RegionSlice,
    ) -> Result<()> {
        let Some(batch) = self.batch else {
            return Ok(());
        };
        let (source, destination) = fitting_ends(pool, list, to)?;
        let _current = self.gpu.enter()?;
        let all = list.as_slice();
        let to = all.iter().map(|one| destination + one.destination_offset);
        let to: Vec<u64> = to.collect();
        let from = all.iter().map(|one| source + u64::from(one.source_offset));
        let from: Vec<u64> = from.collect();
        let sizes: Vec<usize> = all.iter().map(|one| one.length as usize).collect();
        // SAFETY: the structure is of integers, for which zero is a value.
        let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        attributes.srcAccessOrder = CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let (mut first, mut failed) = (0, 0);
        // SAFETY: the arrays have as many elements as said; both ends have every byte, and stay until `wait` returns.
        check("cuMemcpyBatchAsync", unsafe {
            batch(
                to.as_ptr(),
                from.as_ptr(),
                sizes.as_ptr(),
                all.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                self.stream,
            )
        })?;
        self.wait()
    }

    /// A straightforward kernel, one warp a descriptor, with the descriptors in the launch or in mapped memory.
    pub(crate) fn gather(
        &mut self,
        pool: &BouncePool,
        list: &Descriptors,
        to: &RegionSlice,
    ) -> Result<()> {
        let (mut source, mut destination) = fitting_ends(pool, list, to)?;
        let _current = self.gpu.enter()?;
        let all = list.as_slice();
        let nothing = Descriptor {
            source_offset: 0,
            length: 0,
            destination_offset: 0,
        };
        let mut inline = Inline([nothing; CARRIED]);
        let (host, mut address) = self.list;
        let (function, parameter): (_, *mut c_void) = if all.len() <= CARRIED {
            inline.0[..all.len()].copy_from_slice(all);
            (self.carried, (&raw mut inline).cast())
        } else if all.len() <= MOST {
            // SAFETY: the memory has room for `MOST`, and the last launch has ended.
            unsafe { host.copy_from_nonoverlapping(all.as_ptr(), all.len()) };
            (self.mapped, (&raw mut address).cast())
        } else {
            return Err(format!("a list of {} fragments is too long", all.len()).into());
        };
        let mut count = c_uint::try_from(all.len())?;
        // The shapes that did best at either size.
        let threads: c_uint = if all.len() <= 4096 { 256 } else { 1024 };
        let blocks = count.div_ceil(threads / 32).clamp(1, self.multiprocessors);
        let mut parameters: [*mut c_void; 4] = [
            (&raw mut source).cast(),
            (&raw mut destination).cast(),
            (&raw mut count).cast(),
            parameter,
        ];
        // SAFETY: the parameters are of the kernel's types; both ends have every byte, and stay until `wait` returns.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })?;
        self.wait()
    }

    /// Both ends have that many bytes, and stay until `wait` has returned.
    fn issue(&self, to: u64, from: u64, len: usize) -> Result<()> {
        // SAFETY: the callers checked the ends, and hold them while they wait.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(to, from, len, self.stream)
        })
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: both handles are this value's.
        let recorded = unsafe { sys::cuEventRecord(self.event, self.stream) };
        check("cuEventRecord", recorded)?;
        let start = Instant::now();
        loop {
            // SAFETY: as above.
            match unsafe { sys::cuEventQuery(self.event) } {
                CUresult::CUDA_ERROR_NOT_READY if start.elapsed() < LIMIT => std::hint::spin_loop(),
                result => return check("cuEventQuery", result),
            }
        }
    }
}

/// The addresses of both ends on the GPU. The program keeps the memory, and uses it for one way at a time.
fn ends(from: &RegionSlice, to: &RegionSlice) -> Result<(u64, u64)> {
    let addresses = from.device_address().zip(to.device_address());
    addresses.ok_or_else(|| "the GPU cannot reach this memory".into())
}

/// As [`ends`], of a list all of whose fragments lie in them.
fn fitting_ends(pool: &BouncePool, list: &Descriptors, to: &RegionSlice) -> Result<(u64, u64)> {
    if list.source_end() > pool.len() as u64 || list.destination_end() > to.len() as u64 {
        return Err("a fragment lies outside of its memory".into());
    }
    ends(pool.slice(), to)
}

/// The driver's call for many copies, in the form of CUDA 12.8.
fn batch_call() -> Option<Batch> {
    let mut call = ptr::null_mut();
    let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
    let name = c"cuMemcpyBatchAsync".as_ptr();
    // SAFETY: the pointers are valid for one value each.
    let found =
        unsafe { sys::cuGetProcAddress_v2(name, &raw mut call, 12_080, 0, &raw mut status) };
    if found != CUresult::CUDA_SUCCESS || call.is_null() {
        return None;
    }
    // SAFETY: the driver's call of that version has this signature.
    Some(unsafe { std::mem::transmute::<*mut c_void, Batch>(call) })
}

impl Drop for Yardstick {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: all are this value's, and no launch is in flight.
            unsafe {
                let _ = sys::cuEventDestroy_v2(self.event);
                let _ = sys::cuStreamDestroy_v2(self.stream);
                let _ = sys::cuModuleUnload(self.module);
                let _ = sys::cuMemFreeHost(self.list.0.cast());
            }
        }
    }
}
