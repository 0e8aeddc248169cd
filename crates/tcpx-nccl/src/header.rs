//! What travels on a comm's own connections beside payload: the sender's on payload's, the
//! receiver's on the other one.
//!
//! Little endian, 24 bytes each: magic u32, flags u32 (0), two words u64.
//!
//! | record | from | words |
//! |---|---|---|
//! | message | sender, before its payload | sequence (from 0, rising), bytes |
//! | door | sender, first of all, when its connection can come back | port at which its process can be reached, 0 |
//! | join | sender, behind that, when it has lanes | the group of its lanes, 16 bytes |
//! | end | sender, last of all, when nothing is lost | messages sent in all, 0 |
//! | refusal | receiver | sequence of the message that it cannot take, bytes it had posted |
//! | grant | receiver | receives posted in all, stream number for lanes (0: no grants any more) |
//! | read | receiver, and first of all on a connection | bytes of the sender's that it has read in all, 1 if a receive has waited for more (else 0) |
//!
//! A sequence that a message's header leaves out belongs to a message that came over lanes.

use crate::lanes::hello::GroupId;

/// Bytes of a record.
pub(crate) const HEADER_BYTES: usize = 24;

/// The words of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// First word: a message's number, or a count of them.
    pub(crate) sequence: u64,
    /// Second word: bytes, or what the record says.
    pub(crate) size: u64,
}

/// Which record it is, by its magic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Record {
    /// Announces a payload.
    Message = u32::from_le_bytes(*b"TxMs"),
    /// Refuses a message.
    Refusal = u32::from_le_bytes(*b"TxRf"),
    /// Names the sender's lanes.
    Join = u32::from_le_bytes(*b"TxJn"),
    /// Says that everything was sent.
    End = u32::from_le_bytes(*b"TxEn"),
    /// Lets messages take lanes.
    Grant = u32::from_le_bytes(*b"TxGr"),
    /// Says where the sender's process can be reached.
    Door = u32::from_le_bytes(*b"TxDr"),
    /// Says how far the receiver has read.
    Read = u32::from_le_bytes(*b"TxRd"),
}

/// What a sender may say, in words for an error.
pub(crate) const FROM_SENDER: [Record; 4] =
    [Record::Message, Record::Door, Record::Join, Record::End];
/// What a receiver may say.
pub(crate) const FROM_RECEIVER: [Record; 3] = [Record::Refusal, Record::Grant, Record::Read];

impl Header {
    pub(crate) fn encode(self, record: Record) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&(record as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// Reads one of the records `expected`; the error says what was expected and what arrived.
    pub(crate) fn decode(
        expected: &[Record],
        bytes: &[u8; HEADER_BYTES],
    ) -> Result<(Record, Self), (String, String)> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        // The low half is the magic, the high half the flags.
        let (magic, flags) = (word(0) as u32, word(0) >> 32);
        let Some(record) = expected.iter().find(|record| **record as u32 == magic) else {
            return Err((
                format!("one of {expected:?}"),
                format!("magic {magic:#010x}"),
            ));
        };
        if flags != 0 {
            return Err(("flags 0".to_owned(), format!("{flags:#x}")));
        }
        let header = Self {
            sequence: word(8),
            size: word(16),
        };
        Ok((*record, header))
    }

    /// A record that names lanes.
    pub(crate) fn of_group(group: &GroupId) -> Self {
        let [first @ .., _, _, _, _, _, _, _, _] = *group;
        let [_, _, _, _, _, _, _, _, second @ ..] = *group;
        Self {
            sequence: u64::from_le_bytes(first),
            size: u64::from_le_bytes(second),
        }
    }

    /// The lanes that a record names.
    pub(crate) fn group(self) -> GroupId {
        let mut group = GroupId::default();
        group[..8].copy_from_slice(&self.sequence.to_le_bytes());
        group[8..].copy_from_slice(&self.size.to_le_bytes());
        group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Record; 7] = [
        Record::Message,
        Record::Refusal,
        Record::Join,
        Record::End,
        Record::Grant,
        Record::Door,
        Record::Read,
    ];

    #[test]
    fn records_survive_and_are_not_taken_for_each_other() {
        let header = Header {
            sequence: u64::MAX - 3,
            size: 5 << 40,
        };
        for record in ALL {
            let bytes = header.encode(record);
            assert_eq!(Header::decode(&ALL, &bytes), Ok((record, header)));
            let others: Vec<Record> = ALL.into_iter().filter(|other| *other != record).collect();
            assert!(Header::decode(&others, &bytes).is_err());
        }
    }

    #[test]
    fn unknown_flags_are_refused_with_what_arrived() {
        let mut bytes = Header {
            sequence: 0,
            size: 0,
        }
        .encode(Record::Message);
        bytes[5] = 1;
        let (expected, arrived) = Header::decode(&FROM_SENDER, &bytes).unwrap_err();
        assert_eq!((expected.as_str(), arrived.as_str()), ("flags 0", "0x100"));
    }

    #[test]
    fn a_group_survives_as_two_words() {
        let group = *b"0123456789abcdef";
        assert_eq!(Header::of_group(&group).group(), group);
    }
}
