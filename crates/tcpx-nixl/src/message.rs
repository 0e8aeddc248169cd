//! What two agents say to each other, in notifications of their connection. Everything that arrives is
//! hostile until read: the reader is total, and what a message names is checked where it is used.

use tcpx::WindowKey;

use crate::bytes::{Reader, push_short_bytes};
use crate::info::{AgentId, VERSION};

/// Longest message in bytes: what a notification of the engine carries.
pub(crate) const MOST_BYTES: usize = 60 * 1024;
/// Longest notification of NIXL in bytes.
pub(crate) const MOST_NOTICE_BYTES: usize = 16 << 20;

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
                bytes.push(7);
                bytes.extend(window.to_le_bytes());
            }
        }
        bytes
    }
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
            7 => Self::CloseWindow {
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
                    if let Some(message) = Message::from_bytes(&changed) {
                        assert!(message.to_bytes().len() <= bytes.len());
                    }
                }
            }
        }
        assert_eq!(Message::from_bytes(&[]), None);
    }
}
