//! Bytes that say where they belong.
//!
//! Every 8 bytes of a transfer are a one-to-one scramble of (seed, transfer, position). What is
//! found at a wrong place can therefore be named: bytes of which transfer, from which offset.

/// Bits of the position, in words, within a scrambled word; the rest number the transfer.
const POSITION_BITS: u32 = 40;
/// Bytes of a word.
const WORD: usize = 8;

/// Contents of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    key: u64,
    transfer: u64,
}

impl Content {
    /// Contents of transfer `number` (24 bits) under `seed`.
    pub fn new(seed: u64, number: u64) -> Self {
        assert!(number < 1 << (u64::BITS - POSITION_BITS), "24 bits");
        Self {
            key: scramble(seed),
            transfer: number << POSITION_BITS,
        }
    }

    fn word(self, position: u64) -> [u8; WORD] {
        scramble(self.key ^ (self.transfer | position)).to_le_bytes()
    }

    /// Writes the bytes from `offset` (a multiple of 8) on.
    pub fn fill(self, offset: u64, bytes: &mut [u8]) {
        let mut position = first_word(offset);
        let (words, rest) = bytes.as_chunks_mut::<WORD>();
        for word in words {
            *word = self.word(position);
            position += 1;
        }
        rest.copy_from_slice(&self.word(position)[..rest.len()]);
    }

    /// Compares with the bytes from `offset` (a multiple of 8) on; says what is wrong first.
    pub fn difference(self, offset: u64, bytes: &[u8]) -> Option<String> {
        let mut position = first_word(offset);
        let (words, rest) = bytes.as_chunks::<WORD>();
        for word in words {
            let expected = self.word(position);
            if *word != expected {
                return Some(self.describe(position, &expected, word));
            }
            position += 1;
        }
        let expected = self.word(position);
        (rest != &expected[..rest.len()]).then(|| self.describe(position, &expected, rest))
    }

    fn describe(self, position: u64, expected: &[u8], arrived: &[u8]) -> String {
        let origin = <[u8; WORD]>::try_from(arrived)
            .ok()
            .map(|word| unscramble(u64::from_le_bytes(word)) ^ self.key)
            .map(|name| (name >> POSITION_BITS, name % (1 << POSITION_BITS) * 8))
            // A word that is no content at all names a place far beyond any transfer.
            .filter(|(number, offset)| *number < 1 << 16 && *offset < 1 << 36)
            .map_or_else(
                || "that is no content of this scenario".to_owned(),
                |(number, offset)| format!("that is transfer {number} from offset {offset}"),
            );
        format!(
            "transfer {} at offset {}: expected {expected:02x?}, {arrived:02x?} arrived; {origin}",
            self.transfer >> POSITION_BITS,
            position * 8,
        )
    }
}

fn first_word(offset: u64) -> u64 {
    assert_eq!(offset % 8, 0, "offsets are whole words");
    offset / 8
}

/// A bijection of 64 bits in which every input bit changes about half of the output.
pub fn scramble(mut word: u64) -> u64 {
    word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The inverse of [`scramble`].
fn unscramble(mut word: u64) -> u64 {
    word ^= (word >> 31) ^ (word >> 62);
    word = word.wrapping_mul(inverse(0x94d0_49bb_1331_11eb));
    word ^= (word >> 27) ^ (word >> 54);
    word = word.wrapping_mul(inverse(0xbf58_476d_1ce4_e5b9));
    word ^= (word >> 30) ^ (word >> 60);
    word.wrapping_sub(0x9e37_79b9_7f4a_7c15)
}

/// Multiplicative inverse of an odd number modulo 2^64: Newton's step doubles the good bits.
const fn inverse(odd: u64) -> u64 {
    let mut guess = odd;
    let mut step = 0;
    while step < 6 {
        guess = guess.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(guess)));
        step += 1;
    }
    guess
}

/// A seeded stream of numbers, for choices that both sides make alike.
#[derive(Clone, Debug)]
pub struct Choices(u64);

impl Choices {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(scramble(seed ^ 0x63_686f_6963_6573))
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        scramble(self.0)
    }

    /// A number below `limit`, which is at least 1.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.any() % limit
    }

    /// Puts `items` in another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_same_as_the_whole() {
        let content = Content::new(7, 3);
        let mut whole = vec![0; 1003];
        content.fill(0, &mut whole);
        let mut piece = vec![0; 603];
        content.fill(400, &mut piece);
        assert_eq!(whole[400..], piece);
        assert_eq!(content.difference(400, &piece), None);
    }

    #[test]
    fn what_lies_at_a_wrong_place_is_named() {
        let content = Content::new(7, 3);
        let mut bytes = vec![0; 64];
        content.fill(0, &mut bytes);
        let mut stale = vec![0; 8];
        Content::new(7, 2).fill(4096, &mut stale);
        bytes[24..32].copy_from_slice(&stale);
        let words = content.difference(0, &bytes).expect("it differs");
        assert!(words.contains("transfer 3 at offset 24"), "{words}");
        assert!(words.contains("transfer 2 from offset 4096"), "{words}");
        bytes[24..32].fill(0xA5);
        let words = content.difference(0, &bytes).expect("it differs");
        assert!(words.contains("no content"), "{words}");
    }

    #[test]
    fn a_wrong_last_byte_is_found() {
        let content = Content::new(1, 0);
        let mut bytes = vec![0; 23];
        content.fill(0, &mut bytes);
        bytes[22] ^= 1;
        assert!(content.difference(0, &bytes).is_some());
    }
}
