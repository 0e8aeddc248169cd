//! The receives of one comm that lanes may fill.
//!
//! The comm's host program posts into slots; lanes claim room in a slot before they write and count
//! what they wrote. A claim can never take a byte twice, and a message is complete only when all of
//! it was claimed and written: so then no byte is missing, and no lane can touch its memory.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nccl_net::export::{Buffer, RequestId};
use tcpx_memory::{CompletionSink, MemoryError};

use super::chunk::ChunkHeader;
use super::coverage::Coverage;
use super::group::Group;
use crate::memory::DeviceSlice;

/// Bits of a claim word that count claimed bytes; the rest is the message's mark.
const CLAIM_BITS: u32 = 40;
const CLAIM_MASK: u64 = (1 << CLAIM_BITS) - 1;
/// No message of a lane is larger.
const MAX_MESSAGE_BYTES: u64 = CLAIM_MASK;
/// `total` before the first chunk.
const UNKNOWN: u64 = u64::MAX;
/// A mark that no posted message has.
const NOBODY: u64 = 0;
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
    start: AtomicPtr<u8>,
    capacity: AtomicUsize,
    /// The posted buffer is in device memory, which is this.
    on_device: AtomicBool,
    device: Mutex<Option<DeviceSlice>>,
    /// Mark and claimed bytes in one word, so that a claim is for one message.
    claim: AtomicU64,
    /// Which bytes those are. A lane holds it for a few instructions a chunk.
    covered: Mutex<Coverage>,
    total: AtomicU64,
    written: AtomicU64,
}

/// The lanes' side of a receive comm.
#[derive(Debug)]
pub(crate) struct Inlet {
    /// Number that grants and chunks name.
    pub(crate) id: u64,
    slots: [Slot; RequestId::LIMIT],
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
pub(crate) struct Writing<'a>(&'a Inlet);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Never `NOBODY`, and different for messages that share a slot.
const fn mark(sequence: u64) -> u64 {
    ((sequence / RequestId::LIMIT as u64) & ((1 << (63 - CLAIM_BITS)) - 1)) + 1
}

