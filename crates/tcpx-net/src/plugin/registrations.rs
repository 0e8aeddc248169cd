//! Memory registered with a comm: each part of a region once, as long as somebody uses it.

use std::collections::HashMap;
use std::sync::Arc;

use nccl_net::{HostError, MemoryHandle, MemoryType, RecvComm, SendComm};
use tcpx_memory::{Region, RegionId, RegionSlice};

/// Registrations that one comm keeps for reuse.
const KEPT: usize = 64;
/// Sizes are an `int` in older tables, so a large region is registered in windows that start at
/// multiples of this.
const WINDOW: usize = 1 << 30;
/// Windows overlap by this, so that every request lies in the window in which it starts.
pub(super) const LARGEST_REQUEST: usize = 64 << 20;

/// A registration that contains a request, and where the request starts in it.
pub(super) struct Registered {
    pub(super) memory: MemoryHandle,
    pub(super) offset: usize,
}

/// Which window of which region, and how the plugin is told of it.
type Key = (RegionId, usize, MemoryType);

/// The registrations of one comm.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    windows: HashMap<Key, (MemoryHandle, Region)>,
}

impl Registrations {
    /// The registration of a slice on a send comm.
    pub(super) fn of_send(
        &mut self,
        comm: &SendComm,
        slice: &RegionSlice,
        kind: MemoryType,
    ) -> Result<Registered, HostError> {
        self.of(slice, kind, |data, len, owner| {
            // SAFETY: the region is memory of that kind, the registration owns a share of it, and
            // the engine's leases keep writers away while a request is in flight.
            unsafe { comm.register_owned(data, len, kind, owner) }
        })
    }

    /// The registration of a slice on a receive comm.
    pub(super) fn of_receive(
        &mut self,
        comm: &RecvComm,
        slice: &RegionSlice,
        kind: MemoryType,
    ) -> Result<Registered, HostError> {
        self.of(slice, kind, |data, len, owner| {
            // SAFETY: as for sends; leases keep everybody away from the destination.
            unsafe { comm.register_owned(data, len, kind, owner) }
        })
    }

    fn of(
        &mut self,
        slice: &RegionSlice,
        kind: MemoryType,
        register: impl FnOnce(*mut u8, usize, nccl_net::MemoryOwner) -> Result<MemoryHandle, HostError>,
    ) -> Result<Registered, HostError> {
        let region = slice.region();
        let window = slice.offset() / WINDOW;
        let start = window * WINDOW;
        let offset = slice.offset() - start;
        let key = (region.id(), window, kind);
        if let Some((memory, _)) = self.windows.get(&key) {
            let memory = memory.clone();
            return Ok(Registered { memory, offset });
        }
        if self.windows.len() >= KEPT {
            self.forget_unused();
        }
        let len = (region.len() - start).min(WINDOW + LARGEST_REQUEST);
        let data = std::ptr::with_exposed_provenance_mut::<u8>(address(&region.all()));
        let owner = Arc::new(region.clone());
        let memory = register(data.wrapping_add(start), len, owner)?;
        self.windows.insert(key, (memory.clone(), region.clone()));
        Ok(Registered { memory, offset })
    }

    /// Gives registrations back whose regions nobody else holds any more.
    pub(super) fn forget_unused(&mut self) {
        // Two shares a window are ours: the entry's and the registration's owner.
        let mut ours = HashMap::new();
        for (id, ..) in self.windows.keys() {
            *ours.entry(*id).or_insert(0) += 2;
        }
        self.windows.retain(|(id, ..), (_, region)| {
            ours.get(id).is_none_or(|ours| region.shares() > *ours)
        });
    }
}

/// The address under which the plugin knows the memory. On a 64-bit machine every address fits.
fn address(slice: &RegionSlice) -> usize {
    slice.host_ptr().map_or_else(
        || usize::try_from(slice.address()).unwrap_or_default(),
        |pointer| pointer.expose_provenance(),
    )
}
