//! Sealed records: what goes over a connection once its handshake is over.
//!
//! A record is a length (u16, little endian), its complement, and that many bytes, sealed as those
//! of a lane are ([`lane_seal`](crate::lane_seal)): under the keys of this one connection and
//! direction, with the number of the record as its nonce. The numbers are never sent: a record that
//! is dropped, repeated or moved opens no more than one that was changed. The complement tells at
//! once that a length was damaged: its reader would wait for a record that never ends, while what
//! comes shows it that the peer lives.

use thiserror::Error;

pub use crate::lane_seal::TAG_BYTES;
use crate::lane_seal::{Forged, LaneKeys, Opener, Sealer};

/// Bytes of a record's length and of its complement.
pub const LENGTH_BYTES: usize = 4;
/// Most bytes that one record seals.
pub const MOST_BYTES: usize = 16 * 1024;

/// Bytes of the record that seals `bytes` bytes.
pub const fn sealed_bytes(bytes: usize) -> usize {
    LENGTH_BYTES + bytes + TAG_BYTES
}

/// What stands in front of a record that seals so many bytes, at most [`MOST_BYTES`].
pub const fn record_head(bytes: usize) -> [u8; LENGTH_BYTES] {
    let length = (bytes + TAG_BYTES) as u16;
    let [low, high] = length.to_le_bytes();
    [low, high, !low, !high]
}

/// What a side that has ended the session seals, in place of the position that it goes on from, in
/// front of the reason.
pub const SESSION_OVER: u64 = u64::MAX;

/// Seals and opens the records of one connection.
#[derive(Debug)]
pub struct Records {
    sealer: Sealer,
    opener: Opener,
}

/// Bytes that are no record of this connection; nothing behind them means anything.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordError {
    /// Its length and what follows as the complement do not go together.
    #[error(
        "record: expected a length and its complement, {length:#06x} and {complement:#06x} arrived; something between the \
         hosts changes what they send"
    )]
    Complement {
        /// The length.
        length: u16,
        /// What follows it.
        complement: u16,
    },
    /// Its length is not one that a record has.
    #[error(
        "record: expected a length of {TAG_BYTES} to {} bytes, {arrived} arrived; something between the hosts changes \
         what they send",
        MOST_BYTES + TAG_BYTES
    )]
    Length {
        /// Bytes that it says to have.
        arrived: usize,
    },
    /// It is not what the peer sealed as this connection's next record.
    #[error(
        "record: record {number} is not what the peer sealed; something between the hosts changes what they send"
    )]
    Forged {
        /// Its number.
        number: u64,
    },
}

impl Records {
    /// Both directions, each at its first record.
    pub fn new(keys: LaneKeys) -> Self {
        let (sealer, opener) = keys.start();
        Self { sealer, opener }
    }

    /// What seals and what opens, for two who use them apart.
    pub fn into_halves(self) -> (Sealer, Opener) {
        (self.sealer, self.opener)
    }

