//! Receives of device memory: payload lands in pages of a pool, a queue says where it belongs.

use std::ptr::NonNull;

use nccl_net::constants::{UNPACK_QUEUE_DEPTH, UNPACK_SLOT_ENTRIES};
use nccl_net::device::{LoadMeta, NetUnpackMeta, UnpackNetDeviceHandle};
use nccl_net::export::DeviceQueue;
use nccl_net::{QueueSlot, UnpackQueueWriter};
use tcpx_lanes::socket_calls::{MAX_SPANS, Span};
use tcpx_memory::{MemoryError, Region};

use crate::config::{Config, PAGE_BYTES, PoolKind};
use crate::device::Device;
use crate::error::PluginError;
use crate::gpu_pool::GpuPool;

/// The pool, the queue and the handle of one receive comm.
#[derive(Debug)]
pub(crate) struct Scatter {
    /// Whose memory it receives for; without one it only says that host memory lies in place.
    device: Option<Device>,
    /// Where the socket writes.
    landing: Region,
    /// Where the device reads, when that is another place.
    gpu_pool: Option<GpuPool>,
    queue: UnpackQueueWriter,
    /// What `queue` writes into.
    _queue_memory: Region,
    handle: Region,
    /// Pages of the pool that no receive holds.
    free: Vec<u32>,
    /// Pages held by the receive in each slot, in the order of its bytes.
    held: [Vec<u32>; UNPACK_QUEUE_DEPTH],
    /// Bytes of the message that is arriving, and those of them that are here.
    bytes: usize,
    arrived: usize,
    /// Kept from message to message: the host's thread allocates nothing.
    entries: Vec<LoadMeta>,
}

/// Whether a message has its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Ready,
    /// So many pages are missing until something is consumed.
    Missing(usize),
}

/// What became of a message whose bytes are all here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landed {
    /// The device can gather it.
    Complete,
    /// It is on its way to the GPU.
    Moving,
    /// The copy worker takes no more jobs now: try again.
    Later,
}

impl Scatter {
    pub(crate) fn new(config: &Config, device: Option<Device>) -> Result<Self, PluginError> {
        let shared = |bytes| {
            let memory = match &device {
                Some(device) => device.shared_memory(bytes),
                None => Region::host(bytes),
            };
            memory.map_err(unallocated())
        };
        let landing = shared(config.pool_bytes)?;
        let gpu_pool = match (&device, config.pool) {
            (Some(device), PoolKind::Gpu) => Some(GpuPool::new(device, &landing)?),
            _ => None,
        };
        let queue_memory = shared(size_of::<NetUnpackMeta>())?;
        let meta = queue_memory
            .all()
            .host_ptr()
            .and_then(|start| NonNull::new(start.cast::<NetUnpackMeta>()))
            .filter(|meta| meta.is_aligned())
            .ok_or("the memory is not aligned to 16 bytes")
            .map_err(PluginError::copy(
                "receive comm",
                "placing the unpack queue",
            ))?;
        // SAFETY: zeroed, aligned memory of the queue's size that lives beside the writer, the only
        // one to write there.
        let queue = unsafe { UnpackQueueWriter::new(meta) };
        let handle_bytes = size_of::<UnpackNetDeviceHandle>();
        let handle = match &device {
            Some(device) => device.memory(handle_bytes),
            None => Region::host(handle_bytes),
        };
        let handle = handle.map_err(unallocated())?;
        // Field by field, as the layout says: queue, pool, head. The consumer steps its head
        // before it reads, so it starts one before slot 0.
        let mut bytes = [0; size_of::<UnpackNetDeviceHandle>()];
        bytes[..8].copy_from_slice(&device_view(&queue_memory).to_ne_bytes());
        let pool = gpu_pool.as_ref().map_or(&landing, |pool| &pool.memory);
        bytes[8..16].copy_from_slice(&device_view(pool).to_ne_bytes());
        bytes[16..].copy_from_slice(&u64::MAX.to_ne_bytes());
        handle.write_from(0, &bytes).map_err(PluginError::copy(
            "receive comm",
            "writing the device handle",
        ))?;

        // At most 2 GiB of pages.
        let pages = (landing.len() / PAGE_BYTES) as u32;
        Ok(Self {
            device,
            landing,
            gpu_pool,
            queue,
            _queue_memory: queue_memory,
            handle,
            free: (0..pages).collect(),
            held: std::array::from_fn(|_| Vec::with_capacity(UNPACK_SLOT_ENTRIES)),
            bytes: 0,
            arrived: 0,
            entries: Vec::with_capacity(UNPACK_SLOT_ENTRIES),
        })
    }

