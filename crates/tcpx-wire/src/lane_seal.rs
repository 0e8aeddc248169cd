//! What protects a lane once its handshake is over: each chunk header is a sealed record, and so is
//! each piece of payload where both sides agreed on encryption.
//!
//! A record is what it seals and a tag of [`TAG_BYTES`]: AES-256-GCM under the keys of this one
//! connection and direction, with the number of the record as its nonce. Neither number nor length
//! travel: both sides count records, and a header, which has one length, says how long the payload
//! behind it is. So a record that is dropped, repeated or moved opens no more than one that was
//! changed. A direction's key is replaced by the next one behind the record with which it has
//! sealed [`REKEY_BYTES`].

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use thiserror::Error;
use zeroize::Zeroizing;

use crate::chunk_header::ChunkHeader;
use crate::derive;

/// Bytes by which sealing makes something longer.
pub const TAG_BYTES: usize = 16;
/// Most bytes of payload that one record seals; all records of a chunk but the last one seal as
/// many.
pub const RECORD_BYTES: usize = 64 * 1024;
/// Bytes of a sealed chunk header.
pub const HEADER_BYTES: usize = ChunkHeader::BYTES + TAG_BYTES;
/// Bytes after which a key is replaced: what AES-GCM may seal under one key with a single nonce, in
/// all its records together.
pub const REKEY_BYTES: u64 = 64 << 30;

const SECRET_BYTES: usize = 32;

/// Bytes of the records that seal `bytes` bytes of a chunk's payload.
pub const fn sealed_payload_bytes(bytes: usize) -> usize {
    bytes + bytes.div_ceil(RECORD_BYTES) * TAG_BYTES
}

/// The secrets of one connection, a lane: one for each direction. `Debug` hides them, and they are
/// wiped from memory when they are dropped.
pub struct LaneKeys {
    send: Zeroizing<[u8; SECRET_BYTES]>,
    receive: Zeroizing<[u8; SECRET_BYTES]>,
}

hidden!(LaneKeys);

impl LaneKeys {
    /// From secrets that only the two ends of this connection know, and that no other connection
    /// has.
    pub fn new(send: [u8; SECRET_BYTES], receive: [u8; SECRET_BYTES]) -> Self {
        Self {
            send: Zeroizing::new(send),
            receive: Zeroizing::new(receive),
        }
    }

    /// Both directions, each at its first record.
    pub fn start(self) -> (Sealer, Opener) {
        (
            Sealer(Direction::new(self.send, REKEY_BYTES)),
            Opener(Direction::new(self.receive, REKEY_BYTES)),
        )
    }
}

/// Bytes that are not what the peer sealed as this lane's next record: nothing behind them means
/// anything.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "record {number} of the lane is not what the peer sealed; something between the hosts changes what they send"
)]
pub struct Forged {
    /// The record's number.
    pub number: u64,
}

/// Seals what one direction of a lane sends.
#[derive(Debug)]
pub struct Sealer(Direction);

impl Sealer {
    /// Seals `bytes` in place as the next record; the answer is its tag, which follows it. At most
    /// [`RECORD_BYTES`], so that what a key seals stays near its limit.
    pub fn seal(&mut self, bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        debug_assert!(bytes.len() <= RECORD_BYTES);
        let nonce = self.0.nonce();
        let tag = self
            .0
            .key
            .seal_in_place_separate_tag(nonce, Aad::empty(), bytes)
            .expect("AES-GCM seals 64 KiB");
        self.0.count(bytes.len());
        let mut out = [0; TAG_BYTES];
        out.copy_from_slice(tag.as_ref());
        out
    }

    /// The record that seals a chunk header.
    pub fn seal_header(&mut self, header: &[u8; ChunkHeader::BYTES]) -> [u8; HEADER_BYTES] {
        let mut sealed = [0; HEADER_BYTES];
        let (text, tag) = sealed.split_at_mut(ChunkHeader::BYTES);
        text.copy_from_slice(header);
        tag.copy_from_slice(&self.seal(text));
        sealed
    }

    /// Records sealed on this connection: the number of the next one.
    pub fn sealed(&self) -> u64 {
        self.0.number
    }
}

/// Opens what one direction of a lane receives.
#[derive(Debug)]
pub struct Opener(Direction);

