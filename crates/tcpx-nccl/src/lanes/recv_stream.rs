//! The receives of one comm that lanes may fill.
//!
//! The comm's host program posts into slots; lanes claim room in a slot before they write, and
//! count a chunk when they have written all of it. A claim can never take a byte twice, and a
//! message is complete only when all of it was claimed and written: so then no byte is missing, and
//! no lane can touch its memory. What a lane has not written when it ends is put back, for the
//! attempt that comes over another lane.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use nccl_net::export::{Buffer, RequestId};
use tcpx_lanes::claims::{self, Claims};
use tcpx_lanes::lock;
use tcpx_lanes::socket_calls::Span;
use tcpx_memory::{CompletionSink, MemoryError, PinnedPool};
use tcpx_wire::ChunkHeader;

use super::group::Group;
use crate::memory::DeviceSlice;

/// `total` before the first chunk.
const UNKNOWN: u64 = u64::MAX;
/// Largest chunk: what goes to device memory is read to a slot first, and a lane that ends lets go
/// of it whole.
pub(crate) const MAX_CHUNK_BYTES: usize = PinnedPool::SLOT_BYTES;
/// Looks at a lock before a lane sleeps for it: 10 to 20 us. Eight lanes that claim at once keep
/// each other waiting for longer than the standard lock looks, and once one sleeps all do: 512 KiB
/// one at a time took 1.2 times as long.
const LOOKS: u32 = 400;
/// Longest wait for lanes to leave a comm that closes; each is inside one non-blocking call.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// Why a chunk cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The message does not fit the posted receive.
    TooLarge {
        /// Message number.
        sequence: u64,
        /// Bytes of the message.
        total: u64,
        /// Bytes posted.
        capacity: u64,
    },
    /// The peer broke the protocol.
    Protocol {
        /// What it says.
        expected: String,
        /// What came.
        arrived: String,
    },
    /// What came could not be copied to the GPU.
    Copy(String),
}

#[derive(Debug)]
struct Slot {
    receipt: Mutex<Receipt>,
    total: AtomicU64,
    written: AtomicU64,
}

/// What lanes look at before they write; one holds it for a few instructions a chunk.
#[derive(Debug)]
struct Receipt {
    /// The message that lanes may fill.
    sequence: Option<u64>,
    start: Span,
    /// The posted buffer, where it lies in device memory.
    device: Option<DeviceSlice>,
    /// Bytes that lanes have begun or ended.
    claimed: u64,
    /// Which those are, by place.
    claims: Claims<u64>,
}

/// What becomes of a chunk.
#[derive(Debug)]
pub(crate) enum ClaimOutcome {
    /// It is the lane's to write.
    Write(Part),
    /// This lane has it, in an earlier attempt, and must let go first.
    Held(u64),
    /// It came before, or nobody wants it.
    Drain,
}

/// A chunk that a lane has claimed: [completed](RecvStream::complete_part) or [put
/// back](RecvStream::put_back) by it.
#[derive(Debug)]
pub(crate) struct Part {
    pub(super) sequence: u64,
    start: u64,
    end: u64,
    /// Where it goes; nothing where that is device memory.
    pub(super) at: Span,
    pub(super) device: Option<DeviceSlice>,
}

/// The lanes' side of a receive comm.
#[derive(Debug)]
pub(crate) struct RecvStream {
    /// Number that grants and chunks name.
    pub(crate) id: u64,
    slots: [Slot; RequestId::LIMIT],
    /// Messages from here on have no receive yet.
    posted: AtomicU64,
    /// Chunks of messages before this one may come late: a later attempt took them.
    resent: AtomicU64,
    /// Lanes, and copies for them, that write into the comm's memory at this moment.
    writers: AtomicUsize,
    closed: AtomicBool,
    group: OnceLock<Arc<Group>>,
    refusal: OnceLock<Refusal>,
    /// Calls that moved bytes, for whoever watches for a stall.
    moves: AtomicU64,
}

