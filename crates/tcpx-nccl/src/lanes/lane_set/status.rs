//! What `tcpx status` tells of the lanes to a peer process.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use tcpx_lanes::tcp_info::lane_report;
use tcpx_status::{
    ConnectionReport, Counters, Description, Ended, LaneReport, Registration, Source,
};

use super::{LaneSet, lock};
use crate::status::{STALLED, register};

/// The set's place in the status of its process.
#[derive(Debug, Default)]
pub(super) struct Told(OnceLock<(Instant, Registration)>);

impl LaneSet {
    /// Has the status of this process tell of the lanes while they are open.
    pub(crate) fn tell_status(self: &Arc<Self>) {
        let source = Arc::downgrade(self);
        self.told
            .0
            .get_or_init(|| (Instant::now(), register(source)));
    }

    fn counters(&self) -> Counters {
        let dialled = lock(&self.dialling);
        // The first time of a lane is none that came back.
        let again = |epoch: u32| u64::from(epoch.saturating_sub(1));
        let restored = dialled
            .lanes
            .iter()
            .map(|lane| again(lane.epoch))
            .sum::<u64>();
        let missing = match dialled.done {
            true => self.missing.load(std::sync::atomic::Ordering::SeqCst) as u64,
            false => 0,
        };
        Counters {
            chunks_sent: self.chunks.done().map(|done| done.taken).sum(),
            lanes_lost: restored + missing,
            lanes_restored: restored,
            ..Counters::default()
        }
    }

    /// The open lanes, and a line for those that owe something and do not move.
    fn open_lanes(&self) -> (Vec<LaneReport>, Vec<String>) {
        let now = Instant::now();
        let (mut open, mut stalled) = (Vec::new(), Vec::new());
        let dialled = lock(&self.dialling);
        let lanes = (0..).zip(dialled.lanes.iter().zip(self.chunks.done()));
        for (lane, (state, done)) in lanes {
            let stands = state.clock.stands(now);
            if done.under_way() > 0 && stands >= STALLED {
                let (chunks, seconds) = (done.under_way(), stands.as_secs());
                stalled.push(format!(
                    "lane {lane}: {chunks} chunks, not moved for {seconds} s"
                ));
            }
            let Some(stream) = state.stream.upgrade() else {
                continue;
            };
            open.push(lane_report(&*stream, lane, self.peer.address));
        }
        (open, stalled)
    }
}

impl Source for LaneSet {
    fn describe(&self) -> Option<Description> {
        let (since, _) = self.told.0.get()?;
        if self.is_closing() {
            return None;
        }
        let (lanes, stalled) = self.open_lanes();
        let failure = self.failure().map(str::to_owned);
        Some(Description::Connection(Box::new(ConnectionReport {
            peer: self.peer.address.to_string(),
            network: "NCCL, lanes".to_owned(),
            path: format!("{} lanes that all comms to the process share", self.lanes()),
            up_seconds: since.elapsed().as_secs_f64(),
            counters: self.counters(),
            lanes,
            stuck: failure.or_else(|| (!stalled.is_empty()).then(|| stalled.join("; "))),
            ..ConnectionReport::default()
        })))
    }
}

impl Drop for LaneSet {
    fn drop(&mut self) {
        if let Some((_, registration)) = self.told.0.get() {
            registration.ended(|| Ended {
                counters: self.counters(),
                lost: self.failure().is_some(),
                refused: 0,
            });
        }
    }
}
