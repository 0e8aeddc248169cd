//! CRC32C of two parts from that of each: bytes that two checksums cover are read once.
//!
//! A CRC is a polynomial over GF(2) modulo the generator; `n` bytes behind a part multiply its CRC by
//! x^8n. With a table for that factor the product costs a few look-ups. Making the table takes longer than
//! reading a short part again, so there is one only for a length that keeps coming.

use super::polynomial::{power, times_x};
use super::{crc32c, crc32c_of_parts};

/// Shorter parts are read again: that takes no longer than the product.
const WORTH_IT: usize = 512;
/// Parts in a row of one length after which more of them are expected.
const USUAL: u8 = 16;

/// Makes the CRC32C of parts that follow each other, and keeps what the next ones of the same length need.
#[derive(Debug, Default)]
pub(crate) struct Joiner {
    /// Length of the last second part, and how many in a row have had it.
    length: usize,
    row: u8,
    /// For that length, once it is usual.
    shift: Option<Box<Shift>>,
}

impl Joiner {
    /// CRC32C of `first` and `second` behind it, where that of `second` is known.
    pub(crate) fn with_known(&mut self, first: &[u8], second: &[u8], of_second: u32) -> u32 {
        match self.shift_by(second.len()) {
            Some(shift) => shift.times(crc32c(first)) ^ of_second,
            None => crc32c_of_parts(&[first, second]),
        }
    }

    /// CRC32C of `first` and `second` behind it, and of `second` alone where that takes no longer.
    pub(crate) fn of_both(&mut self, first: &[u8], second: &[u8]) -> (u32, Option<u32>) {
        match self.shift_by(second.len()) {
            Some(shift) => {
                let of_second = crc32c(second);
                (shift.times(crc32c(first)) ^ of_second, Some(of_second))
            }
            None => (crc32c_of_parts(&[first, second]), None),
        }
    }

    /// The factor for so many bytes, if they are worth it and usual.
    fn shift_by(&mut self, length: usize) -> Option<&Shift> {
        if length < WORTH_IT {
            return None;
        }
        if length != self.length {
            self.length = length;
            self.row = 0;
            self.shift = None;
        }
        if self.shift.is_none() {
            self.row += 1;
            if self.row < USUAL {
                return None;
            }
            self.shift = Some(Box::new(Shift::by(length)));
        }
        self.shift.as_deref()
    }
}

/// Multiples of a factor: of each value of each half byte, the lowest first.
#[derive(Debug)]
struct Shift([[u32; 16]; 8]);

impl Shift {
    /// By so many bytes.
    fn by(bytes: usize) -> Self {
        let mut multiple = power(8 * bytes as u64);
        let mut table = [[0; 16]; 8];
        for half in table.iter_mut().rev() {
            for bit in [8, 4, 2, 1] {
                for (value, sum) in half.iter_mut().enumerate() {
                    if value & bit != 0 {
                        *sum ^= multiple;
                    }
                }
                multiple = times_x(multiple);
            }
        }
        Self(table)
    }

    fn times(&self, value: u32) -> u32 {
        let halves = self.0.iter().enumerate();
        halves.fold(0, |sum, (at, half)| {
            sum ^ half[(value >> (4 * at) & 15) as usize]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::polynomial::times;
    use super::*;
    use proptest::prelude::*;

    fn joiner_used_to(length: usize) -> Joiner {
        let mut joiner = Joiner::default();
        for _ in 0..USUAL {
            joiner.shift_by(length);
        }
        joiner
    }

    proptest! {
        #[test]
        fn joined_sums_are_those_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), WORTH_IT..20_000),
            at in any::<prop::sample::Index>(),
            known in any::<bool>(),
        ) {
            let (first, second) = bytes.split_at(at.index(bytes.len()));
            let mut joiner = joiner_used_to(second.len());
            let whole = if known {
                joiner.with_known(first, second, crc32c(second))
            } else {
                let (whole, of_second) = joiner.of_both(first, second);
                prop_assert_eq!(of_second.is_some(), second.len() >= WORTH_IT);
                prop_assert!(of_second.is_none_or(|sum| sum == crc32c(second)));
                whole
            };
            prop_assert_eq!(whole, crc32c(&bytes));
        }

        #[test]
        fn a_joiner_is_right_whatever_lengths_follow_each_other(
            lengths in prop::collection::vec((0usize..2000, 1u8..2 * USUAL), 1..10),
            known in any::<bool>(),
        ) {
            let bytes: Vec<u8> = (0..2100u32).map(|at| (at * 37 % 251) as u8).collect();
            let mut joiner = Joiner::default();
            for (length, times) in lengths {
                let (first, second) = bytes[..length + 33].split_at(33);
                for _ in 0..times {
                    let whole = match known {
                        true => joiner.with_known(first, second, crc32c(second)),
                        false => joiner.of_both(first, second).0,
                    };
                    prop_assert_eq!(whole, crc32c(&bytes[..length + 33]));
                }
            }
        }

        #[test]
        fn a_table_agrees_with_plain_products(length in 0usize..1 << 40, value in any::<u32>()) {
            prop_assert_eq!(Shift::by(length).times(value), times(value, power(8 * length as u64)));
        }
    }

    #[test]
    fn only_a_length_that_keeps_coming_is_prepared_for() {
        let mut joiner = Joiner::default();
        for length in (WORTH_IT..).take(2 * usize::from(USUAL)) {
            assert!(joiner.shift_by(length).is_none());
        }
        let mut joiner = joiner_used_to(4096);
        assert!(joiner.shift_by(4096).is_some());
        assert!(joiner.shift_by(WORTH_IT - 1).is_none());
        assert!(
            joiner.shift_by(4096).is_some(),
            "a short one between is none"
        );
        assert!(joiner.shift_by(4097).is_none());
        assert!(joiner.shift_by(4096).is_none());
    }
}