/// A lane's right to write; the comm cannot close while it lives.
#[derive(Debug)]
pub(crate) struct Writing<'a>(&'a RecvStream);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl RecvStream {
    pub(crate) fn new(id: u64) -> Self {
        Self {
            id,
            slots: std::array::from_fn(|_| Slot {
                receipt: Mutex::new(Receipt {
                    sequence: None,
                    start: Span::EMPTY,
                    device: None,
                    claimed: 0,
                    claims: Claims::default(),
                }),
                total: AtomicU64::new(UNKNOWN),
                written: AtomicU64::new(0),
            }),
            posted: AtomicU64::new(0),
            resent: AtomicU64::new(0),
            writers: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            group: OnceLock::new(),
            refusal: OnceLock::new(),
            moves: AtomicU64::new(0),
        }
    }

    fn slot(&self, sequence: u64) -> &Slot {
        // Below the limit, which is 32.
        &self.slots[(sequence % RequestId::LIMIT as u64) as usize]
    }

    /// Says whose lanes may write; the first answer stays.
    pub(crate) fn join(&self, group: Arc<Group>) -> bool {
        self.group.set(group).is_ok()
    }

    /// The lanes that may write.
    pub(crate) fn group(&self) -> Option<&Arc<Group>> {
        self.group.get()
    }

    /// Lets lanes fill the receive with this number; `device` is the buffer where it lies in device
    /// memory.
    pub(crate) fn post(&self, sequence: u64, buffer: Buffer, device: Option<DeviceSlice>) {
        let slot = self.slot(sequence);
        let mut receipt = slot.lock();
        slot.total.store(UNKNOWN, Ordering::Relaxed);
        slot.written.store(0, Ordering::Relaxed);
        receipt.start = Span::new(buffer.data, buffer.len);
        receipt.device = device;
        receipt.claimed = 0;
        receipt.claims.clear();
        receipt.sequence = Some(sequence);
        self.posted.fetch_max(sequence + 1, Ordering::Release);
    }

    /// The message came another way: no lane may touch its receive. `false` when one already did.
    pub(crate) fn withdraw(&self, sequence: u64) -> bool {
        let mut receipt = self.slot(sequence).lock();
        let is_free = receipt.sequence == Some(sequence) && receipt.claimed == 0;
        if is_free {
            receipt.sequence = None;
        }
        is_free
    }

    /// Bytes written and bytes of the whole message, once a chunk of it has arrived.
    pub(crate) fn progress(&self, sequence: u64) -> Option<(u64, u64)> {
        let slot = self.slot(sequence);
        let total = slot.total.load(Ordering::Acquire);
        (total != UNKNOWN).then(|| (slot.written.load(Ordering::Acquire), total))
    }

    /// Calls that moved bytes so far.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Claims room for a chunk that came over `lane` of `group`.
    pub(crate) fn claim(
        &self,
        group: &Arc<Group>,
        lane: u64,
        header: &ChunkHeader,
    ) -> Result<ClaimOutcome, ()> {
        self.room(group, lane, header).map_err(|refusal| {
            // The first reason is the news.
            let _ = self.refusal.set(refusal);
        })
    }

