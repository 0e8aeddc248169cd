//! The sends of one comm that lanes carry.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nccl_net::export::RequestId;
use tcpx_memory::RegionSlice;

use super::chunk::ChunkHeader;
use crate::socket::Span;

/// The lanes' side of a send comm.
#[derive(Debug)]
pub(crate) struct Outlet {
    /// Bytes of each message that are not in a socket yet.
    left: [AtomicUsize; RequestId::LIMIT],
    /// Chunks in the queue or in a lane's hands.
    chunks: AtomicUsize,
    closed: AtomicBool,
    /// Chunks that left, for whoever watches for a stall.
    moves: AtomicU64,
}

/// A part of a message on its way; as long as it exists, its comm's memory stays.
#[derive(Debug)]
pub(crate) struct Chunk {
    outlet: Arc<Outlet>,
    pub(crate) header: ChunkHeader,
    pub(crate) payload: Span,
    /// Keeps the pinned slot that the payload lies in, if it is a copy of GPU memory.
    _slot: Option<RegionSlice>,
}

impl Outlet {
    pub(crate) fn new() -> Self {
        Self {
            left: std::array::from_fn(|_| AtomicUsize::new(0)),
            chunks: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            moves: AtomicU64::new(0),
        }
    }

    fn left(&self, sequence: u64) -> &AtomicUsize {
        // Below the limit, which is 32.
        &self.left[(sequence % RequestId::LIMIT as u64) as usize]
    }

    /// A message of so many bytes begins.
    pub(crate) fn begin(&self, sequence: u64, bytes: usize) {
        self.left(sequence).store(bytes, Ordering::Release);
    }

    /// Whether all bytes of a message are in sockets.
    pub(crate) fn is_sent(&self, sequence: u64) -> bool {
        self.left(sequence).load(Ordering::Acquire) == 0
    }

    /// A part of a message for the queue.
    pub(crate) fn chunk(self: &Arc<Self>, header: ChunkHeader, payload: Span) -> Chunk {
        self.make(header, payload, None)
    }

    /// As [`Self::chunk`], of a payload that lies in a pinned slot.
    pub(crate) fn staged_chunk(
        self: &Arc<Self>,
        header: ChunkHeader,
        payload: Span,
        slot: RegionSlice,
    ) -> Chunk {
        self.make(header, payload, Some(slot))
    }

    fn make(
        self: &Arc<Self>,
        header: ChunkHeader,
        payload: Span,
        slot: Option<RegionSlice>,
    ) -> Chunk {
        self.chunks.fetch_add(1, Ordering::AcqRel);
        Chunk {
            outlet: Arc::clone(self),
            header,
            payload,
            _slot: slot,
        }
    }

    /// Chunks that left so far.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Whether lanes hold parts of messages.
    pub(crate) fn is_busy(&self) -> bool {
        self.chunks.load(Ordering::Acquire) > 0
    }

    /// Chunks that no lane has begun are to be dropped.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Waits until no lane holds a part of a message; `false` when one still does after `limit`.
    pub(crate) fn wait_idle(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.is_busy() {
            if Instant::now() >= deadline {
                return false;
            }
            // Lanes report through memory only, and a comm that closes amid a transfer is rare.
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }
}

impl Chunk {
    /// Whether the comm has closed and nobody waits for these bytes.
    pub(crate) fn is_stale(&self) -> bool {
        self.outlet.closed.load(Ordering::Acquire)
    }

    /// All of it is in a socket.
    pub(crate) fn sent(self) {
        self.outlet.moves.fetch_add(1, Ordering::Relaxed);
        self.outlet
            .left(self.header.sequence)
            .fetch_sub(self.header.len as usize, Ordering::AcqRel);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.outlet.chunks.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_sent_when_its_last_chunk_is_and_memory_is_held_until_no_chunk_is_left() {
        let outlet = Arc::new(Outlet::new());
        outlet.begin(33, 10);
        let part = |offset, len| {
            let header = ChunkHeader {
                stream: 0,
                sequence: 33,
                offset,
                total: 10,
                len,
                answered: false,
            };
            outlet.chunk(header, Span::EMPTY)
        };
        let (first, second) = (part(0, 6), part(6, 4));
        second.sent();
        assert!(!outlet.is_sent(33) && outlet.is_busy());
        first.sent();
        assert!(outlet.is_sent(33) && !outlet.is_busy());
        let third = part(0, 1);
        assert!(!outlet.wait_idle(Duration::from_millis(1)));
        outlet.close();
        assert!(third.is_stale());
        drop(third);
        assert!(outlet.wait_idle(Duration::ZERO));
    }
}
