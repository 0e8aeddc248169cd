//! Is a lane dead, or does its peer rest? One judgement for every group of lanes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::lane_group::Done;
use crate::monitor::TICK;
use crate::tcp_info::Transport;

/// Within this time a system answers a packet, however little room it has.
const ANSWER: Duration = Duration::from_millis(200);

/// A lane on which the peer's system answers nothing is dead after this long without any movement,
/// if other lanes had some.
const STALL: Duration = Duration::from_secs(1);

/// The same where the peer's system answers, but takes no more or has everything: the peer may just
/// be slow to take it, which a dead lane would not fix. A peer whose process is silent meanwhile
/// rests as a whole, so that time does not count.
pub const STALL_BEHIND: Duration = Duration::from_secs(3);

/// That is doubled each time, up to this, until the peer has read something of the lane: it may
/// have no memory to read to.
pub const LONGEST_STALL: Duration = Duration::from_secs(60);

/// When a lane last moved, and what that was judged by.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    since: Instant,
    oldest: Option<u64>,
    acknowledged: u64,
    /// When the peer's system last answered.
    answered: Instant,
    /// Tries of the oldest packet that had been made by then.
    tries: u8,
    /// Since when there is one that it has not answered.
    unanswered: Option<Instant>,
    /// How long it may stall.
    patience: Duration,
    /// Chunks that the peer had read when that was last changed.
    read: u64,
}

impl Clock {
    /// Of a lane that has moved just now.
    pub fn new(now: Instant) -> Self {
        Self {
            since: now,
            oldest: None,
            acknowledged: 0,
            answered: now,
            tries: 0,
            unanswered: None,
            patience: STALL_BEHIND,
            read: 0,
        }
    }

    /// Looks at a lane that has done so much: for how long it has stalled, if it is dead. The peer
    /// was `at_work` then; this process `rested` until now, perhaps with the machine, whose clock
    /// went on.
    pub fn check_lane(
        &mut self,
        now: Instant,
        done: Done,
        transport: Transport,
        rested: bool,
        at_work: (Instant, Instant),
    ) -> Option<Duration> {
        if self.read != done.acknowledged {
            (self.read, self.patience) = (done.acknowledged, STALL_BEHIND);
        }
        self.moves(now, done.owes(), transport);
        if rested {
            self.rested(now);
        }
        self.dead(now, at_work).inspect(|_| self.given_up())
    }

    /// Another stream takes the place of the lane's: that one may stall for longer.
    pub fn given_up(&mut self) {
        self.patience = (self.patience * 2).min(LONGEST_STALL);
    }

    /// Whether it has moved since it was last looked at.
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

    /// What it did before is no matter.
    pub fn rested(&mut self, now: Instant) {
        (self.since, self.unanswered) = (now, None);
    }

    /// For how long it has stalled, if that is too long. The peer was at work in this time, as
    /// far as is known.
    fn hangs(&self, now: Instant, at_work: (Instant, Instant)) -> Option<Duration> {
        let is_silent = self
            .unanswered
            .is_some_and(|since| now.saturating_duration_since(since) >= ANSWER);
        let (since, until, limit) = if is_silent {
            (self.since, now, STALL)
        } else {
            (self.since.max(at_work.0), at_work.1, self.patience)
        };
        let waited = until.saturating_duration_since(since);
        (waited >= limit).then_some(waited)
    }

    /// For how long the lane has stalled, if it is dead: that is too long, and the way is the
    /// reason, and not the peer, which was heard since over another one.
    fn dead(&self, now: Instant, at_work: (Instant, Instant)) -> Option<Duration> {
        self.hangs(now, at_work)
            .filter(|_| at_work.1 > self.since + ANSWER)
    }

