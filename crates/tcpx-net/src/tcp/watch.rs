//! The thread that notices lanes which hang, and sees to it that dead ones come back.
//!
//! It looks at a channel ten times a second while that has sent something which the peer has not
//! placed yet, or lacks a lane; otherwise it sleeps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::loss::Lost;
use super::shared::Shared;
use super::tcp_info::transport;

/// Between two looks.
const TICK: Duration = Duration::from_millis(100);

/// A lane whose bytes the peer's system does not acknowledge is dead after this long without any
/// movement, if other lanes had some.
const STALL: Duration = Duration::from_secs(1);

/// The same where the peer's system acknowledged everything, or has no room for more: the peer may
/// just be slow to take it, which a dead lane would not mend.
const STALL_BEHIND: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
struct State {
    channels: Vec<Watched>,
    /// There is something to look at.
    awake: bool,
    running: bool,
}

#[derive(Debug)]
struct Watched {
    channel: Weak<Shared>,
    lanes: Vec<Clock>,
    oldest: Vec<Option<u64>>,
}

/// When a lane last moved, and what that was judged by.
#[derive(Debug, Clone, Copy)]
struct Clock {
    since: Instant,
    oldest: Option<u64>,
    acknowledged: u64,
}

#[derive(Debug)]
struct Watch {
    state: Mutex<State>,
    changed: Condvar,
}

static WATCH: Watch = Watch {
    state: Mutex::new(State {
        channels: Vec::new(),
        awake: false,
        running: false,
    }),
    changed: Condvar::new(),
};

/// Whether a channel is looked at; kept in the channel, so that posting costs no lock.
#[derive(Debug, Default)]
pub(super) struct Attention(AtomicBool);

impl Attention {
    /// After something was posted: has the thread look at the channel unless it does already.
    pub(super) fn draw(&self) {
        if !self.0.swap(true, Ordering::SeqCst) {
            wake();
        }
    }

    /// Before looking; whatever was posted before is seen, whatever comes later draws again.
    fn lower(&self) {
        self.0.swap(false, Ordering::SeqCst);
    }
}

/// Watches a channel until it is dropped.
///
/// # Errors
/// The system has no thread left.
pub(super) fn register(channel: &Arc<Shared>) -> std::io::Result<()> {
    let lanes = usize::from(channel.roster.lanes());
    let clock = Clock {
        since: Instant::now(),
        oldest: None,
        acknowledged: 0,
    };
    let mut state = WATCH.lock();
    if !state.running {
        std::thread::Builder::new()
            .name("tcpx-watch".to_owned())
            .spawn(|| WATCH.run())?;
        state.running = true;
    }
    state.channels.push(Watched {
        channel: Arc::downgrade(channel),
        lanes: vec![clock; lanes],
        oldest: vec![None; lanes],
    });
    Ok(())
}

/// Has every channel looked at soon.
pub(super) fn wake() {
    let mut state = WATCH.lock();
    state.awake = true;
    drop(state);
    WATCH.changed.notify_one();
}

impl Watch {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let mut state = self.lock();
            while !state.awake {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            state.awake = false;
            let mut channels = std::mem::take(&mut state.channels);
            drop(state);
            let mut busy = false;
            channels.retain_mut(|watched| {
                let Some(channel) = watched.channel.upgrade() else {
                    return false;
                };
                busy |= watched.look(&channel);
                true
            });
            let mut state = self.lock();
            state.channels.append(&mut channels);
            if busy {
                // A wake-up meanwhile only makes the next look an early one.
                let (mut state, _) = self
                    .changed
                    .wait_timeout(state, TICK)
                    .unwrap_or_else(PoisonError::into_inner);
                state.awake = true;
            }
        }
    }
}

impl Watched {
    /// True while the channel is to be looked at again soon.
    fn look(&mut self, channel: &Arc<Shared>) -> bool {
        channel.attention.lower();
        if channel.is_over() {
            return false;
        }
        let repairing = channel.repair.advance(channel);
        channel.transmit.oldest_by_lane(&mut self.oldest);
        let now = Instant::now();
        let mut owing = false;
        for (lane, (clock, oldest)) in (0u16..).zip(self.lanes.iter_mut().zip(&self.oldest)) {
            owing |= oldest.is_some();
            let Some(socket) = channel.roster.socket(lane) else {
                continue;
            };
            let transport = transport(&*socket).unwrap_or_default();
            let moved = clock.oldest != *oldest || clock.acknowledged != transport.acknowledged;
            clock.oldest = *oldest;
            clock.acknowledged = transport.acknowledged;
            let Some(oldest) = oldest.filter(|_| !moved) else {
                clock.since = now;
                continue;
            };
            let limit = if transport.in_flight > 0 {
                STALL
            } else {
                STALL_BEHIND
            };
            let waited = now.saturating_duration_since(clock.since);
            // Without others that got further nothing says that this lane is the reason.
            let overtaken = channel.transmit.forgotten() > oldest;
            if waited >= limit && overtaken && channel.roster.live() > 1 {
                channel.lane_lost_only(lane, Some(&socket), Lost::Stalled(waited));
            }
        }
        if owing {
            // Spares the posters a wake-up: this channel is looked at again anyway.
            channel.attention.0.store(true, Ordering::SeqCst);
        }
        owing || repairing
    }
}
