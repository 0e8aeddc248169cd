//! Log lines about strangers, at a bounded rate.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Lines per period; what is beyond is counted.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Reports {
    period: Instant,
    lines: u32,
    suppressed: u64,
}

impl Reports {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            period: now,
            lines: 0,
            suppressed: 0,
        }
    }

    /// One line about a connection that was turned away.
    pub(super) fn refused(
        &mut self,
        now: Instant,
        peer: SocketAddr,
        reason: &dyn std::fmt::Display,
    ) {
        if now.saturating_duration_since(self.period) >= PERIOD {
            if self.suppressed > 0 {
                tracing::warn!(
                    connections = self.suppressed,
                    "more connections were refused"
                );
            }
            *self = Self::new(now);
        }
        if self.lines < LINES {
            self.lines += 1;
            tracing::warn!(%peer, %reason, "connection refused");
        } else {
            self.suppressed += 1;
        }
    }
}
