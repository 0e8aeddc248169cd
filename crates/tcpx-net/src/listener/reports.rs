//! Log lines about strangers, at a bounded rate.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Lines per period; what is beyond is counted.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(1);
const EXHAUSTED_PERIOD: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Reports {
    period: Instant,
    lines: u32,
    suppressed: u64,
    /// When the lack of descriptors was told last.
    exhausted: Option<Instant>,
}

impl Reports {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            period: now,
            lines: 0,
            suppressed: 0,
            exhausted: None,
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
            *self = Self {
                exhausted: self.exhausted,
                ..Self::new(now)
            };
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
