//! Bytes that travel in a frame.

use std::fmt;
use std::ops::Deref;

use crate::crc::crc32c;

/// The payload of [`Frame::Eager`](super::Frame::Eager), with its checksum where that is known.
#[derive(Clone)]
pub struct Payload {
    bytes: Vec<u8>,
    crc32c: Option<u32>,
}

impl Payload {
    /// With a checksum, so that the encoder need not compute it again.
    pub(crate) fn summed(bytes: Vec<u8>) -> Self {
        let sum = crc32c(&bytes);
        Self::with_sum(bytes, Some(sum))
    }

    /// `sum` must be the CRC32C of the bytes.
    pub(super) fn with_sum(bytes: Vec<u8>, sum: Option<u32>) -> Self {
        Self { bytes, crc32c: sum }
    }

    pub(super) fn known_crc32c(&self) -> Option<u32> {
        self.crc32c
    }

    /// CRC32C of the bytes.
    pub fn crc32c(&self) -> u32 {
        self.crc32c.unwrap_or_else(|| crc32c(&self.bytes))
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
        Self::with_sum(bytes, None)
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// As the bytes are, whether their checksum is known or not.
impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Payload {}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes.fmt(f)
    }
}
