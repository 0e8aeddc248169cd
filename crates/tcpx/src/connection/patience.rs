//! Callers and an engine that may hang inside foreign code: nobody waits for its lock without end.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tcpx_lanes::lock;
use tcpx_net::ChannelStats;

use super::shared::{Locked, Shared};
use crate::error::Error;

/// Least and longest time in one turn after which the engine counts as stuck; networks promise not
/// to block.
const STUCK_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(20));
/// Pause between looks at the lock.
const PAUSE: Duration = Duration::from_micros(20);
/// Longest time that the engine's thread leaves its lock to callers.
const LOCK_YIELD: Duration = Duration::from_micros(200);

/// What becomes of callers while the engine works.
#[derive(Debug)]
pub(crate) struct Patience {
    /// The network calls foreign code, which only the engine's thread may be inside of.
    pub(super) foreign: bool,
    /// Time in one turn after which the engine counts as stuck.
    limit: Duration,
    /// Callers that look at the lock.
    waiting: AtomicUsize,
    /// What was last known of the channels.
    statistics: Mutex<ChannelStats>,
}

impl Patience {
    /// A call of foreign code that outlasts `stall`, a transfer's limit, is stuck, within reason.
    pub(crate) fn new(foreign: bool, stall: Duration) -> Self {
        Self {
            foreign,
            limit: if foreign {
                stall.clamp(STUCK_AFTER.0, STUCK_AFTER.1)
            } else {
                STUCK_AFTER.1
            },
            waiting: AtomicUsize::new(0),
            statistics: Mutex::default(),
        }
    }
}

impl Shared {
    /// The engine's lock, unless the engine is stuck.
    pub(super) fn lock_in_time(&self) -> Result<Locked<'_>, Error> {
        self.check_process()?;
        if !self.patience.foreign {
            return Ok(self.lock());
        }
        self.patience.waiting.fetch_add(1, Ordering::Relaxed);
        let found = loop {
            if let Some(core) = self.try_lock() {
                break Ok(core);
            }
            if let Some(stuck) = self.stuck() {
                break Err(stuck);
            }
            std::thread::sleep(PAUSE);
        };
        self.patience.waiting.fetch_sub(1, Ordering::Relaxed);
        found
    }

    /// Leaves the lock to callers that look for it: the engine's thread would have it again before
    /// they see it free.
    pub(super) fn make_way(&self) {
        if self.patience.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let since = Instant::now();
        while self.patience.waiting.load(Ordering::Relaxed) > 0 && since.elapsed() < LOCK_YIELD {
            std::thread::yield_now();
        }
    }

    pub(super) fn statistics(&self) -> ChannelStats {
        if self.is_inherited() {
            return ChannelStats::default();
        }
        let core = self.lock_in_time();
        let mut known = lock(&self.patience.statistics);
        if let Ok(core) = core {
            *known = core.statistics();
        }
        *known
    }

    /// Why the goodbye has not ended within `limit`, without waiting for an engine that is stuck.
    pub(super) fn unfinished_goodbye(&self, limit: Duration) -> Error {
        let stuck = match self.try_lock() {
            Some(mut core) => {
                core.clock.tick();
                core.stuck_close()
            }
            None => self.stuck(),
        };
        stuck.unwrap_or_else(|| Error::TimedOut {
            peer: self.peer.name(),
            what: "the goodbye",
            limit,
        })
    }

    /// How long the engine has been inside one call, if that is too long.
    pub(crate) fn stuck(&self) -> Option<Error> {
        let since = self.working_since.load(Ordering::Relaxed);
        if since == 0 {
            return None;
        }
        let stuck = self
            .origin
            .elapsed()
            .saturating_sub(Duration::from_micros(since));
        (stuck > self.patience.limit).then_some(Error::EngineStuck {
            peer: self.peer.name(),
            stuck,
        })
    }
}
