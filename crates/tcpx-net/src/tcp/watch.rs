//! What the monitor does for a channel: it notices lanes which hang, and sees to it that dead ones come back.
//!
//! It looks at a channel ten times a second while that has sent something which the peer has not
//! placed yet, lacks a lane to dial, or has none at all; otherwise it sleeps.

use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use tcpx_lanes::monitor::{Attention, Look, Monitor, REST, TICK, Watched};
use tcpx_lanes::tcp_info::{Transport, transport};

use super::loss::Lost;
use super::pace::Paces;
use super::shared::Shared;

/// Microseconds and bytes that tell a lane's speed, and microseconds that do with any bytes.
const LEAST_BUSY: (u64, u64) = (20_000, 500_000);
const LEAST_BYTES: u64 = 64 << 10;

/// Within this time a system answers a packet, however little room it has.
const ANSWER: Duration = Duration::from_millis(200);

/// A lane on which the peer's system answers nothing is dead after this long without any movement,
/// if other lanes had some.
const STALL: Duration = Duration::from_secs(1);

/// The same where the peer's system answers, but takes no more or has everything: the peer may just be
/// slow to take it, which a dead lane would not mend. A peer whose process is silent meanwhile rests
/// as a whole, so that time does not count.
const STALL_BEHIND: Duration = Duration::from_secs(3);

#[derive(Debug)]
struct ChannelWatch {
    channel: Weak<Shared>,
    lanes: Vec<Clock>,
    oldest: Vec<Option<u64>>,
    looked: Instant,
    /// Since when there has been no lane.
    bare: Option<Instant>,
}

/// When a lane last moved, and what that was judged by.
#[derive(Debug, Clone, Copy)]
struct Clock {
    since: Instant,
    oldest: Option<u64>,
    acknowledged: u64,
    /// When the peer's system last answered.
    answered: Instant,
    /// Bytes that had been acknowledged, and microseconds with something under way, when the lane's
    /// speed was last known.
    paced: (u64, u64),
    /// Tries of the oldest packet that had been made by then.
    tries: u8,
    /// Since when there is one that it has not answered.
    unanswered: Option<Instant>,
}

impl Clock {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            oldest: None,
            acknowledged: 0,
            answered: now,
            paced: (0, 0),
            tries: 0,
            unanswered: None,
        }
    }

    /// Whether the lane has moved since it was last looked at.
    fn moves(&mut self, now: Instant, oldest: Option<u64>, transport: Transport) -> bool {
        let moved = self.oldest != oldest || self.acknowledged != transport.acknowledged;
        self.oldest = oldest;
        self.acknowledged = transport.acknowledged;
        if moved || oldest.is_none() {
            self.since = now;
        }
        let answered = now.checked_sub(transport.answered_ago).unwrap_or(now);
        let again = answered > self.answered + TICK / 2;
        if moved || again || transport.is_drained() {
            (self.answered, self.tries, self.unanswered) = (answered, transport.vain_tries(), None);
        } else if transport.vain_tries() > self.tries {
            self.unanswered.get_or_insert(now);
        }
        moved
    }

    /// This process was stopped until now, perhaps with the machine, whose clock went on.
    fn rested(&mut self, now: Instant) {
        (self.since, self.unanswered) = (now, None);
    }

    /// Says how fast the lane was while it had something under way, once that is known.
    fn paces(&mut self, paces: &Paces, lane: u16, transport: Transport) {
        let (bytes, micros) = self.paced;
        let bytes = transport.acknowledged.saturating_sub(bytes);
        let busy = transport.busy_micros.saturating_sub(micros);
        let is_known = busy >= LEAST_BUSY.0 && bytes >= LEAST_BYTES || busy >= LEAST_BUSY.1;
        if is_known {
            paces.measured(lane, bytes, busy);
            self.paced = (transport.acknowledged, transport.busy_micros);
        } else if transport.is_drained() {
            paces.rested(lane);
        }
    }

    /// For how long it has stood still, if that is too long. The peer was at work in this time, as
    /// far as is known.
    fn hangs(&self, now: Instant, at_work: (Instant, Instant)) -> Option<Duration> {
        let is_silent = self
            .unanswered
            .is_some_and(|since| now.saturating_duration_since(since) >= ANSWER);
        let (since, until, limit) = if is_silent {
            (self.since, now, STALL)
        } else {
            (self.since.max(at_work.0), at_work.1, STALL_BEHIND)
        };
        let waited = until.saturating_duration_since(since);
        (waited >= limit).then_some(waited)
    }
}

