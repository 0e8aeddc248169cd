//! The header in front of every chunk on a lane, of the embedded network and of the NCCL plugin.

use thiserror::Error;

use crate::crc::crc32c;
use crate::frame::{Settings, TransferId};

/// Names the chunk whose payload follows on the lane.
///
/// On the wire, little endian: magic u32, version u8, attempt u8, behind u16, sequence u64, transfer u64,
/// offset u64, total u64, length u32, CRC32C of the 44 bytes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Counts the chunks of its transfer from 0. Under NCCL the number of the message in its comm.
    pub sequence: u64,
    /// The receiver's name for where it goes: the window that a [`Posted`](crate::frame::Frame::Posted) or
    /// [`Grant`](crate::frame::Frame::Grant) named. Under NCCL its number for the comm.
    pub transfer: TransferId,
    /// Bytes of the transfer, or message, before this chunk.
    pub offset: u64,
    /// Bytes of the whole transfer, or message; 0 where both sides know it before.
    pub total: u64,
    /// Bytes of payload that follow; 1 to [`Settings::MAX_CHUNK_BYTES`].
    pub length: u32,
    /// How often lanes died with it before, at most 255: its sender does not know whether it had
    /// arrived. A chunk with 0 comes once, and a later attempt makes those before it void.
    pub attempt: u8,
    /// What its sender had queued for the same lane behind it, in whole [units](Self::BEHIND_UNIT) of payload: so
    /// much follows at once. 0 where that is not known, and where the channel has several lanes.
    pub behind: u16,
}

impl ChunkHeader {
    /// Bytes of a header on the wire.
    pub const BYTES: usize = 48;
    /// First four bytes of a header, as an integer ("TCPC" on the wire).
    pub const MAGIC: u32 = u32::from_le_bytes(*b"TCPC");
    /// Version of the layout.
    pub const VERSION: u8 = 2;
    /// Bytes in one unit of `behind`.
    pub const BEHIND_UNIT: u64 = 1 << 16;

    /// Reads a header.
    ///
    /// # Errors
    /// When the bytes are not a header, are damaged, or name an impossible chunk. The lane has
    /// then lost its place and must be closed.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, ChunkHeaderError> {
        let magic = u32::from_le_bytes(field(bytes, 0));
        if magic != Self::MAGIC {
            return Err(ChunkHeaderError::Magic { arrived: magic });
        }
        let [version, attempt] = field(bytes, 4);
        if version != Self::VERSION {
            return Err(ChunkHeaderError::Version { arrived: version });
        }
        let expected = crc32c(&bytes[..CRC_AT]);
        let arrived = u32::from_le_bytes(field(bytes, CRC_AT));
        if arrived != expected {
            return Err(ChunkHeaderError::Checksum { expected, arrived });
        }
        let header = Self {
            sequence: u64::from_le_bytes(field(bytes, 8)),
            transfer: TransferId(u64::from_le_bytes(field(bytes, 16))),
            offset: u64::from_le_bytes(field(bytes, 24)),
            total: u64::from_le_bytes(field(bytes, 32)),
            length: u32::from_le_bytes(field(bytes, 40)),
            attempt,
            behind: u16::from_le_bytes(field(bytes, 6)),
        };
        if !(1..=Settings::MAX_CHUNK_BYTES).contains(&header.length) {
            return Err(ChunkHeaderError::Length {
                arrived: header.length,
            });
        }
        let most = if header.total == 0 {
            u64::MAX
        } else {
            header.total
        };
        let end = header.offset.checked_add(header.length.into());
        if end.is_none_or(|end| end > most) {
            return Err(ChunkHeaderError::Range {
                offset: header.offset,
                length: header.length,
                most,
            });
        }
        Ok(header)
    }

    /// How a header says that so many bytes are behind its chunk.
    pub fn units_behind(bytes: u64) -> u16 {
        u16::try_from(bytes / Self::BEHIND_UNIT).unwrap_or(u16::MAX)
    }

    /// Bytes of payload that follow its chunk at once, as far as that is known.
    pub fn bytes_behind(&self) -> u64 {
        u64::from(self.behind) * Self::BEHIND_UNIT
    }

    /// Changes the attempt and what follows in a header's bytes.
    pub fn renew(bytes: &mut [u8; Self::BYTES], attempt: u8, behind: u16) {
        bytes[5] = attempt;
        bytes[6..8].copy_from_slice(&behind.to_le_bytes());
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }

    /// The header's bytes; a receiver refuses a chunk outside the bounds of the fields.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&Self::MAGIC.to_le_bytes());
        bytes[4] = Self::VERSION;
        bytes[5] = self.attempt;
        bytes[6..8].copy_from_slice(&self.behind.to_le_bytes());
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

