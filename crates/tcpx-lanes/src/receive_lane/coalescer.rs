//! What a lane leaves for later because its peer has said that more follows at once: to read what little has
//! come, and to wake whoever waits for what was read.
//!
//! A wake-up costs what reading 100 KiB does. So while the peer has plenty ready behind a chunk, the lane is
//! woken for many bytes, over the chunk's end too, and tells of several chunks at once. What the peer said counts
//! until the lane has rested for a [`NAP`] without that many bytes: then it reads what there is, tells of what it
//! has, and goes on as though nothing had been said.

use std::time::Instant;

use crate::event_loop::NAP;

/// Bytes that must wait in the socket before the lane is woken, where so many are sure to come.
const LOW_WATER: usize = 512 << 10;
/// Bytes that must be ready at the peer beside what waits here. With less it would run out of chunks before it
/// hears that it may send others: at 256 KiB with four in flight a fifth of the rate.
const BESIDE: usize = 1 << 20;
/// Bytes that are told of at once, whatever follows.
const WORTH_TELLING: usize = 4 << 20;

#[derive(Debug, Default)]
pub(super) struct ReceiveCoalescer {
    /// Bytes that the peer had ready behind the chunk whose header came last.
    behind: usize,
    /// Bytes of chunks that were read, and that nobody was woken for.
    held: usize,
    /// When the first of them was.
    held_since: Option<Instant>,
    /// Since when the lane has rested, counting on more, without as many bytes as it was to be woken for.
    rests_since: Option<Instant>,
}

impl ReceiveCoalescer {
    /// A chunk's header came, with so many bytes behind the chunk.
    pub(super) fn begin(&mut self, behind: u64) {
        self.behind = usize::try_from(behind).unwrap_or(usize::MAX);
    }

    /// A chunk of so many bytes was read to its end; whether nobody need be woken for it yet.
    pub(super) fn holds(&mut self, bytes: usize, now: impl FnOnce() -> Instant) -> bool {
        let held = self.held.saturating_add(bytes);
        if held >= WORTH_TELLING || self.behind < held.saturating_add(BESIDE) {
            self.told();
            return false;
        }
        self.held = held;
        self.held_since.get_or_insert_with(now);
        true
    }

    /// The lane takes another turn at once; whether what is held is to be told now.
    pub(super) fn goes_on(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.rests_since = None;
        let tells = self.held_since.is_some_and(|since| is_over(since, now()));
        if tells {
            self.told();
        }
        tells
    }

    /// The lane comes to rest because its owner must do something first; whether what is held is to be told now.
    pub(super) fn rest_for_owner(&mut self) -> bool {
        let tells = self.held > 0;
        *self = Self::default();
        tells
    }

    /// The lane comes to rest, with `enough` after as many bytes as it was to be woken for; whether what is held is
    /// to be told now.
    pub(super) fn rest(&mut self, enough: bool, now: impl FnOnce() -> Instant) -> bool {
        if !self.naps() {
            self.rests_since = None;
            return false;
        }
        let now = now();
        if enough {
            self.rests_since = Some(now);
        } else if is_over(*self.rests_since.get_or_insert(now), now) {
            (self.behind, self.rests_since) = (0, None);
        }
        let is_late = self.held_since.is_some_and(|since| is_over(since, now));
        let tells = self.held > 0 && (is_late || self.behind == 0);
        if tells {
            self.told();
        }
        tells
    }

    /// How many bytes must wait in the socket before the lane is woken, where enough are sure to come.
    pub(super) fn low_water(&self) -> Option<usize> {
        self.counts_on_more().then_some(LOW_WATER)
    }

    /// Whether the lane has anything to do if nothing comes.
    pub(super) fn naps(&self) -> bool {
        self.counts_on_more() || self.held > 0
    }

    fn counts_on_more(&self) -> bool {
        self.behind >= BESIDE
    }

    /// The owner knows of all that was held, or is woken for it.
    pub(super) fn told(&mut self) {
        (self.held, self.held_since) = (0, None);
    }
}

