//! Kernels: their PTX, loaded by the driver's own compiler, and their launches.

use std::ffi::{CStr, c_void};

use super::Gpu;
use crate::driver::{Api, sys};
use crate::error::CudaError;

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

impl Module {
    /// Loads PTX text, which ends in a zero; the context is current.
    pub(crate) fn load(gpu: &Gpu, ptx: &str) -> Result<Self, CudaError> {
        debug_assert!(ptx.ends_with('\0'));
        let mut module = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle, and the text ends in a zero.
        let code = unsafe { (gpu.api().cuModuleLoadData)(&raw mut module, ptx.as_ptr().cast()) };
        let loaded = gpu.api().check("cuModuleLoadData", code);
        loaded.map_err(|error| unavailable(gpu, error))?;
        Ok(Self(module))
    }

    /// The kernel of this name; the context is current.
    pub(crate) fn function(&self, gpu: &Gpu, name: &CStr) -> Result<Function, CudaError> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle, the module is loaded, the name ends in a zero.
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
    /// The context is current and the parameters are of the function's types. The memory that they lead to must
    /// stay, unused by others, until the stream has passed the launch.
    pub(crate) unsafe fn launch(
        self,
        api: &Api,
        (blocks, threads): (u32, u32),
        stream: sys::CUstream,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: the driver copies the parameters in this call and does not write them; the rest is the
        // caller's promise.
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