static MONITOR: LazyLock<Monitor> = LazyLock::new(|| Monitor::new("tcpx-watch"));

/// For one channel.
pub(super) fn attention() -> Attention {
    MONITOR.attention()
}

/// Watches a channel until it is dropped.
///
/// # Errors
/// The system has no thread left.
pub(super) fn register(channel: &Arc<Shared>) -> std::io::Result<()> {
    let lanes = usize::from(channel.roster.lanes());
    let now = Instant::now();
    MONITOR.watch(Box::new(ChannelWatch {
        channel: Arc::downgrade(channel),
        lanes: vec![Clock::new(now); lanes],
        oldest: vec![None; lanes],
        looked: now,
        bare: None,
    }))
}

/// Has every channel looked at soon.
pub(super) fn wake() {
    MONITOR.wake();
}

impl Watched for ChannelWatch {
    fn look(&mut self) -> Look {
        match self.channel.upgrade() {
            None => Look::Gone,
            Some(channel) if self.look_at(&channel) => Look::In(TICK),
            Some(_) => Look::Asleep,
        }
    }
}

impl ChannelWatch {
    /// True while the channel is to be looked at again soon.
    fn look_at(&mut self, channel: &Arc<Shared>) -> bool {
        channel.attention.lower();
        if channel.is_over() {
            return false;
        }
        let repairing = channel.repair.advance(channel);
        channel.transmit.oldest_by_lane(&mut self.oldest);
        let now = Instant::now();
        let looked = std::mem::replace(&mut self.looked, now);
        let rested = now.saturating_duration_since(looked) > REST;
        if channel.roster.live() > 0 {
            self.bare = None;
        } else if rested || self.bare.is_none() {
            self.bare = Some(now);
        } else if self
            .bare
            .is_some_and(|since| now >= since + channel.dead_after)
        {
            channel.end_without_lanes();
            return false;
        }
        let at_work = channel.presence.at_work(now);
        let mut owing = self.bare.is_some();
        for (lane, (clock, oldest)) in (0u16..).zip(self.lanes.iter_mut().zip(&self.oldest)) {
            owing |= oldest.is_some();
            let Some(socket) = channel.roster.socket(lane) else {
                clock.paced = (0, 0);
                continue;
            };
            let transport = transport(&*socket).unwrap_or_default();
            clock.paces(&channel.paces, lane, transport);
            let moved = clock.moves(now, *oldest, transport);
            if rested {
                clock.rested(now);
            }
            let Some(oldest) = oldest.filter(|_| !moved) else {
                continue;
            };
            // That the way is the reason, and not the peer, other lanes say, which got further, or the peer, which
            // was heard since.
            let overtaken = channel.transmit.forgotten() > oldest && channel.roster.live() > 1;
            if let Some(waited) = clock.hangs(now, at_work)
                && (overtaken || at_work.1 > clock.since + ANSWER)
            {
                channel.lane_lost_only(lane, Some(&socket), Lost::Stalled(waited));
            }
        }
        if channel.transmit.has_queued() {
            // Should one that others rely on stand still, those that left work to it look again.
            owing = true;
            channel.wake_sender(0);
        }
        if owing {
            // Spares the posters a wake-up: this channel is looked at again anyway.
            channel.attention.keep();
        }
        owing || repairing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A lane with bytes under way of which the peer's system has acknowledged so many.
    fn at(acknowledged: u64, in_flight: u32, tries: u8, answered_ago: Duration) -> Transport {
        Transport {
            acknowledged,
            in_flight,
            unsent: 1 << 20,
            packet: 1448,
            tries,
            answered_ago,
            ..Transport::default()
        }
    }

    /// Looks at a lane from the first millisecond to the last, ten times a second; `tell` says how
    /// often its oldest packet was sent again by then, and when that was last answered.
    fn looked_at(
        clock: &mut Clock,
        start: Instant,
        span: std::ops::Range<u64>,
        tell: impl Fn(u64) -> (u8, u64),
    ) -> Instant {
        let mut now = start;
        for passed in span.step_by(100) {
            now = start + ms(passed);
            let (tries, answered) = tell(passed);
            clock.moves(now, Some(7), at(1000, 10, tries, ms(passed - answered)));
        }
        now
    }

    /// Packets are sent again after 200, 600, 1400 and 3000 ms.
    fn tries(passed: u64) -> (u8, u64) {
        let sent = [200, 600, 1400, 3000];
        let done = sent.iter().filter(|at| **at <= passed).count();
        let last = if done == 0 { 0 } else { sent[done - 1] };
        (done as u8, last)
    }

    #[test]
    fn a_lane_that_the_peers_system_leaves_unanswered_hangs_after_a_second() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        let silent = (start, start);
        let now = looked_at(&mut clock, start, 0..1000, |passed| (tries(passed).0, 0));
        assert_eq!(clock.hangs(now, silent), None);
        let now = looked_at(&mut clock, start, 1000..1200, |passed| (tries(passed).0, 0));
        assert_eq!(clock.hangs(now, silent), Some(ms(1100)));
    }

