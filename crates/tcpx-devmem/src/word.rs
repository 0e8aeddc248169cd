//! Words on the connection beside a device-memory payload: how far each side has come, and the payload
//! itself once it can no longer travel on its own connection.
//!
//! Messages of 16 bytes, little endian: kind u32, length u32, place u64 (a byte of the payload stream,
//! counted from 0).
//!
//! | kind | place | length |
//! |---|---|---|
//! | 1 `HAVE` | all bytes before it have arrived | 0 |
//! | 2 `MOVE` | as `HAVE`, and the bytes from it on are to come on this connection | 0 |
//! | 3 `DATA` | of the first byte that follows this message | bytes that follow, at least 1 |

use thiserror::Error;

const HAVE: u32 = 1;
const MOVE: u32 = 2;
const DATA: u32 = 3;

/// A word of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// It has all bytes before this place.
    Have(u64),
    /// As [`Self::Have`], and it wants the rest here.
    Move(u64),
    /// So much of the payload follows.
    Data {
        /// Of the first byte.
        place: u64,
        /// Bytes; at least 1, and the last of them has a place in 64 bits.
        length: u32,
    },
}

impl Word {
    /// Bytes of a message.
    pub const BYTES: usize = 16;

    /// The message.
    pub fn encode(self) -> [u8; Self::BYTES] {
        let (kind, length, place) = match self {
            Self::Have(place) => (HAVE, 0, place),
            Self::Move(place) => (MOVE, 0, place),
            Self::Data { place, length } => (DATA, length, place),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes[8..].copy_from_slice(&place.to_le_bytes());
        bytes
    }

    /// Reads a message.
    ///
    /// # Errors
    /// It is none of the three.
    pub fn decode(bytes: [u8; Self::BYTES]) -> Result<Self, WordError> {
        let [k0, k1, k2, k3, l0, l1, l2, l3, place @ ..] = bytes;
        let kind = u32::from_le_bytes([k0, k1, k2, k3]);
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let place = u64::from_le_bytes(place);
        match (kind, length) {
            (HAVE, 0) => Ok(Self::Have(place)),
            (MOVE, 0) => Ok(Self::Move(place)),
            (DATA, 1..) if place.checked_add(length.into()).is_some() => {
                Ok(Self::Data { place, length })
            }
            _ => Err(WordError {
                kind,
                length,
                place,
            }),
        }
    }
}

/// Reads words from a stream that comes in pieces of any length, with payload between them.
///
/// Ask for [`Self::room`], write to its start, report how much, until a word is complete. After
/// [`Word::Data`] take [`Self::payload_left`] bytes off the stream before the next word.
#[derive(Clone, Debug, Default)]
pub struct WordReader {
    head: [u8; Word::BYTES],
    filled: usize,
    payload_left: usize,
}

impl WordReader {
    /// At the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes of payload that come before the next word.
    pub fn payload_left(&self) -> usize {
        self.payload_left
    }

    /// So many bytes of the payload were taken off the stream; no more than are left count.
    pub fn took_payload(&mut self, bytes: usize) {
        self.payload_left = self.payload_left.saturating_sub(bytes);
    }

    /// Where the next bytes of a word go; empty while payload comes first.
    pub fn room(&mut self) -> &mut [u8] {
        if self.payload_left > 0 {
            return &mut [];
        }
        &mut self.head[self.filled..]
    }

    /// Notes bytes written to [`Self::room`]; returns the word when it is complete.
    ///
    /// # Errors
    /// No such word exists; nothing behind it means anything.
    pub fn filled(&mut self, bytes: usize) -> Result<Option<Word>, WordError> {
        let room = self.room().len();
        self.filled += bytes.min(room);
        if self.filled < Word::BYTES {
            return Ok(None);
        }
        self.filled = 0;
        let word = Word::decode(self.head)?;
        if let Word::Data { length, .. } = word {
            self.payload_left = usize::try_from(length).unwrap_or(usize::MAX);
        }
        Ok(Some(word))
    }
}

/// A message that is no word.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "companion: expected kind 1 or 2 of length 0, or kind 3 of length 1 or more that ends within 2^64; kind {kind} of length {length} at place {place} arrived; close the channel"
)]
pub struct WordError {
    /// Its kind.
    pub kind: u32,
    /// Its length.
    pub length: u32,
    /// Its place.
    pub place: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_read_back_with_the_payload_between_them() {
        let words = [
            Word::Have(5),
            Word::Data {
                place: 9,
                length: 3,
            },
            Word::Move(u64::MAX),
        ];
        let mut stream = Vec::new();
        for word in words {
            stream.extend_from_slice(&word.encode());
            if matches!(word, Word::Data { .. }) {
                stream.extend_from_slice(b"abc");
            }
        }
        let mut reader = WordReader::new();
        let mut read = Vec::new();
        for byte in stream {
            if reader.payload_left() > 0 {
                assert!(reader.room().is_empty());
                reader.took_payload(1);
                continue;
            }
            reader.room()[0] = byte;
            read.extend(reader.filled(1).unwrap());
        }
        assert_eq!(read, words);
    }

    #[test]
    fn a_message_of_no_kind_is_refused() {
        let data = |place, length: u32| {
            let mut bytes = Word::Have(place).encode();
            bytes[0] = 3;
            bytes[4..8].copy_from_slice(&length.to_le_bytes());
            bytes
        };
        let mut long_have = Word::Have(1).encode();
        long_have[4] = 1;
        for bytes in [
            [0; Word::BYTES],
            [0xff; Word::BYTES],
            data(0, 0),
            data(u64::MAX, 1),
            long_have,
        ] {
            assert!(Word::decode(bytes).is_err(), "{bytes:?}");
        }
        let last = data(u64::MAX - 1, 1);
        assert!(Word::decode(last).is_ok());
    }
}
