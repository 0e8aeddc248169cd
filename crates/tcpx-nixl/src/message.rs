//! What two agents say to each other, in notifications of their connection. Everything that arrives
//! is hostile until read: the reader is total, and what a message names is checked where it is
//! used.

use tcpx::WindowKey;

use crate::bytes::{Reader, push_short_bytes};
use crate::info::{AgentId, RegionName};

/// Longest message in bytes: what a notification of the engine carries.
pub(crate) const MOST_BYTES: usize = 60 * 1024;
/// Longest notification of NIXL in bytes.
pub(crate) const MOST_NOTICE_BYTES: usize = 16 << 20;
/// Regions that one message asks about.
pub(crate) const MOST_REGIONS: usize = 512;

const _: () = assert!(MOST_REGIONS * (RegionName::BYTES + 1 + WindowKey::BYTES) < MOST_BYTES);

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
    /// Asks for a window over each of these regions, at most [`MOST_REGIONS`].
    AskWindows { regions: Vec<RegionName> },
    /// The answer, without a key where there is no such region.
    Windows {
        windows: Vec<(RegionName, Option<WindowKey>)>,
    },
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
                bytes.push(1);
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
            Self::AskWindows { regions } => {
                bytes.push(5);
                for region in regions {
                    bytes.extend(region.to_bytes());
                }
            }
            Self::Windows { windows } => {
                bytes.push(6);
                for (region, key) in windows {
                    bytes.extend(region.to_bytes());
                    bytes.push(u8::from(key.is_some()));
                    if let Some(key) = key {
                        bytes.extend(key.to_bytes());
                    }
                }
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
            1 => Self::Hello {
                name: reader.short_bytes()?,
                agent: reader.array()?,
                wanted: reader.array()?,
            },
            2 => Self::Welcome,
            3 => Self::Stranger,
            4 => Self::Notice {
                id: reader.u64()?,
                bytes: reader.u64()?,
                offset: reader.u64()?,
                part: reader.rest(),
            },
            5 => Self::AskWindows {
                regions: all(&mut reader, RegionName::read)?,
            },
            6 => Self::Windows {
                windows: all(&mut reader, |reader| {
                    let region = RegionName::read(reader)?;
                    let key = match reader.u8()? {
                        0 => None,
                        1 => Some(WindowKey::from_bytes(reader.take(WindowKey::BYTES)?).ok()?),
                        _ => return None,
                    };
                    Some((region, key))
                })?,
            },
            _ => return None,
        };
        reader.end()?;
        Some(message)
    }
}

/// What fills the rest of a message: as much as one may name, and not nothing.
fn all<'a, T>(
    reader: &mut Reader<'a>,
    one: impl Fn(&mut Reader<'a>) -> Option<T>,
) -> Option<Vec<T>> {
    let mut all = Vec::new();
    while !reader.is_empty() {
        all.push(one(reader)?);
    }
    (1..=MOST_REGIONS).contains(&all.len()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::RegionNames;

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
            Message::AskWindows {
                regions: regions(3).collect(),
            },
            Message::Windows {
                windows: regions(2).zip([None, Some(key())]).collect(),
            },
        ]
    }

    fn regions(count: u64) -> impl Iterator<Item = RegionName> {
        let names = RegionNames::generate().unwrap();
        (0..count as usize).map(move |address| names.of(address, 1, None))
    }

    fn key() -> WindowKey {
        let mut bytes = [0; WindowKey::BYTES];
        bytes[..5].copy_from_slice(b"TXW\x01\x03");
        WindowKey::from_bytes(&bytes).unwrap()
    }

    #[test]
    fn a_message_asks_about_so_many_regions_and_no_more() {
        let most = MOST_REGIONS as u64;
        for (count, is_read) in [(0, false), (1, true), (most, true), (most + 1, false)] {
            let regions = regions(count).collect();
            let bytes = Message::AskWindows { regions }.to_bytes();
            assert_eq!(Message::from_bytes(&bytes).is_some(), is_read, "{count}");
        }
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