fn is_over(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= NAP
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;

    const MIB: usize = 1 << 20;
    const SOON: Duration = Duration::from_micros(100);

    struct Lane {
        coalescer: ReceiveCoalescer,
        now: Instant,
    }

    impl Lane {
        fn new(behind: usize) -> Self {
            let mut coalescer = ReceiveCoalescer::default();
            coalescer.begin(behind as u64);
            let now = Instant::now();
            Self { coalescer, now }
        }

        fn holds(&mut self, bytes: usize) -> bool {
            self.coalescer.holds(bytes, || self.now)
        }

        fn rests(&mut self, enough: bool, after: Duration) -> bool {
            self.now += after;
            self.coalescer.rest(enough, || self.now)
        }
    }

    #[test]
    fn without_a_promise_nothing_waits() {
        for behind in [0, BESIDE - 1] {
            let mut lane = Lane::new(behind);
            assert!(!lane.holds(1));
            assert!(!lane.rests(true, SOON) && !lane.coalescer.naps());
            assert_eq!(lane.coalescer.low_water(), None);
        }
    }

    #[test]
    fn chunks_are_told_of_together_while_enough_is_on_its_way() {
        let mut lane = Lane::new(100 * MIB);
        assert_eq!(lane.coalescer.low_water(), Some(LOW_WATER));
        assert!([MIB, MIB, MIB].into_iter().all(|bytes| lane.holds(bytes)));
        assert!(!lane.holds(MIB), "four are worth a wake-up");
        assert!(lane.holds(MIB), "it begins anew");
        assert!(!lane.holds(WORTH_TELLING));
        let mut less = Lane::new(BESIDE + MIB);
        assert!(less.holds(MIB / 2) && less.holds(MIB / 2));
        assert!(!less.holds(1), "the peer would run out of chunks");
        less.coalescer.begin(0);
        assert!(!less.holds(1));
    }

    #[test]
    fn a_promise_that_is_not_kept_in_time_counts_no_more_and_what_was_held_is_told() {
        let mut lane = Lane::new(4 * MIB);
        assert!(lane.holds(MIB));
        assert!(!lane.rests(true, SOON) && lane.coalescer.naps());
        assert!(!lane.rests(false, NAP / 2), "woken early");
        assert!(lane.rests(false, NAP));
        assert!(!lane.coalescer.naps());
        assert_eq!(lane.coalescer.low_water(), None);
        // The next chunk may come with another.
        lane.coalescer.begin(4 * MIB as u64);
        assert!(lane.holds(MIB));
    }

    #[test]
    fn what_is_held_is_told_in_time_though_bytes_keep_coming() {
        let mut lane = Lane::new(4 * MIB);
        assert!(lane.holds(MIB));
        let mut waited = Duration::ZERO;
        while !lane.rests(true, SOON) {
            waited += SOON;
            assert!(waited <= NAP, "it waits for ever");
        }
        assert!(lane.coalescer.naps(), "the promise is kept all the same");
        assert!(!lane.rests(true, SOON));
    }

    #[test]
    fn a_lane_that_never_rested_is_not_late() {
        let mut lane = Lane::new(4 * MIB);
        assert!(!lane.rests(false, NAP * 2));
        lane.coalescer.goes_on(|| unreachable!("nothing is held"));
        assert!(!lane.rests(false, NAP * 2));
        assert!(lane.coalescer.naps());
    }

    #[test]
    fn what_is_held_is_told_in_time_though_the_lane_never_rests() {
        let mut lane = Lane::new(4 * MIB);
        assert!(lane.holds(MIB));
        assert!(!lane.coalescer.goes_on(|| lane.now));
        assert!(lane.coalescer.goes_on(|| lane.now + NAP));
        assert!(
            !lane.coalescer.goes_on(|| lane.now + NAP * 2),
            "it was told"
        );
    }

    #[test]
    fn a_lane_that_waits_for_its_owner_tells_it_what_it_has() {
        let mut lane = Lane::new(4 * MIB);
        assert!(!lane.coalescer.rest_for_owner());
        lane.coalescer.begin(4 * MIB as u64);
        assert!(lane.holds(MIB));
        assert!(lane.coalescer.rest_for_owner() && !lane.coalescer.naps());
    }
}
