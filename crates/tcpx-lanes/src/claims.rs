//! Which parts of a transfer its lanes have taken: each once, by one lane at a time.
//!
//! A part that is sent again is taken from the lane that has it only once that lane has let go of
//! it. One that has come is read and dropped when it comes in another attempt, be it an earlier one
//! that was late, and the peer's fault when it comes for no reason.

use std::ops::Range;

use tcpx_wire::range_set::RangeSet;

/// Most separate pieces of a transfer: what lags leaves gaps, no more than chunks are under way.
const MOST_PIECES: usize = 1 << 16;

/// The parts of one transfer that lanes have or have had: by numbers of chunks, or by places of
/// bytes.
#[derive(Debug)]
pub struct Claims<L> {
    taken: RangeSet,
    /// Those of them that came again: the lane that had one first may come back to life with it.
    again: RangeSet,
    held: Vec<Held<L>>,
}

/// A part in a lane's hands.
#[derive(Debug)]
struct Held<L> {
    lane: L,
    part: Range<u64>,
    attempt: u8,
}

/// What becomes of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claimed<L> {
    /// It is the lane's, until that has [completed](Claims::complete) it or [put it
    /// back](Claims::put_back).
    Taken,
    /// This lane has it, in an earlier attempt, and must let go first.
    HeldBy(L),
    /// It is to be dropped: another attempt took it.
    Drain,
    /// It came before, and was not sent again.
    Twice,
    /// The transfer lies in more pieces than chunks can be under way.
    Scattered,
}

impl<L> Default for Claims<L> {
    fn default() -> Self {
        Self {
            taken: RangeSet::default(),
            again: RangeSet::default(),
            held: Vec::with_capacity(4),
        }
    }
}

impl<L: Copy + PartialEq> Claims<L> {
    /// For another transfer. Nobody has a part of this one.
    pub fn clear(&mut self) {
        self.taken.clear();
        self.again.clear();
        self.held.clear();
    }

    /// A part has come over a lane, which so many lanes before died with.
    pub fn claim(&mut self, lane: L, part: Range<u64>, attempt: u8) -> Claimed<L> {
        if self.taken.overlaps(&part) {
            let overlaps = |one: &&Held<L>| one.part.start < part.end && part.start < one.part.end;
            // An older attempt that comes late supersedes nobody.
            let is_later = |one: &&Held<L>| one.attempt < attempt || attempt == u8::MAX;
            let held = self.held.iter().find(overlaps).filter(is_later);
            return match held.filter(|one| one.lane != lane) {
                Some(held) => Claimed::HeldBy(held.lane),
                None if attempt > 0 || self.again.overlaps(&part) => Claimed::Drain,
                None => Claimed::Twice,
            };
        }
        if self.taken.ranges() > MOST_PIECES {
            return Claimed::Scattered;
        }
        if attempt > 0 {
            self.again.insert(part.clone());
        }
        self.taken.insert(part.clone());
        self.held.push(Held {
            lane,
            part,
            attempt,
        });
        Claimed::Taken
    }

    /// The lane that has the part which begins there has read all of it; whether one had it.
    pub fn complete(&mut self, start: u64) -> bool {
        self.let_go(start).is_some()
    }

    /// The lane that has the part which begins there has not read all of it: it may come again.
    /// Whether one had it.
    pub fn put_back(&mut self, start: u64) -> bool {
        let held = self.let_go(start);
        held.map(|held| self.taken.remove(held.part)).is_some()
    }

    fn let_go(&mut self, start: u64) -> Option<Held<L>> {
        let at = self.held.iter().position(|one| one.part.start == start)?;
        Some(self.held.swap_remove(at))
    }

    /// The lanes that have parts, each as often as it has one.
    pub fn lanes(&self) -> impl Iterator<Item = L> {
        self.held.iter().map(|held| held.lane)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_dead_lanes_part_is_taken_once_it_let_go() {
        let mut claims = Claims::default();
        assert_eq!(claims.claim(1, 0..40, 0), Claimed::Taken);
        assert_eq!(claims.claim(2, 20..60, 0), Claimed::Twice, "they overlap");
        assert_eq!(claims.claim(2, 0..40, 1), Claimed::HeldBy(1));
        assert_eq!(claims.claim(1, 0..40, 1), Claimed::Drain, "it has it");
        assert!(claims.put_back(0) && !claims.put_back(0));
        assert_eq!(claims.claim(2, 0..40, 2), Claimed::Taken);
        assert_eq!(claims.lanes().collect::<Vec<_>>(), [2]);
        // The first lane comes back to life, amid it and after it.
        for attempt in [0, 1] {
            assert_eq!(claims.claim(1, 0..40, attempt), Claimed::Drain);
        }
        assert!(claims.complete(0) && !claims.complete(0));
        for attempt in [0, 1, 2] {
            assert_eq!(claims.claim(1, 0..40, attempt), Claimed::Drain);
        }
        assert_eq!(claims.lanes().count(), 0);
    }

    #[test]
    fn a_part_that_nobody_sent_again_cannot_come_twice() {
        let mut claims = Claims::default();
        assert_eq!(claims.claim(1, 7..8, 0), Claimed::Taken);
        assert!(claims.complete(7));
        assert_eq!(claims.claim(1, 7..8, 0), Claimed::Twice);
        assert_eq!(claims.claim(1, 7..8, 1), Claimed::Drain);
        assert_eq!(
            claims.claim(1, 7..8, 0),
            Claimed::Twice,
            "no attempt took it"
        );
        assert_eq!(claims.claim(1, 9..10, 0), Claimed::Taken);
        claims.clear();
        assert_eq!(claims.claim(1, 7..8, 0), Claimed::Taken, "another transfer");
    }

    #[test]
    fn a_transfer_that_lies_in_too_many_pieces_is_refused() {
        let mut claims = Claims::default();
        let mut claim = |at: u64| claims.claim(1, 2 * at..2 * at + 1, 0);
        for at in 0..=MOST_PIECES as u64 {
            assert_eq!(claim(at), Claimed::Taken);
        }
        assert_eq!(claim(1 << 20), Claimed::Scattered);
    }

    #[test]
    fn attempts_beyond_the_count_supersede_each_other() {
        let mut claims = Claims::default();
        assert_eq!(claims.claim(1, 0..1, u8::MAX), Claimed::Taken);
        assert_eq!(claims.claim(2, 0..1, u8::MAX), Claimed::HeldBy(1));
        assert_eq!(claims.claim(2, 0..1, u8::MAX - 1), Claimed::Drain);
    }
}
