//! Log lines about strangers, at a bounded rate.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tcpx_lanes::lock;

use super::Inner;
use crate::peer::Peer;

/// Lines per period; what is beyond is counted.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(1);
const EXHAUSTED_PERIOD: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Reports {
    inner: Arc<Inner>,
    period: Instant,
    lines: u32,
    suppressed: u64,
    /// When the lack of descriptors was told last.
    exhausted: Option<Instant>,
}

impl Reports {
    pub(super) fn new(inner: Arc<Inner>, now: Instant) -> Self {
        Self {
            inner,
            period: now,
            lines: 0,
            suppressed: 0,
            exhausted: None,
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
        if now.saturating_duration_since(self.period) >= PERIOD {
            if self.suppressed > 0 {
                tracing::warn!(
                    connections = self.suppressed,
                    "more connections were refused"
                );
            }
            (self.period, self.lines, self.suppressed) = (now, 0, 0);
        }
        if self.lines < LINES {
            self.lines += 1;
            tracing::warn!(%peer, %reason, "connection refused");
        } else {
            self.suppressed += 1;
        }
    }

    /// One line, now and then, about the system that has no descriptor for another connection.
    pub(super) fn exhausted(&mut self, now: Instant, error: &std::io::Error) {
        let told = self.exhausted;
        if told.is_none_or(|told| now.saturating_duration_since(told) >= EXHAUSTED_PERIOD) {
            self.exhausted = Some(now);
            tracing::warn!(
                %error,
                "no descriptor for another connection; raise the limit (ulimit -n)"
            );
        }
    }
}
