//! Contents that two processes can make from one number, so that every byte can be compared at the
//! far end.

/// Weyl step of the generator; words are a mix of `seed + step * index`, so any range can be made
/// alone.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A reproducible stream of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    seed: u64,
}

/// The first byte that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset} is {arrived:#04x}, expected {expected:#04x}")]
pub struct Difference {
    /// Its place in the stream.
    pub offset: u64,
    /// What it should be.
    pub expected: u8,
    /// What it is.
    pub arrived: u8,
}

impl Pattern {
    /// The stream that this number makes.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Writes the bytes of the stream that begin at `offset`.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        let (mut at, mut rest) = (offset, out);
        while !rest.is_empty() {
            let word = self.word(at / 8).to_le_bytes();
            let skip = usize::from(at.to_le_bytes()[0] & 7);
            let count = (8 - skip).min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&word[skip..skip + count]);
            rest = later;
            at += count as u64;
            if at.is_multiple_of(8) {
                let (words, tail) = rest.as_chunks_mut::<8>();
                for (index, chunk) in words.iter_mut().enumerate() {
                    *chunk = self.word(at / 8 + index as u64).to_le_bytes();
                }
                at += words.len() as u64 * 8;
                rest = tail;
            }
        }
    }

    /// Compares every byte of `arrived`, which should be the stream from `offset` on.
    ///
    /// # Errors
    /// The first byte that differs.
    pub fn compare(self, offset: u64, arrived: &[u8]) -> Result<(), Difference> {
        const BLOCK: usize = 4096;
        let mut expected = [0; BLOCK];
        for (index, block) in arrived.chunks(BLOCK).enumerate() {
            let at = offset + (index * BLOCK) as u64;
            let expected = &mut expected[..block.len()];
            self.fill(at, expected);
            if expected == block {
                continue;
            }
            let wrong = expected
                .iter()
                .zip(block)
                .enumerate()
                .find(|(_, (a, b))| a != b);
            if let Some((place, (&expected, &arrived))) = wrong {
                return Err(Difference {
                    offset: at + place as u64,
                    expected,
                    arrived,
                });
            }
        }
        Ok(())
    }

    fn word(self, index: u64) -> u64 {
        let mut value = self
            .seed
            .wrapping_add(STEP.wrapping_mul(index.wrapping_add(1)));
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_equals_the_same_range_of_the_whole() {
        let pattern = Pattern::new(7);
        let mut whole = vec![0; 10_000];
        pattern.fill(0, &mut whole);
        for (from, to) in [
            (0, 0),
            (0, 1),
            (1, 2),
            (3, 21),
            (8, 16),
            (4093, 8200),
            (9_999, 10_000),
        ] {
            let mut part = vec![0; to - from];
            pattern.fill(from as u64, &mut part);
            assert_eq!(part, whole[from..to], "{from}..{to}");
            assert_eq!(pattern.compare(from as u64, &part), Ok(()));
        }
    }

    #[test]
    fn one_wrong_bit_is_found_where_it_is() {
        let pattern = Pattern::new(1);
        let mut bytes = vec![0; 9_001];
        pattern.fill(5, &mut bytes);
        for place in [0, 1, 4095, 4096, 9_000] {
            bytes[place] ^= 1;
            let found = pattern.compare(5, &bytes).expect_err("a difference");
            assert_eq!(found.offset, place as u64 + 5);
            assert_eq!(found.expected ^ found.arrived, 1);
            bytes[place] ^= 1;
        }
    }

    #[test]
    fn different_seeds_and_shifted_streams_differ() {
        let mut bytes = vec![0; 64];
        Pattern::new(1).fill(0, &mut bytes);
        assert!(Pattern::new(2).compare(0, &bytes).is_err());
        assert!(Pattern::new(1).compare(8, &bytes).is_err());
    }

    #[test]
    fn offsets_beyond_four_gib_are_not_wrapped() {
        let (mut low, mut high) = ([0; 16], [0; 16]);
        Pattern::new(3).fill(0, &mut low);
        Pattern::new(3).fill(1 << 32, &mut high);
        assert_ne!(low, high);
    }
}
