//! The first bytes behind a handshake at a process's door: whose lane it is, and which; or which comm's own connection
//! it takes the place of.
//!
//! Little endian, 32 bytes: magic u32, lanes of the group u16, number of the lane u16, group 16 bytes, epoch
//! u32 (how often a lane of this number was dialled before), CRC32C of the 28 bytes before. Chunks follow,
//! each behind a [`ChunkHeader`](tcpx_wire::ChunkHeader). The other way travels nothing but the bytes of
//! chunks, headers included, that the receiver has read, u64, to the end of a chunk.

use tcpx_lanes::idle::MAX_LANES;
use tcpx_lanes::receive_lane::Violation;
use tcpx_wire::crc::crc32c;
use tcpx_wire::handshake::SessionId;

/// Names a sending process to a receiving one.
pub(crate) type GroupId = [u8; 16];

const MAGIC: u32 = u32::from_le_bytes(*b"TxLn");
const COMM_MAGIC: u32 = u32::from_le_bytes(*b"TxCo");
const CRC_AT: usize = 28;

/// What a connection says first that takes the place of a comm's own one.
///
/// Little endian, 32 bytes: magic u32, 0 u32, the session in which the comm's first connection came about, 16 bytes,
/// epoch u32 (how often the comm's connection was dialled before), CRC32C of the 28 bytes before. What the receiver
/// has read follows the other way, then the comm's stream goes on behind that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resumption {
    pub(crate) session: SessionId,
    /// From 1; one of a higher epoch takes the place of one of a lower.
    pub(crate) epoch: u32,
}

impl Resumption {
    pub(crate) fn encode(&self) -> [u8; Hello::BYTES] {
        record(COMM_MAGIC, 0, &self.session.0, self.epoch)
    }

    /// Reads it from its bytes; `None` where they are something else, such as a lane's hello.
    pub(crate) fn decode(bytes: &[u8; Hello::BYTES]) -> Option<Self> {
        match read(COMM_MAGIC, bytes) {
            Ok((0, session, epoch)) => Some(Self {
                session: SessionId(session),
                epoch,
            }),
            _ => None,
        }
    }
}

/// A record of this form: magic, a word, 16 bytes that name something, epoch, checksum.
fn record(magic: u32, word: u32, name: &[u8; 16], epoch: u32) -> [u8; Hello::BYTES] {
    let mut bytes = [0; Hello::BYTES];
    bytes[..4].copy_from_slice(&magic.to_le_bytes());
    bytes[4..8].copy_from_slice(&word.to_le_bytes());
    bytes[8..24].copy_from_slice(name);
    bytes[24..CRC_AT].copy_from_slice(&epoch.to_le_bytes());
    let crc = crc32c(&bytes[..CRC_AT]);
    bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Reads the word, the name and the epoch of a record; or what is wrong with it.
fn read(magic: u32, bytes: &[u8; Hello::BYTES]) -> Result<(u32, [u8; 16], u32), String> {
    let u32_at = |at: usize| {
        let word = bytes[at..].first_chunk().copied();
        u32::from_le_bytes(word.unwrap_or_default())
    };
    let (found, crc) = (u32_at(0), crc32c(&bytes[..CRC_AT]));
    if found != magic || u32_at(CRC_AT) != crc {
        return Err(format!(
            "magic {found:#010x} (not {magic:#010x}), checksum {:#010x} (computed {crc:#010x})",
            u32_at(CRC_AT)
        ));
    }
    let mut name = [0; 16];
    name.copy_from_slice(&bytes[8..24]);
    Ok((u32_at(4), name, u32_at(24)))
}

/// What a lane says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) group: GroupId,
    /// Lanes of the group.
    pub(crate) lanes: u16,
    /// Which of them this is, from 0.
    pub(crate) lane: u16,
    /// A lane that is dialled again has a higher one.
    pub(crate) epoch: u32,
}

impl Hello {
    /// Bytes on the wire.
    pub(crate) const BYTES: usize = 32;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let word = u32::from(self.lanes) | u32::from(self.lane) << 16;
        record(MAGIC, word, &self.group, self.epoch)
    }

    /// Reads it from its bytes.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Violation> {
        let wrong = |arrived: String| Violation {
            expected: format!("the hello of a lane, one of at most {MAX_LANES}"),
            arrived,
            chunk: None,
        };
        let (word, group, epoch) = read(MAGIC, bytes).map_err(wrong)?;
        let (lanes, lane) = (word as u16, (word >> 16) as u16);
        if usize::from(lanes) > MAX_LANES || lane >= lanes {
            return Err(wrong(format!("lane {lane} of {lanes}")));
        }
        Ok(Self {
            group,
            lanes,
            lane,
            epoch,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumption_survives_the_round_trip_and_is_no_hello_of_a_lane() {
        let resumption = Resumption {
            session: SessionId(*b"0123456789abcdef"),
            epoch: 0x0102_0304,
        };
        let bytes = resumption.encode();
        assert_eq!(Resumption::decode(&bytes), Some(resumption));
        assert!(Hello::decode(&bytes).is_err());
        for at in 0..Hello::BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 0x10;
            assert_eq!(Resumption::decode(&damaged), None, "byte {at}");
        }
        let lane = Hello {
            group: resumption.session.0,
            lanes: 2,
            lane: 1,
            epoch: 0,
        };
        assert_eq!(Resumption::decode(&lane.encode()), None);
    }

    #[test]
    fn a_hello_survives_the_round_trip_and_a_damaged_or_impossible_one_is_refused() {
        let hello = Hello {
            group: *b"0123456789abcdef",
            lanes: 64,
            lane: 63,
            epoch: 0x0102_0304,
        };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello));
        for at in 0..Hello::BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 0x10;
            assert!(Hello::decode(&damaged).is_err(), "byte {at}");
        }
        for (lane, lanes) in [(0, 0), (64, 64), (0, 65)] {
            assert!(
                Hello::decode(
                    &Hello {
                        lane,
                        lanes,
                        ..hello
                    }
                    .encode()
                )
                .is_err()
            );
        }
    }
}
