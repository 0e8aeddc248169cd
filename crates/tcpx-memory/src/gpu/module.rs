//! The kernels: their code, loaded once for a context, and their launches.

use std::ffi::{CStr, c_void};

use super::{Current, Gpu};
use crate::driver::{Api, sys};
use crate::error::CudaError;

/// PTX text, with the zero that the driver wants at the end, which it compiles: that takes up to
/// half a second, in which no thread of the process can copy.
const PTX: &str = concat!(include_str!("../kernels/tcpx.ptx"), "\0");
/// Code that is compiled already, by the first number of the compute capability.
static COMPILED: [(u32, &Code<[u8]>); 2] = [
    (8, &Code(*include_bytes!("../kernels/tcpx.sm_80.cubin"))),
    (9, &Code(*include_bytes!("../kernels/tcpx.sm_90.cubin"))),
];

/// As aligned as the driver's format wants it.
#[repr(C, align(16))]
struct Code<T: ?Sized>(T);

/// Errors that mean that this driver or device cannot run the PTX, and nothing worse.
const CANNOT_LOAD: [i32; 7] = [200, 209, 218, 221, 222, 223, 500];

/// A loaded module. It stays until the process ends.
#[derive(Clone, Copy)]
pub(crate) struct Module(sys::CUmodule);

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: handles of modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; every driver call is itself thread-safe.
unsafe impl Sync for Module {}
// SAFETY: handles of functions may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above; every driver call is itself thread-safe.
unsafe impl Sync for Function {}

impl Gpu {
    /// All kernels, loaded by the first call.
    ///
    /// # Errors
    /// [`CudaError::KernelUnavailable`], or the driver's refusal.
    pub(crate) fn module(&self) -> Result<Module, CudaError> {
        let load = || {
            let _current = Current::enter(self)?;
            let (major, _) = self.info().capability;
            let compiled = COMPILED.iter().find(|(of, _)| *of == major);
            let compiled = compiled.and_then(|(_, code)| Module::load(self, code.0.as_ptr()).ok());
            compiled.map_or_else(|| Module::load(self, PTX.as_ptr()), Ok)
        };
        self.0.module.get_or_init(load).clone()
    }
}

impl Module {
    /// Loads code; the context is current.
    fn load(gpu: &Gpu, code: *const u8) -> Result<Self, CudaError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle, and the code is whole: PTX that ends in a
        // zero, or an ELF file.
        let code = unsafe { (gpu.api().cuModuleLoadData)(&raw mut module, code.cast()) };
        let loaded = gpu.api().check("cuModuleLoadData", code);
        loaded.map_err(|error| unavailable(gpu, error))?;
        Ok(Self(module))
    }

    /// The kernel of this name; the context is current.
    pub(crate) fn function(&self, gpu: &Gpu, name: &CStr) -> Result<Function, CudaError> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle, the module is loaded, the name ends in a
        // zero.
        let code =
            unsafe { (gpu.api().cuModuleGetFunction)(&raw mut function, self.0, name.as_ptr()) };
        let found = gpu.api().check("cuModuleGetFunction", code);
        found.map_err(|error| unavailable(gpu, error))?;
        Ok(Function(function))
    }
}

/// A parameter of a launch.
pub(crate) fn parameter<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

impl Function {
    /// Queues a launch of so many blocks of so many threads.
    ///
    /// # Safety
    /// The context is current and the parameters are of the function's types. The memory that they
    /// lead to must stay, unused by others, until the stream has passed the launch.
    pub(crate) unsafe fn launch(
        self,
        api: &Api,
        (blocks, threads): (u32, u32),
        stream: sys::CUstream,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: the driver copies the parameters in this call and does not write them; the rest
        // is the caller's promise.
        let code = unsafe {
            (api.cuLaunchKernel)(
                self.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        api.check("cuLaunchKernel", code)
    }
}

/// An error of loading, told apart from a broken context.
fn unavailable(gpu: &Gpu, error: CudaError) -> CudaError {
    match error {
        CudaError::Call { code, name, .. } if CANNOT_LOAD.contains(&code) => {
            CudaError::KernelUnavailable {
                device: gpu.ordinal(),
                name,
            }
        }
        other => other,
    }
}