    fn room(
        &self,
        group: &Arc<Group>,
        lane: u64,
        header: &ChunkHeader,
    ) -> Result<ClaimOutcome, Refusal> {
        let protocol = |expected: &str, arrived: String| Refusal::Protocol {
            expected: expected.to_owned(),
            arrived,
        };
        if !self.group().is_some_and(|own| Arc::ptr_eq(own, group)) {
            return Err(protocol(
                "chunks over the lanes of this comm's peer",
                "a chunk over another one's".to_owned(),
            ));
        }
        let (sequence, total, len) = (header.sequence, header.total, u64::from(header.length));
        let (start, end) = (header.offset, header.offset.saturating_add(len));
        if header.attempt > 0 {
            let behind = sequence.saturating_add(1);
            if sequence < self.posted.load(Ordering::Acquire) {
                self.resent.fetch_max(behind, Ordering::AcqRel);
            }
        }
        let slot = self.slot(sequence);
        let mut receipt = slot.lock();
        // Its sender does not know that it had come, or this is the attempt that was given up.
        let may_come_late = || header.attempt > 0 || sequence < self.resent.load(Ordering::Acquire);
        if receipt.sequence != Some(sequence) {
            if sequence < self.posted.load(Ordering::Acquire) && may_come_late() {
                return Ok(ClaimOutcome::Drain);
            }
            return Err(protocol(
                "a chunk of a message with a grant",
                format!("one of message {sequence}"),
            ));
        }
        let capacity = receipt.start.len() as u64;
        if total > capacity {
            return Err(Refusal::TooLarge {
                sequence,
                total,
                capacity,
            });
        }
        if total == 0 || end > total || len > MAX_CHUNK_BYTES as u64 {
            return Err(protocol(
                "chunks of a slot at most that lie in their message",
                format!("{len} bytes at {start} of {total}"),
            ));
        }
        let known = slot.total.load(Ordering::Acquire);
        if known != UNKNOWN && known != total {
            return Err(protocol(
                "one size for all chunks of a message",
                format!("{known} and {total}"),
            ));
        }
        // Inside the capacity: offset + len <= total <= capacity, and capacity is a usize.
        let (offset, bytes) = (start as usize, len as usize);
        let device = receipt
            .device
            .as_ref()
            .map(|device| device.part(offset, bytes));
        let device = device
            .transpose()
            .map_err(|error| Refusal::Copy(error.to_string()))?;
        match receipt.claims.claim(lane, start..end, header.attempt) {
            claims::Claimed::Taken => {}
            claims::Claimed::HeldBy(holder) => return Ok(ClaimOutcome::Held(holder)),
            claims::Claimed::Drain => return Ok(ClaimOutcome::Drain),
            claims::Claimed::Twice if may_come_late() => return Ok(ClaimOutcome::Drain),
            claims::Claimed::Twice => {
                return Err(protocol(
                    "each byte of a message once",
                    format!("bytes {start} to {end} of message {sequence} again"),
                ));
            }
            claims::Claimed::Scattered => {
                return Err(protocol(
                    "a message in few pieces",
                    format!("one more for message {sequence}"),
                ));
            }
        }
        receipt.claimed += len;
        slot.total.store(total, Ordering::Release);
        Ok(ClaimOutcome::Write(Part {
            sequence,
            start,
            end,
            at: match device {
                Some(_) => Span::EMPTY,
                None => receipt.start.from(offset).first(bytes),
            },
            device,
        }))
    }

    /// The lane has read all of its chunk; with `written`, to where it belongs.
    pub(super) fn complete_part(&self, part: &Part, written: bool) {
        let slot = self.slot(part.sequence);
        if let Some(receipt) = slot.lock().of(part) {
            receipt.claims.complete(part.start);
        }
        if written {
            // The last thing: with it the message may be over.
            slot.written
                .fetch_add(part.end - part.start, Ordering::AcqRel);
        }
    }

    /// The lane has not read all of its chunk, which may come again.
    pub(super) fn put_back(&self, part: &Part) {
        let mut receipt = self.slot(part.sequence).lock();
        if let Some(receipt) = receipt.of(part)
            && receipt.claims.put_back(part.start)
        {
            receipt.claimed -= part.end - part.start;
        }
    }

    /// Claims all of a withdrawn receive into device memory, whose message comes beside the lanes.
    pub(crate) fn claim_inline(&self, sequence: u64, total: u64) -> Option<DeviceSlice> {
        let slot = self.slot(sequence);
        let mut receipt = slot.lock();
        if receipt.sequence.is_some() {
            return None;
        }
        let len = usize::try_from(total).ok()?;
        let device = receipt.device.as_ref()?.part(0, len).ok()?;
        receipt.sequence = Some(sequence);
        receipt.claimed = total;
        // By no lane, which need not let go of it.
        receipt.claims.claim(u64::MAX, 0..total, 0);
        receipt.claims.complete(0);
        slot.total.store(total, Ordering::Release);
        Some(device)
    }

    /// Whether every byte of a message has a taker, and copies to the GPU are still under way.
    pub(crate) fn is_copying(&self, sequence: u64) -> bool {
        let slot = self.slot(sequence);
        let receipt = slot.lock();
        receipt.device.is_some()
            && receipt.claimed == slot.total.load(Ordering::Acquire)
            && self.writers.load(Ordering::SeqCst) > 0
    }