    /// Whose memory it receives for.
    pub(crate) const fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// What the host program hands to its device code.
    pub(crate) fn device_queue(&self) -> DeviceQueue {
        DeviceQueue {
            handle: std::ptr::with_exposed_provenance_mut(device_view(&self.handle) as usize),
            len: size_of::<UnpackNetDeviceHandle>(),
            needs_proxy_progress: true,
        }
    }

    /// Empties the slot of a receive that was posted.
    pub(crate) fn post(&mut self, number: u64) {
        self.queue.clear(QueueSlot::of_receive(number));
    }

    /// A message of so many bytes follows; `false` when the pool or a slot of the queue can never hold it.
    pub(crate) fn announce(&mut self, bytes: usize) -> bool {
        (self.bytes, self.arrived) = (bytes, 0);
        let pages = self.landing.len() / PAGE_BYTES;
        bytes <= pages.min(UNPACK_SLOT_ENTRIES) * PAGE_BYTES
    }

    /// Gets pages for the announced message.
    pub(crate) fn make_room(&mut self, number: u64) -> Room {
        let needed = self.bytes.div_ceil(PAGE_BYTES);
        let held = &mut self.held[slot(number)];
        if held.len() < needed {
            let Some(rest) = self.free.len().checked_sub(needed) else {
                return Room::Missing(needed - self.free.len());
            };
            held.extend(self.free.drain(rest..));
        }
        Room::Ready
    }

    /// Bytes of the whole pool.
    pub(crate) fn pool_bytes(&self) -> usize {
        self.landing.len()
    }

    /// The memory of the bytes that are still to arrive, as much as one call takes.
    pub(crate) fn spans(&self, number: u64, spans: &mut Vec<Span>) {
        let Some(base) = self.landing.all().host_ptr() else {
            return;
        };
        let pages = self.held[slot(number)].iter().enumerate();
        for (index, page) in pages.skip(self.arrived / PAGE_BYTES).take(MAX_SPANS - 1) {
            let inside = self.arrived.saturating_sub(index * PAGE_BYTES);
            let len = page_bytes(self.bytes, index) - inside;
            if len > 0 {
                // Within the pool: pages are below its end.
                let start = *page as usize * PAGE_BYTES + inside;
                spans.push(Span::new(base.wrapping_add(start), len));
            }
        }
    }

    /// So many bytes of the message have arrived.
    pub(crate) fn arrived(&mut self, bytes: usize) {
        self.arrived = self.bytes.min(self.arrived + bytes);
    }

    /// The whole message is in the landing pool: publishes it, and starts moving it to the GPU
    /// when the pool of the device is there.
    pub(crate) fn complete(&mut self, comm: &str, number: u64) -> Result<Landed, PluginError> {
        let pages = self.held[slot(number)].iter().enumerate();
        self.entries.clear();
        self.entries.extend(pages.map(|(index, page)| LoadMeta {
            src_off: page * PAGE_BYTES as u32,
            len: page_bytes(self.bytes, index) as u32,
            dst_off: (index * PAGE_BYTES) as u64,
        }));
        // With a pool on the GPU the entries are there before the bytes; nobody may look before
        // the receive is done, and it is done when both are there.
        self.queue
            .publish(QueueSlot::of_receive(number), &self.entries)
            .map_err(PluginError::copy(comm, "publishing fragments"))?;
        match &mut self.gpu_pool {
            Some(pool) if !self.entries.is_empty() => {
                match pool.fetch(comm, slot(number), &self.entries)? {
                    true => Ok(Landed::Moving),
                    false => Ok(Landed::Later),
                }
            }
            _ => Ok(Landed::Complete),
        }
    }

    /// Whether the move to the GPU has ended.
    pub(crate) fn moved(&self, comm: &str, number: u64) -> Result<bool, PluginError> {
        match &self.gpu_pool {
            Some(pool) => pool.fetched(comm, slot(number)),
            None => Ok(true),
        }
    }

    /// Gives the pages of a receive back.
    pub(crate) fn consume(&mut self, number: u64) {
        if let Some(pool) = &self.gpu_pool {
            pool.reset(slot(number));
        }
        self.free.append(&mut self.held[slot(number)]);
    }
}

/// Slot of a receive; there are as many as receives outstanding.
const fn slot(number: u64) -> usize {
    QueueSlot::of_receive(number).index()
}

/// Bytes of a message on its page of this number, which it has.
fn page_bytes(message: usize, index: usize) -> usize {
    PAGE_BYTES.min(message - index * PAGE_BYTES)
}

/// The address by which the device reaches a region; without a device, the CPU's.
fn device_view(region: &Region) -> u64 {
    let all = region.all();
    all.device_address().unwrap_or_else(|| all.address())
}

fn unallocated() -> impl Fn(MemoryError) -> PluginError {
    PluginError::copy("receive comm", "allocating the pool")
}
