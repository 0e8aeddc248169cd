//! The kernels on the device.

use std::ffi::c_void;

use super::feed::{EVEN, FEW, Inline, Shape};
use crate::driver::{Api, sys};
use crate::error::CudaError;
use crate::gpu::{Function, Gpu, parameter};

/// Sources that `tcpx_even_few` carries; `kernels/unpack.cu`.
const EVEN_FEW: usize = 256;
/// Blocks of a long launch that a multiprocessor runs at once; `TCPX_LONG_BLOCKS` of
/// `kernels/unpack.cu`.
const LONG_BLOCKS: u32 = 6;

/// Where a launch signals its completion to the host, besides its stream.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Flag {
    /// A counter in device memory that is zero between launches; 0: no flag is wanted.
    pub(super) counter: u64,
    /// Four bytes of mapped host memory.
    pub(super) flag: u64,
    /// What they become.
    pub(super) value: u32,
}

/// `tcpx_call` of `kernels/unpack.cu`.
#[repr(C)]
struct Call {
    pool: u64,
    to: u64,
    counter: u64,
    flag: u64,
    value: u32,
    count: u32,
    unit: u32,
    last: u32,
    split: u32,
    packs: u32,
}

/// What a launch's pieces count from, for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LaunchEnds {
    pub(super) pool: u64,
    pub(super) to: u64,
    /// Pieces go from `to` to the pool, instead of the other way.
    pub(super) packs: bool,
}

/// Where a launch finds its list.
pub(super) enum Source<'a> {
    /// At the front of these; copied when launched.
    Inline(&'a Inline),
    /// At this device address, which must stay until the launch has run.
    Mapped(u64),
}

/// The loaded kernels, which stay until the process ends.
pub(crate) struct Kernels {
    few: Function,
    mapped: Function,
    even_few: Function,
    even_many: Function,
    even_mapped: Function,
    multiprocessors: u32,
}

impl Kernels {
    /// Finds them; the context must be current.
    pub(crate) fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let module = gpu.module()?;
        let of = |name| module.function(gpu, name);
        Ok(Self {
            few: of(c"tcpx_unpack_few")?,
            mapped: of(c"tcpx_unpack_mapped")?,
            even_few: of(c"tcpx_even_few")?,
            even_many: of(c"tcpx_even_many")?,
            even_mapped: of(c"tcpx_even_mapped")?,
            multiprocessors: gpu.multiprocessors(),
        })
    }

    /// Launches each kernel with nothing to do.
    pub(super) fn warm_up(
        &self,
        api: &Api,
        stream: sys::CUstream,
        scratch: u64,
    ) -> Result<(), CudaError> {
        let inline = Box::new(Inline::EMPTY);
        let carried: *const c_void = inline.0.as_ptr().cast();
        let list = std::ptr::from_ref(&scratch).cast();
        let ends = LaunchEnds {
            pool: scratch,
            to: scratch,
            packs: false,
        };
        let call = Call::new(ends, Shape::default(), Flag::default());
        for (function, list) in [
            (self.few, carried),
            (self.even_few, carried),
            (self.even_many, carried),
            (self.mapped, list),
            (self.even_mapped, list),
        ] {
            // SAFETY: no pieces, so no memory is touched.
            unsafe {
                let parameters = &mut [parameter(&call), list.cast_mut()];
                function.launch(api, (1, 64), stream, parameters)?
            };
        }
        Ok(())
    }

    /// Queues one launch.
    ///
    /// # Safety
    /// Every piece's source, from the pool, and destination must be device-addressable and stay
    /// valid and unused by others until the stream has passed the launch; so must the flag.
    pub(super) unsafe fn unpack(
        &self,
        api: &Api,
        stream: sys::CUstream,
        ends: LaunchEnds,
        shape: Shape,
        source: Source<'_>,
        flag: Flag,
    ) -> Result<(), CudaError> {
        let is_even = shape.even.is_some();
        let start = shape.even.map_or(0, |even| even.start);
        let ends = LaunchEnds {
            to: ends.to + start,
            ..ends
        };
        let mut call = Call::new(ends, shape, flag);
        let (function, list): (_, *const c_void) = match &source {
            Source::Inline(list) => {
                debug_assert!(shape.count <= if is_even { EVEN } else { FEW });
                let function = match is_even {
                    false => self.few,
                    true if shape.count <= EVEN_FEW => self.even_few,
                    true => self.even_many,
                };
                (function, list.0.as_ptr().cast())
            }
            Source::Mapped(address) => (
                if is_even {
                    self.even_mapped
                } else {
                    self.mapped
                },
                std::ptr::from_ref(address).cast(),
            ),
        };
        let grid = match &source {
            Source::Inline(_) => {
                let (grid, split) = short_grid(self.multiprocessors, call.count);
                call.split = split;
                grid
            }
            Source::Mapped(_) => long_grid(self.multiprocessors, call.count),
        };
        // SAFETY: the caller's promise; the parameters are of the function's types.
        unsafe {
            let parameters = &mut [parameter(&call), list.cast_mut()];
            function.launch(api, grid, stream, parameters)
        }
    }
}

