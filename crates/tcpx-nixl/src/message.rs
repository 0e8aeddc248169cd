//! What two agents say to each other, in notifications of their connection. Everything that arrives is
//! hostile until read: the reader is total, and what a message names is checked where it is used.

use tcpx::WindowKey;

use crate::bytes::{Reader, push_short_bytes};
use crate::info::{AgentId, VERSION};

/// Longest message in bytes: what a notification of the engine carries.
pub(crate) const MOST_BYTES: usize = 60 * 1024;
/// Bytes of one [`Piece`].
pub(crate) const PIECE_BYTES: usize = 20;
/// Bytes of a message beside its pieces.
pub(crate) const TABLE_BYTES: usize = 64;
/// Longest notification of NIXL in bytes.
pub(crate) const MOST_NOTICE_BYTES: usize = 16 << 20;

/// A part of the memory that a message names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The region at its owner; in the answer to a [`Message::Pull`]: which piece of the transfer.
    pub(crate) what: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// One message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    /// The first one, of the side that connected: who it is, and whom it looks for.
    Hello {
        name: &'a [u8],
        agent: AgentId,
        wanted: AgentId,
    },
    /// The answer: that agent is here.
    Welcome,
    /// The answer: another one is.
    Stranger,
    /// A part of a notification of NIXL.
    Notice {
        id: u64,
        bytes: u64,
        offset: u64,
        part: &'a [u8],
    },
    /// Asks for a window over a region.
    AskWindow { region: u64 },
    /// The answer, without a key if there is no such region.
    Window { region: u64, key: Option<WindowKey> },
    /// A window that this side does not use any more.
    CloseWindow { window: u64 },
    /// Asks for the staging memory.
    AskStaging,
    /// The answer: a window of `slots` slots of `slot_bytes` bytes.
    Staging {
        key: WindowKey,
        slots: u32,
        slot_bytes: u32,
    },
    /// Bytes for several pieces, in this slot of the receiver's staging memory.
    Push {
        transfer: u64,
        /// They answer a pull of the receiver's.
        is_answer: bool,
        slot: u32,
        pieces: Vec<Piece>,
    },
    /// The bytes of a push were put in place, or were refused with this status.
    Applied {
        transfer: u64,
        slot: u32,
        bytes: u64,
        status: i32,
    },
    /// The slot of an answer may be used again.
    SlotFree { slot: u32 },
    /// Asks for the bytes of these pieces, the first of which is number `first` of the transfer.
    Pull {
        transfer: u64,
        first: u64,
        pieces: Vec<Piece>,
    },
    /// A pull cannot be answered.
    PullFailed { transfer: u64, status: i32 },
}

impl Message<'_> {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Hello {
                name,
                agent,
                wanted,
            } => {
                bytes.extend([1, VERSION]);
                push_short_bytes(&mut bytes, name);
                bytes.extend(agent);
                bytes.extend(wanted);
            }
            Self::Welcome => bytes.push(2),
            Self::Stranger => bytes.push(3),
            Self::Notice {
                id,
                bytes: all,
                offset,
                part,
            } => {
                bytes.reserve(25 + part.len());
                bytes.push(4);
                bytes.extend(id.to_le_bytes());
                bytes.extend(all.to_le_bytes());
                bytes.extend(offset.to_le_bytes());
                bytes.extend(*part);
            }
            Self::AskWindow { region } => {
                bytes.push(5);
                bytes.extend(region.to_le_bytes());
            }
            Self::Window { region, key } => {
                bytes.push(6);
                bytes.extend(region.to_le_bytes());
                if let Some(key) = key {
                    bytes.extend(key.to_bytes());
                }
            }
            Self::CloseWindow { window } => {
                bytes.push(14);
                bytes.extend(window.to_le_bytes());
            }
            Self::AskStaging => bytes.push(7),
            Self::Staging {
                key,
                slots,
                slot_bytes,
            } => {
                bytes.push(8);
                bytes.extend(slots.to_le_bytes());
                bytes.extend(slot_bytes.to_le_bytes());
                bytes.extend(key.to_bytes());
            }
            Self::Push {
                transfer,
                is_answer,
                slot,
                pieces,
            } => {
                bytes.reserve(TABLE_BYTES + pieces.len() * PIECE_BYTES);
                bytes.extend([9, u8::from(*is_answer)]);
                bytes.extend(transfer.to_le_bytes());
                bytes.extend(slot.to_le_bytes());
                push_pieces(&mut bytes, pieces);
            }
            Self::Applied {
                transfer,
                slot,
                bytes: applied,
                status,
            } => {
                bytes.push(10);
                bytes.extend(transfer.to_le_bytes());
                bytes.extend(slot.to_le_bytes());
                bytes.extend(applied.to_le_bytes());
                bytes.extend(status.to_le_bytes());
            }
            Self::SlotFree { slot } => {
                bytes.push(11);
                bytes.extend(slot.to_le_bytes());
            }
            Self::Pull {
                transfer,
                first,
                pieces,
            } => {
                bytes.push(12);
                bytes.extend(transfer.to_le_bytes());
                bytes.extend(first.to_le_bytes());
                push_pieces(&mut bytes, pieces);
            }
            Self::PullFailed { transfer, status } => {
                bytes.push(13);
                bytes.extend(transfer.to_le_bytes());
                bytes.extend(status.to_le_bytes());
            }
        }
        bytes
    }
}

