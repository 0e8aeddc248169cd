//! A send comm's use of the lanes to its peer.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tcpx_memory::MemoryError;
use tcpx_wire::{ChunkHeader, ChunkPayload, TransferId};

use super::from_gpu::{FromGpu, PARTS};
use super::lane_set::LaneSet;
use super::recv_stream::MAX_CHUNK_BYTES;
use super::runtime::Runtime;
use super::send_stream::SendStream;
use crate::device::Device;
use crate::send::Source;

/// Longest wait for lanes to finish a chunk of a comm that closes, and longest time in it without a
/// sign of life: a peer's loops read whatever its host program does.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
const CLOSE_SILENCE: Duration = Duration::from_secs(1);

/// Longest time without a sign of life from a peer that has not read all that was sent; longer than
/// a process is stopped by hand, for what was sent is the comm's word.
const DRAIN_SILENCE: Duration = Duration::from_secs(30);

/// Lanes, and what keeps their loops running.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) set: Arc<LaneSet>,
    /// Held and not used: without it the loops would end.
    pub(crate) _runtime: Arc<Runtime>,
}

/// A comm's place on the lanes; dropping it gives the comm's memory back before it returns.
#[derive(Debug)]
pub(crate) struct SendPath {
    send_stream: Arc<SendStream>,
    route: Route,
    chunk_bytes: usize,
    /// Made when the comm registers GPU memory.
    from_gpu: OnceLock<Arc<FromGpu>>,
}

/// Of a part of a message, which no lane has had before.
pub(super) fn header(
    stream: u64,
    sequence: u64,
    offset: u64,
    length: u32,
    total: u64,
) -> ChunkHeader {
    ChunkHeader {
        sequence,
        transfer: TransferId(stream),
        offset,
        total,
        length,
        attempt: 0,
        payload: ChunkPayload::Follows,
    }
}

impl SendPath {
    /// `None` when the lanes are closing.
    pub(crate) fn new(route: Route, chunk_bytes: usize) -> Option<Self> {
        route.set.enter().then(|| Self {
            send_stream: Arc::new(SendStream::new(route.set.load())),
            route,
            chunk_bytes: chunk_bytes.min(MAX_CHUNK_BYTES),
            from_gpu: OnceLock::new(),
        })
    }

    /// Prepares for sends from GPU memory: pins slots, so that no send ever does.
    pub(crate) fn serve_gpu(&self, device: &Device) -> Result<(), MemoryError> {
        if self.from_gpu.get().is_none() {
            let (set, pool) = (
                Arc::clone(&self.route.set),
                device.worker().slots_to_send(PARTS),
            );
            self.from_gpu
                .get_or_init(|| Arc::new(FromGpu::new(set, pool)));
        }
        Ok(())
    }

    pub(crate) fn set(&self) -> &LaneSet {
        &self.route.set
    }

    pub(crate) fn send_stream(&self) -> &SendStream {
        &self.send_stream
    }

    /// Queues what is left of a message of `total` bytes behind the first `queued`, as far as there
    /// is room; gives the bytes queued in all. `stream` is the receiver's number for the comm.
    pub(crate) fn queue(
        &self,
        (stream, sequence): (u64, u64),
        source: &Source,
        total: usize,
        mut queued: usize,
    ) -> Result<usize, MemoryError> {
        if queued == 0 {
            self.send_stream.begin(sequence, total);
        }
        while queued < total {
            let len = self
                .route
                .set
                .part_bytes(total, total - queued, self.chunk_bytes);
            // A chunk's bytes are limited far below 4 GiB.
            let length = len as u32;
            let header = header(stream, sequence, queued as u64, length, total as u64);
            let is_queued = match (source, self.from_gpu.get()) {
                (Source::Host(payload), _) => {
                    let chunk = self
                        .send_stream
                        .chunk(header, payload.from(queued).first(len));
                    self.route.set.push(chunk).is_ok()
                }
                (Source::Device(from), Some(from_gpu)) => {
                    from_gpu.start(&self.send_stream, header, from.part(queued, len)?)?
                }
                (Source::Device(_), None) => false,
            };
            if !is_queued {
                break;
            }
            queued += len;
        }
        Ok(queued)
    }

    /// An error when a part was lost on its way out of GPU memory.
    pub(crate) fn look_at_gpu(&self) -> Result<(), MemoryError> {
        let failure = self.from_gpu.get().and_then(|one| one.failure());
        failure.cloned().map_or(Ok(()), Err)
    }

    /// Takes the comm's memory back from the lanes; `false` when chunks were lost.
    pub(crate) fn close(&self) -> bool {
        self.send_stream.close();
        let set = &self.route.set;
        if !self
            .send_stream
            .wait_returned(CLOSE_SILENCE, CLOSE_WAIT, || set.chunks.moves())
        {
            // The peer's loops read nothing: half a chunk cannot be taken back, the lanes can, and
            // their loops let go of it at once. Those that have chunks of other comms are dialled
            // again.
            set.end_lanes();
            self.send_stream.wait_returned(CLOSE_WAIT, CLOSE_WAIT, || 0);
        }
        self.route.set.failure().is_none()
    }

    /// Waits until the peer has read what its host was told is sent; `false` when it never will: it
    /// `has_closed`, the lanes have ended, or it rests for too long.
    pub(crate) fn drain(&self, mut has_closed: impl FnMut() -> bool) -> bool {
        let set = &self.route.set;
        let is_read = self.send_stream.wait_read(|| {
            set.failure().is_some() || has_closed() || set.silence(Instant::now()) >= DRAIN_SILENCE
        });
        if is_read {
            set.end_silence();
        }
        is_read
    }
}

impl Drop for SendPath {
    fn drop(&mut self) {
        // A comm that closes has waited for what can be waited for.
        if !self.send_stream.is_closed() {
            self.close();
        }
        self.route.set.release_comm();
    }
}
