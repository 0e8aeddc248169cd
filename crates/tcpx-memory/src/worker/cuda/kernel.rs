//! The unpack kernel on the device.

use std::ffi::{CStr, c_void};

use tcpx_wire::Descriptor;

use super::device::{Device, Lane};
use crate::driver::{Api, sys};
use crate::error::CudaError;
use crate::gpu::Gpu;

/// PTX text for the driver's own compiler, with the zero that it wants at the end.
const PTX: &str = concat!(include_str!("../../ptx/unpack.ptx"), "\0");

/// Descriptors that `tcpx_unpack_few` and `tcpx_unpack_many` carry in their launch; `kernels/unpack.cu`.
pub(super) const FEW: usize = 240;
pub(super) const MANY: usize = 2032;
/// What a launch may carry on every driver, and from compute capability 7.0 on.
const _: () = assert!(32 + FEW * 16 <= 4096 && 32 + MANY * 16 <= 32_764);

/// Errors that mean that this driver or device cannot run the PTX, and nothing worse.
const CANNOT_LOAD: [i32; 7] = [200, 209, 218, 221, 222, 223, 500];

/// Descriptors as a launch carries them.
#[repr(C, align(16))]
pub(super) struct Inline(pub(super) [Descriptor; MANY]);

/// The loaded module.
pub(super) struct Kernels {
    module: sys::CUmodule,
    few: sys::CUfunction,
    many: sys::CUfunction,
    mapped: sys::CUfunction,
}

/// Where a launch finds its descriptors.
pub(super) enum Source<'a> {
    /// At the front of these; copied when launched.
    Inline(&'a Inline),
    /// At this device address, which must stay until the launch has run.
    Mapped(u64),
}

impl Kernels {
    /// Loads the module; the context must be current.
    pub(super) fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let api = gpu.api();
        let mut module = std::ptr::null_mut();
        // SAFETY: the pointer is valid for one handle, and the text ends in a zero.
        let code = unsafe { (api.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()) };
        api.check("cuModuleLoadData", code)
            .map_err(|error| unavailable(gpu, error))?;
        let loaded = [
            c"tcpx_unpack_few",
            c"tcpx_unpack_many",
            c"tcpx_unpack_mapped",
        ]
        .map(|name| function(api, module, name));
        match loaded {
            [Ok(few), Ok(many), Ok(mapped)] => Ok(Self {
                module,
                few,
                many,
                mapped,
            }),
            functions => {
                unload(api, module);
                let error = functions.into_iter().find_map(Result::err);
                Err(unavailable(
                    gpu,
                    error.unwrap_or(CudaError::NoCurrentContext),
                ))
            }
        }
    }

    pub(super) fn unload(&self, api: &Api) {
        unload(api, self.module);
    }

    /// Launches each kernel with nothing to do.
    pub(super) fn warm_up(&self, device: &Device, scratch: u64) -> Result<(), CudaError> {
        let empty = Descriptor {
            source_offset: 0,
            length: 0,
            destination_offset: 0,
        };
        let inline = Box::new(Inline([empty; MANY]));
        for function in [self.few, self.many] {
            // SAFETY: no descriptors, so no memory is touched.
            unsafe {
                launch(
                    device,
                    function,
                    scratch,
                    scratch,
                    0,
                    inline.0.as_ptr().cast(),
                )?
            };
        }
        let mut address = scratch;
        // SAFETY: as above.
        unsafe {
            launch(
                device,
                self.mapped,
                scratch,
                scratch,
                0,
                (&raw mut address).cast(),
            )
        }
    }

    /// Queues one launch for `count` descriptors.
    ///
    /// # Safety
    /// Every descriptor's source, from `pool`, and destination, from `to`, must be device-addressable
    /// and stay valid and unused by others until the stream has passed the launch.
    pub(super) unsafe fn unpack(
        &self,
        device: &Device,
        pool: u64,
        to: u64,
        count: usize,
        source: Source<'_>,
    ) -> Result<(), CudaError> {
        let (function, parameter): (_, *const c_void) = match &source {
            Source::Inline(list) if count <= FEW => (self.few, list.0.as_ptr().cast()),
            Source::Inline(list) => (self.many, list.0.as_ptr().cast()),
            Source::Mapped(address) => (self.mapped, std::ptr::from_ref(address).cast()),
        };
        // SAFETY: the caller's promise; the parameter is of the function's type.
        unsafe { launch(device, function, pool, to, count, parameter) }
    }
}

/// # Safety
/// As [`Kernels::unpack`]; `parameter` points to the function's last parameter.
unsafe fn launch(
    device: &Device,
    function: sys::CUfunction,
    mut pool: u64,
    mut to: u64,
    count: usize,
    parameter: *const c_void,
) -> Result<(), CudaError> {
    let (blocks, threads) = shape(device.gpu.multiprocessors(), count);
    let mut count = count as u32;
    let mut parameters: [*mut c_void; 4] = [
        (&raw mut pool).cast(),
        (&raw mut to).cast(),
        (&raw mut count).cast(),
        parameter.cast_mut(),
    ];
    // SAFETY: the parameters are of the kernel's types and are copied by this call; the memory they
    // lead to is the caller's promise.
    let code = unsafe {
        (device.api().cuLaunchKernel)(
            function,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            0,
            device.stream(Lane::Unpack),
            parameters.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    device.api().check("cuLaunchKernel", code)
}

/// Blocks and threads for a number of descriptors: one warp each while that fits one block of 256 threads
/// per multiprocessor twice over, then blocks of 1,024 that take several.
fn shape(multiprocessors: u32, count: usize) -> (u32, u32) {
    let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
    let threads = if count <= multiprocessors.saturating_mul(16) {
        256
    } else {
        1024
    };
    (count.div_ceil(threads / 32).min(multiprocessors), threads)
}

fn function(api: &Api, module: sys::CUmodule, name: &CStr) -> Result<sys::CUfunction, CudaError> {
    let mut function = std::ptr::null_mut();
    // SAFETY: the pointer is valid for one handle, the module is loaded, the name ends in a zero.
    let code = unsafe { (api.cuModuleGetFunction)(&raw mut function, module, name.as_ptr()) };
    api.check("cuModuleGetFunction", code)?;
    Ok(function)
}

fn unload(api: &Api, module: sys::CUmodule) {
    // SAFETY: ours; no launch of it is under way.
    api.check_teardown("cuModuleUnload", unsafe { (api.cuModuleUnload)(module) });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_wide_and_never_empty() {
        assert_eq!(shape(132, 1), (1, 256));
        assert_eq!(shape(132, 128), (16, 256));
        assert_eq!(shape(132, 1024), (128, 256));
        assert_eq!(shape(132, 2112), (132, 256));
        assert_eq!(shape(132, 16_384), (132, 1024));
        assert_eq!(shape(1, 0), (1, 256));
    }

    #[test]
    fn the_ptx_has_the_kernels_with_room_for_the_lists() {
        for (name, bytes) in [("few", FEW * 16), ("many", MANY * 16)] {
            assert!(
                PTX.contains(&format!("tcpx_unpack_{name}_param_3[{bytes}]")),
                "{name}"
            );
        }
        assert!(PTX.contains(".entry tcpx_unpack_mapped("));
    }
}
