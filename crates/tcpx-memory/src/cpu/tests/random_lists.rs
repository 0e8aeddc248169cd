//! Random scatter lists for tests on the CPU and, with the same seed, on a GPU:
//! `examples/gpu_check` includes this file.

use tcpx_wire::Descriptor;

/// A small, fast source of numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % limit
    }

    /// The next list: lengths, alignments and gaps of any kind, in any order, from `pool` bytes to
    /// at most `room`, of which the last 64 stay free.
    pub(crate) fn list(&mut self, pool: usize, room: usize) -> Vec<Descriptor> {
        let longest = [16, 64, 600, 4096, 8192][self.below(5)];
        let count = 1 + self.below(24);
        let mut end = self.below(64);
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            let length = 1 + self.below(longest);
            let at = end + [0, self.below(40)][self.below(2)];
            end = at + length;
            if end + 64 > room {
                break;
            }
            list.push(Descriptor {
                source_offset: self.below(pool - length) as u32,
                length: length as u32,
                destination_offset: at as u64,
            });
        }
        if self.below(2) == 0 {
            for last in (1..list.len()).rev() {
                list.swap(last, self.below(last + 1));
            }
        }
        list
    }
}
