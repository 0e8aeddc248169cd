//! What goes out to the program and its host: events, ends of transfers, and what `tcpx status`
//! tells of a connection.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use tcpx_status::{ConnectionReport, Counters, Ended, Histogram, OperationReport, Registration};
use tcpx_wire::session::{OperationState, Owes};

use super::Core;
use crate::error::Error;
use crate::event::{Event, Observer};

/// Operations that are told of, at most.
const MOST_OPERATIONS: usize = 64;

/// An operation without progress for this long counts as stalled.
const STALLED: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Program {
    pub(crate) observer: Option<Arc<dyn Observer>>,
    /// The path that the bytes take.
    pub(crate) path: Arc<Mutex<String>>,
    /// Of transfers that have ended; woken when the lock is free again, as that runs the program's
    /// code.
    pub(crate) wakers: Vec<Waker>,
    /// An operation of the program's or of the peer's has ended, or all have, since this was last
    /// forgotten.
    pub(crate) ended_some: bool,
    /// Operations of this side that have ended.
    completed: u64,
    failed: u64,
    durations: Histogram,
    /// The connection's place in its process's status.
    registration: Option<Registration>,
}

impl Program {
    pub(crate) fn new(observer: Option<Arc<dyn Observer>>, path: String) -> Self {
        Self {
            observer,
            path: Arc::new(Mutex::new(path)),
            ..Self::default()
        }
    }

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
    pub(super) fn keep(&self, peer: SocketAddr, error: &Error) {
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
    /// Tells the observer. It is the program's code: a panic in it must not end the engine's
    /// thread, which other connections live on too, nor leave the work around this call half done.
    pub(crate) fn emit(&self, event: &Event) {
        if let Some(observer) = &self.program.observer
            && catch_unwind(AssertUnwindSafe(|| observer.event(event))).is_err()
        {
            tracing::error!(peer = %self.peer, "the observer panicked; the engine goes on");
        }
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
            operations_completed: self.program.completed,
            operations_failed: self.program.failed,
            durations: self.program.durations.clone(),
        }
    }

    /// Tells where the operations stand now; those without progress for longest come first.
    pub(crate) fn tell_operations(&mut self, report: &mut ConnectionReport) {
        self.clock.tick();
        let mut states = self.session.snapshot(self.clock.now());
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
