//! The table of driver functions.
//!
//! Handles and constants come from `cudarc`'s bindings. The functions are looked up here because
//! the bindings panic where one is missing, and results stay plain integers because a newer driver
//! may return a code that the bindings' enum does not know.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::OnceLock;

pub(crate) use cudarc::driver::sys;
use libloading::Library;
use sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUipcMemHandle, CUmemAccessDesc,
    CUmodule, CUstream,
};

use crate::error::CudaError;

const SUCCESS: i32 = 0;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
const NOT_INITIALIZED: i32 = 3;
const DEINITIALIZED: i32 = 4;

macro_rules! functions {
    (optional { $($maybe:ident ($($taken:ty),* $(,)?);)* }
     $($name:ident = $symbol:literal, $needs:literal, ($($argument:ty),* $(,)?);)*) => {
        /// The driver's functions, by the names of their current versions.
        #[expect(non_snake_case, reason = "the driver's own names")]
        #[derive(Debug)]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> i32,)*
            $(pub(crate) $maybe: Option<unsafe extern "C" fn($($taken),*) -> i32>,)*
        }

        fn resolve(library: &Library) -> Result<Api, CudaError> {
            Ok(Api {
                $($name: {
                    // SAFETY: the signature is the driver's documented one for this versioned name,
                    // and the library stays loaded for the life of the process.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> i32>($symbol.as_bytes())
                    };
                    *found.map_err(|_| CudaError::MissingSymbol { name: $symbol, needs: $needs })?
                },)*
                $($maybe: {
                    // SAFETY: as above; these names have had one signature from the start.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($taken),*) -> i32>(stringify!($maybe).as_bytes())
                    };
                    found.ok().map(|symbol| *symbol)
                },)*
            })
        }
    };
}

functions! {
    optional {
        cuCtxGetId(CUcontext, *mut u64);
        cuMemGetHandleForAddressRange(*mut c_void, CUdeviceptr, usize, i32, u64);
        cuFlushGPUDirectRDMAWrites(i32, i32);
        cuStreamWaitValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
        cuStreamWriteValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
        cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
        cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
        cuIpcCloseMemHandle(CUdeviceptr);
        cuMemRetainAllocationHandle(*mut u64, *mut c_void);
        cuMemExportToShareableHandle(*mut c_void, u64, c_uint, u64);
        cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_uint);
        cuMemRelease(u64);
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
        cuMemAddressFree(CUdeviceptr, usize);
        cuMemMap(CUdeviceptr, usize, usize, u64, u64);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    }
    cuInit = "cuInit", "2.0", (c_uint);
    cuDriverGetVersion = "cuDriverGetVersion", "2.2", (*mut i32);
    cuGetErrorName = "cuGetErrorName", "6.0", (i32, *mut *const c_char);
    cuDeviceGetCount = "cuDeviceGetCount", "2.0", (*mut i32);
    cuDeviceGet = "cuDeviceGet", "2.0", (*mut CUdevice, i32);
    cuDeviceGetName = "cuDeviceGetName", "2.0", (*mut c_char, i32, CUdevice);
    cuDeviceGetPCIBusId = "cuDeviceGetPCIBusId", "4.1", (*mut c_char, i32, CUdevice);
    cuDeviceTotalMem = "cuDeviceTotalMem_v2", "3.2", (*mut usize, CUdevice);
    cuDeviceGetAttribute = "cuDeviceGetAttribute", "2.0", (*mut i32, i32, CUdevice);
    cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain", "7.0", (*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease_v2", "11.0", (CUdevice);
    cuDevicePrimaryCtxGetState = "cuDevicePrimaryCtxGetState", "7.0", (CUdevice, *mut c_uint, *mut i32);
    cuCtxGetCurrent = "cuCtxGetCurrent", "4.0", (*mut CUcontext);
    cuCtxSetCurrent = "cuCtxSetCurrent", "4.0", (CUcontext);
    cuCtxPushCurrent = "cuCtxPushCurrent_v2", "4.0", (CUcontext);
    cuCtxPopCurrent = "cuCtxPopCurrent_v2", "4.0", (*mut CUcontext);
    cuCtxGetDevice = "cuCtxGetDevice", "2.0", (*mut CUdevice);
    cuMemAlloc = "cuMemAlloc_v2", "3.2", (*mut CUdeviceptr, usize);
    cuMemFree = "cuMemFree_v2", "3.2", (CUdeviceptr);
    cuMemHostRegister = "cuMemHostRegister_v2", "6.5", (*mut c_void, usize, c_uint);
    cuMemHostUnregister = "cuMemHostUnregister", "4.0", (*mut c_void);
    cuMemHostGetDevicePointer =
        "cuMemHostGetDevicePointer_v2", "3.2", (*mut CUdeviceptr, *mut c_void, c_uint);
    cuPointerGetAttribute = "cuPointerGetAttribute", "4.0", (*mut c_void, i32, CUdeviceptr);
    cuMemcpyAsync = "cuMemcpyAsync", "4.0", (CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuStreamCreate = "cuStreamCreate", "2.0", (*mut CUstream, c_uint);
    cuStreamCreateWithPriority = "cuStreamCreateWithPriority", "5.5", (*mut CUstream, c_uint, i32);
    cuCtxGetStreamPriorityRange = "cuCtxGetStreamPriorityRange", "5.5", (*mut i32, *mut i32);
    cuStreamDestroy = "cuStreamDestroy_v2", "4.0", (CUstream);
    cuStreamQuery = "cuStreamQuery", "2.0", (CUstream);
    cuStreamIsCapturing = "cuStreamIsCapturing", "10.0", (CUstream, *mut i32);
    cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode", "10.1", (*mut c_uint);
    cuEventCreate = "cuEventCreate", "2.0", (*mut CUevent, c_uint);
    cuEventRecord = "cuEventRecord", "2.0", (CUevent, CUstream);
    cuEventQuery = "cuEventQuery", "2.0", (CUevent);
    cuModuleLoadData = "cuModuleLoadData", "2.0", (*mut CUmodule, *const c_void);
    cuModuleGetFunction = "cuModuleGetFunction", "2.0", (*mut CUfunction, CUmodule, *const c_char);
    cuLaunchKernel = "cuLaunchKernel", "4.0",
        (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
         *mut *mut c_void, *mut *mut c_void);
}

