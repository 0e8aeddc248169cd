//! Bytes that travel in a frame.

use std::ops::Deref;

use crate::crc::crc32c;

/// The payload of [`Frame::Eager`](super::Frame::Eager), and its checksum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    bytes: Vec<u8>,
    crc32c: u32,
}

impl Payload {
    /// CRC32C of the bytes.
    pub fn crc32c(&self) -> u32 {
        self.crc32c
    }

    /// The bytes alone.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Gives memory back, where the buffer has held a much longer payload before.
    pub(crate) fn shrink(&mut self) {
        if self.bytes.capacity() / 2 > self.bytes.len() {
            self.bytes.shrink_to_fit();
        }
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        let crc32c = crc32c(&bytes);
        Self { bytes, crc32c }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
