//! What a channel's owner, its lanes and the copy workers share.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;

use tcpx_lanes::event_loop::Remote;
use tcpx_lanes::health::PeerLiveness;
pub(super) use tcpx_lanes::lock;
use tcpx_lanes::monitor::MonitorHandle;
use tcpx_lanes::receive_lane::Violation;
use tcpx_lanes::sealing::Protection;
#[cfg(test)]
use tcpx_lanes::send_lane::TURN_BYTES;
use tcpx_lanes::tcp_info::tcp_counters;
use tcpx_memory::RegionSlice;

use super::Lend;
use super::lane_rates::LaneRates;
use super::local::LocalPath;
use super::receive_table::{Claim, ReceiveTable, position};
use super::repair::Repair;
use super::roster::Roster;
use super::staging::Staging;
use super::transmit_table::{Outgoing, TransmitTable};
use super::watch;
use crate::channel::ChannelStats;
use crate::error::ChannelError;

/// Slots that are kept for the kernel, at which a connection copies what it sends.
const MOST_LENT: usize = 4;
/// With more bytes in the queue, lanes that were not opened at first are worth it.
const MUCH: u64 = 512 << 10;

/// Most lanes of a channel: lane sets are one machine word.
pub(super) const MAX_LANES: u16 = 64;

/// News of a send on their way to the channel's owner; a slot has at most two under way.
#[derive(Debug)]
pub(super) enum Event {
    /// The send's source may be reused; the slot is still in use.
    Copied {
        slot: u16,
    },
    /// The send has ended; its slot may be used again.
    Sent {
        slot: u16,
    },
    SendFailed {
        slot: u16,
        error: ChannelError,
    },
    /// A send that ended in the queue; its slot may be used again.
    SendWithdrawn {
        slot: u16,
    },
}

/// One TCP stream. Both halves hold it; it closes when both have let go.
#[derive(Debug)]
pub(super) struct LaneSocket {
    pub(super) descriptor: OwnedFd,
    pub(super) peer: SocketAddr,
    pub(super) lane: u16,
    /// Since when there has been this stream.
    pub(super) since: Instant,
    /// Its halves, as others reach them.
    pub(super) transmit: Remote,
    pub(super) receive: Remote,
    /// It ended between two of the peer's chunks, as a peer that is done ends it.
    pub(super) ended_by_peer: AtomicBool,
}

impl AsFd for LaneSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) bytes_sent: AtomicU64,
    pub(super) bytes_received: AtomicU64,
    pub(super) chunks_sent: AtomicU64,
    pub(super) chunks_received: AtomicU64,
    pub(super) bytes_discarded: AtomicU64,
    pub(super) bytes_spliced: AtomicU64,
    pub(super) lanes_lost: AtomicU64,
    pub(super) lanes_restored: AtomicU64,
    pub(super) chunks_resent: AtomicU64,
    pub(super) lanes_forged: AtomicU64,
}

impl Counters {
    pub(super) fn read(&self) -> ChannelStats {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ChannelStats {
            bytes_sent: value(&self.bytes_sent),
            bytes_received: value(&self.bytes_received),
            chunks_sent: value(&self.chunks_sent),
            chunks_received: value(&self.chunks_received),
            bytes_discarded: value(&self.bytes_discarded),
            bytes_spliced: value(&self.bytes_spliced),
            lanes_lost: value(&self.lanes_lost),
            lanes_restored: value(&self.lanes_restored),
            chunks_resent: value(&self.chunks_resent),
            lanes_forged: value(&self.lanes_forged),
            ..ChannelStats::default()
        }
    }
}

#[derive(Debug)]
pub(super) struct ChannelShared {
    /// Itself.
    pub(super) own: Weak<Self>,
    pub(super) parts: Parts,
    pub(super) transmit: TransmitTable,
    pub(super) receive: ReceiveTable,
    pub(super) counters: Counters,
    pub(super) closing: AtomicBool,
    pub(super) roster: Arc<Roster>,
    pub(super) monitor_handle: MonitorHandle,
    pub(super) peer_liveness: PeerLiveness,
    pub(super) lane_rates: LaneRates,
    /// How the last lane was lost, while there is none.
    pub(super) last_loss: Mutex<Option<ChannelError>>,
    /// Held while lanes are added, and while closing begins.
    pub(super) membership: Mutex<()>,
    events: ArrayQueue<Event>,
    has_ended: AtomicBool,
    ended: Mutex<Option<ChannelError>>,
}

