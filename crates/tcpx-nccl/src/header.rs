//! What travels on a connection beside payload.
//!
//! Little endian, 24 bytes each. Sender to receiver, before each payload: magic u32, flags u32
//! (0), sequence u64 (from 0, one more each), size u64. Receiver to sender, only when it refuses
//! a message: magic u32, flags u32 (0), sequence u64, bytes it had posted u64.

/// Bytes of a header or a refusal.
pub(crate) const HEADER_BYTES: usize = 24;
const MESSAGE: u32 = u32::from_le_bytes(*b"TxMs");
const REFUSAL: u32 = u32::from_le_bytes(*b"TxRf");

/// One decoded record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Message number of the connection.
    pub(crate) sequence: u64,
    /// Message bytes, or in a refusal the bytes that were posted.
    pub(crate) size: u64,
}

/// Which record is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// Announces a payload.
    Message,
    /// Refuses a message.
    Refusal,
}

impl Record {
    const fn magic(self) -> u32 {
        match self {
            Self::Message => MESSAGE,
            Self::Refusal => REFUSAL,
        }
    }
}

impl Header {
    pub(crate) fn encode(self, record: Record) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&record.magic().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// Reads a record; the error says what was expected and what arrived.
    pub(crate) fn decode(
        record: Record,
        bytes: &[u8; HEADER_BYTES],
    ) -> Result<Self, (String, String)> {
        let [m0, m1, m2, m3, f0, f1, f2, f3, rest @ ..] = *bytes;
        let magic = u32::from_le_bytes([m0, m1, m2, m3]);
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        if magic != record.magic() {
            return Err((
                format!("{record:?} magic {:#010x}", record.magic()),
                format!("{magic:#010x}"),
            ));
        }
        if flags != 0 {
            return Err(("flags 0".to_owned(), format!("{flags:#x}")));
        }
        let [
            s0,
            s1,
            s2,
            s3,
            s4,
            s5,
            s6,
            s7,
            z0,
            z1,
            z2,
            z3,
            z4,
            z5,
            z6,
            z7,
        ] = rest;
        Ok(Self {
            sequence: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            size: u64::from_le_bytes([z0, z1, z2, z3, z4, z5, z6, z7]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_round_trip_and_are_not_taken_for_each_other() {
        let header = Header {
            sequence: u64::MAX - 3,
            size: 5 << 40,
        };
        for record in [Record::Message, Record::Refusal] {
            let bytes = header.encode(record);
            assert_eq!(Header::decode(record, &bytes), Ok(header));
            let other = match record {
                Record::Message => Record::Refusal,
                Record::Refusal => Record::Message,
            };
            assert!(Header::decode(other, &bytes).is_err());
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
        let (expected, arrived) = Header::decode(Record::Message, &bytes).unwrap_err();
        assert_eq!((expected.as_str(), arrived.as_str()), ("flags 0", "0x100"));
    }
}
