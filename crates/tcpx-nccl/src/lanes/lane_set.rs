//! The lanes from this process to one peer process, and the queue that feeds them.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use tcpx_lanes::event_loop::Remote;
use tcpx_lanes::idle::LaneSet as IdleLanes;
use tcpx_lanes::socket_calls::{self as socket, Moved};

use super::chunk::{GroupId, encode_group};
use super::outlet::Chunk;
use super::transmit_lane::TransmitLane;
use super::users::Users;
use crate::config::PAGE_BYTES;
use crate::dialer::Dialer;
use crate::error::PluginError;
use crate::held::Stream;
use crate::log::Log;

/// Chunks that wait for a lane; a comm that finds no room tries again at its next call.
const QUEUE_CHUNKS: usize = 2048;
/// Smallest part of a message that is worth a lane of its own.
const SMALL_PART_BYTES: usize = 64 << 10;
/// The peer's loop answers by itself, so this is a broken path and not a slow program.
const CONNECT_TIME: Duration = Duration::from_secs(15);

/// Lanes to one peer process.
#[derive(Debug)]
pub(crate) struct LaneSet {
    group: GroupId,
    queue: ArrayQueue<Chunk>,
    /// Bytes of the chunks that wait, or that a lane has begun and not ended.
    load: Arc<AtomicUsize>,
    /// Calls in which a peer's kernel took bytes, and answers of the peer: its signs of life.
    moves: AtomicU64,
    /// Lanes without work.
    idle: IdleLanes,
    /// The place of each lane in an event loop.
    lanes: Vec<Remote>,
    /// How many loops those are: so many lanes move at a time.
    at_a_time: usize,
    comms: Users,
    failed: AtomicBool,
    why: OnceLock<String>,
    /// Large chunks go without a copy.
    splice: AtomicBool,
    log: Arc<Log>,
    connecting: Mutex<Connecting>,
}

#[derive(Debug)]
struct Connecting {
    dialers: Vec<Dialer>,
    /// Authenticated, kept until all are.
    streams: Vec<Stream>,
    deadline: Instant,
    done: bool,
    failed: Option<Instant>,
}

/// How the connecting stands.
#[derive(Debug)]
pub(crate) enum Standing {
    /// Ask again.
    Connecting,
    /// Chunks may be queued; `true` for the first who hears it.
    Ready(bool),
    /// There are no lanes; the comm goes on without.
    Failed(String),
}

impl LaneSet {
    /// A set that `dialers` will connect, each lane for the place of the same number, which lie in so many
    /// `loops`; with `splice`, large chunks go without a copy.
    pub(crate) fn new(
        group: GroupId,
        dialers: Vec<Dialer>,
        lanes: Vec<Remote>,
        loops: usize,
        splice: bool,
        log: Arc<Log>,
    ) -> Self {
        Self {
            at_a_time: loops.min(lanes.len()),
            group,
            queue: ArrayQueue::new(QUEUE_CHUNKS),
            load: Arc::default(),
            moves: AtomicU64::new(0),
            idle: IdleLanes::new(),
            lanes,
            comms: Users::default(),
            failed: AtomicBool::new(false),
            why: OnceLock::new(),
            splice: AtomicBool::new(splice),
            log,
            connecting: Mutex::new(Connecting {
                dialers,
                streams: Vec::new(),
                deadline: Instant::now() + CONNECT_TIME,
                done: false,
                failed: None,
            }),
        }
    }

    pub(crate) const fn group(&self) -> GroupId {
        self.group
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// The peer took bytes, or answered.
    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// How often it did.
    pub(super) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Where the chunks of a comm are counted.
    pub(super) fn load(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.load)
    }

    /// Bytes of the next part of a message of `total` bytes, of which `left` wait and at most `largest` make
    /// a part.
    pub(super) fn part_bytes(&self, total: usize, left: usize, largest: usize) -> usize {
        let load = self.load.load(Ordering::Relaxed);
        part_bytes(total, left, largest, self.at_a_time, load)
    }

    fn connecting(&self) -> MutexGuard<'_, Connecting> {
        self.connecting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// When the connecting failed, if it did.
    pub(crate) fn unreachable_since(&self) -> Option<Instant> {
        self.connecting().failed
    }

    /// Drives the connecting; whichever comm waits for it may call.
    pub(crate) fn connect(self: &Arc<Self>, now: Instant) -> Standing {
        if let Some(why) = self.failure() {
            return Standing::Failed(why.to_owned());
        }
        let mut connecting = self.connecting();
        if connecting.done {
            return Standing::Ready(false);
        }
        match self.dial(&mut connecting, now) {
            Ok(true) => {
                connecting.done = true;
                Standing::Ready(true)
            }
            Ok(false) => Standing::Connecting,
            Err(why) => {
                connecting.dialers.clear();
                connecting.streams.clear();
                connecting.failed = Some(now);
                self.fail(why.clone());
                Standing::Failed(why)
            }
        }
    }

    fn dial(self: &Arc<Self>, connecting: &mut Connecting, now: Instant) -> Result<bool, String> {
        let mut at = 0;
        while let Some(dialer) = connecting.dialers.get_mut(at) {
            match dialer.poll(now)? {
                Some(stream) => {
                    connecting.dialers.remove(at);
                    // At most 64 lanes; 24 bytes on a fresh connection always fit its buffer.
                    let record = encode_group(&self.group, self.lanes.len() as u32);
                    match socket::send_bytes(&stream, &record) {
                        Ok(Moved::Bytes(bytes)) if bytes == record.len() => {}
                        moved => return Err(format!("a fresh lane takes no bytes: {moved:?}")),
                    }
                    connecting.streams.push(stream);
                }
                None => at += 1,
            }
        }
        if connecting.dialers.is_empty() {
            for ((number, place), stream) in
                (0..).zip(&self.lanes).zip(connecting.streams.drain(..))
            {
                place.start(Box::new(TransmitLane::new(
                    Arc::clone(self),
                    number,
                    stream,
                )));
            }
            return Ok(true);
        }
        if now >= connecting.deadline {
            return Err(format!(
                "{} of {} lanes are not connected after {} s",
                connecting.dialers.len(),
                self.lanes.len(),
                CONNECT_TIME.as_secs()
            ));
        }
        Ok(false)
    }

