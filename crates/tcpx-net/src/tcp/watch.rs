//! What the monitor does for a channel: it notices lanes which hang, and sees to it that dead ones
//! come back.
//!
//! It looks at a channel ten times a second while that has sent something which the peer has not
//! placed yet, lacks a lane to dial or to ask for, or has none at all; otherwise it sleeps.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use nccl_net::export::fork::PerProcess;
use tcpx_lanes::health::Clock;
use tcpx_lanes::monitor::{Look, Monitor, MonitorHandle, REST, TICK, Watched};
use tcpx_lanes::tcp_info::{Transport, transport};

use super::lane_rates::LaneRates;
use super::loss::Lost;
use super::shared::ChannelShared;

/// Microseconds and bytes that tell a lane's speed, and microseconds that do with any bytes.
const LEAST_BUSY: (u64, u64) = (20_000, 500_000);
const LEAST_BYTES: u64 = 64 << 10;

#[derive(Debug)]
struct ChannelWatch {
    channel: Weak<ChannelShared>,
    lanes: Vec<(Clock, Speed)>,
    looked: Instant,
}

/// What tells a lane's speed.
#[derive(Debug, Clone, Copy, Default)]
struct Speed {
    /// Bytes that had been acknowledged, and microseconds with something under way, when it was
    /// last known.
    paced: (u64, u64),
}

impl Speed {
    /// Says how fast the lane was while it had something under way, once that is known.
    fn lane_rates(&mut self, lane_rates: &LaneRates, lane: u16, transport: Transport) {
        let (bytes, micros) = self.paced;
        let bytes = transport.acknowledged.saturating_sub(bytes);
        let busy = transport.busy_micros.saturating_sub(micros);
        let is_known = busy >= LEAST_BUSY.0 && bytes >= LEAST_BYTES || busy >= LEAST_BUSY.1;
        if is_known {
            lane_rates.measured(lane, bytes, busy);
            self.paced = (transport.acknowledged, transport.busy_micros);
        } else if transport.is_drained() {
            lane_rates.rested(lane);
        }
    }
}

/// This process's, as the thread of a parent is not in a fork's child.
fn monitor() -> &'static Monitor {
    static MONITOR: PerProcess<OnceLock<Monitor>> = PerProcess::new();
    MONITOR.get().get_or_init(|| Monitor::new("tcpx-watch"))
}

/// For one channel.
pub(super) fn handle() -> MonitorHandle {
    monitor().handle()
}

/// Watches a channel until it is dropped.
///
/// # Errors
/// The system has no thread left.
pub(super) fn register(channel: &Arc<ChannelShared>) -> std::io::Result<()> {
    let lanes = usize::from(channel.roster.lanes());
    let now = Instant::now();
    monitor().watch(Box::new(ChannelWatch {
        channel: Arc::downgrade(channel),
        lanes: vec![(Clock::new(now), Speed::default()); lanes],
        looked: now,
    }))
}

/// Has every channel looked at soon.
pub(super) fn wake() {
    monitor().wake();
}

impl Watched for ChannelWatch {
    fn check_liveness(&mut self) -> Look {
        match self.channel.upgrade() {
            None => Look::Gone,
            Some(channel) => self.look_at(&channel).map_or(Look::Asleep, Look::In),
        }
    }
}

impl ChannelWatch {
    /// When the channel is to be looked at again.
    fn look_at(&mut self, channel: &Arc<ChannelShared>) -> Option<Duration> {
        channel.monitor_handle.lower();
        if channel.is_over() {
            return None;
        }
        let now = Instant::now();
        let repair = &channel.parts.repair;
        let repairing = repair.advance(channel, now);
        let looked = std::mem::replace(&mut self.looked, now);
        let rested = now.saturating_duration_since(looked) > REST;
        let bare = repair.bare(now).filter(|_| channel.roster.live() == 0);
        if bare.is_some_and(|bare| bare >= channel.parts.dead_after) {
            channel.end_without_lanes();
            return None;
        }
        let at_work = channel.peer_liveness.at_work(now);
        // Before what the lanes have done: a chunk that a lane takes counts here until it counts
        // there.
        let queued = channel.transmit.queued_bytes() > 0;
        let mut owing = queued || bare.is_some();
        let lanes = self.lanes.iter_mut().zip(channel.transmit.chunks.done());
        for (lane, ((clock, speed), done)) in (0u16..).zip(lanes) {
            owing |= done.owes().is_some();
            let Some(socket) = channel.roster.socket(lane) else {
                *speed = Speed::default();
                continue;
            };
            let transport = transport(&*socket).unwrap_or_default();
            speed.lane_rates(&channel.lane_rates, lane, transport);
            let dead = clock.check_lane(now, done, transport, rested, at_work);
            if let Some(waited) = dead {
                let text = format!("nothing moved for {} ms", waited.as_millis());
                let how = Lost::given_up("sending", text);
                channel.lane_lost_only(lane, Some(&socket), how);
            }
        }
        if queued {
            // Should one that others rely on stall, those that left work to it look again.
            channel.wake_another();
        }
        if owing {
            // Spares the posters a wake-up: this channel is looked at again anyway.
            channel.monitor_handle.keep();
        }
        repairing.or_else(|| owing.then_some(TICK))
    }
}
