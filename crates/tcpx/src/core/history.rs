//! What `tcpx status` tells of a connection: what it counted, and where its operations stand.

use std::time::Duration;

use tcpx_net::Peer;
use tcpx_status::{
    ConnectionReport, Counters, Ended, Histogram, LaneReport, OperationReport, Registration,
};
use tcpx_wire::session::{OperationState, Owes};

use super::Core;
use crate::error::Error;

/// Operations that are told of, at most.
const MOST_OPERATIONS: usize = 64;

/// An operation without progress for this long counts as stalled.
const STALLED: Duration = Duration::from_secs(1);

/// Operations of this side that have ended, and the connection's place in its process's status.
#[derive(Debug, Default)]
pub(crate) struct History {
    completed: u64,
    failed: u64,
    durations: Histogram,
    registration: Option<Registration>,
}

impl History {
    /// Gives the connection its place.
    pub(crate) fn register(&mut self, registration: Registration) {
        self.registration = Some(registration);
    }

    /// An operation ended well.
    pub(super) fn completed(&mut self, took: Duration) {
        self.completed += 1;
        self.durations.record(took);
    }

    /// An operation ended with an error.
    pub(super) fn failed(&mut self) {
        self.failed += 1;
    }

    /// Keeps an error among the process's last ones.
    pub(super) fn keep(&self, peer: Peer, error: &Error) {
        if let Some(registration) = &self.registration {
            registration.failed(peer.to_string(), error.to_string());
        }
    }

    /// The connection is finished.
    pub(super) fn close(&self, counters: Counters, lost: bool) {
        if let Some(registration) = &self.registration {
            registration.ended(|| Ended {
                counters,
                lost,
                refused: 0,
            });
        }
    }
}

impl Core {
    /// Whether nothing is left of the connection.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Everything that it counted.
    pub(crate) fn counters(&self) -> Counters {
        let stats = self.statistics();
        Counters {
            bytes_sent: stats.bytes_sent,
            bytes_received: stats.bytes_received,
            control_bytes_sent: stats.control_bytes_sent,
            control_bytes_received: stats.control_bytes_received,
            bytes_discarded: stats.bytes_discarded,
            chunks_sent: stats.chunks_sent,
            chunks_received: stats.chunks_received,
            chunks_resent: stats.chunks_resent,
            lanes_lost: stats.lanes_lost,
            lanes_restored: stats.lanes_restored,
            lanes_forged: stats.lanes_forged,
            operations_completed: self.history.completed,
            operations_failed: self.history.failed,
            durations: self.history.durations.clone(),
        }
    }

    /// The open lanes of all channels.
    pub(crate) fn lanes(&self) -> Vec<LaneReport> {
        let channels = (0..).zip(self.channels.iter());
        let lanes = channels.flat_map(|(channel, state)| {
            let lanes = state.channel.lanes().into_iter();
            lanes.map(move |lane| LaneReport {
                channel,
                lane: lane.lane,
                peer: lane.peer.to_string(),
                bytes_sent: lane.bytes_sent,
                bytes_received: lane.bytes_received,
                retransmits: lane.retransmits,
                round_trip_us: u64::try_from(lane.round_trip.as_micros()).unwrap_or(u64::MAX),
                backlog_bytes: lane.backlog,
            })
        });
        lanes.collect()
    }

    /// Tells where the operations stand now; those without progress for longest come first.
    pub(crate) fn tell_operations(&mut self, report: &mut ConnectionReport) {
        self.tick();
        let mut states = self.session.snapshot(self.now());
        states.retain(|state| !state.completed);
        states.sort_by_key(|state| std::cmp::Reverse(state.standing.waited));
        // A receive that waits for its send is early, not stalled.
        let is_stalled = |state: &&OperationState| {
            state.standing.waited >= STALLED && state.standing.owes != Owes::PeerSendMatching
        };
        report.operations_stalled = states.iter().filter(is_stalled).count() as u64;
        report.operations_running = states.len() as u64;
        states.truncate(MOST_OPERATIONS);
        let operations = states.into_iter().map(|state| {
            let standing = state.standing;
            OperationReport {
                kind: standing.kind.to_string(),
                tag: standing.kind.has_tag().then_some(standing.tag.0),
                bytes_done: standing.bytes_done,
                bytes_total: standing.bytes_total,
                waited_seconds: standing.waited.as_secs_f64(),
                next: standing.owes.to_string(),
                line: standing.to_string(),
            }
        });
        report.operations = operations.collect();
    }
}
