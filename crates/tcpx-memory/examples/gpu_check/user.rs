//! The program's own use of the GPU, apart from the crate: streams, events, kernels and memory
//! through `cudarc`'s bindings.

use std::ffi::{CStr, c_void};
use std::ptr;

use cudarc::driver::sys::{self, CUcontext, CUevent, CUfunction, CUresult, CUstream};
use tcpx_memory::{After, Gpu};

const PTX: &str = concat!(include_str!("gpu_check.ptx"), "\0");

/// Names of the default streams.
pub(crate) const LEGACY: CUstream = ptr::without_provenance_mut(1);

/// A program that uses the same GPU.
pub(crate) struct User {
    context: CUcontext,
    slow_fill: CUfunction,
    spin_until: CUfunction,
    pub(crate) stream: CUstream,
    /// One that synchronises with the default streams.
    pub(crate) blocking: CUstream,
    pub(crate) event: CUevent,
    device: i32,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

/// A flag in memory that both the CPU and the GPU see, and a place for the kernel's answer.
pub(crate) struct Flag(*mut u32);

pub(crate) fn check(call: &str, result: CUresult) -> Result<(), String> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(format!("{call}: {error:?}")),
    }
}

impl User {
    /// On the GPU's context.
    pub(crate) fn create(gpu: &Gpu) -> Result<Self, String> {
        let context: CUcontext = ptr::with_exposed_provenance_mut(gpu.context() as usize);
        let mut user = Self {
            context,
            slow_fill: ptr::null_mut(),
            spin_until: ptr::null_mut(),
            stream: ptr::null_mut(),
            blocking: ptr::null_mut(),
            event: ptr::null_mut(),
            device: gpu.ordinal() as i32,
        };
        let (mut module, mut stream, mut event) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mut blocking = ptr::null_mut();
        let functions = user.inside(|| {
            // SAFETY: the pointers are valid for one handle each, the text ends in a zero.
            unsafe {
                check(
                    "cuModuleLoadData",
                    sys::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()),
                )?;
                check("cuStreamCreate", sys::cuStreamCreate(&raw mut stream, 1))?;
                check("cuStreamCreate", sys::cuStreamCreate(&raw mut blocking, 0))?;
                check("cuEventCreate", sys::cuEventCreate(&raw mut event, 2))?;
            }
            let function = |name: &CStr| {
                let mut function = ptr::null_mut();
                // SAFETY: the module was loaded just now.
                let result =
                    unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
                check("cuModuleGetFunction", result).map(|()| function)
            };
            Ok((function(c"slow_fill")?, function(c"spin_until")?))
        })?;
        (user.slow_fill, user.spin_until) = functions;
        (user.stream, user.blocking, user.event) = (stream, blocking, event);
        // Both kernels once, so that nothing is loaded lazily behind a spinning one.
        let flag = user.flag()?;
        flag.raise();
        user.spin(user.stream, &flag, 1)?;
        let scratch = user.alloc(16)?;
        user.slow_fill(user.stream, scratch, 16, 1, 0)?;
        user.wait(user.stream)?;
        user.free(scratch)?;
        Ok(user)
    }

    /// Calls with the context current.
    pub(crate) fn inside<R>(&self, call: impl FnOnce() -> Result<R, String>) -> Result<R, String> {
        // SAFETY: the bench's `Gpu` keeps the context.
        check("cuCtxPushCurrent", unsafe {
            sys::cuCtxPushCurrent_v2(self.context)
        })?;
        let result = call();
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is valid for one handle.
        check("cuCtxPopCurrent", unsafe {
            sys::cuCtxPopCurrent_v2(&raw mut popped)
        })?;
        result
    }

    pub(crate) fn alloc(&self, len: usize) -> Result<u64, String> {
        self.inside(|| {
            let mut address = 0;
            // SAFETY: the pointer is valid for one address.
            check("cuMemAlloc", unsafe {
                sys::cuMemAlloc_v2(&raw mut address, len)
            })?;
            Ok(address)
        })
    }

    pub(crate) fn free(&self, address: u64) -> Result<(), String> {
        // SAFETY: the caller's allocation, not used any more.
        self.inside(|| check("cuMemFree", unsafe { sys::cuMemFree_v2(address) }))
    }

    pub(crate) fn read(&self, address: u64, len: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; len];
        // SAFETY: the buffer has that length, and so has the allocation.
        let mut copy = || unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, len) };
        self.inside(|| check("cuMemcpyDtoH", copy()))?;
        Ok(bytes)
    }

    pub(crate) fn wait(&self, stream: CUstream) -> Result<(), String> {
        self.inside(|| {
            // SAFETY: a stream of this context.
            let result = unsafe { sys::cuStreamSynchronize(stream) };
            check("cuStreamSynchronize", result)
        })
    }

    /// Managed memory.
    pub(crate) fn managed(&self, len: usize) -> Result<u64, String> {
        self.inside(|| {
            let mut address = 0;
            // SAFETY: the pointer is valid for one address; every device and the CPU may use it.
            check("cuMemAllocManaged", unsafe {
                sys::cuMemAllocManaged(&raw mut address, len, 1)
            })?;
            Ok(address)
        })
    }

    /// Memory of the driver's pool, which stays until the process ends.
    pub(crate) fn pooled(&self, len: usize) -> Result<u64, String> {
        let mut address = 0;
        // SAFETY: the pointer is valid for one address.
        self.inside(|| unsafe {
            let result = sys::cuMemAllocAsync(&raw mut address, len, self.stream);
            check("cuMemAllocAsync", result)
        })?;
        self.wait(self.stream)?;
        Ok(address)
    }

    fn place(&self) -> sys::CUmemLocation {
        // SAFETY: plain numbers, for which zeros are valid.
        let mut place: sys::CUmemLocation = unsafe { std::mem::zeroed() };
        place.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        place.id = self.device;
        place
    }

    fn parts(&self) -> sys::CUmemAllocationProp {
        // SAFETY: plain numbers and a null pointer, for which zeros are valid.
        let mut parts: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        parts.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        parts.location = self.place();
        parts
    }

    /// Addresses for so many parts, and the length of one. They stay until the process ends, as
    /// what is mapped there.
    pub(crate) fn reserve(&self, parts: usize) -> Result<(u64, usize), String> {
        let (mut address, mut part) = (0, 0);
        let kind = self.parts();
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the pointers are valid for one value each.
        self.inside(|| unsafe {
            let result = sys::cuMemGetAllocationGranularity(&raw mut part, &raw const kind, least);
            check("cuMemGetAllocationGranularity", result)?;
            let result = sys::cuMemAddressReserve(&raw mut address, parts * part, 0, 0, 0);
            check("cuMemAddressReserve", result)
        })?;
        Ok((address, part))
    }

    /// Maps a part of its own there.
    pub(crate) fn map(&self, address: u64, len: usize) -> Result<(), String> {
        let (mut handle, kind) = (0, self.parts());
        // SAFETY: the pointers are valid, and the addresses are reserved.
        self.inside(|| unsafe {
            let result = sys::cuMemCreate(&raw mut handle, len, &raw const kind, 0);
            check("cuMemCreate", result)?;
            check("cuMemMap", sys::cuMemMap(address, len, 0, handle, 0))
        })
    }

    /// Lets the device read and write what is mapped there.
    pub(crate) fn allow(&self, address: u64, len: usize) -> Result<(), String> {
        let access = sys::CUmemAccessDesc {
            location: self.place(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pointer is valid for one description, and the addresses are mapped.
        self.inside(|| unsafe {
            let result = sys::cuMemSetAccess(address, len, &raw const access, 1);
            check("cuMemSetAccess", result)
        })
    }

    /// Captures what `run` submits to a stream as a graph; in the global mode a forbidden call of
    /// any thread breaks the capture.
    pub(crate) fn capture<R>(
        &self,
        stream: CUstream,
        mode: sys::CUstreamCaptureMode,
        run: impl FnOnce() -> Result<R, String>,
    ) -> Result<R, String> {
        self.inside(|| {
            // SAFETY: a stream of this context.
            let result = unsafe { sys::cuStreamBeginCapture_v2(stream, mode) };
            check("cuStreamBeginCapture", result)
        })?;
        let result = run();
        self.inside(|| {
            let mut graph = ptr::null_mut();
            // SAFETY: the stream captures, the pointer is valid for one handle.
            let ended = unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) };
            check("cuStreamEndCapture", ended)?;
            // SAFETY: the graph is ours and was not instantiated.
            check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) })
        })?;
        result
    }

    /// What waits for an event, recorded now.
    pub(crate) fn record(&self, stream: CUstream) -> Result<After, String> {
        self.inside(|| {
            // SAFETY: both are of this context.
            let result = unsafe { sys::cuEventRecord(self.event, stream) };
            check("cuEventRecord", result)?;
            // SAFETY: it stays until the process ends, and each check records it once.
            Ok(unsafe { After::event(self.event.addr() as u64) })
        })
    }

    /// Queues a kernel that fills the bytes after a delay.
    pub(crate) fn slow_fill(
        &self,
        stream: CUstream,
        mut address: u64,
        len: usize,
        mut value: u8,
        mut delay_ns: u64,
    ) -> Result<(), String> {
        let mut count = len as u64;
        let mut parameters: [*mut c_void; 4] = [
            (&raw mut address).cast(),
            (&raw mut count).cast(),
            (&raw mut value).cast(),
            (&raw mut delay_ns).cast(),
        ];
        self.launch(self.slow_fill, 8, 256, stream, &mut parameters)
    }

    /// Queues a kernel of one thread that spins until the flag is raised or the time is over.
    pub(crate) fn spin(&self, stream: CUstream, flag: &Flag, limit_ns: u64) -> Result<(), String> {
        self.spin_in(1, 1, stream, flag, limit_ns)
    }

    /// As above, of so many threads that no other block fits beside them.
    pub(crate) fn spin_everywhere(
        &self,
        stream: CUstream,
        flag: &Flag,
        limit_ns: u64,
    ) -> Result<(), String> {
        // Two blocks of 1024 threads fill a multiprocessor; the rest comes when those end.
        self.spin_in(512, 1024, stream, flag, limit_ns)
    }

    fn spin_in(
        &self,
        blocks: u32,
        threads: u32,
        stream: CUstream,
        flag: &Flag,
        mut limit_ns: u64,
    ) -> Result<(), String> {
        let (mut raised, mut answer) = (flag.0, flag.0.wrapping_add(1));
        let mut parameters: [*mut c_void; 3] = [
            (&raw mut raised).cast(),
            (&raw mut answer).cast(),
            (&raw mut limit_ns).cast(),
        ];
        self.launch(self.spin_until, blocks, threads, stream, &mut parameters)
    }

    fn launch(
        &self,
        function: CUfunction,
        blocks: u32,
        threads: u32,
        stream: CUstream,
        parameters: &mut [*mut c_void],
    ) -> Result<(), String> {
        // SAFETY: the parameters are of the kernel's types and are copied by the call.
        self.inside(|| unsafe {
            let (parameters, extra) = (parameters.as_mut_ptr(), ptr::null_mut());
            let result = sys::cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, extra,
            );
            check("cuLaunchKernel", result)
        })
    }

    /// A flag that is down. Its memory stays until the process ends.
    pub(crate) fn flag(&self) -> Result<Flag, String> {
        self.inside(|| {
            let mut address = ptr::null_mut();
            // SAFETY: the pointer is valid for one address; portable and mapped, so it is the same
            // address for the GPU.
            let result = unsafe { sys::cuMemHostAlloc(&raw mut address, 4096, 3) };
            check("cuMemHostAlloc", result)?;
            let flag = Flag(address.cast());
            // SAFETY: allocated just now.
            unsafe { flag.0.write_bytes(0, 1024) };
            Ok(flag)
        })
    }
}

/// What waits for the work on a stream of the program.
pub(crate) fn after(stream: CUstream) -> After {
    // SAFETY: the program's streams stay until the process ends.
    unsafe { After::stream(stream.addr() as u64) }
}

impl Flag {
    pub(crate) fn raise(&self) {
        // SAFETY: the memory stays until the process ends; the GPU only reads it.
        unsafe { self.0.write_volatile(1) };
    }

    /// What the kernel said: 1 for raised, 2 for given up.
    pub(crate) fn answer(&self) -> u32 {
        // SAFETY: as above; the kernel has ended.
        unsafe { self.0.add(1).read_volatile() }
    }
}
