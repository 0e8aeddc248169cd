//! How a transfer is cut into chunks.

use crate::session::CHUNK_GRAIN_BYTES;

/// Chunks that become shorter towards the end of a transfer, so that all lanes are done with their
/// last ones at about the same time: some of half the full length, then as many of a quarter, and
/// so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Taper {
    halvings: u8,
    each: u16,
}

impl Taper {
    /// Most lengths below the full one.
    pub const MAX_HALVINGS: u8 = 8;
    /// Most chunks of each of these lengths.
    pub const MAX_EACH: u16 = 1024;

    /// `each` chunks of each of `halvings` lengths; `None` where a number is 0 or above its bound.
    pub const fn new(halvings: u8, each: u16) -> Option<Self> {
        if halvings == 0 || halvings > Self::MAX_HALVINGS || each == 0 || each > Self::MAX_EACH {
            return None;
        }
        Some(Self { halvings, each })
    }

    /// Lengths below the full one.
    pub const fn halvings(self) -> u8 {
        self.halvings
    }

    /// Chunks of each length.
    pub const fn each(self) -> u16 {
        self.each
    }

    /// Bytes of all shorter chunks behind those of `chunk_bytes`; `None` where they are not of
    /// whole grains.
    pub fn bytes(self, chunk_bytes: u32) -> Option<u64> {
        (chunk_bytes > 0 && chunk_bytes.is_multiple_of(CHUNK_GRAIN_BYTES << self.halvings))
            .then(|| self.bytes_of(chunk_bytes, self.halvings))
    }

    /// Bytes of the first so many lengths.
    fn bytes_of(self, chunk_bytes: u32, lengths: u8) -> u64 {
        // A half, a quarter, and so on: a whole without what is left of it.
        u64::from(self.each) * u64::from(chunk_bytes - (chunk_bytes >> lengths))
    }

    fn chunks(self) -> u32 {
        u32::from(self.halvings) * u32::from(self.each)
    }
}

/// The chunks of one transfer: all of one length, only the last may be shorter; or tapered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    bytes: u64,
    chunk_bytes: u32,
    taper: Option<Taper>,
    /// Bytes before the taper, and their chunks, of which the last may be shorter.
    body: u64,
    body_chunks: u32,
}

impl ChunkPlan {
    /// Plans a transfer of `bytes` in chunks of `chunk_bytes`; 0 bytes have no chunk. `None` where
    /// `chunk_bytes` is 0, more than `u32::MAX` chunks would be needed, or the taper does not fit:
    /// it is longer than the transfer, or its chunks are not of whole grains.
    pub fn new(bytes: u64, chunk_bytes: u32, taper: Option<Taper>) -> Option<Self> {
        if chunk_bytes == 0 {
            return None;
        }
        let body = match taper {
            None => bytes,
            Some(taper) => {
                let body = bytes.checked_sub(taper.bytes(chunk_bytes)?)?;
                // Shorter chunks begin at a grain, and the last of them is shorter by what that
                // takes.
                body.next_multiple_of(CHUNK_GRAIN_BYTES.into())
            }
        };
        let body_chunks = body.div_ceil(chunk_bytes.into());
        let chunks = body_chunks + u64::from(taper.map_or(0, Taper::chunks));
        u32::try_from(chunks).ok()?;
        Some(Self {
            bytes,
            chunk_bytes,
            taper,
            body,
            // No more than all.
            body_chunks: body_chunks as u32,
        })
    }

    /// Without a taper, of a transfer that is known to need no more chunks than can be numbered.
    pub fn even(bytes: u64, chunk_bytes: u32) -> Self {
        let chunks = bytes.div_ceil(chunk_bytes.max(1).into());
        Self {
            bytes,
            chunk_bytes,
            taper: None,
            body: bytes,
            body_chunks: u32::try_from(chunks).unwrap_or(u32::MAX),
        }
    }

    /// How a transfer of `bytes`, at most as many as this one's and at least 1, is cut that goes
    /// where this one would: alike if it is as long, else without a taper.
    pub fn for_total(&self, bytes: u64) -> Self {
        match bytes == self.bytes {
            true => *self,
            false => Self::even(bytes, self.chunk_bytes),
        }
    }

    /// Length in bytes of the chunks before the taper.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The shorter chunks at the end.
    pub fn taper(&self) -> Option<Taper> {
        self.taper
    }

    /// Number of chunks.
    pub fn count(&self) -> u32 {
        self.body_chunks + self.taper.map_or(0, Taper::chunks)
    }

