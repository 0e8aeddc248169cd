//! The thread that notices lanes which hang, and sees to it that dead ones come back.
//!
//! It looks at a channel ten times a second while that has sent something which the peer has not
//! placed yet, or lacks a lane; otherwise it sleeps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::loss::Lost;
use super::shared::Shared;
use super::tcp_info::{Transport, transport};

/// Between two looks.
const TICK: Duration = Duration::from_millis(100);

/// Looks further apart than this: this process was stopped, or had no core. What its lanes did
/// meanwhile, and what was said to it, is not known yet.
const REST: Duration = Duration::from_millis(500);

/// A lane on which the peer's system answers nothing is dead after this long without any movement,
/// if other lanes had some.
const STALL: Duration = Duration::from_secs(1);

/// The same where the peer's system answers, but takes no more or has everything: the peer may just be
/// slow to take it, which a dead lane would not mend. A peer whose process is silent meanwhile rests
/// as a whole, so that time does not count.
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
    looked: Instant,
}

/// When a lane last moved, and what that was judged by.
#[derive(Debug, Clone, Copy)]
struct Clock {
    since: Instant,
    oldest: Option<u64>,
    acknowledged: u64,
}

impl Clock {
    /// Whether the lane has moved since it was last looked at.
    fn moves(&mut self, now: Instant, oldest: Option<u64>, transport: Transport) -> bool {
        let moved = self.oldest != oldest || self.acknowledged != transport.acknowledged;
        self.oldest = oldest;
        self.acknowledged = transport.acknowledged;
        if moved || oldest.is_none() {
            self.since = now;
        }
        moved
    }

    /// For how long it has stood still, if that is too long. The peer was at work in this time, as
    /// far as is known.
    fn hangs(
        &self,
        now: Instant,
        transport: Transport,
        at_work: (Instant, Instant),
    ) -> Option<Duration> {
        let (since, until, limit) = if transport.is_unanswered_for(STALL) {
            (self.since, now, STALL)
        } else {
            (self.since.max(at_work.0), at_work.1, STALL_BEHIND)
        };
        let waited = until.saturating_duration_since(since);
        (waited >= limit).then_some(waited)
    }
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
        looked: Instant::now(),
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
        let rested = now.saturating_duration_since(self.looked) > REST;
        self.looked = now;
        let at_work = channel.presence.at_work(now);
        let mut owing = !channel.transmit.lingering.is_empty();
        for (lane, (clock, oldest)) in (0u16..).zip(self.lanes.iter_mut().zip(&self.oldest)) {
            owing |= oldest.is_some();
            let written = channel.transmit.next_order();
            let Some(socket) = channel.roster.socket(lane) else {
                if channel.roster.is_vacant(lane) {
                    channel.transmit.lingering.lane_gone(lane);
                }
                continue;
            };
            let transport = transport(&*socket).unwrap_or_default();
            if transport.is_drained() {
                channel.transmit.lingering.acknowledged(lane, written);
            }
            let moved = clock.moves(now, *oldest, transport);
            if rested {
                clock.since = now;
            }
            let Some(oldest) = oldest.filter(|_| !moved) else {
                continue;
            };
            // Without others that got further nothing says that this lane is the reason.
            let overtaken = channel.transmit.forgotten() > oldest;
            if let Some(waited) = clock.hangs(now, transport, at_work)
                && overtaken
                && channel.roster.live() > 1
            {
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

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: Duration = Duration::from_millis(500);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn stopped_at(since: Instant) -> Clock {
        Clock {
            since,
            oldest: Some(7),
            acknowledged: 1000,
        }
    }

    /// Everything was acknowledged, or the peer has no room: its system answers.
    fn answered() -> Transport {
        Transport {
            acknowledged: 1000,
            unsent: 1 << 20,
            sent_ago: ms(4000),
            answered_ago: ms(4000),
            ..Transport::default()
        }
    }

    /// Packets left, the last one `sent` ago, and the last answer came `heard` ago.
    fn in_flight(sent: Duration, heard: Duration) -> Transport {
        Transport {
            in_flight: 10,
            sent_ago: sent,
            answered_ago: heard,
            ..answered()
        }
    }

    #[test]
    fn a_lane_that_the_peers_system_leaves_unanswered_hangs_after_a_second() {
        let start = Instant::now();
        let (clock, now) = (stopped_at(start), start + ms(1100));
        let silent = (start, start);
        let lost = in_flight(ms(500), ms(1100));
        assert_eq!(clock.hangs(now, lost, silent), Some(ms(1100)));
        // Sent again a moment ago: the answer may be on its way.
        assert_eq!(clock.hangs(now, in_flight(ms(50), ms(1100)), silent), None);
        // A full receiver answers what is sent again, and has no room all the same.
        let now = start + ms(2900);
        assert_eq!(
            clock.hangs(now, in_flight(ms(1300), ms(1300)), silent),
            None
        );
    }

    #[test]
    fn a_lane_stands_still_only_while_the_peer_is_at_work() {
        let start = Instant::now();
        let clock = stopped_at(start);
        let now = start + 8 * STALL_BEHIND;
        // It was heard all the time.
        let waited = clock.hangs(now, answered(), (start, now));
        assert_eq!(waited, Some(8 * STALL_BEHIND));
        // It was stopped soon after the lane moved last.
        assert_eq!(clock.hangs(now, answered(), (start, start + HALF)), None);
        // It is back: the lane has as much time as before.
        let back = now - STALL_BEHIND + HALF;
        assert_eq!(clock.hangs(now, answered(), (back, now)), None);
        let later = now + HALF;
        assert_eq!(
            clock.hangs(later, answered(), (back, later)),
            Some(STALL_BEHIND)
        );
    }

    #[test]
    fn a_lane_that_moved_or_owes_nothing_starts_anew() {
        let start = Instant::now();
        let mut clock = stopped_at(start);
        let now = start + HALF;
        assert!(!clock.moves(now, Some(7), answered()));
        assert_eq!(clock.since, start);
        let further = Transport {
            acknowledged: 1001,
            ..answered()
        };
        assert!(clock.moves(now, Some(7), further));
        assert_eq!(clock.since, now);
        assert!(clock.moves(now + HALF, None, further));
        assert!(!clock.moves(now + 2 * HALF, None, further));
        assert_eq!(clock.since, now + 2 * HALF);
    }
}