impl Api {
    /// Turns a result into a typed error that names the call.
    pub(crate) fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(CudaError::Call {
            call,
            code,
            name: self.error_name(code),
            hint: hint(code),
        })
    }

    /// For teardown, where nothing can be done about a failure but to say so. After the driver has
    /// shut down at the end of the process every call fails, and that is fine.
    pub(crate) fn check_teardown(&self, call: &'static str, code: i32) {
        if code != DEINITIALIZED
            && let Err(error) = self.check(call, code)
        {
            tracing::warn!(%error, "CUDA teardown");
        }
    }

    fn error_name(&self, code: i32) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is valid for one string pointer.
        let found = unsafe { (self.cuGetErrorName)(code, &raw mut name) };
        if found != SUCCESS || name.is_null() {
            return "unknown to the driver".to_owned();
        }
        // SAFETY: the driver returns a static string that ends in a zero.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }
}

fn hint(code: i32) -> &'static str {
    match code {
        1 => {
            "an argument is wrong; if memory was given by address, check the address and its length"
        }
        OUT_OF_MEMORY => "no memory left; free some or ask for less",
        NOT_INITIALIZED | DEINITIALIZED => "the driver is shutting down with the process",
        46 | 802 => "the device or the fabric is not ready; see nvidia-smi and the fabric manager",
        100 => "no device is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
        101 => "there is no such device; see nvidia-smi and CUDA_VISIBLE_DEVICES",
        201 => "the context is not valid here; use the GPU whose context the stream belongs to",
        218 | 222 => "the driver cannot compile the kernel; update NVIDIA's driver",
        400 => "a handle is not valid here; streams and events must belong to this GPU's context",
        700 | 716 | 717 | 718 | 719 => {
            "a kernel of this process has broken the context; no CUDA work can go on in this process"
        }
        803 | 804 => {
            "the driver's library does not fit its kernel module; reinstall NVIDIA's driver"
        }
        900..=908 => "a stream is being captured; start transfers outside of the capture",
        _ => "see the driver's documentation of this code, and the kernel log for a device error",
    }
}

fn table() -> Result<&'static Api, CudaError> {
    static TABLE: OnceLock<Result<Api, CudaError>> = OnceLock::new();
    TABLE.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> Result<Api, CudaError> {
    let mut why = String::new();
    for name in ["libcuda.so.1", "libcuda.so"] {
        // SAFETY: loading NVIDIA's driver runs its initialisers, which do not depend on our state.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                let api = resolve(&library);
                // The driver starts threads of its own: it must never be unloaded.
                std::mem::forget(library);
                return api;
            }
            Err(error) if why.is_empty() => {
                // The loader's own words are in the cause.
                why = std::error::Error::source(&error)
                    .map_or_else(|| error.to_string(), ToString::to_string);
            }
            Err(_) => {}
        }
    }
    Err(CudaError::NoDriver { why })
}

/// The table, after `cuInit`.
pub(super) fn initialized() -> Result<&'static Api, CudaError> {
    let api = table()?;
    // SAFETY: 0 is the only legal flag; repeated calls are harmless.
    let code = unsafe { (api.cuInit)(0) };
    if code != SUCCESS {
        let why = format!(
            "cuInit answered {code} ({}): {}",
            api.error_name(code),
            hint(code)
        );
        return Err(CudaError::NoDriver { why });
    }
    Ok(api)
}