impl Opener {
    /// Opens the next record in place: `record` is all of it with its tag. The answer is what it
    /// sealed.
    ///
    /// # Errors
    /// It is not what the peer sealed next; what is in `record` then means nothing, and the lane
    /// must end.
    pub fn open<'a>(&mut self, record: &'a mut [u8]) -> Result<&'a mut [u8], Forged> {
        let number = self.0.number;
        let nonce = self.0.nonce();
        let text = record.len().checked_sub(TAG_BYTES);
        let (text, tag) = text
            .and_then(|bytes| record.split_at_mut_checked(bytes))
            .ok_or(Forged { number })?;
        let tag = Tag::try_from(&*tag).map_err(|_| Forged { number })?;
        let opened = self
            .0
            .key
            .open_in_place_separate_tag(nonce, Aad::empty(), tag, text, 0..)
            .map_err(|_| Forged { number })?;
        self.0.count(opened.len());
        Ok(opened)
    }

    /// Opens a chunk header.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_header(
        &mut self,
        record: &mut [u8; HEADER_BYTES],
    ) -> Result<[u8; ChunkHeader::BYTES], Forged> {
        let number = self.0.number;
        let opened = self.open(record)?;
        opened.first_chunk().copied().ok_or(Forged { number })
    }
}

/// The chain of keys of one direction, and the number of the next record.
struct Direction {
    key: LessSafeKey,
    /// What the next key derives from; the present one does not lead to it.
    next: Zeroizing<[u8; SECRET_BYTES]>,
    /// Counts on over all keys.
    number: u64,
    /// Bytes sealed under this key.
    bytes: u64,
    rekey_bytes: u64,
}

impl Direction {
    fn new(secret: Zeroizing<[u8; SECRET_BYTES]>, rekey_bytes: u64) -> Self {
        let (key, next) = derive(&secret);
        Self {
            key,
            next,
            number: 0,
            bytes: 0,
            rekey_bytes,
        }
    }

    fn nonce(&self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_be_bytes());
        Nonce::assume_unique_for_key(nonce)
    }

    /// A record of so many bytes is done.
    fn count(&mut self, bytes: usize) {
        // Nobody lives to see 2^64 of them.
        self.number += 1;
        self.bytes += bytes as u64;
        if self.bytes >= self.rekey_bytes {
            (self.key, self.next) = derive(&self.next);
            self.bytes = 0;
        }
    }
}

hidden!(Direction);

