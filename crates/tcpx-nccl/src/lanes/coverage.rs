//! Which bytes of a message have a taker.

/// Most separate pieces: lanes that lag leave gaps, a few for each chunk in flight.
const MOST_PIECES: usize = 4096;

/// Sorted pieces, from their first byte to behind their last; none touches another.
#[derive(Debug, Default)]
pub(super) struct Coverage(Vec<(u64, u64)>);

impl Coverage {
    /// Of a new message.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether a byte of a piece is there.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        let at = self.0.partition_point(|(_, end)| *end <= start);
        self.0.get(at).is_some_and(|(first, _)| *first < end)
    }

    /// Takes a piece out that was added before.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        let at = self.0.partition_point(|(_, end)| *end <= start);
        let Some((first, last)) = self.0.get(at).copied() else {
            return;
        };
        let left = (first < start).then_some((first, start));
        let right = (end < last).then_some((end, last));
        self.0.splice(at..=at, left.into_iter().chain(right));
    }

    /// Adds a piece that is not empty; `false` when a byte of it was there before, or the message is
    /// in too many pieces.
    pub(super) fn add(&mut self, start: u64, end: u64) -> bool {
        let pieces = &mut self.0;
        let at = pieces.partition_point(|(_, end)| *end < start);
        let joins_left = pieces.get(at).is_some_and(|(_, end)| *end == start);
        let right = at + usize::from(joins_left);
        let next = pieces.get(right).map(|(start, _)| *start);
        if next.is_some_and(|next| next < end) {
            return false;
        }
        match (joins_left, next == Some(end)) {
            (true, true) => {
                pieces[at].1 = pieces[right].1;
                pieces.remove(right);
            }
            (true, false) => pieces[at].1 = end,
            (false, true) => pieces[right].0 = start,
            (false, false) if pieces.len() >= MOST_PIECES => return false,
            (false, false) => pieces.insert(at, (start, end)),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_of_chunks_covers_a_message_once() {
        // By counting through all orders of six chunks of one byte.
        for number in 0..720_u64 {
            let (mut left, mut number) = ((0..6).collect::<Vec<u64>>(), number);
            let mut coverage = Coverage::default();
            while !left.is_empty() {
                let choices = left.len() as u64;
                let at = left.remove((number % choices) as usize);
                number /= choices;
                assert!(!coverage.overlaps(at, at + 1) && coverage.add(at, at + 1));
                assert!(!coverage.add(at, at + 1), "twice");
                let before = coverage.0.clone();
                coverage.remove(at, at + 1);
                assert!(!coverage.overlaps(at, at + 1) && coverage.add(at, at + 1));
                assert_eq!(coverage.0, before);
                let apart = |pair: &[(u64, u64)]| pair[0].1 < pair[1].0;
                assert!(coverage.0.windows(2).all(apart), "{coverage:?}");
            }
            assert_eq!(coverage.0, [(0, 6)]);
        }
    }

    #[test]
    fn a_piece_that_overlaps_another_is_refused() {
        let overlapping = [
            (0, 11),
            (10, 20),
            (12, 13),
            (19, 30),
            (5, 45),
            (39, 40),
            (0, 100),
        ];
        for (start, end) in overlapping {
            let mut coverage = Coverage::default();
            assert!(coverage.add(10, 20) && coverage.add(30, 40));
            assert!(
                coverage.overlaps(start, end) && !coverage.add(start, end),
                "{start}..{end}"
            );
            assert_eq!(coverage.0, [(10, 20), (30, 40)]);
        }
    }

    #[test]
    fn the_number_of_pieces_is_bounded() {
        let mut coverage = Coverage::default();
        let apart = |number: usize| number as u64 * 2;
        assert!((0..MOST_PIECES).all(|number| coverage.add(apart(number), apart(number) + 1)));
        assert!(!coverage.add(apart(MOST_PIECES), apart(MOST_PIECES) + 1));
        assert!(coverage.add(1, 2), "it closes a gap");
        coverage.clear();
        assert!(coverage.add(0, 1));
    }
}
