//! The death of a lane: what dies with it, and what the others take over.

use std::io::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tcpx_lanes::receive_lane::Violation;

use super::receive_table::Arrival;
use super::shared::{ChannelShared, LaneSocket, lock};
use super::watch;
use crate::error::{ChannelError, ChunkPosition, IoError};

/// Why a lane is dead.
#[derive(Debug)]
pub(super) enum Lost {
    /// The peer closed it between two chunks.
    ByPeer,
    /// The peer opened it anew.
    Replaced,
    /// Its socket failed, or one of both sides gave it up.
    Broken {
        /// `sending` or `receiving`.
        operation: &'static str,
        position: Option<ChunkPosition>,
        cause: IoError,
    },
}

impl Lost {
    pub(super) fn broken(
        operation: &'static str,
        position: Option<ChunkPosition>,
        cause: impl Into<IoError>,
    ) -> Self {
        Self::Broken {
            operation,
            position,
            cause: cause.into(),
        }
    }

    /// It was given up, for this reason.
    pub(super) fn given_up(operation: &'static str, text: String) -> Self {
        let kind = ErrorKind::TimedOut;
        Self::broken(operation, None, IoError { kind, text })
    }

    fn into_error(self, channel: &str, socket: &LaneSocket) -> ChannelError {
        let (operation, position, cause) = match self {
            Self::ByPeer => {
                let cause = Error::from(ErrorKind::UnexpectedEof);
                ("receiving", None, cause.into())
            }
            Self::Replaced => {
                let text = "the peer gave it up and opened it anew".to_owned();
                let kind = ErrorKind::TimedOut;
                ("receiving", None, IoError { kind, text })
            }
            Self::Broken {
                operation,
                position,
                cause,
            } => (operation, position, cause),
        };
        ChannelError::LaneLost {
            channel: channel.to_owned(),
            lane: socket.lane,
            peer: socket.peer,
            operation,
            position: position.map(Box::new),
            cause,
        }
    }
}

impl ChannelShared {
    /// A lane is dead. The others take over what it had, or it does itself once it is back.
    pub(super) fn lane_lost(&self, lane: u16, how: Lost) {
        self.lane_lost_only(lane, None, how);
    }

    /// As [`lane_lost`](Self::lane_lost), unless another stream has taken the lane's place.
    pub(super) fn lane_lost_only(&self, lane: u16, only: Option<&Arc<LaneSocket>>, how: Lost) {
        let (by_peer, replaced) = (matches!(how, Lost::ByPeer), matches!(how, Lost::Replaced));
        let Some((socket, left)) = self.roster.remove_lane(lane, only, !by_peer) else {
            return;
        };
        // Nobody leaves work to it any more.
        self.lane_rates.forget(lane);
        let error = how.into_error(&self.parts.name, &socket);
        let closing = self.closing.load(Ordering::Acquire);
        if by_peer {
            socket.ended_by_peer.store(true, Ordering::Release);
        } else if !closing {
            self.counters.lanes_lost.fetch_add(1, Ordering::Relaxed);
        }
        if by_peer || closing || replaced {
            tracing::debug!(%error, left, "a lane ended");
        } else if left > 0 {
            tracing::warn!(%error, left, "a lane died; the others take over");
        } else {
            tracing::warn!(%error, "the last lane died; waiting for it to come back");
        }
        if left == 0 && !closing {
            *lock(&self.last_loss) = Some(error);
            // The owner may learn of the peer's end by this alone.
            self.roster.signal.wake();
        }
        // Nothing more goes in or out, whatever its buffers hold; the peer sees that it is over.
        if let Err(error) = rustix::net::shutdown(&socket.descriptor, rustix::net::Shutdown::Both) {
            tracing::debug!(%error, lane, "the lane was down already");
        }
        socket.transmit.remove();
        socket.receive.remove();
        watch::wake();
    }

    /// Claims a chunk. The sender of one that another lane holds gave that up: nothing of it may be
    /// written once another attempt begins, so its stream ends first.
    pub(super) fn without_holder(
        &self,
        mut claim: impl FnMut() -> Result<Arrival, Violation>,
    ) -> Result<Arrival, Violation> {
        let mut arrival = claim()?;
        while let Arrival::HeldBy(holder) = arrival {
            let socket = self.roster.socket(holder);
            // Whoever holds it still had that stream: its place is empty until it has put back all
            // that it held.
            arrival = claim()?;
            if matches!(arrival, Arrival::HeldBy(now) if now == holder) {
                if let Some(socket) = &socket {
                    let text = "the peer gave it up and sent its chunk on another lane";
                    let how = Lost::given_up("receiving", text.to_owned());
                    self.lane_lost_only(holder, Some(socket), how);
                }
                break;
            }
        }
        Ok(arrival)
    }

    /// No lane came back in time: the channel has ended.
    pub(super) fn end_without_lanes(&self) {
        if let Some(last) = lock(&self.last_loss).take() {
            self.end(ChannelError::NoLaneLeft {
                lanes: self.roster.lanes(),
                last: Box::new(last),
            });
        }
    }
}