/// What a channel is made of, and how.
#[derive(Debug)]
pub(super) struct Parts {
    /// `tcp, 4 lanes to 10.0.0.2:12345`.
    pub(super) name: String,
    /// What was chosen, for a person: ` over eth0 10.0.0.1 to 10.0.0.2, 1 event loop, cubic`.
    pub(super) ways: String,
    pub(super) lanes: u16,
    /// Chunks that may be on their way.
    pub(super) window: u16,
    /// Slots are sent by references to their pages.
    pub(super) lend: Lend,
    /// Of every lane.
    pub(super) protection: Protection,
    /// Bytes that every lane's socket buffers hold each way, restored lanes' too; 0: automatic.
    pub(super) socket_buffer: u32,
    /// Bytes that a lane moves in a turn.
    pub(super) turn_bytes: usize,
    /// Without any lane for this long the channel has ended.
    pub(super) dead_after: Duration,
    pub(super) staging: Staging,
    pub(super) repair: Repair,
    pub(super) local: LocalPath,
}

#[cfg(test)]
impl Parts {
    /// Of two lanes that do not come back.
    pub(super) fn of_two_lanes(stage_host: bool, window: u16) -> Self {
        Self {
            name: String::new(),
            ways: String::new(),
            lanes: 2,
            window,
            lend: Lend::Never,
            protection: Protection::None,
            socket_buffer: 0,
            turn_bytes: TURN_BYTES,
            dead_after: Duration::from_secs(10),
            staging: Staging::new(&[], stage_host, window).unwrap(),
            repair: Repair::new(super::repair::Restores::Never),
            local: LocalPath::default(),
        }
    }
}

impl ChannelShared {
    pub(super) fn new(mut parts: Parts) -> Result<Arc<Self>, rustix::io::Errno> {
        // What is sealed leaves from memory of the lane.
        if parts.protection == Protection::All {
            parts.lend = Lend::Never;
        }
        let (lanes, window) = (parts.lanes, parts.window);
        let roster = Arc::new(Roster::new(lanes)?);
        Ok(Arc::new_cyclic(|own| Self {
            own: Weak::clone(own),
            parts,
            transmit: TransmitTable::new(lanes, window),
            receive: ReceiveTable::new(),
            counters: Counters::default(),
            closing: AtomicBool::new(false),
            roster,
            monitor_handle: watch::handle(),
            peer_liveness: PeerLiveness::new(),
            lane_rates: LaneRates::new(lanes),
            last_loss: Mutex::default(),
            membership: Mutex::new(()),
            events: ArrayQueue::new(2 * usize::from(window)),
            has_ended: AtomicBool::new(false),
            ended: Mutex::new(None),
        }))
    }

    /// What the channel moved, and what the kernel says that its open streams did.
    pub(super) fn stats(&self) -> ChannelStats {
        let mut stats = self.counters.read();
        for socket in self.roster.sockets() {
            stats.streams += 1;
            if let Some(counters) = tcp_counters(&*socket) {
                stats.tcp_bytes_sent += counters.sent;
                stats.tcp_bytes_received += counters.received;
            }
        }
        stats
    }

    /// Reports an end and wakes the owner. Drop what points at the request's memory before.
    pub(super) fn report(&self, event: Event) {
        // A send has at most two under way, so the queue cannot be full.
        let pushed = self.events.push(event);
        debug_assert!(pushed.is_ok(), "more events than slots");
        self.roster.signal.wake();
    }

    /// A chunk has ended that its lane had in its hands.
    pub(super) fn send_ended(&self, slot: u16) {
        self.transmit.free(slot);
        self.report(Event::Sent { slot });
    }

    /// A chunk in a lane's hands cannot be sent, and the lane has let go of it.
    pub(super) fn send_failed(&self, lane: u16, chunk: Outgoing, error: ChannelError) {
        let slot = chunk.slot;
        drop(chunk);
        self.transmit.chunks.acknowledged(lane);
        self.transmit.free(slot);
        self.report(Event::SendFailed { slot, error });
    }

    /// Memory of a chunk is not there, which its program promised to keep.
    pub(super) fn unmapped(&self, operation: &'static str, memory: &RegionSlice) -> ChannelError {
        let region = memory.region().all();
        // One that is gathered of pieces has no address of its own.
        let memory = match region.address() {
            0 => memory,
            _ => &region,
        };
        let parts = memory.host_parts(0..memory.len()).ok().flatten();
        let (address, len) = parts
            .and_then(|mut parts| parts.next())
            .map_or((0, 0), |(start, len)| (start.addr(), len));
        ChannelError::Memory {
            channel: self.parts.name.clone(),
            operation,
            cause: format!(
                "memory at {address:#x} of {len} bytes is not mapped, or not to be used so; deregister it, or close its \
                 window, before it is freed"
            ),
        }
    }

