//! Receives of device memory: payload lands in pages of a pool, a queue says where it belongs.

use std::ptr::NonNull;

use nccl_net::constants::{UNPACK_QUEUE_DEPTH, UNPACK_SLOT_ENTRIES};
use nccl_net::device::{LoadMeta, NetUnpackMeta, UnpackNetDeviceHandle};
use nccl_net::export::{DeviceQueue, NetError};
use nccl_net::{QueueSlot, UnpackQueueWriter};
use tcpx_lanes::socket_calls::{MAX_SPANS, Span};
use tcpx_memory::Region;

use crate::config::{Config, PAGE_BYTES, PoolKind};
use crate::device::Device;
use crate::error;
use crate::fragments::{self, Piece};
use crate::gpu_pool::GpuPool;
use crate::pages::Pages;
use crate::shuffle::Shuffle;

/// Pages that a receive may hold: each has a piece at least.
const MOST_PAGES: usize = UNPACK_SLOT_ENTRIES;

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
    pages: Pages,
    shuffle: Shuffle,
    /// Pages held by the receive in each slot.
    held: [Vec<u32>; UNPACK_QUEUE_DEPTH],
    /// The message that is arriving: its fragments, and those already complete.
    pieces: Vec<Piece>,
    entries: Vec<LoadMeta>,
    pages_needed: usize,
    piece: usize,
    inside: usize,
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
    pub(crate) fn new(
        config: &Config,
        device: Option<Device>,
        seed: u64,
    ) -> Result<Self, NetError> {
        let shared = |bytes| {
            let memory = match &device {
                Some(device) => device.shared_memory(bytes),
                None => Region::host(bytes),
            };
            memory.map_err(error::copy("receive comm", "allocating the pool"))
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
            .map_err(error::copy("receive comm", "placing the unpack queue"))?;
        // SAFETY: zeroed, aligned memory of the queue's size that lives beside the writer, the only
        // one to write there.
        let queue = unsafe { UnpackQueueWriter::new(meta) };
        let handle_bytes = size_of::<UnpackNetDeviceHandle>();
        let handle = match &device {
            Some(device) => device.memory(handle_bytes),
            None => Region::host(handle_bytes),
        };
        let handle = handle.map_err(error::copy("receive comm", "allocating the device handle"))?;
        // Field by field, as the layout says: queue, pool, head. The consumer steps its head
        // before it reads, so it starts one before slot 0.
        let mut bytes = [0; size_of::<UnpackNetDeviceHandle>()];
        bytes[..8].copy_from_slice(&device_view(&queue_memory).to_ne_bytes());
        let pool = gpu_pool.as_ref().map_or(&landing, |pool| &pool.memory);
        bytes[8..16].copy_from_slice(&device_view(pool).to_ne_bytes());
        bytes[16..].copy_from_slice(&u64::MAX.to_ne_bytes());
        handle
            .write_from(0, &bytes)
            .map_err(error::copy("receive comm", "writing the device handle"))?;

        let mut shuffle = Shuffle::new(seed);
        // At most 2 GiB of pages.
        let total = (landing.len() / PAGE_BYTES) as u32;
        Ok(Self {
            device,
            landing,
            gpu_pool,
            queue,
            _queue_memory: queue_memory,
            handle,
            pages: Pages::new(total, &mut shuffle),
            shuffle,
            held: std::array::from_fn(|_| Vec::with_capacity(MOST_PAGES)),
            pieces: Vec::with_capacity(UNPACK_SLOT_ENTRIES),
            entries: Vec::with_capacity(UNPACK_SLOT_ENTRIES),
            pages_needed: 0,
            piece: 0,
            inside: 0,
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

    /// Cuts an announced message into fragments; `false` when the pool can never hold it.
    pub(crate) fn announce(&mut self, bytes: usize) -> bool {
        self.piece = 0;
        self.inside = 0;
        let total = self.pages.total();
        match fragments::plan(bytes, total, &mut self.shuffle, &mut self.pieces) {
            Some(pages) => {
                self.pages_needed = pages;
                true
            }
            None => false,
        }
    }

    /// Gets pages for the announced message.
    pub(crate) fn make_room(&mut self, number: u64) -> Room {
        let held = &mut self.held[slot(number)];
        if held.len() == self.pages_needed || self.pages.take(self.pages_needed, held) {
            Room::Ready
        } else {
            Room::Missing(self.pages_needed - self.pages.free())
        }
    }

    /// Bytes of the whole pool.
    pub(crate) fn pool_bytes(&self) -> usize {
        self.landing.len()
    }

    /// The memory of the fragments that are still to arrive, as many as one call takes.
    pub(crate) fn spans(&self, number: u64, spans: &mut Vec<Span>) {
        let held = &self.held[slot(number)];
        let Some(base) = self.landing.all().host_ptr() else {
            return;
        };
        let mut inside = self.inside;
        for piece in self.pieces[self.piece..].iter().take(MAX_SPANS - 1) {
            let start = source_offset(held, piece) as usize + inside;
            // Within the pool: pages are below its end, pieces within their page.
            spans.push(Span::new(
                base.wrapping_add(start),
                piece.len as usize - inside,
            ));
            inside = 0;
        }
    }

    /// So many bytes of the message have arrived.
    pub(crate) fn arrived(&mut self, mut bytes: usize) {
        while bytes > 0 && self.piece < self.pieces.len() {
            let left = self.pieces[self.piece].len as usize - self.inside;
            if bytes < left {
                self.inside += bytes;
                return;
            }
            bytes -= left;
            self.piece += 1;
            self.inside = 0;
        }
    }

    /// The whole message is in the landing pool: publishes it, and starts moving it to the GPU
    /// when the pool of the device is there.
    pub(crate) fn complete(&mut self, comm: &str, number: u64) -> Result<Landed, NetError> {
        self.shuffle.shuffle(&mut self.pieces);
        let held = &self.held[slot(number)];
        self.entries.clear();
        self.entries
            .extend(self.pieces.iter().map(|piece| LoadMeta {
                src_off: source_offset(held, piece),
                len: piece.len,
                dst_off: piece.offset,
            }));
        // With a pool on the GPU the entries are there before the bytes; nobody may look before
        // the receive is done, and it is done when both are there.
        self.queue
            .publish(QueueSlot::of_receive(number), &self.entries)
            .map_err(error::copy(comm, "publishing fragments"))?;
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
    pub(crate) fn moved(&self, comm: &str, number: u64) -> Result<bool, NetError> {
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
        self.pages.give_back(&mut self.held[slot(number)]);
    }
}

/// Slot of a receive; there are as many as receives outstanding.
const fn slot(number: u64) -> usize {
    QueueSlot::of_receive(number).index()
}

/// Where a fragment lies in the pool, of at most 2 GiB.
fn source_offset(held: &[u32], piece: &Piece) -> u32 {
    let page = held.get(piece.page as usize).copied().unwrap_or(0);
    page * PAGE_BYTES as u32 + piece.start
}

/// The address by which the device reaches a region; without a device, the CPU's.
fn device_view(region: &Region) -> u64 {
    let all = region.all();
    all.device_address().unwrap_or_else(|| all.address())
}
