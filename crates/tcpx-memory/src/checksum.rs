//! CRC32C (Castagnoli) over bytes that arrive in pieces.

use crc_fast::{CrcAlgorithm, Digest};
use tcpx_wire::crc::polynomial::{ONE, power, times, times_x};

/// A running CRC32C.
#[derive(Debug)]
pub(crate) struct Crc32c(Digest);

impl Crc32c {
    pub(crate) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(&self) -> u32 {
        // The algorithm's width is 32 bits; the upper half is always zero.
        self.0.finalize() as u32
    }
}

/// Bytes that a block of the checksum kernel takes in one go; `kernels/crc32c_lane.h`.
const ROW: u64 = 512 * 16;
/// Rows that a thread has in flight.
const BATCH: u64 = 4;
/// x to this power is 1, so powers may be negative.
const ORDER: u64 = (1 << 31) - 1;

/// How device memory is divided among blocks of the checksum kernel, and how their sums become one
/// CRC32C.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SumPlan {
    /// Addresses of the bytes.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Where the last block ends: the next aligned address.
    pub(crate) blocks_end: u64,
    /// Rows of a block.
    pub(crate) rows: u32,
    pub(crate) blocks: u32,
}

impl SumPlan {
    /// Divides `len` bytes, at least one, at `start` among at most `blocks` blocks.
    pub(crate) fn new(start: u64, len: u64, blocks: u32) -> Self {
        let end = start + len;
        let blocks_end = end.next_multiple_of(16);
        let rows = (blocks_end - start).div_ceil(ROW);
        // Whole batches of the kernel's loads, where there are that many rows.
        let each = match rows.div_ceil(u64::from(blocks.max(1))) {
            few @ 0..=BATCH => few,
            many => many.next_multiple_of(BATCH),
        };
        Self {
            start,
            end,
            blocks_end,
            rows: each as u32,
            blocks: rows.div_ceil(each) as u32,
        }
    }

    /// What the end takes; to be made while the kernel runs.
    pub(crate) fn factors(&self) -> SumFactors {
        let behind = (self.blocks_end - self.end) * 8;
        SumFactors {
            block: Multiplier::new(power(u64::from(self.rows) * ROW * 8)),
            behind: if behind == 0 {
                ONE
            } else {
                power(ORDER - behind)
            },
            ones: times(u32::MAX, power((self.end - self.start) * 8)),
        }
    }
}

/// Factors that make one CRC32C of the blocks' sums.
pub(crate) struct SumFactors {
    /// One block further.
    block: Multiplier,
    /// The kernel saw zeros behind the bytes.
    behind: u32,
    /// It began from zero instead of from all ones.
    ones: u32,
}

impl SumFactors {
    /// The CRC32C.
    pub(crate) fn finish(&self, sums: &[u32]) -> u32 {
        let sum = sums
            .iter()
            .fold(0, |sum, block| self.block.times(sum) ^ block);
        times(sum, self.behind) ^ self.ones ^ u32::MAX
    }
}

/// A factor with its multiples.
struct Multiplier([u32; 32]);

impl Multiplier {
    fn new(mut factor: u32) -> Self {
        Self(std::array::from_fn(|_| {
            let now = factor;
            factor = times_x(factor);
            now
        }))
    }

    fn times(&self, value: u32) -> u32 {
        let terms = self.0.iter().enumerate();
        terms.fold(0, |sum, (bit, multiple)| {
            sum ^ (multiple & (value >> (31 - bit) & 1).wrapping_neg())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `tcpx_crc_tables` in `kernels/crc32c_lane.h`.
    type Tables = [u32; 4 * 256 + 4 * 512];

    unsafe extern "C" {
        fn tcpx_crc32c_prepare_host(tables: *mut u32);
        fn tcpx_crc32c_host(
            tables: *const u32,
            block: usize,
            block_end: usize,
            start: usize,
            end: usize,
        ) -> u32;
    }

    fn tables() -> Box<Tables> {
        let mut tables = Box::new([0; 4 * 256 + 4 * 512]);
        // SAFETY: the structure is as large as the C one.
        unsafe { tcpx_crc32c_prepare_host(tables.as_mut_ptr()) };
        tables
    }

    /// The kernel's blocks on the CPU.
    fn by_blocks(tables: &Tables, bytes: &[u8], blocks: u32) -> u32 {
        let start = bytes.as_ptr().expose_provenance();
        let plan = SumPlan::new(start as u64, bytes.len() as u64, blocks);
        let size = u64::from(plan.rows) * ROW;
        let sums: Vec<_> = (0..u64::from(plan.blocks))
            .map(|block| {
                let end = plan.blocks_end - (u64::from(plan.blocks) - block - 1) * size;
                // SAFETY: only the bytes between `start` and `end` are read.
                unsafe {
                    tcpx_crc32c_host(
                        tables.as_ptr(),
                        (end - size) as usize,
                        end as usize,
                        start,
                        start + bytes.len(),
                    )
                }
            })
            .collect();
        plan.factors().finish(&sums)
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as u8
        };
        (0..len).map(next).collect()
    }

    fn expected(bytes: &[u8]) -> u32 {
        let mut crc = Crc32c::new();
        crc.update(bytes);
        crc.finish()
    }

    #[test]
    fn the_kernels_threads_agree_at_every_alignment_and_length() {
        let (tables, bytes) = (tables(), noise(70_000));
        for start in 0..16 {
            for len in (1..100).chain([4096, 8191, 8192, 8193, 20_000, 65_535]) {
                let bytes = &bytes[start..start + len];
                assert_eq!(
                    by_blocks(&tables, bytes, 3),
                    expected(bytes),
                    "{len} bytes at {start}"
                );
            }
        }
        for len in 1..=8192 {
            assert_eq!(
                by_blocks(&tables, &bytes[5..5 + len], 1),
                expected(&bytes[5..5 + len])
            );
        }
    }

    #[test]
    fn many_blocks_of_many_rows_agree() {
        let (tables, bytes) = (tables(), noise(3_000_001));
        for blocks in [1, 2, 7, 132, 1000] {
            assert_eq!(
                by_blocks(&tables, &bytes[1..], blocks),
                expected(&bytes[1..])
            );
        }
    }

    #[test]
    fn the_check_value_of_crc32c() {
        let mut crc = Crc32c::new();
        crc.update(b"1234");
        crc.update(b"56789");
        assert_eq!(crc.finish(), 0xE306_9283);
    }
}