fn push_pieces(bytes: &mut Vec<u8>, pieces: &[Piece]) {
    bytes.extend((pieces.len() as u32).to_le_bytes());
    for piece in pieces {
        bytes.extend(piece.what.to_le_bytes());
        bytes.extend(piece.offset.to_le_bytes());
        bytes.extend(piece.len.to_le_bytes());
    }
}

fn read_pieces(reader: &mut Reader<'_>) -> Option<Vec<Piece>> {
    let count = usize::try_from(reader.u32()?).ok()?;
    let bytes = reader.take(count.checked_mul(PIECE_BYTES)?)?;
    let mut pieces = Vec::with_capacity(count);
    for piece in bytes.chunks_exact(PIECE_BYTES) {
        let mut reader = Reader(piece);
        pieces.push(Piece {
            what: reader.u64()?,
            offset: reader.u64()?,
            len: reader.u32()?,
        });
    }
    Some(pieces)
}

impl<'a> Message<'a> {
    /// Reads a message; `None` if it is none.
    pub(crate) fn from_bytes(bytes: &'a [u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let message = match reader.u8()? {
            1 => {
                if reader.u8()? != VERSION {
                    return None;
                }
                Self::Hello {
                    name: reader.short_bytes()?,
                    agent: reader.array()?,
                    wanted: reader.array()?,
                }
            }
            2 => Self::Welcome,
            3 => Self::Stranger,
            4 => Self::Notice {
                id: reader.u64()?,
                bytes: reader.u64()?,
                offset: reader.u64()?,
                part: reader.rest(),
            },
            5 => Self::AskWindow {
                region: reader.u64()?,
            },
            6 => Self::Window {
                region: reader.u64()?,
                key: match reader.rest() {
                    [] => None,
                    bytes => Some(WindowKey::from_bytes(bytes).ok()?),
                },
            },
            7 => Self::AskStaging,
            8 => Self::Staging {
                slots: reader.u32()?,
                slot_bytes: reader.u32()?,
                key: WindowKey::from_bytes(reader.rest()).ok()?,
            },
            9 => Self::Push {
                is_answer: match reader.u8()? {
                    0 => false,
                    1 => true,
                    _ => return None,
                },
                transfer: reader.u64()?,
                slot: reader.u32()?,
                pieces: read_pieces(&mut reader)?,
            },
            10 => Self::Applied {
                transfer: reader.u64()?,
                slot: reader.u32()?,
                bytes: reader.u64()?,
                status: i32::from_le_bytes(reader.array()?),
            },
            11 => Self::SlotFree {
                slot: reader.u32()?,
            },
            12 => Self::Pull {
                transfer: reader.u64()?,
                first: reader.u64()?,
                pieces: read_pieces(&mut reader)?,
            },
            13 => Self::PullFailed {
                transfer: reader.u64()?,
                status: i32::from_le_bytes(reader.array()?),
            },
            14 => Self::CloseWindow {
                window: reader.u64()?,
            },
            _ => return None,
        };
        reader.end()?;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> Vec<Message<'static>> {
        let pieces = vec![
            Piece {
                what: 1,
                offset: 2,
                len: 3,
            },
            Piece {
                what: u64::MAX,
                offset: u64::MAX,
                len: u32::MAX,
            },
        ];
        vec![
            Message::Hello {
                name: b"agent",
                agent: [1; 16],
                wanted: [2; 16],
            },
            Message::Welcome,
            Message::Stranger,
            Message::Notice {
                id: 1,
                bytes: 2,
                offset: 3,
                part: b"part",
            },
            Message::AskWindow { region: 5 },
            Message::Window {
                region: 5,
                key: None,
            },
            Message::CloseWindow { window: 6 },
            Message::AskStaging,
            Message::Push {
                transfer: 9,
                is_answer: true,
                slot: 3,
                pieces: pieces.clone(),
            },
            Message::Applied {
                transfer: 1,
                slot: 0,
                bytes: 7,
                status: -3,
            },
            Message::SlotFree { slot: 4 },
            Message::Pull {
                transfer: 2,
                first: 3,
                pieces,
            },
            Message::PullFailed {
                transfer: 2,
                status: -4,
            },
        ]
    }

    #[test]
    fn what_is_written_is_read() {
        for message in messages() {
            let bytes = message.to_bytes();
            assert_eq!(Message::from_bytes(&bytes).as_ref(), Some(&message));
        }
    }

    #[test]
    fn cuts_and_changed_bytes_are_read_or_refused_and_never_more() {
        for message in messages() {
            let bytes = message.to_bytes();
            for len in 0..bytes.len() {
                let _ = Message::from_bytes(&bytes[..len]);
                let mut changed = bytes.clone();
                for value in [0, 1, 0x7f, 0xff] {
                    changed[len] = value;
                    if let Some(Message::Push { pieces, .. } | Message::Pull { pieces, .. }) =
                        Message::from_bytes(&changed)
                    {
                        assert!(pieces.len() * PIECE_BYTES <= bytes.len());
                    }
                }
            }
        }
        assert_eq!(Message::from_bytes(&[]), None);
    }
}
