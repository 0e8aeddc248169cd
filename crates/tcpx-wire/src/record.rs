//! Sealed records: what goes over a connection once its handshake is over.
//!
//! A record is a length (u16, little endian) and that many bytes: a transport message of the Noise protocol framework,
//! so AES-256-GCM under the keys of this one connection and direction, with the number of the record as its nonce. The
//! numbers are never sent: a record that is dropped, repeated or moved opens no more than one that was changed. After
//! every [`REKEY_RECORDS`] records of a direction its key is replaced by the next one.

use snow::TransportState;
use thiserror::Error;

/// Bytes of a record's length.
pub const LENGTH_BYTES: usize = 2;
/// Bytes by which sealing makes something longer.
pub const TAG_BYTES: usize = 16;
/// Most bytes that one record seals.
pub const MOST_BYTES: usize = 16 * 1024;
/// Records that one key seals, which are at most 16 GiB: far below what AES-GCM may seal with one key.
pub const REKEY_RECORDS: u64 = 1 << 20;

/// Bytes of the record that seals `bytes` bytes.
pub const fn sealed_bytes(bytes: usize) -> usize {
    LENGTH_BYTES + bytes + TAG_BYTES
}

/// Seals and opens the records of one connection.
#[derive(Debug)]
pub struct Records {
    state: TransportState,
}