const CRC_AT: usize = 44;

/// `LENGTH` bytes at a constant place inside the header.
fn field<const LENGTH: usize>(bytes: &[u8; ChunkHeader::BYTES], at: usize) -> [u8; LENGTH] {
    std::array::from_fn(|index| bytes[at + index])
}

/// Bytes on a lane that are not the header of a possible chunk.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChunkHeaderError {
    /// The bytes do not begin like a header.
    #[error(
        "chunk: expected magic 0x{expected:08x}, 0x{arrived:08x} arrived; the lane lost its place, close it",
        expected = ChunkHeader::MAGIC
    )]
    Magic {
        /// What arrived.
        arrived: u32,
    },
    /// The layout is another version's.
    #[error(
        "chunk: expected header version {expected}, {arrived} arrived; run the same version on both sides",
        expected = ChunkHeader::VERSION
    )]
    Version {
        /// What arrived.
        arrived: u8,
    },
    /// The checksum does not match the bytes.
    #[error(
        "chunk: checksum of the header is 0x{expected:08x}, 0x{arrived:08x} arrived; the bytes were damaged on the way, close the lane"
    )]
    Checksum {
        /// CRC32C of the bytes that arrived.
        expected: u32,
        /// The value in the header.
        arrived: u32,
    },
    /// No chunk has this length.
    #[error(
        "chunk: expected a length of 1 to {most} bytes, {arrived} arrived; close the lane",
        most = Settings::MAX_CHUNK_BYTES
    )]
    Length {
        /// What arrived.
        arrived: u32,
    },
    /// The chunk ends beyond its transfer, or beyond any.
    #[error("chunk: {length} bytes at offset {offset} pass {most}; close the lane")]
    Range {
        /// Offset in the transfer.
        offset: u64,
        /// Length in bytes.
        length: u32,
        /// Bytes of the transfer, or of the longest one.
        most: u64,
    },
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
            behind: 0,
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
            behind: u16,
        ) {
            let transfer = TransferId(transfer);
            let total = if says_total { offset + u64::from(length) } else { 0 };
            let header = ChunkHeader { sequence, transfer, offset, total, length, attempt, behind };
            prop_assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
            let mut bytes = ChunkHeader { attempt: !attempt, behind: 0, ..header }.encode();
            ChunkHeader::renew(&mut bytes, attempt, behind);
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
            behind: 0x0102,
            total: 6 << 32,
            ..header()
        };
        assert_eq!(again.encode()[5..8], [2, 2, 1]);
        assert_eq!(again.encode()[32..40], [0, 0, 0, 0, 6, 0, 0, 0]);
    }

    #[test]
    fn each_error_names_what_arrived() {
        use ChunkHeaderError as E;

        assert_eq!(
            tampered(|bytes| bytes[0] = 0),
            Err(E::Magic {
                arrived: 0x4350_4300
            })
        );
        assert_eq!(
            tampered(|bytes| bytes[4] = 1),
            Err(E::Version { arrived: 1 })
        );
        assert_eq!(
            tampered(|bytes| bytes[40..44].fill(0)),
            Err(E::Length { arrived: 0 })
        );
        assert_eq!(
            tampered(|bytes| bytes[43] = 0x40),
            Err(E::Length {
                arrived: 0x4008_0000
            })
        );
        assert_eq!(
            tampered(|bytes| bytes[24..32].fill(0xFF)),
            Err(E::Range {
                offset: u64::MAX,
                length: 524_288,
                most: u64::MAX
            })
        );
        assert_eq!(
            tampered(|bytes| bytes[32] = 1),
            Err(E::Range {
                offset: 5 << 32,
                length: 524_288,
                most: 1
            })
        );
    }
}