    /// Appends the record that seals the beginning of `plain`, at most [`MOST_BYTES`] of it;
    /// returns how much that is.
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) -> usize {
        let plain = &plain[..plain.len().min(MOST_BYTES)];
        let start = out.len();
        out.resize(start + sealed_bytes(plain.len()), 0);
        self.seal_into(plain, &mut out[start..]);
        plain.len()
    }

    /// The record that seals `plain`; `WHOLE` is its length.
    pub(crate) fn seal_array<const WHOLE: usize>(&mut self, plain: &[u8]) -> [u8; WHOLE] {
        let mut whole = [0; WHOLE];
        self.seal_into(plain, &mut whole);
        whole
    }

    fn seal_into(&mut self, plain: &[u8], whole: &mut [u8]) {
        let (head, sealed) = whole.split_at_mut(LENGTH_BYTES);
        head.copy_from_slice(&record_head(plain.len()));
        let (text, tag) = sealed.split_at_mut(plain.len());
        text.copy_from_slice(plain);
        tag.copy_from_slice(&self.sealer.seal(text));
    }

    /// Bytes behind its length that the next record has, once the length has come.
    ///
    /// # Errors
    /// When no record has that length, or its complement is another one's.
    pub fn length(input: &[u8]) -> Result<Option<usize>, RecordError> {
        let Some(&[low, high, others @ ..]) = input.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u16::from_le_bytes([low, high]);
        let complement = u16::from_le_bytes(others);
        if complement != !length {
            return Err(RecordError::Complement { length, complement });
        }
        let arrived = usize::from(length);
        if !(TAG_BYTES..=MOST_BYTES + TAG_BYTES).contains(&arrived) {
            return Err(RecordError::Length { arrived });
        }
        Ok(Some(arrived))
    }

    /// Opens the next record: `sealed` is all of it behind its length. What it sealed is at the
    /// beginning of `out`, which must be at least as long as `sealed`; returns how much that is.
    ///
    /// # Errors
    /// It is not what the peer sealed next.
    pub fn open(&mut self, sealed: &[u8], out: &mut [u8]) -> Result<usize, RecordError> {
        let out = &mut out[..sealed.len()];
        out.copy_from_slice(sealed);
        match self.opener.open(out) {
            Ok(text) => Ok(text.len()),
            Err(Forged { number }) => Err(RecordError::Forged { number }),
        }
    }

    /// Opens a whole record of a known length, which seals `BYTES` bytes.
    pub(crate) fn open_array<const BYTES: usize>(
        &mut self,
        whole: &[u8],
    ) -> Result<[u8; BYTES], RecordError> {
        let expected = BYTES + TAG_BYTES;
        let arrived = Self::length(whole)?.unwrap_or_default();
        if arrived != expected || whole.len() != sealed_bytes(BYTES) {
            return Err(RecordError::Length { arrived });
        }
        // No more than a tag and a byte are ever asked for.
        let mut room = [0; 2 * TAG_BYTES];
        self.open(&whole[LENGTH_BYTES..], &mut room[..expected])?;
        Ok(std::array::from_fn(|at| room[at]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Both ends of a connection with these keys.
    fn pair(secret: u8) -> (Records, Records) {
        let keys = |send, receive| Records::new(LaneKeys::new([send; 32], [receive; 32]));
        (keys(secret, 0), keys(0, secret))
    }

    /// Opens a record that came whole.
    fn open(records: &mut Records, whole: &[u8]) -> Result<Vec<u8>, RecordError> {
        let length = Records::length(whole)?.expect("it came whole");
        let mut out = vec![0; length];
        let count = records.open(&whole[LENGTH_BYTES..], &mut out)?;
        out.truncate(count);
        Ok(out)
    }

    fn seal(records: &mut Records, plain: &[u8]) -> Vec<u8> {
        let mut whole = Vec::new();
        assert_eq!(records.seal(plain, &mut whole), plain.len());
        whole
    }

    proptest! {
        #[test]
        fn what_was_sealed_opens_in_order(texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..20)) {
            let (mut one, mut other) = pair(3);
            for text in &texts {
                let whole = seal(&mut one, text);
                prop_assert_eq!(whole.len(), sealed_bytes(text.len()));
                prop_assert_eq!(&open(&mut other, &whole).unwrap(), text);
            }
        }

        #[test]
        fn a_changed_byte_opens_nothing(at in any::<prop::sample::Index>(), by in 1u8..) {
            let (mut one, mut other) = pair(3);
            let mut whole = seal(&mut one, b"announce transfer 7");
            let at = at.index(whole.len());
            whole[at] ^= by;
            match Records::length(&whole) {
                Ok(_) => prop_assert!(at >= LENGTH_BYTES && open(&mut other, &whole).is_err()),
                // Without another byte of it.
                Err(error) => prop_assert!(at < LENGTH_BYTES, "{error}"),
            }
        }

        #[test]
        fn any_length_is_bounded(length: u16, other: u16, is_whole: bool) {
            let complement = if is_whole { !length } else { other };
            let [low, high] = length.to_le_bytes();
            let [third, last] = complement.to_le_bytes();
            let bounds = TAG_BYTES..=MOST_BYTES + TAG_BYTES;
            let expected = match usize::from(length) {
                _ if complement != !length => Err(RecordError::Complement { length, complement }),
                length if bounds.contains(&length) => Ok(Some(length)),
                arrived => Err(RecordError::Length { arrived }),
            };
            prop_assert_eq!(Records::length(&[low, high, third, last]), expected);
            prop_assert_eq!(Records::length(&[low, high, third]), Ok(None));
        }
    }

    #[test]
    fn dropped_repeated_and_reflected_records_open_nothing() {
        let (mut one, mut other) = pair(3);
        let (first, second) = (seal(&mut one, b"first"), seal(&mut one, b"second"));
        assert!(open(&mut other, &second).is_err(), "the first was dropped");
        assert!(
            open(&mut one, &first).is_err(),
            "it comes back to its sender"
        );
        let (mut one, mut other) = pair(3);
        let first = seal(&mut one, b"first");
        assert_eq!(open(&mut other, &first).unwrap(), b"first");
        assert_eq!(
            open(&mut other, &first),
            Err(RecordError::Forged { number: 1 })
        );
    }

    #[test]
    fn a_long_text_takes_several_records() {
        let (mut one, mut other) = pair(3);
        let text = vec![7; MOST_BYTES + 1];
        let mut whole = Vec::new();
        assert_eq!(one.seal(&text, &mut whole), MOST_BYTES);
        assert_eq!(open(&mut other, &whole).unwrap(), &text[1..]);
    }

    #[test]
    fn what_has_been_read_is_told_as_the_page_says() {
        let (mut records, _) = pair(7);
        let mut told = Vec::new();
        records.seal(&1000_u64.to_le_bytes(), &mut told);
        let told = told.iter().map(|byte| format!("{byte:02x}")).collect();
        crate::tests::assert_on_page(&[told]);
    }
}
