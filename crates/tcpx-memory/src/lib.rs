//! Host, pinned and CUDA memory for tcpx.
//!
//! Three ideas carry this crate:
//!
//! - A [`Region`] is owned, reference-counted memory of one [`MemoryKind`]. Asynchronous work takes
//!   [`RegionSlice`]s, which keep their region alive, and never borrowed slices.
//! - A [`Lease`] says that an operation may touch a range of bytes. Safe CPU access and every copy
//!   job take one, so a program cannot read bytes that a transfer is still writing.
//! - A [`CopyWorker`] is the one thread per GPU that calls the CUDA driver after set-up: it copies,
//!   unpacks scattered fragments and checksums. A process without a GPU has a host worker with the
//!   same interface.
//!
//! The CUDA driver is found at run time and never needed to build or to start; see
//! [`driver::probe`].

pub mod awake;
mod bounce;
mod cache;
mod checksum;
mod cpu;
mod dma_buf;
pub mod driver;
mod ending;
mod error;
#[cfg(feature = "fake-driver")]
pub mod fake_driver;
mod fence;
pub mod fork;
mod free_slots;
mod gpu;
mod job;
mod kind;
mod lease;
mod pinned;
mod region;
mod slice;
mod small_copies;
mod worker;

pub use bounce::{BouncePool, ParseMethodError, UnpackMethod};
pub use checksum::{KeyedTag, TagKey};
pub use dma_buf::{DmaBuf, DmaBufError};
pub use error::{CudaError, MemoryError, PointerFault};
pub use fence::{After, Event, Fence, Stream};
pub use gpu::{Gpu, InContext, MemoryHandle, PointerInfo, SegmentRow, Shareable, peer_mappings};
pub use job::{CompletionSink, Job, SubmitError, Work};
pub use kind::MemoryKind;
pub use lease::{Access, Lease, ReadUntilWritten};
pub use pinned::{FreeWatch, PinnedPool, PinnedSlot, PoolHalf};
pub use region::{
    DeviceParts, Gather, HostParts, KeptMemory, Region, RegionId, RegionWatch, WeakRegion,
};
pub use slice::RegionSlice;
pub use small_copies::{SmallCopies, SmallRead};
pub use tcpx_wire::{Descriptor, Descriptors};
pub use worker::CopyWorker;
#[cfg(feature = "simulation")]
pub use worker::{FAILS, HOST_ROOM};

/// Locks what a panic may have left locked: whoever changes it leaves nothing half done where it
/// can panic.
pub fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