    #[test]
    fn a_lane_that_lost_its_route_before_anything_was_under_way_hangs_after_a_second_too() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        let mut now = start;
        for passed in (0..1200).step_by(100) {
            now = start + ms(passed);
            let transport = at(1000, 0, tries(passed).0, ms(passed));
            clock.moves(now, Some(7), transport);
        }
        assert_eq!(clock.hangs(now, (start, start)), Some(ms(1100)));
    }

    #[test]
    fn a_receiver_without_room_that_leaves_every_other_question_unanswered_does_not_hang() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        for passed in (0..2900).step_by(100) {
            let now = start + ms(passed);
            // Asked after 200, 600 and 1400 ms; of two within half a second only the first is answered.
            let (tries, answered) = match passed {
                ..200 => (0, 0),
                200..600 => (0, 200),
                600..1400 => (1, 200),
                _ => (0, 1400),
            };
            clock.moves(now, Some(7), at(1000, 0, tries, ms(passed - answered)));
            assert_eq!(clock.hangs(now, (start, start)), None, "after {passed} ms");
        }
    }

    #[test]
    fn a_full_receiver_that_answers_what_is_sent_again_does_not_hang() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        for end in (100..5000).step_by(100) {
            let now = looked_at(&mut clock, start, end..end + 1, tries);
            assert_eq!(clock.hangs(now, (start, start)), None, "after {end} ms");
        }
    }

    #[test]
    fn a_lane_stands_still_only_while_the_peer_is_at_work() {
        let start = Instant::now();
        let clock = Clock {
            oldest: Some(7),
            ..Clock::new(start)
        };
        let now = start + 8 * STALL_BEHIND;
        // It was heard all the time.
        assert_eq!(clock.hangs(now, (start, now)), Some(8 * STALL_BEHIND));
        // It was stopped soon after the lane moved last.
        assert_eq!(clock.hangs(now, (start, start + STALL)), None);
        // It is back: the lane has as much time as before.
        let back = now - STALL_BEHIND + STALL;
        assert_eq!(clock.hangs(now, (back, now)), None);
        let later = now + STALL;
        assert_eq!(clock.hangs(later, (back, later)), Some(STALL_BEHIND));
    }

    #[test]
    fn a_lane_that_nobody_looked_at_has_its_time_anew() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        let silent = |passed| (tries(passed).0, 0);
        looked_at(&mut clock, start, 0..900, silent);
        let back = start + 8 * STALL;
        clock.rested(back);
        assert_eq!(clock.hangs(back, (start, back)), None);
        // It owes an answer as before.
        let now = looked_at(&mut clock, start, 8000..9100, silent);
        assert_eq!(clock.hangs(now, (start, start)), Some(STALL));
    }

    #[test]
    fn a_lane_that_moved_or_owes_nothing_starts_anew() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        let stands = at(1000, 0, 0, ms(0));
        assert!(clock.moves(start, Some(7), stands));
        let now = start + STALL;
        assert!(!clock.moves(now, Some(7), stands));
        assert_eq!(clock.since, start);
        let further = at(1001, 0, 0, ms(0));
        assert!(clock.moves(now, Some(7), further));
        assert_eq!(clock.since, now);
        assert!(clock.moves(now + STALL, None, further));
        assert!(!clock.moves(now + 2 * STALL, None, further));
        assert_eq!(clock.since, now + 2 * STALL);
    }
}