impl Inlet {
    pub(crate) fn new(id: u64) -> Self {
        Self {
            id,
            slots: std::array::from_fn(|_| Slot {
                start: AtomicPtr::new(std::ptr::null_mut()),
                capacity: AtomicUsize::new(0),
                on_device: AtomicBool::new(false),
                device: Mutex::new(None),
                claim: AtomicU64::new(NOBODY << CLAIM_BITS),
                covered: Mutex::default(),
                total: AtomicU64::new(UNKNOWN),
                written: AtomicU64::new(0),
            }),
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

    /// Lets lanes fill the receive with this number; `device` is the buffer where it lies in device memory.
    pub(crate) fn post(&self, sequence: u64, buffer: Buffer, device: Option<DeviceSlice>) {
        let slot = self.slot(sequence);
        slot.on_device.store(device.is_some(), Ordering::Relaxed);
        if device.is_some() {
            *slot.lock_device() = device;
        }
        slot.start.store(buffer.data, Ordering::Relaxed);
        slot.capacity.store(buffer.len, Ordering::Relaxed);
        slot.total.store(UNKNOWN, Ordering::Relaxed);
        slot.written.store(0, Ordering::Relaxed);
        slot.lock_covered().clear();
        // Publishes the rest.
        slot.claim
            .store(mark(sequence) << CLAIM_BITS, Ordering::Release);
    }

    /// The message came another way: no lane may touch its receive. `false` when one already did.
    pub(crate) fn withdraw(&self, sequence: u64) -> bool {
        self.slot(sequence)
            .claim
            .compare_exchange(
                mark(sequence) << CLAIM_BITS,
                NOBODY << CLAIM_BITS,
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .is_ok()
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

    /// Claims room for a chunk that came over a lane of `group`; gives where it goes.
    pub(crate) fn claim(&self, group: &Arc<Group>, header: &ChunkHeader) -> Result<*mut u8, ()> {
        self.room(group, header).map_err(|refusal| {
            // The first reason is the news.
            let _ = self.refusal.set(refusal);
        })
    }

    fn room(&self, group: &Arc<Group>, header: &ChunkHeader) -> Result<*mut u8, Refusal> {
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
        let (sequence, total) = (header.sequence, header.total);
        let slot = self.slot(sequence);
        let mark = mark(sequence);
        let mut claim = slot.claim.load(Ordering::Acquire);
        loop {
            let claimed = claim & CLAIM_MASK;
            if claim >> CLAIM_BITS != mark {
                return Err(protocol(
                    "a chunk of a message with a grant",
                    format!("one of message {sequence}"),
                ));
            }
            let capacity = slot.capacity.load(Ordering::Relaxed) as u64;
            if total > capacity || total > MAX_MESSAGE_BYTES {
                return Err(Refusal::TooLarge {
                    sequence,
                    total,
                    capacity,
                });
            }
            let len = u64::from(header.len);
            if claimed + len > total {
                return Err(protocol(
                    "chunks of a message to make up its size",
                    format!("{claimed} and {len} of {total} bytes"),
                ));
            }
            match slot.claim.compare_exchange_weak(
                claim,
                claim + len,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => break,
                Err(now) => claim = now,
            }
        }
        // From here the message cannot end without us, so its slot stays its own.
        if let Err(known) =
            slot.total
                .compare_exchange(UNKNOWN, total, Ordering::AcqRel, Ordering::Acquire)
            && known != total
        {
            return Err(protocol(
                "one size for all chunks of a message",
                format!("{known} and {total}"),
            ));
        }
        let end = header.offset + u64::from(header.len);
        if !slot.lock_covered().add(header.offset, end) {
            return Err(protocol(
                "each byte of a message once",
                format!(
                    "bytes {} to {end} of message {sequence} again",
                    header.offset
                ),
            ));
        }
        // Inside the capacity: offset + len <= total <= capacity, and capacity is a usize.
        let offset = header.offset as usize;
        Ok(slot.start.load(Ordering::Relaxed).wrapping_add(offset))
    }

    /// Where in device memory a claimed chunk goes, if there.
    pub(super) fn device(&self, header: &ChunkHeader) -> Option<DeviceSlice> {
        let slot = self.slot(header.sequence);
        if !slot.on_device.load(Ordering::Relaxed) {
            return None;
        }
        let device = slot.lock_device();
        // The claim has shown that it is inside.
        let part = device
            .as_ref()?
            .part(header.offset as usize, header.len as usize);
        part.ok()
    }

    /// Claims all of a withdrawn receive into device memory, whose message comes beside the lanes.
    pub(crate) fn claim_inline(&self, sequence: u64, total: u64) -> Option<DeviceSlice> {
        let slot = self.slot(sequence);
        slot.total.store(total, Ordering::Release);
        let claimed = (mark(sequence) << CLAIM_BITS) | (total & CLAIM_MASK);
        slot.claim
            .compare_exchange(
                NOBODY << CLAIM_BITS,
                claimed,
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .ok()?;
        let len = usize::try_from(total).ok()?;
        slot.lock_device().as_ref()?.part(0, len).ok()
    }

    /// Whether every byte of a message has a taker, and copies to the GPU are still under way.
    pub(crate) fn is_copying(&self, sequence: u64) -> bool {
        let slot = self.slot(sequence);
        let claimed = slot.claim.load(Ordering::Acquire) & CLAIM_MASK;
        slot.on_device.load(Ordering::Relaxed)
            && claimed == slot.total.load(Ordering::Acquire)
            && self.writers.load(Ordering::SeqCst) > 0
    }

    /// A copy into the comm's memory begins; only while the comm is open.
    pub(super) fn begin_copy(&self) {
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

    /// Bytes of a claimed chunk are in place.
    pub(crate) fn wrote(&self, sequence: u64, bytes: usize) {
        self.slot(sequence)
            .written
            .fetch_add(bytes as u64, Ordering::AcqRel);
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// Why a chunk of this comm was refused.
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        self.refusal.get()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Takes the memory away from the lanes; chunks that still arrive are read and dropped. `false`: a
    /// lane or a copy has not let go of it yet, and may still write there.
    #[must_use = "memory that is written to must not be given back"]
    pub(crate) fn close(&self) -> bool {
        self.closed.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + CLOSE_WAIT;
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
    fn lock_device(&self) -> MutexGuard<'_, Option<DeviceSlice>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_covered(&self) -> MutexGuard<'_, Coverage> {
        self.covered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CompletionSink for Inlet {
    /// `token`: the message's number.
    fn complete(&self, token: u64, result: Result<u64, MemoryError>) {
        match result {
            // At most a slot's bytes.
            Ok(bytes) => self.wrote(token, bytes as usize),
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
    use super::*;
    use crate::lanes::group::Group;

    fn header(sequence: u64, offset: u64, len: u32, total: u64) -> ChunkHeader {
        ChunkHeader {
            stream: 1,
            sequence,
            offset,
            total,
            len,
            answered: false,
        }
    }

    fn inlet(bytes: &mut [u8]) -> (Inlet, Arc<Group>) {
        let (inlet, group) = (Inlet::new(1), Arc::new(Group::default()));
        assert!(inlet.join(group.clone()));
        inlet.post(
            5,
            Buffer {
                data: bytes.as_mut_ptr(),
                len: bytes.len(),
            },
            None,
        );
        (inlet, group)
    }

    #[test]
    fn chunks_fill_a_receive_in_any_order_and_never_beyond_it() {
        let mut bytes = [0; 100];
        let start = bytes.as_mut_ptr();
        let (inlet, group) = inlet(&mut bytes);
        assert_eq!(inlet.progress(5), None);
        assert_eq!(
            inlet.claim(&group, &header(5, 40, 40, 80)),
            Ok(start.wrapping_add(40))
        );
        inlet.wrote(5, 40);
        assert_eq!(inlet.progress(5), Some((40, 80)));
        assert_eq!(inlet.claim(&group, &header(5, 0, 40, 80)), Ok(start));
        inlet.wrote(5, 40);
        assert_eq!(inlet.progress(5), Some((80, 80)));
        assert_eq!(inlet.claim(&group, &header(5, 0, 1, 80)), Err(()));
        assert!(matches!(inlet.refusal(), Some(Refusal::Protocol { .. })));
    }

    #[test]
    fn a_message_that_does_not_fit_is_refused_with_both_sizes() {
        let mut bytes = [0; 100];
        let (inlet, group) = inlet(&mut bytes);
        assert_eq!(inlet.claim(&group, &header(5, 0, 10, 101)), Err(()));
        assert_eq!(
            inlet.refusal(),
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
        let (own, group) = inlet(&mut bytes);
        for sequence in [4, 6, 5 + RequestId::LIMIT as u64] {
            assert_eq!(own.claim(&group, &header(sequence, 0, 1, 1)), Err(()));
        }
        let stranger = Arc::new(Group::default());
        let (other, _) = inlet(&mut bytes);
        assert_eq!(other.claim(&stranger, &header(5, 0, 1, 1)), Err(()));
        assert!(other.refusal().is_some());
    }

    #[test]
    fn a_message_that_came_another_way_is_closed_to_lanes() {
        let mut bytes = [0; 100];
        let (one, group) = inlet(&mut bytes);
        assert!(one.withdraw(5));
        assert_eq!(one.claim(&group, &header(5, 0, 1, 1)), Err(()));
        let (two, group) = inlet(&mut bytes);
        assert!(two.claim(&group, &header(5, 0, 1, 1)).is_ok());
        assert!(!two.withdraw(5));
    }

    #[test]
    fn a_copy_counts_when_it_has_ended_and_a_failed_one_refuses_its_message() {
        let mut bytes = [0; 100];
        let (inlet, group) = inlet(&mut bytes);
        assert!(inlet.claim(&group, &header(5, 0, 80, 80)).is_ok());
        inlet.begin_copy();
        assert_eq!(inlet.progress(5), Some((0, 80)));
        inlet.complete(5, Ok(50));
        assert_eq!(inlet.progress(5), Some((50, 80)));
        inlet.begin_copy();
        inlet.complete(5, Err(MemoryError::WorkerStopped));
        assert_eq!(inlet.progress(5), Some((50, 80)));
        assert!(matches!(inlet.refusal(), Some(Refusal::Copy(_))));
        // Nothing holds the memory any more.
        assert_eq!(inlet.writers.load(Ordering::SeqCst), 0);
        inlet.begin_copy();
        inlet.complete(5, Err(MemoryError::WorkerFailed));
        assert_eq!(inlet.writers.load(Ordering::SeqCst), 1, "it may go on");
    }

    #[test]
    fn closing_ends_the_right_to_write() {
        let inlet = Inlet::new(1);
        drop(inlet.write().expect("open"));
        assert!(inlet.close());
        assert!(inlet.write().is_none() && inlet.is_closed());
    }

    #[test]
    fn bytes_that_come_twice_do_not_make_a_message_whole() {
        let mut bytes = [0; 100];
        let (inlet, group) = inlet(&mut bytes);
        assert!(inlet.claim(&group, &header(5, 0, 40, 80)).is_ok());
        inlet.wrote(5, 40);
        assert_eq!(inlet.claim(&group, &header(5, 0, 40, 80)), Err(()));
        assert!(matches!(inlet.refusal(), Some(Refusal::Protocol { .. })));
        assert_eq!(
            inlet.progress(5),
            Some((40, 80)),
            "bytes 40 to 80 never came"
        );
    }

    #[test]
    fn closing_while_somebody_writes_says_so() {
        let inlet = Inlet::new(1);
        let writing = inlet.write().expect("open");
        assert!(!inlet.close());
        drop(writing);
        assert!(inlet.close());
    }
}
