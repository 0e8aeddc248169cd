//! What frames carry: payload, sets of chunks, text for a person.

use std::fmt;
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

/// Chunks of one transfer, out of [`PlacedChunks::SPAN`] that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedChunks {
    /// The first chunk of the range.
    pub first: u32,
    /// Bit `i` stands for chunk `first + i`.
    pub bits: u64,
}

impl PlacedChunks {
    /// Chunks that a range spans.
    pub const SPAN: u32 = u64::BITS;

    /// The set of exactly one chunk.
    pub fn single(chunk: u32) -> Self {
        Self {
            first: chunk,
            bits: 1,
        }
    }

    /// The chunks in the set, ascending. What lies beyond the last number is that one, which no
    /// transfer has.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        let bits = (0..Self::SPAN).filter(move |bit| self.bits >> bit & 1 == 1);
        bits.map(move |bit| self.first.saturating_add(bit))
    }
}

/// Text for a person, at most [`Detail::MAX_BYTES`] of UTF-8.
///
/// Made from a longer text it keeps the beginning, cut between two characters: an explanation is
/// better short than missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Detail(String);

impl Detail {
    /// Most bytes a detail holds.
    pub const MAX_BYTES: usize = 512;

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Detail {
    fn from(mut text: String) -> Self {
        let end = text.floor_char_boundary(Self::MAX_BYTES);
        text.truncate(end);
        Self(text)
    }
}

impl From<&str> for Detail {
    fn from(text: &str) -> Self {
        let end = text.floor_char_boundary(Self::MAX_BYTES);
        Self(text.get(..end).unwrap_or_default().to_owned())
    }
}

impl Deref for Detail {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_names_its_chunks_in_order_and_never_wraps() {
        let set = |first| PlacedChunks {
            first,
            bits: 1 | 1 << 5 | 1 << 63,
        };
        assert!(set(100).iter().eq([100, 105, 163]));
        assert!(
            set(u32::MAX - 5)
                .iter()
                .eq([u32::MAX - 5, u32::MAX, u32::MAX])
        );
        assert!(PlacedChunks::single(7).iter().eq([7]));
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = "é".repeat(400);
        assert_eq!(Detail::from(text.as_str()).len(), 512);
        let odd = format!("x{text}");
        assert_eq!(Detail::from(odd.as_str()).len(), 511);
        assert_eq!(Detail::from(odd.clone()).as_str(), &odd[..511]);
    }

    #[test]
    fn a_short_text_is_kept_whole() {
        assert_eq!(Detail::from("peer closed").as_str(), "peer closed");
        assert_eq!(Detail::from(String::new()), Detail::default());
    }
}
