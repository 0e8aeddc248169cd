//! Memory registered with a comm: each region once, as long as somebody uses it.

use std::collections::HashMap;
use std::sync::Arc;

use nccl_net::{HostError, MemoryHandle, MemoryType, RecvComm, SendComm};
use tcpx_memory::{Region, RegionId, RegionSlice};

/// Registrations that one comm keeps for reuse.
const KEPT: usize = 64;

/// The registrations of one comm.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    by_region: HashMap<(RegionId, MemoryType), (MemoryHandle, Region)>,
}

impl Registrations {
    /// The registration of a slice's region on a send comm.
    pub(super) fn of_send(
        &mut self,
        comm: &SendComm,
        slice: &RegionSlice,
        kind: MemoryType,
    ) -> Result<MemoryHandle, HostError> {
        self.of(slice, kind, |data, len, owner| {
            // SAFETY: the region is memory of that kind, the registration owns a share of it, and
            // the engine's leases keep writers away while a request is in flight.
            unsafe { comm.register_owned(data, len, kind, owner) }
        })
    }

    /// The registration of a slice's region on a receive comm.
    pub(super) fn of_receive(
        &mut self,
        comm: &RecvComm,
        slice: &RegionSlice,
        kind: MemoryType,
    ) -> Result<MemoryHandle, HostError> {
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
    ) -> Result<MemoryHandle, HostError> {
        let region = slice.region();
        let key = (region.id(), kind);
        if let Some((handle, _)) = self.by_region.get(&key) {
            return Ok(handle.clone());
        }
        if self.by_region.len() >= KEPT {
            self.forget_unused();
        }
        let all = region.all();
        let data = std::ptr::with_exposed_provenance_mut(address(&all));
        let handle = register(data, all.len(), Arc::new(region.clone()))?;
        self.by_region.insert(key, (handle.clone(), region.clone()));
        Ok(handle)
    }

    /// Gives registrations back whose regions nobody else holds any more.
    pub(super) fn forget_unused(&mut self) {
        // Two shares are ours: the entry's and the registration's owner.
        self.by_region.retain(|_, (_, region)| region.shares() > 2);
    }

    pub(super) fn clear(&mut self) {
        self.by_region.clear();
    }
}

/// The address under which the plugin knows the memory. On a 64-bit machine every address fits.
fn address(slice: &RegionSlice) -> usize {
    slice.host_ptr().map_or_else(
        || usize::try_from(slice.address()).unwrap_or_default(),
        |pointer| pointer.expose_provenance(),
    )
}