    /// Length of the transfer in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where the chunk of this index, which is below [`Self::count`], begins, and how long it is.
    pub fn range(&self, index: u32) -> (u64, u32) {
        let whole = self.chunk_bytes;
        let (offset, length, end) = match (self.taper, index.checked_sub(self.body_chunks)) {
            (Some(taper), Some(behind)) => {
                let each = u32::from(taper.each);
                // Bounded by the number of lengths.
                let longer = (behind / each).min(u32::from(taper.halvings) - 1) as u8;
                let length = whole >> (longer + 1);
                let before = taper.bytes_of(whole, longer);
                let place = u64::from(behind - u32::from(longer) * each);
                let offset = self.body + before + place * u64::from(length);
                (offset, length, self.bytes)
            }
            _ => (u64::from(index) * u64::from(whole), whole, self.body),
        };
        let left = end.saturating_sub(offset);
        let length = u32::try_from(left).map_or(length, |left| left.min(length));
        (offset, length)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every chunk begins where the one before ended, and the last ends the transfer.
    fn check_tiles(plan: &ChunkPlan) -> Result<(), TestCaseError> {
        let mut end = 0;
        for index in 0..plan.count() {
            let (offset, length) = plan.range(index);
            prop_assert_eq!(offset, end, "chunk {}", index);
            prop_assert!(length >= 1 && length <= plan.chunk_bytes);
            end += u64::from(length);
        }
        prop_assert_eq!(end, plan.bytes());
        Ok(())
    }

    proptest! {
        #[test]
        fn chunks_tile_the_transfer(bytes in 0u64..1 << 40, parts in 1u64..500) {
            let chunk_bytes = (bytes / parts).clamp(1 + bytes / 10_000, u32::MAX.into()) as u32;
            check_tiles(&ChunkPlan::new(bytes, chunk_bytes, None).unwrap())?;
        }

        #[test]
        fn tapered_chunks_tile_the_transfer(
            extra in 0u64..1 << 26, halvings in 1u8..=8, each in 1u16..100, grains in 1u32..4,
        ) {
            let taper = Taper::new(halvings, each).unwrap();
            let chunk_bytes = (CHUNK_GRAIN_BYTES << halvings) * grains;
            let tail = taper.bytes(chunk_bytes).unwrap();
            let plan = ChunkPlan::new(tail + extra, chunk_bytes, Some(taper)).unwrap();
            check_tiles(&plan)?;
            for behind in 0..taper.chunks() {
                let (offset, length) = plan.range(plan.body_chunks + behind);
                prop_assert_eq!(offset % u64::from(CHUNK_GRAIN_BYTES), 0);
                let full = chunk_bytes >> (behind / u32::from(each) + 1);
                prop_assert!(length == full || behind + 1 == taper.chunks());
                prop_assert!(full - length < CHUNK_GRAIN_BYTES);
            }
        }
    }

    #[test]
    fn no_bytes_have_no_chunk() {
        assert_eq!(ChunkPlan::new(0, 4096, None).unwrap().count(), 0);
    }

    #[test]
    fn the_longest_plan_ends_at_its_last_byte() {
        let bytes = u64::from(u32::MAX) * u64::from(u32::MAX);
        let plan = ChunkPlan::new(bytes, u32::MAX, None).unwrap();
        let (offset, length) = plan.range(u32::MAX - 1);
        assert_eq!(offset + u64::from(length), bytes);
        assert_eq!(ChunkPlan::new(bytes + 1, u32::MAX, None), None);
        assert_eq!(ChunkPlan::new(1, 0, None), None);
    }

    #[test]
    fn a_transfer_ends_with_halves_and_quarters() {
        let plan = ChunkPlan::new(100_000, 16_384, Taper::new(2, 3)).unwrap();
        let lengths: Vec<u32> = (0..plan.count()).map(|index| plan.range(index).1).collect();
        // The last is shorter by what a whole grain at the body's end takes.
        let tail = [8192, 8192, 8192, 4096, 4096, 1696];
        assert_eq!(lengths, [[16_384; 4].as_slice(), &tail].concat());
    }

    #[test]
    fn a_taper_that_does_not_fit_is_refused() {
        for (halvings, each) in [(0, 1), (9, 1), (1, 0), (1, 1025)] {
            assert_eq!(Taper::new(halvings, each), None);
        }
        let taper = Taper::new(2, 3);
        for (bytes, chunk_bytes) in [(36_863, 16_384), (u64::MAX, 8192), (1 << 20, 20_480)] {
            let refused = ChunkPlan::new(bytes, chunk_bytes, taper);
            assert_eq!(refused, None, "{bytes}");
        }
        assert_eq!(ChunkPlan::new(36_864, 16_384, taper).unwrap().count(), 6);
    }
}
