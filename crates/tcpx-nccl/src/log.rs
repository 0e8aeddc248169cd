//! Lines for the host's logger, a bounded number a second.

use std::time::Instant;

use nccl_net::constants::{level, subsystem};
use nccl_net::export::HostLogger;
use nccl_net::{RateLimiter, Verdict};

/// Lines a second; the rest is counted.
const LINES_PER_SECOND: u32 = 20;

/// The host's logger behind a rate limit. Callable from any thread.
#[derive(Debug)]
pub(crate) struct Log {
    logger: HostLogger,
    limiter: RateLimiter,
    start: Instant,
}

impl Log {
    pub(crate) fn new(logger: HostLogger) -> Self {
        Self {
            logger,
            limiter: RateLimiter::new(LINES_PER_SECOND),
            start: Instant::now(),
        }
    }

    pub(crate) fn warn(&self, text: &str) {
        self.line(level::WARN, text);
    }

    pub(crate) fn info(&self, text: &str) {
        self.line(level::INFO, text);
    }

    fn line(&self, level: std::ffi::c_int, text: &str) {
        let second = self.start.elapsed().as_secs();
        let Verdict::Pass { suppressed } = self.limiter.check(second) else {
            return;
        };
        let text = if suppressed == 0 {
            format!("NET/TCPX : {text}")
        } else {
            format!("NET/TCPX : {text} ({suppressed} lines before this one were dropped)")
        };
        self.logger
            .log(level, subsystem::INIT | subsystem::NET, c"tcpx", 0, &text);
    }
}
