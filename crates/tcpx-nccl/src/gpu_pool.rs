//! A receive pool in GPU memory, filled from pinned memory page for page.

use std::sync::Arc;

use nccl_net::constants::{UNPACK_QUEUE_DEPTH, UNPACK_SLOT_ENTRIES};
use nccl_net::device::LoadMeta;
use nccl_net::export::NetError;
use tcpx_memory::{Access, BouncePool, Job, Lease, MemoryError, Region, UnpackMethod, Work};
use tcpx_wire::{Descriptors, Fragment, Limits, ScatterList};

use crate::copies::Copies;
use crate::device::Device;
use crate::error;

/// What its jobs do, for errors.
const MOVING: &str = "moving a received message to the GPU pool";

/// The pool and the moves into it, one for each queue slot.
#[derive(Debug)]
pub(crate) struct GpuPool {
    device: Device,
    pub(crate) memory: Region,
    /// Jobs of several slots write disjoint pages at once, all under this one lease.
    lease: Lease,
    /// Rides on a lease of ours: the socket fills other pages while some are moved.
    landing: BouncePool,
    copies: Arc<Copies<UNPACK_QUEUE_DEPTH>>,
    /// Kept from message to message: the host's thread allocates nothing.
    list: ScatterList,
    /// By slot; the copy worker shares one while its job lasts.
    descriptors: [Arc<Descriptors>; UNPACK_QUEUE_DEPTH],
}

impl GpuPool {
    pub(crate) fn new(device: &Device, landing: &Region) -> Result<Self, NetError> {
        let memory = device
            .memory(landing.len())
            .map_err(error::copy("receive comm", MOVING))?;
        let lease = memory
            .lease(.., Access::Write)
            .map_err(error::copy("receive comm", MOVING))?;
        let source = landing
            .lease(.., Access::Write)
            .map_err(error::copy("receive comm", MOVING))?;
        for lease in [&lease, &source] {
            lease.reserve_users(UNPACK_QUEUE_DEPTH);
        }
        Ok(Self {
            device: device.clone(),
            memory,
            lease,
            landing: BouncePool::new(source.all()),
            copies: Arc::new(Copies::new()),
            list: ScatterList::with_capacity(UNPACK_SLOT_ENTRIES),
            descriptors: std::array::from_fn(|_| {
                Arc::new(Descriptors::with_capacity(UNPACK_SLOT_ENTRIES))
            }),
        })
    }

    /// Starts to move the fragments to the same offsets in GPU memory; `false` when the copy worker takes
    /// no more jobs now.
    pub(crate) fn fetch(
        &mut self,
        comm: &str,
        slot: usize,
        entries: &[LoadMeta],
    ) -> Result<bool, NetError> {
        // The slot's last job has ended, but its end is told before the worker lets go of it.
        let Some(descriptors) = Arc::get_mut(&mut self.descriptors[slot]) else {
            return Ok(false);
        };
        let mut bytes = 0;
        self.list.clear();
        for entry in entries {
            self.list.push(Fragment {
                source_offset: entry.src_off.into(),
                length: entry.len,
                destination_offset: entry.src_off.into(),
            });
            bytes += u64::from(entry.len);
        }
        let pool_bytes = self.memory.len() as u64;
        descriptors
            .build(
                &self.list,
                Limits {
                    pool_bytes,
                    destination_bytes: pool_bytes,
                    received_bytes: bytes,
                },
            )
            .map_err(error::copy(comm, MOVING))?;
        self.copies.start(slot);
        let job = Job {
            work: Work::Unpack {
                pool: self.landing.clone(),
                descriptors: Arc::clone(&self.descriptors[slot]),
                to: self.lease.all(),
                with: UnpackMethod::Kernel,
            },
            // Only our own memory is touched.
            fence: None,
            sink: self.copies.clone(),
            // Below 16.
            token: slot as u64,
        };
        let Err(refused) = self.device.worker().submit(job) else {
            return Ok(true);
        };
        self.copies.reset(slot);
        match refused.error {
            MemoryError::QueueFull { .. } => Ok(false),
            error => Err(error::copy(comm, MOVING)(error)),
        }
    }

    /// Whether the move of a slot has ended.
    pub(crate) fn fetched(&self, comm: &str, slot: usize) -> Result<bool, NetError> {
        self.copies
            .finished(slot)
            .map_err(error::copy(comm, MOVING))
    }

    /// The slot is free for another receive.
    pub(crate) fn reset(&self, slot: usize) {
        self.copies.reset(slot);
    }
}

impl Drop for GpuPool {
    fn drop(&mut self) {
        // The pinned memory goes back into use by others once the comm is closed.
        self.copies.wait_quiet();
    }
}
