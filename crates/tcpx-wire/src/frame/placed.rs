//! The set of chunks one acknowledgement reports.

use thiserror::Error;

const WORDS: usize = PlacedChunks::MAX_COUNT as usize / 64;

/// A set of chunk indices of one transfer inside a range of at most
/// [`PlacedChunks::MAX_COUNT`] chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedChunks {
    first: u32,
    count: u16,
    /// Bit `i` stands for chunk `first + i`; bits at and above `count` are zero.
    bits: [u64; WORDS],
}

impl PlacedChunks {
    /// Most chunks a range spans.
    pub const MAX_COUNT: u16 = 1024;

    /// An empty set over the chunks `first .. first + count`.
    ///
    /// # Errors
    /// When `count` is 0 or above [`Self::MAX_COUNT`], or the range passes `u32::MAX`.
    pub fn new(first: u32, count: u16) -> Result<Self, InvalidPlaced> {
        if count == 0 || count > Self::MAX_COUNT {
            return Err(InvalidPlaced::Count { arrived: count });
        }
        if first.checked_add(u32::from(count) - 1).is_none() {
            return Err(InvalidPlaced::Range { first, count });
        }
        Ok(Self {
            first,
            count,
            bits: [0; WORDS],
        })
    }

    /// The set of exactly one chunk.
    pub fn single(chunk: u32) -> Self {
        let mut bits = [0; WORDS];
        bits[0] = 1;
        Self {
            first: chunk,
            count: 1,
            bits,
        }
    }

    /// Adds a chunk; `false` when it lies outside the range (the set is then unchanged).
    pub fn insert(&mut self, chunk: u32) -> bool {
        match self.index(chunk) {
            Some(index) => {
                self.bits[index / 64] |= 1 << (index % 64);
                true
            }
            None => false,
        }
    }

    /// Whether the chunk is in the set.
    pub fn contains(&self, chunk: u32) -> bool {
        self.index(chunk)
            .is_some_and(|index| self.bits[index / 64] >> (index % 64) & 1 == 1)
    }

    /// First chunk of the range.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// Chunks the range spans, in the set or not.
    pub fn count(&self) -> u16 {
        self.count
    }

    /// Number of chunks in the set.
    pub fn len(&self) -> u32 {
        self.bits.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether the set holds no chunk.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|word| *word == 0)
    }

    /// The chunks in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let first = self.first;
        (0u32..).zip(self.bits).flat_map(move |(word, bits)| {
            let mut rest = bits;
            std::iter::from_fn(move || {
                if rest == 0 {
                    return None;
                }
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                Some(first + word * 64 + bit)
            })
        })
    }

    /// Reads the set from its bitmap, least significant bit of the first byte first.
    pub(super) fn from_bitmap(
        first: u32,
        count: u16,
        bitmap: &[u8],
    ) -> Result<Self, InvalidPlaced> {
        let mut set = Self::new(first, count)?;
        for (index, byte) in bitmap.iter().enumerate() {
            if let Some(word) = set.bits.get_mut(index / 8) {
                *word |= u64::from(*byte) << (index % 8 * 8);
            }
        }
        // Bits at and above `count` would name chunks outside the range.
        let stray = set.bits.iter().enumerate().any(|(word, bits)| {
            let kept = usize::from(count).saturating_sub(word * 64);
            kept < 64 && bits >> kept != 0
        });
        if stray {
            return Err(InvalidPlaced::StrayBits { count });
        }
        Ok(set)
    }

    /// Bytes of the bitmap of a range of `count` chunks.
    pub(super) fn bitmap_bytes(count: u16) -> usize {
        usize::from(count).div_ceil(8)
    }

    /// The bitmap, least significant bit of the first byte first.
    pub(super) fn bitmap(&self) -> impl Iterator<Item = u8> + '_ {
        self.bits
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .take(Self::bitmap_bytes(self.count))
    }

    fn index(&self, chunk: u32) -> Option<usize> {
        let index = chunk.checked_sub(self.first)?;
        (index < u32::from(self.count)).then_some(index as usize)
    }
}

/// A range that cannot be a set of placed chunks.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum InvalidPlaced {
    /// The range's length is out of bounds.
    #[error("placed: expected a range of 1 to 1024 chunks, {arrived} arrived; split the range")]
    Count {
        /// The length given.
        arrived: u16,
    },
    /// The range passes the last possible chunk.
    #[error("placed: {count} chunks from {first} pass the last possible chunk 4294967295")]
    Range {
        /// First chunk.
        first: u32,
        /// Chunks spanned.
        count: u16,
    },
    /// A bit at or above the range's length is set.
    #[error("placed: the bitmap marks chunks beyond its own range of {count}")]
    StrayBits {
        /// Chunks spanned.
        count: u16,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_was_inserted_in_order() {
        let mut set = PlacedChunks::new(100, 1024).unwrap();
        for chunk in [100, 163, 164, 1123, 500] {
            assert!(set.insert(chunk));
        }
        assert!(!set.insert(99) && !set.insert(1124));
        assert_eq!(set.iter().collect::<Vec<_>>(), [100, 163, 164, 500, 1123]);
        assert_eq!(set.len(), 5);
        assert!(set.contains(500) && !set.contains(501) && !set.contains(0));
    }

    #[test]
    fn a_range_out_of_bounds_is_refused() {
        assert_eq!(
            PlacedChunks::new(0, 0),
            Err(InvalidPlaced::Count { arrived: 0 })
        );
        assert_eq!(
            PlacedChunks::new(0, 1025),
            Err(InvalidPlaced::Count { arrived: 1025 })
        );
        assert!(PlacedChunks::new(u32::MAX, 1).is_ok());
        assert_eq!(
            PlacedChunks::new(u32::MAX, 2),
            Err(InvalidPlaced::Range {
                first: u32::MAX,
                count: 2
            })
        );
    }

    #[test]
    fn the_bitmap_reads_back_and_stray_bits_are_refused() {
        for count in [1, 7, 8, 9, 64, 65, 1000, 1024] {
            let mut set = PlacedChunks::new(7, count).unwrap();
            set.insert(7);
            set.insert(7 + u32::from(count) / 2);
            set.insert(6 + u32::from(count));
            let mut bitmap: Vec<u8> = set.bitmap().collect();
            assert_eq!(PlacedChunks::from_bitmap(7, count, &bitmap), Ok(set));
            if count % 8 != 0 {
                *bitmap.last_mut().unwrap() |= 0x80;
                assert_eq!(
                    PlacedChunks::from_bitmap(7, count, &bitmap),
                    Err(InvalidPlaced::StrayBits { count })
                );
            }
        }
    }

    #[test]
    fn a_single_chunk_at_the_very_end() {
        let set = PlacedChunks::single(u32::MAX);
        assert_eq!(set.iter().collect::<Vec<_>>(), [u32::MAX]);
        assert!(!set.is_empty());
    }
}