/// Bytes that are no record of this connection; nothing behind them means anything.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordError {
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
    pub(crate) fn new(state: TransportState) -> Self {
        Self { state }
    }

    /// Appends the record that seals the beginning of `plain`, at most [`MOST_BYTES`] of it; returns how much that is.
    ///
    /// # Errors
    /// After 2^64 records, which nobody lives to see: the connection has to end.
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<usize, RecordError> {
        let plain = &plain[..plain.len().min(MOST_BYTES)];
        let start = out.len();
        out.resize(start + sealed_bytes(plain.len()), 0);
        let sealed = self.seal_into(plain, &mut out[start..]);
        sealed
            .map(|()| plain.len())
            .inspect_err(|_| out.truncate(start))
    }

    /// The record that seals `plain`; `WHOLE` is its length.
    pub(crate) fn seal_array<const WHOLE: usize>(
        &mut self,
        plain: &[u8],
    ) -> Result<[u8; WHOLE], RecordError> {
        let mut whole = [0; WHOLE];
        self.seal_into(plain, &mut whole)?;
        Ok(whole)
    }

    fn seal_into(&mut self, plain: &[u8], whole: &mut [u8]) -> Result<(), RecordError> {
        let (length, sealed) = whole.split_at_mut(LENGTH_BYTES);
        // At most `MOST_BYTES` and a tag.
        length.copy_from_slice(&(sealed.len() as u16).to_le_bytes());
        let number = self.state.sending_nonce();
        self.state
            .write_message(plain, sealed)
            .map_err(|_| RecordError::Forged { number })?;
        if (number + 1).is_multiple_of(REKEY_RECORDS) {
            self.state.rekey_outgoing();
        }
        Ok(())
    }

    /// Bytes behind its length that the next record has, once the length has come.
    ///
    /// # Errors
    /// When no record has that length.
    pub fn length(input: &[u8]) -> Result<Option<usize>, RecordError> {
        let Some(length) = input.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let arrived = usize::from(u16::from_le_bytes(*length));
        if !(TAG_BYTES..=MOST_BYTES + TAG_BYTES).contains(&arrived) {
            return Err(RecordError::Length { arrived });
        }
        Ok(Some(arrived))
    }

    /// Opens the next record: `sealed` is all of it behind its length. What it sealed is at the beginning of `out`,
    /// which must be as long as `sealed`; returns how much that is.
    ///
    /// # Errors
    /// It is not what the peer sealed next.
    pub fn open(&mut self, sealed: &[u8], out: &mut [u8]) -> Result<usize, RecordError> {
        let number = self.state.receiving_nonce();
        let opened = self
            .state
            .read_message(sealed, out)
            .map_err(|_| RecordError::Forged { number })?;
        if (number + 1).is_multiple_of(REKEY_RECORDS) {
            self.state.rekey_incoming();
        }
        Ok(opened)
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

    /// Records that this side has sealed on this connection: the number of the next one.
    pub fn sealed(&self) -> u64 {
        self.state.sending_nonce()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::handshake::{
        LaneClient, ServerHandshake, ServerStep, Session, SessionId, Step, test_session,
    };

    /// Both ends of a connection of a session.
    fn pair(entropy: u8) -> (Records, Records) {
        let session: Session = test_session(SessionId([1; 16]));
        let (mut client, hello) = LaneClient::new(&session, 0, 1, [entropy; 32]).unwrap();
        let step = ServerHandshake::new(None, [2; 80], 0).receive(&mut &hello[..]);
        let Ok(ServerStep::Lane(request)) = step else {
            panic!("{step:?}");
        };
        let (mut server, answer) = request.accept(&session.key).unwrap();
        let Ok(Step::SendLast(confirm, joined)) = client.receive(&mut &answer[..]) else {
            panic!("no answer");
        };
        match server.receive(&mut &confirm[..]) {
            Ok(Step::Done(accepted)) => (joined.records, accepted.joined.records),
            other => panic!("{other:?}"),
        }
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
        assert_eq!(records.seal(plain, &mut whole), Ok(plain.len()));
        whole
    }

    proptest! {
        #[test]
        fn what_was_sealed_opens_in_order(texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..20)) {
            let (mut one, mut other) = pair(3);
            for (at, text) in texts.iter().enumerate() {
                // The confirmation was the first record.
                prop_assert_eq!(one.sealed(), at as u64 + 1);
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
            let opened = match Records::length(&whole) {
                Ok(Some(length)) if whole.len() == LENGTH_BYTES + length => open(&mut other, &whole),
                // Waits for more, which is no more the peer's.
                Ok(Some(length)) => {
                    whole.resize(LENGTH_BYTES + length, 0);
                    open(&mut other, &whole)
                }
                other => other.map(|_| Vec::new()),
            };
            prop_assert!(opened.is_err());
        }

        #[test]
        fn any_length_is_bounded(bytes: [u8; 2]) {
            match Records::length(&bytes) {
                Ok(Some(length)) => prop_assert!((TAG_BYTES..=MOST_BYTES + TAG_BYTES).contains(&length)),
                Ok(None) => prop_assert!(false, "both bytes came"),
                Err(RecordError::Length { arrived }) => prop_assert!(!(TAG_BYTES..=MOST_BYTES + TAG_BYTES).contains(&arrived)),
                Err(other) => prop_assert!(false, "{other}"),
            }
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
            Err(RecordError::Forged { number: 2 })
        );
    }

    /// The same bytes sealed on two connections of one session have nothing in common: a nonce counts from 0 on each
    /// of them, under keys of its own.
    #[test]
    fn each_connection_of_a_session_has_its_own_keys() {
        let (mut one, _) = pair(3);
        let (mut later, mut other) = pair(4);
        let whole = seal(&mut one, b"the same bytes");
        assert_ne!(whole, seal(&mut later, b"the same bytes"));
        assert!(open(&mut other, &whole).is_err());
    }

    #[test]
    fn keys_change_after_their_records_and_numbers_go_on() {
        let (mut one, mut other) = pair(3);
        let mut whole = Vec::new();
        for number in 1..REKEY_RECORDS + 3 {
            assert_eq!(one.sealed(), number, "no number comes twice");
            whole.clear();
            one.seal(&[], &mut whole).unwrap();
            other
                .open(&whole[LENGTH_BYTES..], &mut [0; TAG_BYTES])
                .unwrap();
        }
    }

    #[test]
    fn a_long_text_takes_several_records() {
        let (mut one, mut other) = pair(3);
        let text = vec![7; MOST_BYTES + 1];
        let mut whole = Vec::new();
        assert_eq!(one.seal(&text, &mut whole), Ok(MOST_BYTES));
        assert_eq!(open(&mut other, &whole).unwrap(), &text[1..]);
    }
}
