//! How a transfer is cut into chunks.

use thiserror::Error;

/// The chunks of one transfer: all of one length, only the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    bytes: u64,
    chunk_bytes: u32,
    count: u32,
}

impl ChunkPlan {
    /// Plans a transfer of `bytes` in chunks of `chunk_bytes`; 0 bytes have no chunk.
    ///
    /// # Errors
    /// When `chunk_bytes` is 0, or more than `u32::MAX` chunks would be needed.
    pub fn new(bytes: u64, chunk_bytes: u32) -> Result<Self, PlanError> {
        if chunk_bytes == 0 {
            return Err(PlanError::ZeroChunk);
        }
        let chunks = bytes.div_ceil(chunk_bytes.into());
        let count = u32::try_from(chunks).map_err(|_| PlanError::TooManyChunks {
            bytes,
            chunk_bytes,
            chunks,
        })?;
        Ok(Self {
            bytes,
            chunk_bytes,
            count,
        })
    }

    /// All chunks in order.
    pub fn chunks(self) -> impl ExactSizeIterator<Item = Chunk> {
        ChunkIterator {
            plan: self,
            next: 0,
        }
    }

    /// The chunk of this index; `None` at and after [`Self::count`].
    pub fn chunk(&self, index: u32) -> Option<Chunk> {
        if index >= self.count {
            return None;
        }
        // Below `bytes`, because `index` is below `count`.
        let offset = u64::from(index) * u64::from(self.chunk_bytes);
        let left = self.bytes - offset;
        Some(Chunk {
            index,
            offset,
            length: u32::try_from(left).map_or(self.chunk_bytes, |left| left.min(self.chunk_bytes)),
        })
    }

    /// The chunk with exactly this range; `None` when the plan has no such chunk.
    pub fn chunk_at(&self, offset: u64, length: u32) -> Option<Chunk> {
        let index = u32::try_from(offset / u64::from(self.chunk_bytes)).ok()?;
        self.chunk(index)
            .filter(|chunk| chunk.offset == offset && chunk.length == length)
    }

    /// Number of chunks.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Length of the transfer in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Length in bytes of every chunk but the last.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }
}

/// One chunk of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Index in the transfer, from 0.
    pub index: u32,
    /// Bytes of the transfer before it.
    pub offset: u64,
    /// Its bytes; at least 1.
    pub length: u32,
}

/// A transfer that cannot be cut as asked.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// Chunks of no bytes never end.
    #[error("chunk length: expected at least 1 byte, 0 arrived; set a chunk length")]
    ZeroChunk,
    /// The chunks cannot be numbered.
    #[error(
        "{bytes} bytes in chunks of {chunk_bytes} are {chunks} chunks, expected at most 4294967295; use longer chunks"
    )]
    TooManyChunks {
        /// Length of the transfer in bytes.
        bytes: u64,
        /// Length of a chunk in bytes.
        chunk_bytes: u32,
        /// Chunks this makes.
        chunks: u64,
    },
}

struct ChunkIterator {
    plan: ChunkPlan,
    next: u32,
}

impl Iterator for ChunkIterator {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let chunk = self.plan.chunk(self.next)?;
        self.next += 1;
        Some(chunk)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.plan.count - self.next) as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for ChunkIterator {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_tile_the_transfer(bytes in 0u64..1 << 40, parts in 1u64..500) {
            let chunk_bytes = (bytes / parts).clamp(1 + bytes / 10_000, u32::MAX.into()) as u32;
            let plan = ChunkPlan::new(bytes, chunk_bytes).unwrap();
            let mut end = 0;
            for (index, chunk) in (0..).zip(plan.chunks()) {
                prop_assert_eq!(chunk.index, index);
                prop_assert_eq!(chunk.offset, end);
                prop_assert!(chunk.length >= 1 && chunk.length <= chunk_bytes);
                prop_assert_eq!(plan.chunk(index), Some(chunk));
                prop_assert_eq!(plan.chunk_at(chunk.offset, chunk.length), Some(chunk));
                prop_assert_eq!(plan.chunk_at(chunk.offset, chunk.length.wrapping_add(1)), None);
                end += u64::from(chunk.length);
            }
            prop_assert_eq!(end, bytes);
            prop_assert_eq!(plan.chunk(plan.count()), None);
            prop_assert_eq!(plan.chunks().len(), plan.count() as usize);
        }
    }

    #[test]
    fn no_bytes_have_no_chunk() {
        let plan = ChunkPlan::new(0, 4096).unwrap();
        assert_eq!(plan.count(), 0);
        assert_eq!(plan.chunk(0), None);
        assert_eq!(plan.chunk_at(0, 0), None);
    }

    #[test]
    fn the_longest_plan_ends_at_its_last_byte() {
        let bytes = u64::from(u32::MAX) * u64::from(u32::MAX);
        let plan = ChunkPlan::new(bytes, u32::MAX).unwrap();
        let last = plan.chunk(u32::MAX - 1).unwrap();
        assert_eq!(last.offset + u64::from(last.length), bytes);
        assert_eq!(plan.chunk(u32::MAX), None);
        assert!(matches!(
            ChunkPlan::new(bytes + 1, u32::MAX),
            Err(PlanError::TooManyChunks {
                chunks: 4_294_967_296,
                ..
            })
        ));
        assert_eq!(ChunkPlan::new(1, 0), Err(PlanError::ZeroChunk));
    }

    #[test]
    fn a_range_off_the_grid_is_no_chunk() {
        let plan = ChunkPlan::new(10, 4).unwrap();
        assert_eq!(plan.chunk_at(8, 2).map(|chunk| chunk.index), Some(2));
        for (offset, length) in [(2, 4), (8, 4), (12, 4), (u64::MAX, 4), (0, 2)] {
            assert_eq!(plan.chunk_at(offset, length), None);
        }
    }
}
