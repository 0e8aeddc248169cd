//! The header in front of every chunk on a lane, of the embedded network and of the NCCL plugin.

use thiserror::Error;

use crate::array;
use crate::crc::crc32c;
use crate::frame::{Settings, TransferId};

/// Names the chunk whose payload follows on the lane.
///
/// On the wire, little endian: magic u32, kind u8, attempt u8, entry u16, sequence u64, transfer
/// u64, offset u64, total u64, length u32, CRC32C of the 44 bytes before. The kind says where the
/// payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Counts the chunks of its transfer from 0. Under NCCL the number of the message in its comm.
    pub sequence: u64,
    /// The receiver's name for where it goes: the window that a
    /// [`Posted`](crate::frame::Frame::Posted) or [`Grant`](crate::frame::Frame::Grant) named.
    /// Under NCCL its number for the comm.
    pub transfer: TransferId,
    /// Bytes of the transfer, or message, before this chunk.
    pub offset: u64,
    /// Bytes of the whole transfer, or message; 0 where both sides know it before.
    pub total: u64,
    /// Bytes of payload; 1 to [`Settings::MAX_CHUNK_BYTES`].
    pub length: u32,
    /// How often lanes died with it before, at most 255: its sender does not know whether it had
    /// arrived. A chunk with 0 comes once, and a later attempt makes those before it void.
    pub attempt: u8,
    /// Where the payload is.
    pub payload: ChunkPayload,
}

/// Where the payload of a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkPayload {
    /// It follows its header.
    Follows,
    /// It lies in the sender's memory, on the same host, and the receiver reads it there. Nothing
    /// of it follows.
    Exposed {
        /// The entry of the sender's table that says where.
        entry: u16,
    },
}

impl ChunkHeader {
    /// Bytes of a header on the wire.
    pub const BYTES: usize = 48;
    /// First four bytes of a header, as an integer ("TCPC" on the wire).
    pub const MAGIC: u32 = u32::from_le_bytes(*b"TCPC");
    /// Kind of a chunk whose payload follows; version 2 of the layout.
    pub const FOLLOWS: u8 = 2;
    /// Kind of a chunk whose payload lies in the sender's memory.
    pub const EXPOSED: u8 = 3;

    /// Reads a header.
    ///
    /// # Errors
    /// When the bytes are not a header, are damaged, or name an impossible chunk. The lane has
    /// then lost its place and must be closed.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, ChunkHeaderError> {
        let error = |field, expected: String, arrived: String| ChunkHeaderError {
            field,
            expected,
            arrived,
        };
        let hex = |number: u32| format!("0x{number:08x}");
        let magic = u32::from_le_bytes(array(bytes, 0));
        if magic != Self::MAGIC {
            return Err(error("magic", hex(Self::MAGIC), hex(magic)));
        }
        let [kind, attempt] = array(bytes, 4);
        let number = u16::from_le_bytes(array(bytes, 6));
        let payload = match (kind, number) {
            (Self::FOLLOWS, 0) => ChunkPayload::Follows,
            (Self::FOLLOWS, _) => return Err(error("entry", "0".to_owned(), number.to_string())),
            (Self::EXPOSED, entry) => ChunkPayload::Exposed { entry },
            _ => {
                let known = format!("{} or {}", Self::FOLLOWS, Self::EXPOSED);
                return Err(error("kind", known, kind.to_string()));
            }
        };
        let sum = crc32c(&bytes[..CRC_AT]);
        let arrived = u32::from_le_bytes(array(bytes, CRC_AT));
        if arrived != sum {
            return Err(error("checksum", hex(sum), hex(arrived)));
        }
        let header = Self {
            sequence: u64::from_le_bytes(array(bytes, 8)),
            transfer: TransferId(u64::from_le_bytes(array(bytes, 16))),
            offset: u64::from_le_bytes(array(bytes, 24)),
            total: u64::from_le_bytes(array(bytes, 32)),
            length: u32::from_le_bytes(array(bytes, 40)),
            attempt,
            payload,
        };
        if !(1..=Settings::MAX_CHUNK_BYTES).contains(&header.length) {
            let most = format!("1 to {} bytes", Settings::MAX_CHUNK_BYTES);
            return Err(error("length", most, header.length.to_string()));
        }
        let most = match header.total {
            0 => u64::MAX,
            total => total,
        };
        let end = header.offset.checked_add(header.length.into());
        if end.is_none_or(|end| end > most) {
            let arrived = format!("{} bytes at {}", header.length, header.offset);
            return Err(error("end", format!("at most {most}"), arrived));
        }
        Ok(header)
    }

    /// Whether its payload lies in the sender's memory.
    pub const fn is_exposed(&self) -> bool {
        matches!(self.payload, ChunkPayload::Exposed { .. })
    }

    /// Changes the attempt in a header's bytes, and where the payload is.
    pub fn renew(bytes: &mut [u8; Self::BYTES], attempt: u8, payload: ChunkPayload) {
        bytes[4..8].copy_from_slice(&payload.encode(attempt));
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }

    /// The header's bytes; a receiver refuses a chunk outside the bounds of the fields.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&Self::MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.payload.encode(self.attempt));
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.transfer.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.total.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.length.to_le_bytes());
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

