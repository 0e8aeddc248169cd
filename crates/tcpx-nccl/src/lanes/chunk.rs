//! What travels on a lane: once the group, then chunks.
//!
//! Little endian. The first 24 bytes of a lane: magic u32, lanes of the group u32, group 16 bytes. Then for each
//! chunk 40 bytes and its payload: magic u32, payload bytes u32, stream u64, sequence of the
//! message in its comm u64, offset in the message u64, bytes of the whole message u64. A second
//! magic asks for an answer: the other way travels nothing but the number u64 of such chunks that the
//! lane has read to their end.

use tcpx_lanes::idle::MAX_LANES;

/// Bytes of a lane's first record.
pub(crate) const GROUP_BYTES: usize = 24;
/// Bytes before each payload.
pub(crate) const CHUNK_HEADER_BYTES: usize = 40;
/// Largest payload of a chunk.
pub(crate) const MAX_CHUNK_BYTES: usize = 16 << 20;

const GROUP: u32 = u32::from_le_bytes(*b"TxLn");
const CHUNK: u32 = u32::from_le_bytes(*b"TxCk");
const ANSWERED: u32 = u32::from_le_bytes(*b"TxCa");
/// Bytes of an answer.
pub(crate) const ANSWER_BYTES: usize = 8;

/// Names a sending process to a receiving one.
pub(crate) type GroupId = [u8; 16];

/// What comes before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkHeader {
    /// Receive comm, by the number that its grants name.
    pub(crate) stream: u64,
    /// Message of the comm.
    pub(crate) sequence: u64,
    /// Place of the payload in the message.
    pub(crate) offset: u64,
    /// Bytes of the message.
    pub(crate) total: u64,
    /// Bytes of the payload.
    pub(crate) len: u32,
    /// The sender waits for the answer that it was read.
    pub(crate) answered: bool,
}

impl ChunkHeader {
    pub(crate) fn encode(&self) -> [u8; CHUNK_HEADER_BYTES] {
        let mut bytes = [0; CHUNK_HEADER_BYTES];
        let magic = if self.answered { ANSWERED } else { CHUNK };
        bytes[..4].copy_from_slice(&magic.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.stream.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes[32..].copy_from_slice(&self.total.to_le_bytes());
        bytes
    }

    /// Reads a header; the error says what was expected and what arrived.
    pub(crate) fn decode(bytes: &[u8; CHUNK_HEADER_BYTES]) -> Result<Self, String> {
        let magic = u32_at(bytes, 0);
        if magic != CHUNK && magic != ANSWERED {
            return Err(format!(
                "expected chunk magic {CHUNK:#010x} or {ANSWERED:#010x}, got {magic:#010x}"
            ));
        }
        let header = Self {
            len: u32_at(bytes, 4),
            stream: u64_at(bytes, 8),
            sequence: u64_at(bytes, 16),
            offset: u64_at(bytes, 24),
            total: u64_at(bytes, 32),
            answered: magic == ANSWERED,
        };
        let fits = header
            .offset
            .checked_add(u64::from(header.len))
            .is_some_and(|end| end <= header.total);
        if header.len == 0 || header.len as usize > MAX_CHUNK_BYTES || !fits {
            return Err(format!(
                "expected 1 to {MAX_CHUNK_BYTES} bytes inside the message, got {} at {} of {}",
                header.len, header.offset, header.total
            ));
        }
        Ok(header)
    }
}

/// A lane's first record.
pub(crate) fn encode_group(group: &GroupId, lanes: u32) -> [u8; GROUP_BYTES] {
    let mut bytes = [0; GROUP_BYTES];
    bytes[..4].copy_from_slice(&GROUP.to_le_bytes());
    bytes[4..8].copy_from_slice(&lanes.to_le_bytes());
    bytes[8..].copy_from_slice(group);
    bytes
}

/// Reads a lane's first record: its group, and how many lanes that has.
pub(crate) fn decode_group(bytes: &[u8; GROUP_BYTES]) -> Result<(GroupId, u32), String> {
    let (magic, lanes) = (u32_at(bytes, 0), u32_at(bytes, 4));
    if magic != GROUP || lanes == 0 || lanes as usize > MAX_LANES {
        return Err(format!(
            "expected lane magic {GROUP:#010x} and 1 to {MAX_LANES} lanes, got {magic:#010x} and {lanes}"
        ));
    }
    let mut group = GroupId::default();
    group.copy_from_slice(&bytes[8..]);
    Ok((group, lanes))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: ChunkHeader = ChunkHeader {
        stream: 7,
        sequence: u64::MAX,
        offset: 1 << 33,
        total: (1 << 33) + 5,
        len: 5,
        answered: false,
    };

    #[test]
    fn records_survive_the_round_trip_and_are_not_taken_for_each_other() {
        for answered in [false, true] {
            let header = ChunkHeader { answered, ..HEADER };
            assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
        }
        let group = *b"0123456789abcdef";
        let bytes = encode_group(&group, 12);
        assert_eq!(decode_group(&bytes), Ok((group, 12)));
        for lanes in [0, 65] {
            assert!(decode_group(&encode_group(&group, lanes)).is_err());
        }
        let mut longer = [0; CHUNK_HEADER_BYTES];
        longer[..GROUP_BYTES].copy_from_slice(&bytes);
        assert!(ChunkHeader::decode(&longer).is_err());
    }

    #[test]
    fn a_chunk_must_lie_inside_its_message() {
        for wrong in [
            ChunkHeader { len: 0, ..HEADER },
            ChunkHeader { len: 6, ..HEADER },
            ChunkHeader {
                offset: u64::MAX,
                ..HEADER
            },
            ChunkHeader {
                len: u32::MAX,
                total: u64::MAX,
                ..HEADER
            },
        ] {
            assert!(ChunkHeader::decode(&wrong.encode()).is_err(), "{wrong:?}");
        }
    }
}
