//! The first bytes behind a handshake at a process's door: whose lane it is, and which; or which
//! comm's own connection.
//!
//! Both are pairs of connections, of which each carries bytes one way only, behind these first
//! ones: payload, and what its receiver answers. A connection whose process ends before it has read
//! all that came on it is reset by the system, which drops what it was still to send; on payload's
//! nothing comes.
//!
//! Little endian, 32 bytes: magic u32, lanes of the group u16, number of the lane u16, group 16
//! bytes, epoch u32 (how often a lane of this number was dialled before), CRC32C of the 28 bytes
//! before. Chunks follow on payload's, each behind a [`ChunkHeader`](tcpx_wire::ChunkHeader). On
//! the other one travels nothing but the bytes of chunks, headers included, that the receiver has
//! read, u64, to the end of a chunk.

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

/// What a comm's own connection says first: as a lane's, with 0 in place of lanes and number, and
/// the session that introduced the comm for the group. What the receiver has read comes first of
/// the answers, then the comm's stream goes on behind that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resumption {
    pub(crate) session: SessionId,
    /// From 1; those of a higher epoch take the place of those of a lower.
    pub(crate) epoch: u32,
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

impl Greeting {
    /// Bytes on the wire.
    pub(crate) const BYTES: usize = 32;

    pub(crate) fn encode(self, part: Part) -> [u8; Self::BYTES] {
        let (magics, word, name, epoch) = match self {
            Self::Comm(Resumption { session, epoch }) => (COMM_MAGICS, 0, session.0, epoch),
            Self::Lane(hello) => {
                let word = u32::from(hello.lanes) | u32::from(hello.lane) << 16;
                (MAGICS, word, hello.group, hello.epoch)
            }
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&magics[part as usize].to_le_bytes());
        bytes[4..8].copy_from_slice(&word.to_le_bytes());
        bytes[8..24].copy_from_slice(&name);
        bytes[24..CRC_AT].copy_from_slice(&epoch.to_le_bytes());
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads it from its bytes.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<(Self, Part), Violation> {
        let u32_at = |at: usize| {
            let word = bytes[at..].first_chunk().copied();
            u32::from_le_bytes(word.unwrap_or_default())
        };
        let (magic, word, epoch) = (u32_at(0), u32_at(4), u32_at(24));
        let mut name = [0; 16];
        name.copy_from_slice(&bytes[8..24]);
        let (lanes, lane) = (word as u16, (word >> 16) as u16);
        let is_of = |magics: [u32; 2]| magics.iter().position(|one| *one == magic);
        let is_whole = u32_at(CRC_AT) == crc32c(&bytes[..CRC_AT]);
        let session = SessionId(name);
        let found = match (is_of(MAGICS), is_of(COMM_MAGICS)) {
            (Some(part), _) if usize::from(lanes) <= MAX_LANES && lane < lanes => {
                let hello = Hello {
                    group: name,
                    lanes,
                    lane,
                    epoch,
                };
                Some((Self::Lane(hello), part))
            }
            (_, Some(part)) if word == 0 => Some((Self::Comm(Resumption { session, epoch }), part)),
            _ => None,
        };
        let found = found.filter(|_| is_whole);
        let (greeting, part) = found.ok_or_else(|| Violation {
            expected: format!("the hello of a comm, or of one of at most {MAX_LANES} lanes"),
            arrived: format!(
                "magic {magic:#010x}, lane {lane} of {lanes}, checksum {:#010x}",
                u32_at(CRC_AT)
            ),
            chunk: None,
        })?;
        Ok((greeting, [Part::Payload, Part::Answers][part]))
    }

    /// Says it first of all on both of a pair, payload's first; whether they took it.
    pub(crate) fn send(self, links: &[Link; 2]) -> bool {
        let mut greeted = links.iter().zip([Part::Payload, Part::Answers]);
        // A few bytes on a fresh connection always fit its buffer.
        greeted.all(|(link, part)| {
            let moved = link.send_whole(&self.encode(part));
            matches!(moved, Ok(Moved::Bytes(Self::BYTES)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_survives_and_a_damaged_one_is_refused() {
        let hello = Hello {
            group: *b"0123456789abcdef",
            lanes: 64,
            lane: 63,
            epoch: 0x0102_0304,
        };
        let comm = Greeting::Comm(Resumption {
            session: SessionId(hello.group),
            epoch: 0x0102_0304,
        });
        for greeting in [Greeting::Lane(hello), comm] {
            for part in [Part::Payload, Part::Answers] {
                let bytes = greeting.encode(part);
                assert_eq!(Greeting::decode(&bytes), Ok((greeting, part)));
                for at in 0..Greeting::BYTES {
                    let mut damaged = bytes;
                    damaged[at] ^= 0x10;
                    assert!(Greeting::decode(&damaged).is_err(), "byte {at}");
                }
            }
        }
        for (lane, lanes) in [(0, 0), (64, 64), (0, 65)] {
            let impossible = Greeting::Lane(Hello {
                lane,
                lanes,
                ..hello
            });
            assert!(Greeting::decode(&impossible.encode(Part::Payload)).is_err());
        }
    }
}
