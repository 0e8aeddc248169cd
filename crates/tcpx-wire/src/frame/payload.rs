//! Bytes that travel in a frame.

use std::ops::Deref;

use super::{Destination, Frame, Level, TransferId};
use crate::crc::crc32c;

/// All of a transfer, with the frame that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Eager {
    /// Its bytes.
    Bytes(Payload),
    /// Where they lie, for a receiver that reads them there.
    Exposed(Exposure),
}

impl Eager {
    /// Bytes of the transfer.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Bytes(payload) => payload.len() as u64,
            Self::Exposed(at) => at.bytes.into(),
        }
    }

    /// Those that the receiver keeps until there is a place for them.
    pub(crate) fn kept(&self) -> u64 {
        match self {
            Self::Bytes(payload) => payload.len() as u64,
            Self::Exposed(_) => 0,
        }
    }

    /// The frame that asks.
    pub(crate) fn frame(self, transfer: TransferId, level: Level, to: Destination) -> Frame {
        match self {
            Self::Bytes(payload) => Frame::Eager {
                transfer,
                level,
                to,
                payload,
            },
            Self::Exposed(at) => Frame::Exposed {
                transfer,
                level,
                to,
                at,
            },
        }
    }

    /// CRC32C of bytes that are here.
    pub(crate) fn crc32c(&self) -> Option<u128> {
        match self {
            Self::Bytes(payload) => Some(payload.crc32c().into()),
            Self::Exposed(_) => None,
        }
    }
}

impl From<Vec<u8>> for Eager {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

/// Where a payload lies in the memory of the sender's process, as its table of exposed memory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exposure {
    /// The entry of the table.
    pub entry: u16,
    /// What the entry says as long as the payload may be read.
    pub mark: u64,
    /// Length in bytes.
    pub bytes: u32,
}

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
