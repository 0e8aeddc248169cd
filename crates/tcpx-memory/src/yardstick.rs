//! What the unpackers are measured against: other ways to move the same bytes.
//!
//! For benchmarks. Every call waits, spinning, until its bytes are in place.

use std::ffi::{c_uint, c_void};
use std::fmt;
use std::time::{Duration, Instant};

use tcpx_wire::{Descriptor, Descriptors};

use crate::bounce::{BouncePool, check_bounds};
use crate::driver::{Api, sys};
use crate::error::{CudaError, MemoryError};
use crate::fence::Event;
use crate::gpu::{
    Current, Function, Gpu, MappedHost, Module, create_stream, destroy_stream, host_free,
};
use crate::kind::MemoryKind;
use crate::lease::{Access, Held};
use crate::slice::RegionSlice;

const PTX: &str = concat!(include_str!("ptx/yardstick.ptx"), "\0");
/// Descriptors that a launch carries; `kernels/yardstick.cu`.
const CARRIED: usize = 240;
/// Most descriptors of a list.
const MOST: usize = 131_072;
const LIMIT: Duration = Duration::from_secs(20);
const HOLDER: &str = "a measurement";

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
    sys::CUstream,
) -> i32;

/// Copies and a straightforward gather kernel on a stream of its own.
pub struct Yardstick {
    gpu: Gpu,
    stream: sys::CUstream,
    event: Event,
    module: Module,
    carried: Function,
    mapped: Function,
    list: MappedHost,
    batch: Option<Batch>,
}

#[repr(C, align(16))]
struct Inline([Descriptor; CARRIED]);