    /// For how long it has stalled, be it the peer's fault.
    pub fn stands(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// Whether that is too long.
    pub fn is_doubtful(&self, now: Instant) -> bool {
        self.stands(now) >= self.patience
    }
}

/// When the peer's process was last heard. Its system answers for it while it is stopped, so that
/// only what it says by itself tells a lane that hangs from a peer that rests.
#[derive(Debug)]
pub struct PeerLiveness {
    origin: Instant,
    /// Microseconds from the origin; 0: never.
    heard: AtomicU64,
    /// When it was first heard after it had rested.
    back: AtomicU64,
}

impl Default for PeerLiveness {
    fn default() -> Self {
        Self::new()
    }
}

impl PeerLiveness {
    /// Of a peer that was not heard yet.
    pub fn new() -> Self {
        Self {
            origin: Instant::now(),
            heard: AtomicU64::new(0),
            back: AtomicU64::new(0),
        }
    }

    /// It was heard now; `rested`: after a silence that a process at work does not keep.
    pub fn note(&self, rested: bool) {
        let now = u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX);
        let now = now.max(1);
        if rested {
            self.back.store(now, Ordering::Relaxed);
        }
        // Behind the other: whoever sees that it was heard sees that it had rested.
        self.heard.store(now, Ordering::Release);
    }

    /// From when until when it was at work, as far as is known; `now` where nobody tells.
    pub fn at_work(&self, now: Instant) -> (Instant, Instant) {
        let at = |micros| self.origin + Duration::from_micros(micros);
        match self.heard.load(Ordering::Acquire) {
            0 => (self.origin, now),
            heard => (at(self.back.load(Ordering::Relaxed)), at(heard)),
        }
    }
}

#[cfg(all(test, not(loom)))]
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
    fn an_unanswered_lane_hangs_after_a_second() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        let silent = (start, start);
        let now = looked_at(&mut clock, start, 0..1000, |passed| (tries(passed).0, 0));
        assert_eq!(clock.hangs(now, silent), None);
        let now = looked_at(&mut clock, start, 1000..1200, |passed| (tries(passed).0, 0));
        assert_eq!(clock.hangs(now, silent), Some(ms(1100)));
    }

    #[test]
    fn an_idle_lane_without_a_route_hangs_after_a_second() {
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
    fn a_full_receiver_that_answers_half_does_not_hang() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        for passed in (0..2900).step_by(100) {
            let now = start + ms(passed);
            // Asked after 200, 600 and 1400 ms; of two within half a second only the first is
            // answered.
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
    fn a_full_receiver_that_answers_does_not_hang() {
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
    fn a_lane_is_dead_only_where_the_peer_was_heard() {
        let start = Instant::now();
        let clock = Clock {
            oldest: Some(7),
            ..Clock::new(start)
        };
        let now = start + 2 * STALL_BEHIND;
        let dead = |heard| clock.dead(now, (start, heard));
        assert_eq!(dead(now), Some(2 * STALL_BEHIND));
        assert_eq!(dead(start), None, "the peer rests");
        assert!(clock.is_doubtful(start + STALL_BEHIND) && !clock.is_doubtful(start));
    }

    #[test]
    fn a_lane_of_which_nothing_is_read_is_given_up_later_each_time() {
        let mut now = Instant::now();
        let mut clock = Clock::new(now);
        let mut done = Done {
            moves: 1,
            taken: 1,
            acknowledged: 0,
        };
        let mut dead_after = |clock: &mut Clock, done: Done| {
            clock.rested(now);
            for after in 1.. {
                now += TICK;
                let at_work = (now - Duration::from_secs(600), now);
                let transport = at(1000, 10, 0, TICK);
                if clock
                    .check_lane(now, done, transport, false, at_work)
                    .is_some()
                {
                    return after * TICK;
                }
            }
            unreachable!()
        };
        for seconds in [3, 6, 12, 24, 48, 60, 60] {
            let waited = dead_after(&mut clock, done);
            assert!(
                waited.abs_diff(ms(seconds * 1000)) <= 2 * TICK,
                "{waited:?}"
            );
        }
        done.taken += 1;
        done.acknowledged += 1;
        assert!(dead_after(&mut clock, done) <= STALL_BEHIND + 2 * TICK);
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
