//! The sends of one comm that lanes carry.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nccl_net::export::RequestId;
use tcpx_lanes::socket_calls::Span;
use tcpx_memory::RegionSlice;
use tcpx_wire::ChunkHeader;

use super::retention::{RetainedCopy, Retention};

/// Between two looks of a comm that closes.
const LOOK: Duration = Duration::from_micros(50);

/// The lanes' side of a send comm.
#[derive(Debug)]
pub(crate) struct SendStream {
    /// Bytes of each message that neither the peer has read nor a copy keeps, as far as we know.
    left: [AtomicUsize; RequestId::LIMIT],
    /// Chunks in the queue or in a lane's hands.
    chunks: AtomicUsize,
    /// Those of them that lie in the host's memory, and of which somebody reads that.
    borrowed: AtomicUsize,
    closed: AtomicBool,
    /// Chunks that the peer has read, for whoever watches for a stall.
    moves: AtomicU64,
    /// Bytes of chunks of all comms that use the same lanes.
    load: Arc<AtomicUsize>,
}

/// A part of a message on its way; its comm's memory stays from when somebody [begins](Self::begin)
/// to read it until it is [retained](Self::retain), or [waits](Self::put_back) again.
#[derive(Debug)]
pub(crate) struct Chunk {
    send_stream: Arc<SendStream>,
    pub(crate) header: ChunkHeader,
    pub(crate) payload: Span,
    /// Where the payload lies, if it is a copy.
    copy: Option<Copied>,
    /// Somebody reads the host's memory.
    held: bool,
    /// Its message may be over for the host.
    retained: bool,
}