    /// A comm begins to use the lanes; `false` when they are closing already.
    pub(crate) fn enter(&self) -> bool {
        if !self.comms.enter() {
            return false;
        }
        if self.failed.load(Ordering::SeqCst) {
            self.leave();
            return false;
        }
        true
    }

    /// A comm is done with the lanes; the last one closes them.
    pub(crate) fn leave(&self) {
        if self.comms.leave() {
            self.resume_all();
        }
    }

    /// Whether the set can serve another comm.
    pub(crate) fn is_open(&self) -> bool {
        !self.comms.is_closed() && !self.failed.load(Ordering::SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.comms.is_closed()
    }

    /// Whether large chunks go without a copy.
    pub(super) fn splices(&self) -> bool {
        self.splice.load(Ordering::Relaxed)
    }

    /// The system refuses; from now on chunks are copied.
    pub(super) fn stop_splicing(&self, error: &io::Error) {
        if self.splice.swap(false, Ordering::Relaxed) {
            self.log.info(&format!(
                "large messages are copied into sockets, which costs processor time: {error}"
            ));
        }
    }

    /// Queues a chunk and wakes a lane for it; gives it back when there is no room.
    pub(crate) fn push(&self, chunk: Chunk) -> Result<(), Chunk> {
        self.queue.push(chunk)?;
        if self.failed.load(Ordering::SeqCst) {
            // No lane will take it.
            self.drain();
        }
        if let Some(lane) = self.idle.take(0)
            && let Some(lane) = self.lanes.get(usize::from(lane))
        {
            lane.resume();
        }
        Ok(())
    }

    pub(crate) fn pop(&self) -> Option<Chunk> {
        self.queue.pop()
    }

    pub(super) fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The lane found no work. It must look once more before it rests.
    pub(super) fn rest(&self, lane: u16) {
        self.idle.insert(lane);
    }

    pub(super) fn unrest(&self, lane: u16) {
        self.idle.remove(lane);
    }

    fn resume_all(&self) {
        self.lanes.iter().for_each(Remote::resume);
    }

    /// Ends every lane: chunks may be lost, so every comm must fail.
    pub(crate) fn fail(&self, why: String) {
        let _ = self.why.set(why);
        self.failed.store(true, Ordering::SeqCst);
        self.drain();
        self.resume_all();
    }

    fn drain(&self) {
        while self.queue.pop().is_some() {}
    }

    /// Why the lanes ended, if they did.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failed
            .load(Ordering::SeqCst)
            .then(|| self.why.get().map_or("they ended", String::as_str))
    }

    /// The failure as an answer for a comm.
    pub(crate) fn check(&self, comm: &str) -> Result<(), PluginError> {
        match self.failure() {
            None => Ok(()),
            Some(why) => Err(PluginError::LanesEnded {
                comm: comm.to_owned(),
                why: why.to_owned(),
            }),
        }
    }
}

/// While the `lanes` that move at a time have less than a part each, a message is spread over all of them.
fn part_bytes(total: usize, left: usize, largest: usize, lanes: usize, load: usize) -> usize {
    let lanes = lanes.max(1);
    let most = if load < lanes * largest {
        (total / lanes).clamp(SMALL_PART_BYTES.min(largest), largest)
    } else {
        largest
    };
    // Parts of one size, and no small rest.
    let even = left.div_ceil(left.div_ceil(most).max(1));
    even.next_multiple_of(PAGE_BYTES).min(most).min(left)
}

#[cfg(test)]
mod tests {
    use super::part_bytes;

    const KIB: usize = 1 << 10;

    fn parts(total: usize, lanes: usize, mut load: usize) -> Vec<usize> {
        let (mut left, mut parts) = (total, Vec::new());
        while left > 0 {
            let bytes = part_bytes(total, left, 256 * KIB, lanes, load);
            assert!(bytes > 0 && bytes <= left, "{bytes} of {left}");
            parts.push(bytes / KIB);
            left -= bytes;
            load += bytes;
        }
        parts
    }

    #[test]
    fn idle_lanes_share_a_message_and_busy_ones_get_large_parts() {
        assert_eq!(parts(256 * KIB, 12, 0), [64; 4]);
        assert_eq!(parts(256 * KIB, 12, 3 << 20), [256]);
        assert_eq!(parts(256 * KIB, 2, 0), [128; 2]);
        assert_eq!(parts(256 * KIB, 1, 0), [256]);
        assert_eq!(parts(100 * KIB, 12, 0), [52, 48]);
        assert_eq!(parts(300 * KIB, 2, 1 << 20), [152, 148]);
        assert_eq!(parts(4 << 20, 12, 0), [256; 16]);
        // The first lanes get small parts; once all have enough, the rest is large.
        let mixed = parts(2 << 20, 12, 2 << 20);
        assert!(mixed[0] < 200 && mixed.last() > Some(&200), "{mixed:?}");
        for (total, largest) in [(1, 16_384), (usize::MAX >> 1, 1 << 24), (70_000, 65_536)] {
            let bytes = part_bytes(total, total, largest, 0, 0);
            assert!(bytes > 0 && bytes <= total.min(largest));
        }
    }
}