impl ChunkPayload {
    /// Kind, attempt and entry.
    fn encode(self, attempt: u8) -> [u8; 4] {
        let (kind, number) = match self {
            Self::Follows => (ChunkHeader::FOLLOWS, 0),
            Self::Exposed { entry } => (ChunkHeader::EXPOSED, entry),
        };
        let [low, high] = number.to_le_bytes();
        [kind, attempt, low, high]
    }
}

const CRC_AT: usize = 44;

/// Bytes on a lane that are not the header of a possible chunk: they were damaged on the way, the
/// lane has lost its place, or the peer is of another version.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("chunk: expected {field} {expected}, {arrived} arrived; close the lane")]
pub struct ChunkHeaderError {
    /// Name of the field.
    pub field: &'static str,
    /// What it can be.
    pub expected: String,
    /// What arrived.
    pub arrived: String,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> ChunkHeader {
        ChunkHeader {
            sequence: 7,
            transfer: TransferId(3),
            offset: 5 << 32,
            total: 0,
            length: 524_288,
            attempt: 0,
            payload: ChunkPayload::Follows,
        }
    }

    /// Changes a header's bytes and makes its checksum fit again.
    fn tampered(
        change: impl FnOnce(&mut [u8; ChunkHeader::BYTES]),
    ) -> Result<ChunkHeader, ChunkHeaderError> {
        let mut bytes = header().encode();
        change(&mut bytes);
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        ChunkHeader::decode(&bytes)
    }

    proptest! {
        #[test]
        fn a_possible_chunk_reads_back(
            sequence: u64,
            transfer: u64,
            offset in 0..u64::MAX - (1 << 30),
            says_total: bool,
            length in 1..=Settings::MAX_CHUNK_BYTES,
            attempt: u8,
            number: u16,
            is_exposed: bool,
        ) {
            let transfer = TransferId(transfer);
            let payload = match is_exposed {
                true => ChunkPayload::Exposed { entry: number },
                false => ChunkPayload::Follows,
            };
            let total = if says_total { offset + u64::from(length) } else { 0 };
            let header = ChunkHeader { sequence, transfer, offset, total, length, attempt, payload };
            prop_assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
            let other = ChunkPayload::Follows;
            let mut bytes = ChunkHeader { attempt: !attempt, payload: other, ..header }.encode();
            ChunkHeader::renew(&mut bytes, attempt, payload);
            prop_assert_eq!(bytes, header.encode());
        }

        #[test]
        fn any_damaged_byte_is_noticed(at in 0..ChunkHeader::BYTES, by in 1u8..) {
            let mut bytes = header().encode();
            bytes[at] ^= by;
            prop_assert!(ChunkHeader::decode(&bytes).is_err());
        }
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = header().encode();
        assert_eq!(&bytes[..8], b"TCPC\x02\0\0\0");
        assert_eq!(bytes[8], 7);
        assert_eq!(bytes[16], 3);
        assert_eq!(bytes[24..32], [0, 0, 0, 0, 5, 0, 0, 0]);
        assert_eq!(bytes[32..40], [0; 8]);
        assert_eq!(bytes[40..44], [0, 0, 8, 0]);
        let again = ChunkHeader {
            attempt: 2,
            total: 6 << 32,
            ..header()
        };
        assert_eq!(again.encode()[5..8], [2, 0, 0]);
        let exposed = ChunkHeader {
            payload: ChunkPayload::Exposed { entry: 0x0304 },
            ..again
        };
        assert_eq!(exposed.encode()[4..8], [3, 2, 4, 3]);
        assert_eq!(again.encode()[32..40], [0, 0, 0, 0, 6, 0, 0, 0]);
    }

    #[test]
    fn each_error_names_what_arrived() {
        let refused = |change: fn(&mut [u8; ChunkHeader::BYTES]), field, arrived| {
            let error = tampered(change).unwrap_err();
            assert_eq!((error.field, error.arrived.as_str()), (field, arrived));
        };
        refused(|bytes| bytes[0] = 0, "magic", "0x43504300");
        refused(|bytes| bytes[4] = 1, "kind", "1");
        refused(|bytes| bytes[7] = 1, "entry", "256");
        refused(|bytes| bytes[40..44].fill(0), "length", "0");
        refused(|bytes| bytes[43] = 0x40, "length", "1074266112");
        let beyond = "524288 bytes at 18446744073709551615";
        refused(|bytes| bytes[24..32].fill(0xFF), "end", beyond);
        let beyond = "524288 bytes at 21474836480";
        refused(|bytes| bytes[32] = 1, "end", beyond);
    }
}