    /// A copy into the comm's memory begins; only while the comm is open.
    pub(crate) fn begin_copy(&self) {
        self.writers.fetch_add(1, Ordering::SeqCst);
    }

    /// A copy touches the comm's memory no more.
    pub(super) fn end_copy(&self) {
        self.writers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Bytes are lost: they could not be copied.
    pub(super) fn copy_failed(&self, error: &MemoryError) {
        // The first reason is the news.
        let _ = self.refusal.set(Refusal::Copy(error.to_string()));
    }

    /// Asks for the right to write; `None` once the comm closes.
    pub(crate) fn write(&self) -> Option<Writing<'_>> {
        self.writers.fetch_add(1, Ordering::SeqCst);
        let writing = Writing(self);
        (!self.closed.load(Ordering::SeqCst)).then_some(writing)
    }

    /// A call has moved bytes.
    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// Why a chunk of this comm was refused.
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        self.refusal.get()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Takes the memory away from the lanes; chunks that still arrive are read and dropped.
    /// `false`: a lane or a copy has not let go of it yet, and may still write there. It is waited
    /// for once.
    #[must_use = "memory that is written to must not be given back"]
    pub(crate) fn close(&self) -> bool {
        let was_closed = self.closed.swap(true, Ordering::SeqCst);
        let wait = if was_closed {
            Duration::ZERO
        } else {
            CLOSE_WAIT
        };
        let deadline = Instant::now() + wait;
        while self.writers.load(Ordering::SeqCst) > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Receipt> {
        for _ in 0..LOOKS {
            if let Ok(receipt) = self.receipt.try_lock() {
                return receipt;
            }
            std::hint::spin_loop();
        }
        lock(&self.receipt)
    }
}

impl Receipt {
    /// Itself, unless it is another message's by now.
    fn of(&mut self, part: &Part) -> Option<&mut Self> {
        (self.sequence == Some(part.sequence)).then_some(self)
    }
}

impl CompletionSink for RecvStream {
    /// `token`: the message's number.
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        match result {
            Ok(bytes) => {
                self.slot(token).written.fetch_add(bytes, Ordering::AcqRel);
                self.moved();
            }
            Err(error) => {
                self.copy_failed(&error);
                if error.may_go_on() {
                    // Closing then takes its full time; nobody can tell when the copy has ended.
                    return;
                }
            }
        }
        self.end_copy();
    }
}

#[cfg(test)]
mod tests {
    use tcpx_wire::TransferId;

    use tcpx_wire::ChunkPayload;

    use super::*;
    use crate::lanes::group::Group;

    fn header(sequence: u64, offset: u64, length: u32, total: u64) -> ChunkHeader {
        ChunkHeader {
            sequence,
            transfer: TransferId(1),
            offset,
            total,
            length,
            attempt: 0,
            payload: ChunkPayload::Follows,
        }
    }

    /// The same chunk, after a lane ended with it.
    fn again(header: ChunkHeader) -> ChunkHeader {
        let attempt = header.attempt + 1;
        ChunkHeader { attempt, ..header }
    }

    fn recv_stream(bytes: &mut [u8]) -> (RecvStream, Arc<Group>) {
        let (recv_stream, group) = (RecvStream::new(1), Arc::new(Group::default()));
        assert!(recv_stream.join(group.clone()));
        post(&recv_stream, 5, bytes);
        (recv_stream, group)
    }

    fn post(recv_stream: &RecvStream, sequence: u64, bytes: &mut [u8]) {
        let buffer = Buffer {
            data: bytes.as_mut_ptr(),
            len: bytes.len(),
        };
        recv_stream.post(sequence, buffer, None);
    }

    impl RecvStream {
        /// What `lane` may write.
        fn taken(&self, group: &Arc<Group>, lane: u64, header: ChunkHeader) -> Part {
            match self.claim(group, lane, &header) {
                Ok(ClaimOutcome::Write(part)) => part,
                other => panic!("{other:?}, {:?}", self.refusal()),
            }
        }

        fn drains(&self, group: &Arc<Group>, lane: u64, header: ChunkHeader) -> bool {
            matches!(self.claim(group, lane, &header), Ok(ClaimOutcome::Drain))
        }
    }

