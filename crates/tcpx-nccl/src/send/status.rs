//! What `tcpx status` tells of a send comm.

use std::sync::atomic::Ordering;

use nccl_net::export::NetError;
use tcpx_lanes::tcp_info::{is_unanswered, tcp_counters};
use tcpx_status::{ConnectionReport, Counters};

use super::State;
use crate::lanes::send_path::SendPath;
use crate::status::{Comm, Running};

impl Comm for State {
    fn describe(&self, report: &mut ConnectionReport) {
        report.path = match &self.send_path {
            Some(send_path) => format!(
                "{}, large messages over the {} lanes to its process",
                self.name,
                send_path.set().lanes()
            ),
            None => format!("{}, all messages over its own connection", self.name),
        };
        let waited = self.stall.waited();
        self.ring.all(|sequence, request| {
            let send_stream = self
                .send_path
                .as_ref()
                .map(|send_path| send_path.send_stream());
            let (done, next) = match send_stream {
                Some(send_stream) if request.on_lanes => {
                    let left = send_stream.left(sequence).min(request.size);
                    (
                        request.size - left,
                        "the lanes to the peer's process must carry it",
                    )
                }
                _ if sequence > self.next => (0, "the sends before it must end"),
                Some(_) if sequence >= self.granted && self.granting => {
                    (0, "the peer must post its receive")
                }
                _ => {
                    let written = request.total() - request.written;
                    let next = match is_unanswered(&*self.link) {
                        true => "the peer's host must answer",
                        false => "the peer must read it",
                    };
                    (request.size - written.min(request.size), next)
                }
            };
            if done < request.size || request.size == 0 {
                let (done, total) = (done as u64, request.size as u64);
                let kind = "send";
                Running {
                    kind,
                    sequence,
                    done,
                    total,
                    waited,
                    next,
                    is_due: true,
                }
                .describe(report);
            }
            true
        });
    }

    fn counters(&self) -> Counters {
        let own = tcp_counters(&*self.link).unwrap_or_default();
        let lanes = self.send_path.as_ref().map(SendPath::set);
        // Those of lanes, which comms share, by the comm that asks first.
        let news = lanes.map_or(0, |set| set.forged.swap(0, Ordering::Relaxed));
        let (operations_completed, bytes_sent) = self.sent;
        Counters {
            bytes_sent,
            operations_completed,
            operations_failed: u64::from(self.failure.is_some()),
            lanes_forged: self.forged.fetch_add(news, Ordering::Relaxed) + news,
            control_bytes_sent: own.sent,
            control_bytes_received: own.received,
            ..Counters::default()
        }
    }

    fn failure(&self) -> Option<&NetError> {
        self.failure.as_ref()
    }
}
