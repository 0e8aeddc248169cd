//! What a receive comm says of itself.

use std::sync::atomic::Ordering;

use tcpx_lanes::tcp_info::tcp_counters;
use tcpx_status::{ConnectionReport, Counters};

use super::{Inbound, Phase};
use crate::landing::Landing;
use crate::status::Running;

impl Inbound {
    pub(crate) fn describe(&self, report: &mut ConnectionReport) {
        let joined = self.lanes.as_ref().is_some_and(Landing::is_joined);
        report.path = match joined {
            true => format!(
                "{}, large messages over the lanes of its process",
                self.name
            ),
            false => format!("{}, all messages over its own connection", self.name),
        };
        let waited = self.stall.waited();
        self.ring.all(|sequence, request| {
            let on_lanes = self
                .lanes
                .as_ref()
                .and_then(|lanes| lanes.recv_stream.progress(sequence));
            let (done, total, next) = match (request.phase, on_lanes) {
                (Phase::Done, _) => return true,
                (Phase::Posted, Some((done, total))) if done < total => {
                    (done, total, "the peer's lanes must bring the rest")
                }
                (Phase::Posted, Some(_)) => return true,
                (Phase::Posted, None) => (0, request.capacity as u64, "the peer must send"),
                (Phase::Payload, _) => (
                    request.received as u64,
                    request.size as u64,
                    "the peer must send the rest",
                ),
            };
            // A receive that waits for its message is early, not stalled.
            let is_due = request.phase != Phase::Posted || on_lanes.is_some();
            Running {
                kind: "receive",
                sequence,
                done,
                total,
                waited,
                next,
                is_due,
            }
            .describe(report);
            true
        });
    }

    /// What the comm's own connection carried.
    pub(crate) fn counters(&self) -> Counters {
        let own = tcp_counters(&*self.link).unwrap_or_default();
        let lanes = self
            .lanes
            .as_ref()
            .and_then(|lanes| lanes.recv_stream.group());
        // Those of lanes, which comms share, by the comm that asks first.
        let news = lanes.map_or(0, |group| group.take_forged());
        Counters {
            lanes_forged: self.forged.fetch_add(news, Ordering::Relaxed) + news,
            control_bytes_sent: own.sent,
            control_bytes_received: own.received,
            ..Counters::default()
        }
    }
}
