//! A send comm's use of the lanes to its peer.

use std::sync::Arc;
use std::time::Duration;

use super::chunk::ChunkHeader;
use super::lane_set::LaneSet;
use super::outlet::Outlet;
use super::runtime::Runtime;
use crate::socket::Span;

/// Longest wait for lanes to finish a chunk of a comm that closes: a peer's loop reads whatever its
/// host program does.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// Lanes, and what keeps their loops running.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) set: Arc<LaneSet>,
    /// Held and not used: without it the loops would end.
    pub(crate) _runtime: Arc<Runtime>,
}

/// A comm's place on the lanes; dropping it gives the comm's memory back before it returns.
#[derive(Debug)]
pub(crate) struct Carriage {
    outlet: Arc<Outlet>,
    route: Route,
    chunk_bytes: usize,
}

/// A message that takes lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// The receiver's number for the comm.
    pub(crate) stream: u64,
    pub(crate) sequence: u64,
    pub(crate) payload: Span,
    /// Bytes queued before.
    pub(crate) queued: usize,
}

impl Carriage {
    /// `None` when the lanes are closing.
    pub(crate) fn new(route: Route, chunk_bytes: usize) -> Option<Self> {
        route.set.enter().then(|| Self {
            outlet: Arc::new(Outlet::new()),
            route,
            chunk_bytes,
        })
    }

    pub(crate) fn set(&self) -> &LaneSet {
        &self.route.set
    }

    pub(crate) fn outlet(&self) -> &Outlet {
        &self.outlet
    }

    /// Queues what is left of a message, as far as there is room; gives the bytes queued in all.
    pub(crate) fn queue(&self, load: Load) -> usize {
        let total = load.payload.len();
        let mut queued = load.queued;
        if queued == 0 {
            self.outlet.begin(load.sequence, total);
        }
        while queued < total {
            let rest = load.payload.from(queued);
            let len = rest.len().min(self.chunk_bytes);
            let header = ChunkHeader {
                stream: load.stream,
                sequence: load.sequence,
                offset: queued as u64,
                total: total as u64,
                // A chunk's bytes are limited far below 4 GiB.
                len: len as u32,
                // The lane decides.
                answered: false,
            };
            let chunk = self.outlet.chunk(header, rest.first(len));
            if self.route.set.push(chunk).is_err() {
                break;
            }
            queued += len;
        }
        queued
    }
}

impl Carriage {
    /// Takes the comm's memory back from the lanes; `false` when chunks were lost.
    pub(crate) fn close(&self) -> bool {
        self.outlet.close();
        if !self.outlet.wait_idle(CLOSE_WAIT) {
            // The peer's loops read nothing: half a chunk cannot be taken back, the lane can.
            self.route
                .set
                .fail("the peer takes no bytes while a comm closes".to_owned());
            self.outlet.wait_idle(CLOSE_WAIT);
        }
        self.route.set.failure().is_none()
    }
}

impl Drop for Carriage {
    fn drop(&mut self) {
        self.close();
        self.route.set.leave();
    }
}