    #[test]
    fn chunks_fill_a_receive_in_any_order_and_never_beyond_it() {
        let mut bytes = [0; 100];
        let start = bytes.as_ptr();
        let (recv_stream, group) = recv_stream(&mut bytes);
        assert_eq!(recv_stream.progress(5), None);
        let second = recv_stream.taken(&group, 1, header(5, 40, 40, 80));
        assert_eq!(second.at.start(), start.wrapping_add(40));
        recv_stream.complete_part(&second, true);
        assert_eq!(recv_stream.progress(5), Some((40, 80)));
        let first = recv_stream.taken(&group, 2, header(5, 0, 40, 80));
        assert_eq!((first.at.start(), first.at.len()), (start, 40));
        recv_stream.complete_part(&first, true);
        assert_eq!(recv_stream.progress(5), Some((80, 80)));
        assert!(recv_stream.claim(&group, 1, &header(5, 0, 1, 80)).is_err());
        assert!(matches!(
            recv_stream.refusal(),
            Some(Refusal::Protocol { .. })
        ));
    }

    #[test]
    fn a_message_that_does_not_fit_is_refused_with_both_sizes() {
        let mut bytes = [0; 100];
        let (recv_stream, group) = recv_stream(&mut bytes);
        assert!(
            recv_stream
                .claim(&group, 1, &header(5, 0, 10, 101))
                .is_err()
        );
        assert_eq!(
            recv_stream.refusal(),
            Some(&Refusal::TooLarge {
                sequence: 5,
                total: 101,
                capacity: 100
            })
        );
    }

    #[test]
    fn only_posted_messages_and_the_peers_own_lanes_get_in() {
        let mut bytes = [0; 100];
        let (own, group) = recv_stream(&mut bytes);
        for sequence in [4, 6, 5 + RequestId::LIMIT as u64] {
            assert!(own.claim(&group, 1, &header(sequence, 0, 1, 1)).is_err());
        }
        let stranger = Arc::new(Group::default());
        let (other, _) = recv_stream(&mut bytes);
        assert!(other.claim(&stranger, 1, &header(5, 0, 1, 1)).is_err());
        assert!(other.refusal().is_some());
    }

    #[test]
    fn a_message_that_came_another_way_is_closed_to_lanes() {
        let mut bytes = [0; 100];
        let (one, group) = recv_stream(&mut bytes);
        assert!(one.withdraw(5));
        assert!(one.claim(&group, 1, &header(5, 0, 1, 1)).is_err());
        let (two, group) = recv_stream(&mut bytes);
        two.taken(&group, 1, header(5, 0, 1, 1));
        assert!(!two.withdraw(5));
    }

    #[test]
    fn a_chunk_that_a_lane_ended_with_comes_over_another_one() {
        let mut bytes = [0; 100];
        let (recv_stream, group) = recv_stream(&mut bytes);
        let chunk = header(5, 0, 40, 80);
        let half = recv_stream.taken(&group, 1, chunk);
        // The sender knows of the lane's end first.
        let held = recv_stream.claim(&group, 2, &again(chunk));
        assert!(matches!(held, Ok(ClaimOutcome::Held(1))), "{held:?}");
        recv_stream.put_back(&half);
        assert_eq!(recv_stream.progress(5), Some((0, 80)));
        let whole = recv_stream.taken(&group, 2, again(chunk));
        // The first lane comes back to life, amid it and after it.
        assert!(recv_stream.drains(&group, 1, chunk));
        recv_stream.complete_part(&whole, true);
        assert!(
            recv_stream.drains(&group, 1, chunk) && recv_stream.drains(&group, 3, again(chunk))
        );
        assert_eq!(recv_stream.progress(5), Some((40, 80)));
        let rest = recv_stream.taken(&group, 2, header(5, 40, 40, 80));
        recv_stream.complete_part(&rest, true);
        assert_eq!(recv_stream.progress(5), Some((80, 80)));
        assert_eq!(recv_stream.refusal(), None);
    }