impl Call {
    fn new(ends: LaunchEnds, shape: Shape, flag: Flag) -> Self {
        let (unit, last) = shape.even.map_or((0, 0), |even| (even.unit, even.last));
        Self {
            pool: ends.pool,
            to: ends.to,
            counter: flag.counter,
            flag: flag.flag,
            value: flag.value,
            count: shape.count as u32,
            unit,
            last,
            split: 0,
            packs: ends.packs.into(),
        }
    }
}

/// Blocks and threads for a list that came with the launch, and how many warps share a piece, as a
/// power of two: two where that leaves each multiprocessor no more than 16 warps, because all their
/// loads are in flight at once then; few blocks, because each of them takes its turn at the end.
fn short_grid(multiprocessors: u32, count: u32) -> ((u32, u32), u32) {
    let multiprocessors = multiprocessors.max(1);
    let split = u32::from(count <= multiprocessors * 8);
    let warps = (count << split).max(1);
    let fits = |each: &u32| warps <= multiprocessors * each;
    let each = [4, 8].into_iter().find(fits).unwrap_or(16);
    let blocks = warps.div_ceil(each);
    // A multiprocessor without a block would leave its work to the others.
    let nearly_all = blocks < multiprocessors && blocks * 4 >= multiprocessors * 3;
    let blocks = if nearly_all { multiprocessors } else { blocks };
    ((blocks, each * 32), split)
}

/// Blocks and threads for a list in mapped memory: one warp a piece while all of them fit at once,
/// in blocks so small that every multiprocessor gets some; warps that take several pieces in turn
/// beyond that, because each then fetches its next entry while it copies.
fn long_grid(multiprocessors: u32, count: u32) -> (u32, u32) {
    let (multiprocessors, count) = (multiprocessors.max(1), count.max(1));
    let warps = match count / multiprocessors {
        0..=3 => 2,
        4..=15 => 4,
        _ => 8,
    };
    let blocks = count.div_ceil(warps);
    (blocks.min(multiprocessors * LONG_BLOCKS), warps * 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_pieces_use_every_multiprocessor() {
        assert_eq!(long_grid(132, 0), (1, 64));
        assert_eq!(long_grid(132, 1025), (257, 128));
        assert_eq!(long_grid(132, 4096), (512, 256));
        assert_eq!(long_grid(132, 46_341), (792, 256));
        assert_eq!(long_grid(1, 16), (2, 256));
        assert_eq!(long_grid(1, 1000), (6, 256));
        assert_eq!(short_grid(132, 0), ((1, 128), 1));
        assert_eq!(short_grid(132, 128), ((64, 128), 1));
        assert_eq!(short_grid(132, 240), ((132, 128), 1));
        assert_eq!(short_grid(132, 1024), ((132, 512), 1));
        assert_eq!(short_grid(1, 1024), ((64, 512), 0));
    }

    #[test]
    fn the_ptx_has_the_kernels_with_room_for_the_lists() {
        const PTX: &str = include_str!("../../kernels/tcpx.ptx");
        for (name, bytes) in [
            ("unpack_few", FEW * 16),
            ("even_few", EVEN_FEW * 4),
            ("even_many", EVEN * 4),
        ] {
            assert!(
                PTX.contains(&format!("tcpx_{name}_param_1[{bytes}]")),
                "{name}"
            );
            assert!(PTX.contains(&format!("tcpx_{name}_param_0[{}]", size_of::<Call>())));
        }
        assert!(PTX.contains(".entry tcpx_unpack_mapped("));
        assert!(PTX.contains(".entry tcpx_even_mapped("));
    }
}
