//! CRC32C (Castagnoli) over bytes that arrive in pieces.

use crc_fast::{CrcAlgorithm, Digest};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_crc32c() {
        let mut crc = Crc32c::new();
        crc.update(b"1234");
        crc.update(b"56789");
        assert_eq!(crc.finish(), 0xE306_9283);
    }
}
