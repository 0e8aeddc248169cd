//! Tables by numbers that this side counts itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// As nobody else chooses the keys, they need no hashing that withstands an attack, which takes
/// longer than everything else about finding an entry.
pub type Numbered<K, V> = HashMap<K, V, BuildHasherDefault<Spread>>;

/// Entries that an empty table keeps its room for.
const KEPT: usize = 4096;

/// Takes an entry out, and gives the memory of a burst back with the last one.
pub fn take_out<K: Eq + Hash, V>(table: &mut Numbered<K, V>, key: &K) -> Option<V> {
    let taken = table.remove(key);
    if table.is_empty() && table.capacity() > 2 * KEPT {
        table.shrink_to(KEPT);
    }
    taken
}

/// Spreads numbers that follow each other over all bits.
#[derive(Debug, Default)]
pub struct Spread(u64);

/// 2^64 divided by the golden ratio.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        // A table looks at the lowest and at the highest bits.
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(FACTOR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn an_empty_table_keeps_no_room_for_a_burst() {
        let mut table = Numbered::default();
        for entries in [KEPT, 20 * KEPT] {
            table.extend((0..entries).map(|number| (number, ())));
            for number in 0..entries {
                assert_eq!(take_out(&mut table, &number), Some(()));
            }
            assert!((KEPT..=2 * KEPT).contains(&table.capacity()));
        }
    }

    #[test]
    fn numbers_in_a_row_share_neither_low_nor_high_bits() {
        let of = |number: u64| {
            let mut spread = Spread::default();
            spread.write_u64(number);
            spread.finish()
        };
        for step in [1, 2, 1 << 20] {
            let hashes: Vec<u64> = (0..128).map(|number| of(number * step)).collect();
            let distinct = |part: fn(u64) -> u64| {
                let parts: HashSet<u64> = hashes.iter().map(|hash| part(*hash)).collect();
                parts.len()
            };
            assert!(distinct(|hash| hash) == 128, "step {step}");
            assert!(distinct(|hash| hash & 0xff) > 64, "step {step}");
            assert!(distinct(|hash| hash >> 57) > 64, "step {step}");
        }
    }
}