    #[test]
    fn an_attempt_that_comes_late_never_lands_in_the_next_message() {
        let mut bytes = [0; 100];
        let (recv_stream, group) = recv_stream(&mut bytes);
        let chunk = header(5, 0, 80, 80);
        let part = recv_stream.taken(&group, 2, again(chunk));
        recv_stream.complete_part(&part, true);
        // The same buffer and the same slot.
        let next = 5 + RequestId::LIMIT as u64;
        post(&recv_stream, next, &mut bytes);
        assert!(
            recv_stream.drains(&group, 1, chunk) && recv_stream.drains(&group, 1, again(chunk))
        );
        assert_eq!(recv_stream.progress(next), None);
        // A message that never had a second attempt cannot come twice.
        let part = recv_stream.taken(&group, 1, header(next, 0, 80, 80));
        recv_stream.complete_part(&part, true);
        assert!(
            recv_stream
                .claim(&group, 1, &header(next, 0, 80, 80))
                .is_err()
        );
    }

    #[test]
    fn a_second_attempt_for_no_receive_is_refused() {
        let mut bytes = [0; 100];
        let (recv_stream, group) = recv_stream(&mut bytes);
        let early = again(header(6, 0, 80, 80));
        assert!(recv_stream.claim(&group, 1, &early).is_err());
        let last = again(header(u64::MAX, 0, 80, 80));
        assert!(recv_stream.claim(&group, 1, &last).is_err());
        // And it makes no first one late.
        let part = recv_stream.taken(&group, 1, header(5, 0, 80, 80));
        recv_stream.complete_part(&part, true);
        assert!(recv_stream.claim(&group, 1, &header(5, 0, 80, 80)).is_err());
    }

    #[test]
    fn an_ended_copy_counts_and_a_failed_one_refuses() {
        let mut bytes = [0; 100];
        let (recv_stream, group) = recv_stream(&mut bytes);
        let part = recv_stream.taken(&group, 1, header(5, 0, 80, 80));
        recv_stream.begin_copy();
        recv_stream.complete_part(&part, false);
        assert_eq!(recv_stream.progress(5), Some((0, 80)));
        recv_stream.complete(5, Ok(50));
        assert_eq!(recv_stream.progress(5), Some((50, 80)));
        recv_stream.begin_copy();
        recv_stream.complete(5, Err(MemoryError::WorkerStopped));
        assert_eq!(recv_stream.progress(5), Some((50, 80)));
        assert!(matches!(recv_stream.refusal(), Some(Refusal::Copy(_))));
        // Nothing holds the memory any more.
        assert_eq!(recv_stream.writers.load(Ordering::SeqCst), 0);
        recv_stream.begin_copy();
        recv_stream.complete(5, Err(MemoryError::WorkerFailed));
        assert_eq!(
            recv_stream.writers.load(Ordering::SeqCst),
            1,
            "it may go on"
        );
    }

    #[test]
    fn closing_ends_the_right_to_write() {
        let recv_stream = RecvStream::new(1);
        drop(recv_stream.write().expect("open"));
        assert!(recv_stream.close());
        assert!(recv_stream.write().is_none() && recv_stream.is_closed());
    }

    #[test]
    fn bytes_that_come_twice_do_not_make_a_message_whole() {
        let mut bytes = [0; 100];
        let (recv_stream, group) = recv_stream(&mut bytes);
        let part = recv_stream.taken(&group, 1, header(5, 0, 40, 80));
        recv_stream.complete_part(&part, true);
        assert!(recv_stream.claim(&group, 1, &header(5, 0, 40, 80)).is_err());
        assert!(matches!(
            recv_stream.refusal(),
            Some(Refusal::Protocol { .. })
        ));
        assert_eq!(
            recv_stream.progress(5),
            Some((40, 80)),
            "bytes 40 to 80 never came"
        );
    }

    #[test]
    fn closing_while_somebody_writes_says_so() {
        let recv_stream = RecvStream::new(1);
        let writing = recv_stream.write().expect("open");
        let start = Instant::now();
        assert!(!recv_stream.close());
        let waited = start.elapsed();
        // Whoever asks again, as a comm's close and its drop do, does not wait again.
        assert!((0..5).all(|_| !recv_stream.close()));
        assert!(start.elapsed() < 2 * waited);
        drop(writing);
        assert!(recv_stream.close());
    }
}