/// The key of a secret, and the secret that comes after it.
fn derive(secret: &[u8; SECRET_BYTES]) -> (LessSafeKey, Zeroizing<[u8; SECRET_BYTES]>) {
    let secret = derive::uniform(secret);
    let expand = |label: &[u8]| {
        let mut out = Zeroizing::new([0; SECRET_BYTES]);
        derive::expand(&secret, label, &mut *out);
        out
    };
    let key = expand(b"tcpx lane key");
    let key = UnboundKey::new(&AES_256_GCM, &*key).expect("AES-256 has a key of 32 bytes");
    (LessSafeKey::new(key), expand(b"tcpx lane next"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Both ends of one direction, with keys that are replaced after so many bytes.
    fn pair(sends: u64, receives: u64) -> (Sealer, Opener) {
        let direction = |bytes| Direction::new(Zeroizing::new([7; SECRET_BYTES]), bytes);
        (Sealer(direction(sends)), Opener(direction(receives)))
    }

    fn seal(sealer: &mut Sealer, text: &[u8]) -> Vec<u8> {
        let mut record = text.to_vec();
        let tag = sealer.seal(&mut record);
        record.extend_from_slice(&tag);
        record
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    proptest! {
        #[test]
        fn what_was_sealed_opens_in_order(
            texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..20),
            rekey_bytes in 1u64..500,
        ) {
            let (mut sealer, mut opener) = pair(rekey_bytes, rekey_bytes);
            for (at, text) in texts.iter().enumerate() {
                prop_assert_eq!(sealer.sealed(), at as u64);
                let mut record = seal(&mut sealer, text);
                prop_assert_eq!(record.len(), text.len() + TAG_BYTES);
                prop_assert_eq!(&*opener.open(&mut record).unwrap(), &text[..]);
            }
        }

        #[test]
        fn a_changed_byte_opens_nothing(at in any::<prop::sample::Index>(), by in 1u8..) {
            let (mut sealer, mut opener) = pair(1 << 20, 1 << 20);
            let mut record = seal(&mut sealer, b"part of a tensor");
            let at = at.index(record.len());
            record[at] ^= by;
            prop_assert_eq!(opener.open(&mut record), Err(Forged { number: 0 }));
        }

        #[test]
        fn bytes_of_any_length_open_nothing(mut bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let (_, mut opener) = pair(1 << 20, 1 << 20);
            prop_assert_eq!(opener.open(&mut bytes), Err(Forged { number: 0 }));
        }
    }

    #[test]
    fn a_record_out_of_its_turn_opens_nothing() {
        let (mut sealer, mut opener) = pair(1 << 20, 1 << 20);
        let first = seal(&mut sealer, b"first");
        let second = seal(&mut sealer, b"second");
        assert_eq!(opener.open(&mut second.clone()), Err(Forged { number: 0 }));
        assert!(opener.open(&mut first.clone()).is_ok());
        assert_eq!(opener.open(&mut first.clone()), Err(Forged { number: 1 }));
        assert!(opener.open(&mut second.clone()).is_ok());
    }

    #[test]
    fn a_direction_does_not_open_its_own_records() {
        let (mut sealer, mut opener) = LaneKeys::new([1; 32], [2; 32]).start();
        assert!(opener.open(&mut seal(&mut sealer, b"back")).is_err());
        let (_, mut there) = LaneKeys::new([2; 32], [1; 32]).start();
        assert_eq!(sealer.sealed(), 1);
        let (mut sealer, _) = LaneKeys::new([1; 32], [2; 32]).start();
        assert!(there.open(&mut seal(&mut sealer, b"there")).is_ok());
    }

    #[test]
    fn a_header_is_one_record() {
        let (mut sealer, mut opener) = pair(1 << 20, 1 << 20);
        let header = [5; ChunkHeader::BYTES];
        let mut sealed = sealer.seal_header(&header);
        assert_ne!(sealed[..ChunkHeader::BYTES], header);
        assert_eq!(opener.open_header(&mut sealed), Ok(header));
    }

    /// What AES-256-GCM under keys of HKDF-SHA256 gives, computed apart from this crate by Python's
    /// `cryptography`: one where both sides forget to replace a key agrees with itself, and not
    /// with this.
    #[test]
    fn keys_change_at_their_limit_and_numbers_go_on() {
        let text = [0x42; 10];
        let (mut sealer, _) = pair(20, 20);
        let sealed: Vec<_> = (0..5).map(|_| hex(&seal(&mut sealer, &text))).collect();
        assert_eq!(sealed, KNOWN);
        crate::tests::assert_on_page(&sealed);
        let (mut without, _) = pair(u64::MAX, u64::MAX);
        let under_one: Vec<_> = (0..5).map(|_| hex(&seal(&mut without, &text))).collect();
        assert_eq!(sealed[..2], under_one[..2]);
        for number in 2..5 {
            assert_ne!(sealed[number], under_one[number], "record {number}");
        }
    }

    const KNOWN: [&str; 5] = [
        "27517379911a1591cac25946bda5371c0888bfc43055aab5ac9c",
        "fd2cac4ca9da970e76c95bed9053d50bc1790efb501540ed422d",
        "f2e38e2b3dd429e53899eb2f37a44966507dd310764adcec0a54",
        "1ce83a592c08dd25744b4031ea1b2dbdb2f6f0cef3b349bc3ab1",
        "3a704b2a31dc8e88cae8fb0dd65a96817de8067abd2dbb069f6c",
    ];

    #[test]
    fn a_side_that_does_not_replace_its_key_is_found_at_once() {
        for (sends, receives) in [(20, u64::MAX), (u64::MAX, 20)] {
            let (mut sealer, mut opener) = pair(sends, receives);
            for _ in 0..2 {
                assert!(opener.open(&mut seal(&mut sealer, &[1; 10])).is_ok());
            }
            let mut third = seal(&mut sealer, &[1; 10]);
            assert_eq!(opener.open(&mut third), Err(Forged { number: 2 }));
        }
    }

    #[test]
    fn a_payload_has_a_tag_for_every_64_kib() {
        for (bytes, tags) in [
            (1, 1),
            (RECORD_BYTES, 1),
            (RECORD_BYTES + 1, 2),
            (1 << 20, 16),
        ] {
            assert_eq!(sealed_payload_bytes(bytes), bytes + tags * TAG_BYTES);
        }
    }
}
