//! The set of chunks one acknowledgement reports.

/// Chunks of one transfer, out of [`PlacedChunks::SPAN`] that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedChunks {
    /// The first chunk of the range.
    pub first: u32,
    /// Bit `i` stands for chunk `first + i`.
    pub bits: u64,
}

impl PlacedChunks {
    /// Chunks that a range spans.
    pub const SPAN: u32 = u64::BITS;

    /// The set of exactly one chunk.
    pub fn single(chunk: u32) -> Self {
        Self {
            first: chunk,
            bits: 1,
        }
    }

    /// The chunks in the set, ascending. What lies beyond the last number is that one, which no transfer has.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        let bits = (0..Self::SPAN).filter(move |bit| self.bits >> bit & 1 == 1);
        bits.map(move |bit| self.first.saturating_add(bit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_names_its_chunks_in_order_and_never_wraps() {
        let set = |first| PlacedChunks {
            first,
            bits: 1 | 1 << 5 | 1 << 63,
        };
        assert!(set(100).iter().eq([100, 105, 163]));
        assert!(
            set(u32::MAX - 5)
                .iter()
                .eq([u32::MAX - 5, u32::MAX, u32::MAX])
        );
        assert!(PlacedChunks::single(7).iter().eq([7]));
    }
}