impl Yardstick {
    /// Prepares stream, kernel and memory.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(gpu: &Gpu) -> Result<Self, MemoryError> {
        let list = MappedHost::alloc(gpu, MOST * size_of::<Descriptor>())?;
        let _current = Current::enter(gpu)?;
        let api = gpu.api();
        let module = Module::load(gpu, PTX)?;
        Ok(Self {
            gpu: gpu.clone(),
            stream: create_stream(api)?,
            event: Event::create(api)?,
            carried: module.function(gpu, c"yardstick_carried")?,
            mapped: module.function(gpu, c"yardstick_mapped")?,
            module,
            list,
            batch: batch_call(),
        })
    }

    /// One copy.
    ///
    /// # Errors
    /// Memory in use or out of reach, different lengths, or the driver's refusal.
    pub fn copy(&mut self, from: &RegionSlice, to: &RegionSlice) -> Result<(), MemoryError> {
        if from.len() != to.len() {
            return Err(MemoryError::LengthMismatch {
                from: from.len(),
                to: to.len(),
            });
        }
        let (_holds, source, destination) = ends(from, to)?;
        let _current = Current::enter(&self.gpu)?;
        self.issue(destination, source, to.len())?;
        self.wait()
    }

    /// One copy for each descriptor.
    ///
    /// # Errors
    /// As [`Self::copy`], and bounds.
    pub fn copy_each(
        &mut self,
        pool: &BouncePool,
        list: &Descriptors,
        to: &RegionSlice,
    ) -> Result<(), MemoryError> {
        check_bounds(list, pool.len(), to.len())?;
        let (_holds, source, destination) = ends(pool.slice(), to)?;
        let _current = Current::enter(&self.gpu)?;
        for one in list.as_slice() {
            let from = source + u64::from(one.source_offset);
            self.issue(
                destination + one.destination_offset,
                from,
                one.length as usize,
            )?;
        }
        self.wait()
    }

    /// Whether the driver has a call for many copies.
    pub fn has_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// All descriptors in one `cuMemcpyBatchAsync`; nothing where the driver has none.
    ///
    /// # Errors
    /// As [`Self::copy_each`].
    pub fn copy_batch(
        &mut self,
        pool: &BouncePool,
        list: &Descriptors,
        to: &RegionSlice,
    ) -> Result<(), MemoryError> {
        check_bounds(list, pool.len(), to.len())?;
        let Some(batch) = self.batch else {
            return Ok(());
        };
        let (_holds, source, destination) = ends(pool.slice(), to)?;
        let _current = Current::enter(&self.gpu)?;
        let all = list.as_slice();
        let to: Vec<u64> = all
            .iter()
            .map(|one| destination + one.destination_offset)
            .collect();
        let from: Vec<u64> = all
            .iter()
            .map(|one| source + u64::from(one.source_offset))
            .collect();
        let sizes: Vec<usize> = all.iter().map(|one| one.length as usize).collect();
        // SAFETY: the structure is of integers, for which zero is a value.
        let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let (mut first, mut failed) = (0, 0);
        // SAFETY: the arrays have as many elements as said; the ends are checked and held.
        let code = unsafe {
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
        };
        self.gpu.api().check("cuMemcpyBatchAsync", code)?;
        self.wait()
    }

    /// A straightforward kernel, one warp a descriptor, with the descriptors in the launch or in mapped memory.
    ///
    /// # Errors
    /// As [`Self::copy_each`].
    pub fn gather(
        &mut self,
        pool: &BouncePool,
        list: &Descriptors,
        to: &RegionSlice,
    ) -> Result<(), MemoryError> {
        check_bounds(list, pool.len(), to.len())?;
        let (_holds, mut source, mut destination) = ends(pool.slice(), to)?;
        let _current = Current::enter(&self.gpu)?;
        let all = &list.as_slice()[..list.len().min(MOST)];
        let mut inline = Inline(
            [Descriptor {
                source_offset: 0,
                length: 0,
                destination_offset: 0,
            }; CARRIED],
        );
        let (mut count, mut address) = (all.len() as c_uint, self.list.device);
        let (function, parameter): (_, *mut c_void) = if all.len() <= CARRIED {
            inline.0[..all.len()].copy_from_slice(all);
            (self.carried, (&raw mut inline).cast())
        } else {
            // SAFETY: the memory has room for `MOST`, and the last launch has ended.
            unsafe {
                self.list
                    .host
                    .as_ptr()
                    .cast::<Descriptor>()
                    .copy_from_nonoverlapping(all.as_ptr(), all.len());
            }
            (self.mapped, (&raw mut address).cast())
        };
        // The shapes that did best at either size.
        let threads: u32 = if all.len() <= 4096 { 256 } else { 1024 };
        let blocks = count
            .div_ceil(threads / 32)
            .clamp(1, self.gpu.multiprocessors());
        let mut parameters: [*mut c_void; 4] = [
            (&raw mut source).cast(),
            (&raw mut destination).cast(),
            (&raw mut count).cast(),
            parameter,
        ];
        let api = self.gpu.api();
        // SAFETY: the parameters are of the kernel's types; the ends are checked and held.
        unsafe { function.launch(api, (blocks, threads), self.stream, &mut parameters)? };
        self.wait()
    }

    fn issue(&self, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
        let api = self.gpu.api();
        // SAFETY: the caller's holds keep both ends until `wait` has returned.
        api.check("cuMemcpyAsync", unsafe {
            (api.cuMemcpyAsync)(to, from, len, self.stream)
        })
    }

    fn wait(&self) -> Result<(), MemoryError> {
        let api: &Api = self.gpu.api();
        self.event.record(api, self.stream)?;
        let start = Instant::now();
        while !self.event.is_ready(api)? {
            if start.elapsed() > LIMIT {
                let (device, what) = (self.gpu.ordinal(), "a measured copy");
                let error = CudaError::TimedOut {
                    device,
                    what,
                    after: LIMIT,
                };
                return Err(error.into());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// Leases both ends; their device addresses.
fn ends(from: &RegionSlice, to: &RegionSlice) -> Result<([Held; 2], u64, u64), MemoryError> {
    let holds = [
        from.hold(Access::Read, HOLDER)?,
        to.hold(Access::Write, HOLDER)?,
    ];
    let address = |slice: &RegionSlice| {
        slice
            .device_address()
            .ok_or_else(|| MemoryError::WrongWorker {
                worker: MemoryKind::Cuda { device: 0 },
                kind: slice.kind(),
            })
    };
    Ok((holds, address(from)?, address(to)?))
}

/// The driver's call for many copies, in the form of CUDA 12.8.
fn batch_call() -> Option<Batch> {
    type Lookup =
        unsafe extern "C" fn(*const std::ffi::c_char, *mut *mut c_void, i32, u64, *mut i32) -> i32;
    // SAFETY: the driver is loaded already, so that no initialiser runs.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.ok()?;
    let (mut call, mut status) = (std::ptr::null_mut(), 0);
    // SAFETY: the documented signature; the pointers are valid for one value each.
    let code = unsafe {
        let lookup = library.get::<Lookup>(b"cuGetProcAddress_v2").ok()?;
        lookup(
            c"cuMemcpyBatchAsync".as_ptr(),
            &raw mut call,
            12_080,
            0,
            &raw mut status,
        )
    };
    // The driver must never be unloaded.
    std::mem::forget(library);
    if code != 0 || call.is_null() {
        return None;
    }
    // SAFETY: the driver's call of that version has this signature.
    Some(unsafe { std::mem::transmute::<*mut c_void, Batch>(call) })
}

impl Drop for Yardstick {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(&self.gpu) {
            let api = self.gpu.api();
            self.event.destroy(api);
            destroy_stream(api, self.stream);
            self.module.unload(api);
            // SAFETY: no launch is in flight.
            unsafe { host_free(&self.gpu, self.list) };
        }
    }
}

impl fmt::Debug for Yardstick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Yardstick({:?})", self.gpu)
    }
}
