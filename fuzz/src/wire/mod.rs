//! What the fuzz targets of `tcpx-wire` assert.

pub mod chunk_header;
pub mod descriptors;
pub mod frames;
pub mod handshake;
pub mod key_text;
pub mod lane_seal;
pub mod pieces;
pub mod records;
pub mod window_key;

/// CRC32C, one bit at a time; independent of the implementation under test.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg())
        })
    })
}
