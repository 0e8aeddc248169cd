//! A set of chunk indices that fills up from the front.

use std::collections::VecDeque;

/// Chunk indices of one transfer. Memory is proportional to the distance between the first missing
/// chunk and the last present one, not to the transfer.
#[derive(Clone, Debug, Default)]
pub(super) struct ChunkSet {
    /// Words before `words` are full.
    full_words: usize,
    words: VecDeque<u64>,
    len: u32,
}

impl ChunkSet {
    /// Adds a chunk; `false` when it was in the set.
    pub(super) fn insert(&mut self, chunk: u32) -> bool {
        let (word, bit) = Self::position(chunk);
        let Some(word) = word.checked_sub(self.full_words) else {
            return false;
        };
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        if self.words[word] & bit != 0 {
            return false;
        }
        self.words[word] |= bit;
        self.len += 1;
        while self.words.front() == Some(&u64::MAX) {
            self.words.pop_front();
            self.full_words += 1;
        }
        true
    }

    pub(super) fn contains(&self, chunk: u32) -> bool {
        let (word, bit) = Self::position(chunk);
        self.word(word) & bit != 0
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first chunk that is not in the set.
    pub(super) fn first_missing(&self) -> u64 {
        let open = self.words.iter().position(|word| *word != u64::MAX);
        let word = self.full_words + open.unwrap_or(self.words.len());
        word as u64 * 64 + u64::from(self.word(word).trailing_ones())
    }

    /// The chunks of this set that are not in `other`, ascending.
    pub(super) fn difference<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u32> + 'a {
        let end = self.full_words + self.words.len();
        (other.full_words..end).flat_map(move |word| {
            let mut rest = self.word(word) & !other.word(word);
            std::iter::from_fn(move || {
                if rest == 0 {
                    return None;
                }
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                // Every index came in as u32.
                Some((word as u32) << 6 | bit)
            })
        })
    }

    fn word(&self, word: usize) -> u64 {
        match word.checked_sub(self.full_words) {
            None => u64::MAX,
            Some(word) => self.words.get(word).copied().unwrap_or(0),
        }
    }

    fn position(chunk: u32) -> (usize, u64) {
        ((chunk >> 6) as usize, 1 << (chunk & 63))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set(
            first in prop::collection::vec(0u32..400, 0..600),
            second in prop::collection::vec(0u32..400, 0..600),
        ) {
            let (mut a, mut b) = (ChunkSet::default(), ChunkSet::default());
            let (mut model_a, mut model_b) = (BTreeSet::new(), BTreeSet::new());
            for chunk in first {
                prop_assert_eq!(a.insert(chunk), model_a.insert(chunk));
                let missing = (0u64..).find(|c| !model_a.contains(&(*c as u32))).unwrap();
                prop_assert_eq!(a.first_missing(), missing);
            }
            for chunk in second {
                prop_assert_eq!(b.insert(chunk), model_b.insert(chunk));
            }
            prop_assert_eq!(a.len() as usize, model_a.len());
            prop_assert_eq!(a.is_empty(), model_a.is_empty());
            for chunk in 0..500 {
                prop_assert_eq!(a.contains(chunk), model_a.contains(&chunk));
            }
            let difference: Vec<u32> = model_a.difference(&model_b).copied().collect();
            prop_assert_eq!(a.difference(&b).collect::<Vec<_>>(), difference);
        }
    }

    #[test]
    fn a_set_that_fills_in_order_stays_small() {
        let mut set = ChunkSet::default();
        for chunk in 0..1_000_000 {
            assert!(set.insert(chunk));
            assert!(set.words.len() <= 1);
        }
        assert!(!set.insert(3) && set.contains(3));
        assert_eq!(set.first_missing(), 1_000_000);
    }
}
