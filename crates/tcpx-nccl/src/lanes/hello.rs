//! The first bytes behind a handshake at a process's door: whose lane it is, and which; or which comm's own connection
//! it takes the place of.
//!
//! Both are pairs of connections, of which each carries bytes one way only, behind these first ones: payload, and what
//! its receiver answers. A connection whose process ends before it has read all that came on it is reset by the system,
//! which drops what it was still to send; on payload's nothing comes.
//!
//! Little endian, 32 bytes: magic u32, lanes of the group u16, number of the lane u16, group 16 bytes, epoch
//! u32 (how often a lane of this number was dialled before), CRC32C of the 28 bytes before. Chunks follow on payload's,
//! each behind a [`ChunkHeader`](tcpx_wire::ChunkHeader). On the other one travels nothing but the bytes of
//! chunks, headers included, that the receiver has read, u64, to the end of a chunk.

use tcpx_lanes::idle::MAX_LANES;
use tcpx_lanes::receive_lane::Violation;
use tcpx_lanes::socket_calls::Moved;
use tcpx_wire::crc::crc32c;
use tcpx_wire::handshake::SessionId;

use crate::link::Link;

/// Names a sending process to a receiving one.
pub(crate) type GroupId = [u8; 16];

/// Of payload's connection, and of the one for answers.
const MAGICS: [u32; 2] = [u32::from_le_bytes(*b"TxLn"), u32::from_le_bytes(*b"TxLa")];
const COMM_MAGICS: [u32; 2] = [u32::from_le_bytes(*b"TxCo"), u32::from_le_bytes(*b"TxCa")];
const CRC_AT: usize = 28;

/// Which of a pair a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It carries what the sender sends.
    Payload,
    /// It carries what the receiver answers.
    Answers,
}

/// What a connection at the door is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    /// A comm's own.
    Comm(Resumption),
    /// A lane.
    Lane(Hello),
}

impl Greeting {
    /// Reads it from its bytes.
    pub(crate) fn decode(bytes: &[u8; Hello::BYTES]) -> Result<(Self, Part), Violation> {
        match Resumption::decode(bytes) {
            Some((resumption, part)) => Ok((Self::Comm(resumption), part)),
            None => Hello::decode(bytes).map(|(hello, part)| (Self::Lane(hello), part)),
        }
    }

    /// Says it first of all on a connection.
    pub(crate) fn send(self, part: Part, link: &Link) -> Result<(), String> {
        let bytes = match self {
            Self::Comm(resumption) => resumption.encode(part),
            Self::Lane(hello) => hello.encode(part),
        };
        // A few bytes on a fresh connection always fit its buffer.
        match link.send_whole(&bytes) {
            Ok(Moved::Bytes(Hello::BYTES)) => Ok(()),
            moved => Err(format!("a fresh connection takes no bytes: {moved:?}")),
        }
    }

    /// Says it on both of a pair, payload's first.
    pub(crate) fn send_on_both(self, links: &[Link; 2]) -> Result<(), String> {
        let parts = [Part::Payload, Part::Answers];
        let mut greeted = links.iter().zip(parts);
        greeted.try_for_each(|(link, part)| self.send(part, link))
    }
}

/// What a connection says first that takes the place of a comm's own one, or that joins its first one for answers.
///
/// Little endian, 32 bytes: magic u32, 0 u32, the session in which the comm's first connection came about, 16 bytes,
/// epoch u32 (how often the comm's connections were dialled before; 0: answers for the first one), CRC32C of the 28 bytes
/// before. What the receiver has read comes first of the answers, then the comm's stream goes on behind that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resumption {
    pub(crate) session: SessionId,
    /// From 1; those of a higher epoch take the place of those of a lower.
    pub(crate) epoch: u32,
}

impl Resumption {
    pub(crate) fn encode(&self, part: Part) -> [u8; Hello::BYTES] {
        record(COMM_MAGICS[part as usize], 0, &self.session.0, self.epoch)
    }

