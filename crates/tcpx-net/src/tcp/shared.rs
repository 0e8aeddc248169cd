//! What a channel's owner, its lanes and the copy workers share.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use crossbeam_queue::ArrayQueue;

use super::receive_table::ReceiveTable;
use super::staging::Staging;
use super::tcp_info::tcp_counters;
use super::transmit_table::TransmitTable;
use super::wakers::Wakers;
use crate::channel::ChannelStats;
use crate::error::{ChannelError, ChunkPosition, IoError};

/// Most lanes of a channel: lane sets are one machine word.
pub(super) const MAX_LANES: u16 = 64;

/// The end of a request on its way to the channel's owner. A slot has at most one under way.
#[derive(Debug)]
pub(super) enum Event {
    Sent {
        slot: u16,
    },
    SendFailed {
        slot: u16,
        error: ChannelError,
    },
    /// A send that was taken back; its slot may be used again.
    SendWithdrawn {
        slot: u16,
    },
    Received {
        slot: u16,
        bytes: u64,
    },
    ReceiveFailed {
        slot: u16,
        error: ChannelError,
    },
}

/// One TCP stream. Both halves hold it; it closes when both have let go.
#[derive(Debug)]
pub(super) struct LaneSocket {
    pub(super) descriptor: OwnedFd,
    pub(super) peer: SocketAddr,
    pub(super) lane: u16,
}

impl AsFd for LaneSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// How the channel ended, when it has.
#[derive(Debug, Clone)]
pub(super) enum Ended {
    /// The peer closed a lane between two chunks.
    ByPeer,
    /// Something broke.
    Broken(ChannelError),
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) bytes_sent: AtomicU64,
    pub(super) bytes_received: AtomicU64,
    pub(super) chunks_sent: AtomicU64,
    pub(super) chunks_received: AtomicU64,
    pub(super) wire_calls: AtomicU64,
    pub(super) early_arrivals: AtomicU64,
    pub(super) bytes_discarded: AtomicU64,
}

impl Counters {
    pub(super) fn read(&self) -> ChannelStats {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ChannelStats {
            bytes_sent: value(&self.bytes_sent),
            bytes_received: value(&self.bytes_received),
            chunks_sent: value(&self.chunks_sent),
            chunks_received: value(&self.chunks_received),
            fragments: 0,
            wire_calls: value(&self.wire_calls),
            early_arrivals: value(&self.early_arrivals),
            bytes_discarded: value(&self.bytes_discarded),
            ..ChannelStats::default()
        }
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    /// `tcp, 4 lanes to 10.0.0.2:12345`.
    pub(super) name: String,
    pub(super) transmit: TransmitTable,
    pub(super) receive: ReceiveTable,
    pub(super) staging: Staging,
    pub(super) wakers: Arc<Wakers>,
    pub(super) counters: Counters,
    pub(super) closing: AtomicBool,
    /// Lane halves that a loop still holds.
    pub(super) halves: AtomicUsize,
    /// The streams, for the kernel's counters; they close when both halves have let go.
    pub(super) sockets: OnceLock<Box<[Weak<LaneSocket>]>>,
    events: ArrayQueue<Event>,
    has_ended: AtomicBool,
    ended: Mutex<Option<Ended>>,
}

impl Shared {
    pub(super) fn new(
        name: String,
        window: u16,
        staging: Staging,
    ) -> Result<Self, rustix::io::Errno> {
        Ok(Self {
            name,
            transmit: TransmitTable::new(window),
            receive: ReceiveTable::new(window),
            staging,
            wakers: Arc::new(Wakers::new()?),
            counters: Counters::default(),
            closing: AtomicBool::new(false),
            halves: AtomicUsize::new(0),
            sockets: OnceLock::new(),
            events: ArrayQueue::new(2 * usize::from(window)),
            has_ended: AtomicBool::new(false),
            ended: Mutex::new(None),
        })
    }

    /// What the channel moved, and what the kernel says that its open streams did.
    pub(super) fn stats(&self) -> ChannelStats {
        let mut stats = self.counters.read();
        let sockets = self.sockets.get().into_iter().flatten();
        for socket in sockets.filter_map(Weak::upgrade) {
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
        // Each slot has at most one event under way, so the queue cannot be full.
        let pushed = self.events.push(event);
        debug_assert!(pushed.is_ok(), "more events than slots");
        self.wakers.signal.raise();
    }

    pub(super) fn next_event(&self) -> Option<Event> {
        self.events.pop()
    }

    /// Notes that the channel has ended; the first breakage wins.
    pub(super) fn end(&self, how: Ended) {
        let mut ended = self.lock_ended();
        if !matches!(*ended, Some(Ended::Broken(_))) {
            *ended = Some(how);
        }
        drop(ended);
        self.has_ended.store(true, Ordering::Release);
        self.wakers.signal.raise();
    }

    pub(super) fn ended(&self) -> Option<Ended> {
        if self.has_ended.load(Ordering::Acquire) {
            self.lock_ended().clone()
        } else {
            None
        }
    }

    fn lock_ended(&self) -> MutexGuard<'_, Option<Ended>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error for requests that end because the channel does.
    pub(super) fn failure(&self, outstanding: usize) -> ChannelError {
        match self.ended() {
            Some(Ended::Broken(error)) => error,
            Some(Ended::ByPeer) => ChannelError::PeerClosed {
                channel: self.name.clone(),
                outstanding,
            },
            None => ChannelError::Closed {
                channel: self.name.clone(),
            },
        }
    }

    /// A lane failed: the channel is broken.
    pub(super) fn lane_lost(
        &self,
        socket: &LaneSocket,
        operation: &'static str,
        position: Option<ChunkPosition>,
        cause: impl Into<IoError>,
    ) {
        self.end(Ended::Broken(ChannelError::LaneLost {
            channel: self.name.clone(),
            lane: socket.lane,
            peer: socket.peer,
            operation,
            position: position.map(Box::new),
            cause: cause.into(),
        }));
    }

    /// The peer broke the protocol: the channel is broken.
    pub(super) fn protocol_error(&self, lane: u16, violation: Violation) {
        let Violation {
            expected,
            arrived,
            position,
        } = violation;
        self.end(Ended::Broken(ChannelError::Protocol {
            channel: self.name.clone(),
            lane,
            expected,
            arrived,
            position: position.map(Box::new),
        }));
    }

    /// Gives a turn to a lane that can send.
    pub(super) fn wake_sender(&self) {
        if let Some(lane) = self.transmit.idle.take() {
            self.wakers.wake_sender(lane);
        }
    }

    /// Has the lanes that paused in front of an unposted chunk look again.
    pub(super) fn wake_early(&self) {
        self.wakers.wake_receivers(self.receive.early.take_all());
    }

    /// A loop has let go of a half.
    pub(super) fn half_gone(&self) {
        self.halves.fetch_sub(1, Ordering::AcqRel);
        self.wakers.signal.raise();
    }
}

/// What a peer did against the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) expected: String,
    pub(super) arrived: String,
    pub(super) position: Option<ChunkPosition>,
}

/// Locks one slot; its state is consistent between statements, so a panic elsewhere spoils nothing.
pub(super) fn lock<T>(slot: &Mutex<T>) -> MutexGuard<'_, T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
