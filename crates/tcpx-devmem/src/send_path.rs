//! Memory that a card can send from.

use std::any::Any;
use std::sync::Arc;

use tcpx_memory::{DmaBuf, RegionSlice};

/// Memory bound for sending on one interface. Clones are the same binding; the last one unbinds.
#[derive(Clone, Debug)]
pub struct SendPath {
    /// The kernel's number for the bound memory, for `SCM_DEVMEM_DMABUF`.
    pub dmabuf_id: u32,
    /// The card's interface; the socket must be bound to it (`SO_BINDTODEVICE`).
    pub interface: String,
    /// The interface's number.
    pub ifindex: u32,
    memory: DmaBuf,
    _binding: Arc<dyn Any + Send + Sync>,
}

impl SendPath {
    /// A path out of its parts; `binding` unbinds when it is dropped.
    pub fn new(
        memory: DmaBuf,
        dmabuf_id: u32,
        interface: String,
        ifindex: u32,
        binding: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            dmabuf_id,
            interface,
            ifindex,
            memory,
            _binding: binding,
        }
    }

    /// The memory.
    pub fn memory(&self) -> &DmaBuf {
        &self.memory
    }

    /// Where a slice lies in the bound memory, in bytes from its start: what the iovec of a send must
    /// point at. `None` when the slice is of another region.
    pub fn offset_of(&self, slice: &RegionSlice) -> Option<u64> {
        self.memory.offset_of(slice)
    }
}
