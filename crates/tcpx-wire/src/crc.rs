//! CRC32C (Castagnoli), the checksum of headers and frames.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32C of the bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// CRC32C of the parts one after the other.
pub(crate) fn crc32c_of_parts(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    // A 32-bit algorithm keeps its value in the low half.
    (digest.finalize() & u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_published_check_values() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c_of_parts(&[b"1234", b"", b"56789"]), 0xE306_9283);
    }
}