    /// A chunk is at its destination: wakes the owner.
    pub(super) fn report_placed(&self, claim: Claim) {
        self.receive.arrived(claim);
        self.roster.signal.wake();
    }

    pub(super) fn next_event(&self) -> Option<Event> {
        self.events.pop()
    }

    /// Notes that the channel is broken; the first breakage wins.
    pub(super) fn end(&self, how: ChannelError) {
        lock(&self.ended).get_or_insert(how);
        self.has_ended.store(true, Ordering::Release);
        self.roster.signal.wake();
    }

    pub(super) fn ended(&self) -> Option<ChannelError> {
        let has_ended = self.has_ended.load(Ordering::Acquire);
        has_ended.then(|| lock(&self.ended).clone())?
    }

    /// The error for requests that end because the channel does.
    pub(super) fn failure(&self) -> ChannelError {
        self.ended().unwrap_or_else(|| ChannelError::Closed {
            channel: self.parts.name.clone(),
        })
    }

    /// Nothing is sent or received any more.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended.load(Ordering::Acquire) || self.closing.load(Ordering::Acquire)
    }

    /// The peer broke the protocol: the channel is broken.
    pub(super) fn protocol_error(&self, lane: u16, violation: Violation) {
        let Violation {
            expected,
            arrived,
            chunk,
        } = violation;
        self.end(ChannelError::Protocol {
            channel: self.parts.name.clone(),
            lane,
            expected,
            arrived,
            position: chunk.map(|chunk| Box::new(position(&chunk))),
        });
    }

    /// Whether another slot may be sent so, or too many are kept for the kernel already.
    pub(super) fn may_splice(&self) -> bool {
        self.transmit.chunks.unwanted() < MOST_LENT
    }

    /// Has a lane give back the source of a chunk that it is writing and that nobody waits for.
    pub(super) fn let_go(&self, lane: u16) {
        self.transmit.let_go(lane);
        // One that is gone gives it back with everything else.
        self.roster.wake_sender(lane);
    }

    /// Gives a turn to a lane that rests, if what is queued is worth one more.
    pub(super) fn wake_sender(&self) {
        self.want_lanes();
        if self.transmit.is_worth_another(self.roster.live()) {
            self.wake_another();
        }
    }

    /// Gives a turn to a lane that rests for a chunk that was copied from a GPU: those behind it
    /// are still being copied, so that there are never enough bytes in the queue for a second lane,
    /// and 1 MiB took 1.37 times as long.
    pub(super) fn wake_sender_of_copy(&self) {
        self.want_lanes();
        self.wake_another();
    }

    /// Has lanes opened that were not at first, if what is queued is worth them.
    fn want_lanes(&self) {
        if self.transmit.queued_bytes() > MUCH && self.roster.want_unopened() {
            watch::wake();
        }
    }

    /// Gives a turn to a lane that rests, if there is one.
    pub(super) fn wake_another(&self) {
        while let Some(lane) = self.transmit.chunks.take_idle() {
            // A lane that is gone hands its turn on.
            if self.roster.wake_sender(lane) {
                return;
            }
        }
    }

    /// A lane leaves what is queued to others: one of them gets its turn, unless none is at rest,
    /// for those that are not look at the queue before they rest.
    pub(super) fn leave_to_others(&self, lane: u16) {
        let mut slow = 1u64 << lane;
        self.transmit.chunks.unrest(lane);
        while let Some(other) = self.transmit.chunks.take_idle() {
            // One that is slow as well would hand the turn back, and so on until others are done.
            if self.lane_rates.is_slow(other) {
                slow |= 1 << other;
            } else if self.roster.wake_sender(other) {
                break;
            }
        }
        self.transmit.chunks.rest_all(slow);
    }

    /// Has the lanes look again that wait for another one to let go of their chunk.
    pub(super) fn wake_waiting(&self) {
        self.roster.wake_receivers(self.receive.waiting.take_all());
    }

    /// A loop has let go of a half.
    pub(super) fn half_gone(&self, lane: u16) {
        let vacant = self.roster.half_gone(lane);
        self.roster.signal.wake();
        // Another stream may take its place now.
        if vacant && !self.is_over() {
            watch::wake();
        }
    }
}
