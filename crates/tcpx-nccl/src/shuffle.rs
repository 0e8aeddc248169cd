//! Cheap pseudo-random numbers, for the order of pages and fragments only.

/// xorshift64*; the seed decides the whole sequence.
#[derive(Clone, Debug)]
pub(crate) struct Shuffle(u64);

impl Shuffle {
    pub(crate) const fn new(seed: u64) -> Self {
        // The generator has one fixed point, zero.
        Self(if seed == 0 {
            0x9e37_79b9_7f4a_7c15
        } else {
            seed
        })
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let wide = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        // The high half times the bound: no division, and the bias does not matter here.
        let scaled = (u128::from(wide) * bound as u128) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }

    /// Puts `items` in another order.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_below_the_bound_and_reach_all_of_it() {
        let mut shuffle = Shuffle::new(1);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[shuffle.below(7)] = true;
        }
        assert_eq!(seen, [true; 7]);
        assert_eq!(shuffle.below(0), 0);
    }

    #[test]
    fn shuffling_keeps_every_item_and_changes_the_order() {
        let mut items: Vec<u32> = (0..1000).collect();
        Shuffle::new(0).shuffle(&mut items);
        assert!(items.windows(2).any(|pair| pair[0] > pair[1]));
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }
}
