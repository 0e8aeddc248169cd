//! Log lines about strangers, at a bounded rate.

use std::sync::Arc;
use std::time::Instant;

use tcpx_lanes::door::LineQuota;
use tcpx_lanes::lock;

use super::Inner;
use crate::peer::Peer;

#[derive(Debug)]
pub(super) struct Reports {
    inner: Arc<Inner>,
    lines: LineQuota,
}

impl Reports {
    pub(super) fn new(inner: Arc<Inner>, now: Instant) -> Self {
        Self {
            inner,
            lines: LineQuota::new(now),
        }
    }

    /// Counts a connection that was turned away, and says so on one line.
    pub(super) fn refused(
        &mut self,
        now: Instant,
        peer: impl Into<Peer>,
        reason: &dyn std::fmt::Display,
    ) {
        let peer = peer.into();
        let mut refusals = lock(&self.inner.refusals);
        refusals.count += 1;
        if let Some(name) = peer.key {
            // As many names as there are keys: nobody has one that is not let in.
            *refusals.by_name.entry(name).or_default() += 1;
        }
        refusals.last = Some((peer, reason.to_string()));
        drop(refusals);
        let (is_line, suppressed) = self.lines.take(now);
        if let Some(connections) = suppressed {
            tracing::warn!(connections, "more connections were refused");
        }
        if is_line {
            tracing::warn!(%peer, %reason, "connection refused");
        }
    }
}