/// What keeps a copy.
#[derive(Debug)]
enum Copied {
    /// The pinned slot of a part of GPU memory.
    FromGpu(#[expect(dead_code, reason = "it is held")] RegionSlice),
    /// Of a short chunk.
    Short(#[expect(dead_code, reason = "it is held")] RetainedCopy),
}

impl SendStream {
    /// `load` counts the bytes of every chunk until its message may be over for the host.
    pub(crate) fn new(load: Arc<AtomicUsize>) -> Self {
        Self {
            left: std::array::from_fn(|_| AtomicUsize::new(0)),
            chunks: AtomicUsize::new(0),
            borrowed: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            moves: AtomicU64::new(0),
            load,
        }
    }

    /// Bytes of a message of which the host's memory may still be read.
    pub(crate) fn left(&self, sequence: u64) -> usize {
        self.slot(sequence).load(Ordering::Acquire)
    }

    fn slot(&self, sequence: u64) -> &AtomicUsize {
        // Below the limit, which is 32.
        &self.left[(sequence % RequestId::LIMIT as u64) as usize]
    }

    /// A message of so many bytes begins.
    pub(crate) fn begin(&self, sequence: u64, bytes: usize) {
        self.slot(sequence).store(bytes, Ordering::Release);
    }

    /// Whether the host may have the memory of a message back: the peer has read all bytes, or
    /// copies keep them.
    pub(crate) fn is_sent(&self, sequence: u64) -> bool {
        self.left(sequence) == 0
    }

    /// A part of a message for the queue.
    pub(crate) fn chunk(self: &Arc<Self>, header: ChunkHeader, payload: Span) -> Chunk {
        self.make(header, payload, None)
    }

    /// As [`Self::chunk`], of a payload that is being copied to a pinned slot.
    pub(crate) fn staged_chunk(
        self: &Arc<Self>,
        header: ChunkHeader,
        payload: Span,
        slot: RegionSlice,
    ) -> Chunk {
        let mut chunk = self.make(header, payload, Some(Copied::FromGpu(slot)));
        self.borrowed.fetch_add(1, Ordering::SeqCst);
        chunk.held = true;
        chunk
    }

    fn make(self: &Arc<Self>, header: ChunkHeader, payload: Span, copy: Option<Copied>) -> Chunk {
        self.chunks.fetch_add(1, Ordering::AcqRel);
        self.load
            .fetch_add(header.length as usize, Ordering::Relaxed);
        Chunk {
            send_stream: Arc::clone(self),
            header,
            payload,
            copy,
            held: false,
            retained: false,
        }
    }

    /// Chunks that the peer has read so far.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Whether lanes hold parts of messages, be they copies.
    pub(crate) fn is_busy(&self) -> bool {
        self.chunks.load(Ordering::Acquire) > 0
    }

    /// Whether lanes read parts of messages that lie in the host's memory.
    pub(crate) fn is_borrowing(&self) -> bool {
        self.borrowed.load(Ordering::SeqCst) > 0
    }

    /// Chunks in the host's memory that no lane has begun, or that must be sent again, begin no
    /// more: where they wait is no matter.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Whether the comm took its memory back.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until no lane holds a part of the host's memory; `false` when one still does after
    /// `limit`, or after `silence` in which `moves` stalled.
    pub(crate) fn wait_returned(
        &self,
        silence: Duration,
        limit: Duration,
        moves: impl Fn() -> u64,
    ) -> bool {
        let start = Instant::now();
        let mut last = (moves(), start);
        while self.is_borrowing() {
            let (now, moves) = (Instant::now(), moves());
            if moves != last.0 {
                last = (moves, now);
            }
            if now.duration_since(start) >= limit || now.duration_since(last.1) >= silence {
                return false;
            }
            // Lanes report through memory only, and a comm that closes amid a transfer is rare.
            std::thread::sleep(LOOK);
        }
        true
    }

    /// Waits until the peer has read everything; `false` when `gives_up` says so before.
    pub(crate) fn wait_read(&self, mut gives_up: impl FnMut() -> bool) -> bool {
        while self.is_busy() {
            if gives_up() {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }
}

impl Chunk {
    /// Whether it lies in a slot, which serves other comms afterwards: no peer may read that where
    /// it lies.
    pub(crate) fn is_in_slot(&self) -> bool {
        matches!(self.copy, Some(Copied::FromGpu(_)))
    }

    /// A lane takes it; `false` where its comm has closed and nobody waits for these bytes. What
    /// the host was told is sent goes on.
    pub(crate) fn begin(&mut self) -> bool {
        if !self.retained && !self.held {
            // In this order: whoever closes says so first, and then looks.
            self.send_stream.borrowed.fetch_add(1, Ordering::SeqCst);
            self.held = true;
            if self.send_stream.closed.load(Ordering::SeqCst) {
                self.put_back();
                return false;
            }
        }
        true
    }

    /// It waits: nobody reads the host's memory.
    pub(crate) fn put_back(&mut self) {
        if std::mem::take(&mut self.held) {
            self.send_stream.borrowed.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Takes a copy if there is room for one: with it the host may have the memory back, as if the
    /// peer had read the chunk.
    pub(crate) fn retain(&mut self, retention: &Arc<Retention>) {
        if self.retained {
            return;
        }
        if self.copy.is_none() {
            // SAFETY: the comm keeps the memory until the chunk is settled, and its host does not
            // write there.
            let Some((kept, copy)) = (unsafe { retention.copy(self.payload) }) else {
                return;
            };
            self.payload = copy;
            self.copy = Some(Copied::Short(kept));
        }
        self.settle();
    }

    /// The peer has read all of it.
    pub(crate) fn acknowledged(mut self) {
        self.send_stream.moves.fetch_add(1, Ordering::Relaxed);
        if !self.retained {
            self.settle();
        }
    }

    /// No lane has to carry it any more, unless its own one ends.
    fn lighten(&self) {
        let bytes = self.header.length as usize;
        self.send_stream.load.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// The last touch of the host's memory is over.
    fn settle(&mut self) {
        self.retained = true;
        self.lighten();
        self.put_back();
        self.send_stream
            .slot(self.header.sequence)
            .fetch_sub(self.header.length as usize, Ordering::AcqRel);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.retained {
            self.lighten();
            self.put_back();
        }
        self.send_stream.chunks.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::lanes::send_path::header as of;

    fn header(sequence: u64, offset: u64, length: u32, total: u64) -> ChunkHeader {
        of(0, sequence, offset, length, total)
    }

    #[test]
    fn memory_is_held_until_no_chunk_is_left() {
        let load = Arc::new(AtomicUsize::new(0));
        let send_stream = Arc::new(SendStream::new(Arc::clone(&load)));
        send_stream.begin(33, 10);
        let part = |offset, len| send_stream.chunk(header(33, offset, len, 10), Span::EMPTY);
        let (first, second) = (part(0, 6), part(6, 4));
        second.acknowledged();
        assert!(!send_stream.is_sent(33) && send_stream.is_busy());
        first.acknowledged();
        assert!(send_stream.is_sent(33) && !send_stream.is_busy());
        let mut third = part(0, 1);
        assert!(third.begin());
        let (short, long) = (Duration::from_millis(1), Duration::from_secs(60));
        assert!(!send_stream.wait_returned(short, long, || 0));
        assert!(!send_stream.wait_returned(long, short, || 0));
        send_stream.close();
        let mut waits = part(1, 1);
        assert!(send_stream.is_borrowing() && !waits.begin());
        drop(waits);
        assert_eq!(load.load(Ordering::Relaxed), 1);
        drop(third);
        assert_eq!(load.load(Ordering::Relaxed), 0);
        assert!(send_stream.wait_returned(Duration::ZERO, Duration::ZERO, || 0));
    }

    #[test]
    fn waiting_chunks_hold_nothing_of_a_closing_comm() {
        let send_stream = Arc::new(SendStream::new(Arc::default()));
        send_stream.begin(0, 20);
        let part = |offset| send_stream.chunk(header(0, offset, 10, 20), Span::EMPTY);
        let [mut first, mut second] = [part(0), part(10)];
        assert!(!send_stream.is_borrowing() && first.begin() && send_stream.is_borrowing());
        // Its lane has ended.
        first.put_back();
        send_stream.close();
        assert!(send_stream.wait_returned(Duration::ZERO, Duration::ZERO, || 0));
        assert!(!first.begin() && !second.begin() && !send_stream.is_borrowing());
        drop((first, second));
        assert!(!send_stream.is_busy());
    }

    #[test]
    fn a_copy_gives_the_hosts_memory_back_and_outlives_its_comm() {
        let retention = Retention::new().unwrap();
        let send_stream = Arc::new(SendStream::new(Arc::default()));
        let mut bytes = [5; 10];
        send_stream.begin(0, 10);
        let mut chunk = send_stream.chunk(header(0, 0, 10, 10), Span::of(&bytes));
        assert!(chunk.begin());
        chunk.retain(&retention);
        assert!(send_stream.is_sent(0) && !send_stream.is_borrowing() && send_stream.is_busy());
        bytes.fill(6);
        send_stream.close();
        assert!(chunk.begin());
        // SAFETY: the slot that the chunk keeps.
        let kept = unsafe { std::slice::from_raw_parts(chunk.payload.start(), 10) };
        assert_eq!(kept, [5; 10]);
        // The next message with the number's place begins before the peer has read this one.
        send_stream.begin(32, 7);
        chunk.acknowledged();
        assert_eq!(send_stream.left(32), 7);
        assert!(!send_stream.is_borrowing() && !send_stream.is_busy());
        assert!(send_stream.wait_read(|| true));
    }

    #[test]
    fn a_peer_that_still_moves_is_waited_for() {
        let load = Arc::new(AtomicUsize::new(0));
        let send_stream = Arc::new(SendStream::new(load));
        let mut chunk = send_stream.chunk(header(0, 0, 1, 1), Span::EMPTY);
        assert!(chunk.begin());
        let chunk = Cell::new(Some(chunk));
        let (moves, silence) = (Cell::new(0), Duration::from_millis(200));
        let start = Instant::now();
        let moved = || {
            moves.set(moves.get() + 1);
            if start.elapsed() > 2 * silence {
                drop(chunk.take());
            }
            moves.get()
        };
        assert!(send_stream.wait_returned(silence, Duration::from_secs(60), moved));
        assert!(start.elapsed() > 2 * silence);
    }
}