    /// Reads it from its bytes; `None` where they are something else, such as a lane's hello.
    pub(crate) fn decode(bytes: &[u8; Hello::BYTES]) -> Option<(Self, Part)> {
        let (part, word, session, epoch) = read(COMM_MAGICS, bytes).ok()?;
        let session = SessionId(session);
        (word == 0).then_some((Self { session, epoch }, part))
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

/// Reads which of these a record is, the word, the name and the epoch; or what is wrong with it.
fn read(
    magics: [u32; 2],
    bytes: &[u8; Hello::BYTES],
) -> Result<(Part, u32, [u8; 16], u32), String> {
    let u32_at = |at: usize| {
        let word = bytes[at..].first_chunk().copied();
        u32::from_le_bytes(word.unwrap_or_default())
    };
    let (found, crc) = (u32_at(0), crc32c(&bytes[..CRC_AT]));
    let parts = [Part::Payload, Part::Answers].into_iter().zip(magics);
    let part = parts
        .filter(|(_, magic)| *magic == found)
        .map(|(part, _)| part)
        .next();
    let Some(part) = part.filter(|_| u32_at(CRC_AT) == crc) else {
        return Err(format!(
            "magic {found:#010x} (not one of {magics:#010x?}), checksum {:#010x} (computed {crc:#010x})",
            u32_at(CRC_AT)
        ));
    };
    let mut name = [0; 16];
    name.copy_from_slice(&bytes[8..24]);
    Ok((part, u32_at(4), name, u32_at(24)))
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

    pub(crate) fn encode(&self, part: Part) -> [u8; Self::BYTES] {
        let word = u32::from(self.lanes) | u32::from(self.lane) << 16;
        record(MAGICS[part as usize], word, &self.group, self.epoch)
    }

    /// Reads it from its bytes.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<(Self, Part), Violation> {
        let wrong = |arrived: String| Violation {
            expected: format!("the hello of a lane, one of at most {MAX_LANES}"),
            arrived,
            chunk: None,
        };
        let (part, word, group, epoch) = read(MAGICS, bytes).map_err(wrong)?;
        let (lanes, lane) = (word as u16, (word >> 16) as u16);
        if usize::from(lanes) > MAX_LANES || lane >= lanes {
            return Err(wrong(format!("lane {lane} of {lanes}")));
        }
        let hello = Self {
            group,
            lanes,
            lane,
            epoch,
        };
        Ok((hello, part))
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
        for part in [Part::Payload, Part::Answers] {
            let bytes = resumption.encode(part);
            assert_eq!(Resumption::decode(&bytes), Some((resumption, part)));
            assert_eq!(
                Greeting::decode(&bytes),
                Ok((Greeting::Comm(resumption), part))
            );
            assert!(Hello::decode(&bytes).is_err());
            for at in 0..Hello::BYTES {
                let mut damaged = bytes;
                damaged[at] ^= 0x10;
                assert_eq!(Resumption::decode(&damaged), None, "byte {at}");
            }
        }
        let lane = Hello {
            group: resumption.session.0,
            lanes: 2,
            lane: 1,
            epoch: 0,
        };
        assert_eq!(Resumption::decode(&lane.encode(Part::Payload)), None);
    }

    #[test]
    fn a_hello_survives_the_round_trip_and_a_damaged_or_impossible_one_is_refused() {
        let hello = Hello {
            group: *b"0123456789abcdef",
            lanes: 64,
            lane: 63,
            epoch: 0x0102_0304,
        };
        for part in [Part::Payload, Part::Answers] {
            let bytes = hello.encode(part);
            assert_eq!(Hello::decode(&bytes), Ok((hello, part)));
            for at in 0..Hello::BYTES {
                let mut damaged = bytes;
                damaged[at] ^= 0x10;
                assert!(Hello::decode(&damaged).is_err(), "byte {at}");
            }
        }
        for (lane, lanes) in [(0, 0), (64, 64), (0, 65)] {
            assert!(
                Hello::decode(
                    &Hello {
                        lane,
                        lanes,
                        ..hello
                    }
                    .encode(Part::Payload)
                )
                .is_err()
            );
        }
    }
}
