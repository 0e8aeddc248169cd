//! The secrets that let a peer in: a server's key, and what of it a client gets.
//!
//! A server's key is 128 random bits. Everything else derives from it: the server's static key
//! pair, whose private half proves that it is the server, and a pre-shared key, which proves that a
//! client may connect. A *client's key* holds the public half and the pre-shared key, and so cannot
//! play the server.

use std::sync::Arc;

use data_encoding::{BASE32_NOPAD, BASE32_NOPAD_NOCASE, DecodeKind};
use subtle::ConstantTimeEq;
use thiserror::Error;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::derive;
use crate::handshake::public_key;

/// Bytes at the end of a key's text that tell a generated key from a typed or damaged one.
const CHECK_BYTES: usize = 4;
/// Bytes of the pre-shared key.
const PSK_BYTES: usize = 16;
/// Bytes of what a client calls its key.
pub(crate) const ID_BYTES: usize = 16;
/// Bytes of a half of the static key pair.
pub(crate) const STATIC_BYTES: usize = 32;

/// A server's key: a 128-bit secret, wiped from memory when it is dropped.
///
/// Whoever holds it can serve and connect. It has no `Display`, and `Debug` hides it: it is printed
/// only where [`Key::to_text`] is called.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Key {
    secret: [u8; Self::BYTES],
    /// The public half of the static key pair.
    public: [u8; STATIC_BYTES],
}

secret!(Key, secret);

impl Key {
    /// Bytes of a key.
    pub const BYTES: usize = 16;
    /// Characters of a key's text.
    pub const TEXT_CHARACTERS: usize = 32;

    /// A new key; `fill` must fill all the bytes it gets from a cryptographic random source.
    pub fn generate(fill: &mut dyn FnMut(&mut [u8])) -> Self {
        let mut bytes = [0; Self::BYTES];
        fill(&mut bytes);
        Self::of(bytes)
    }

    fn of(secret: [u8; Self::BYTES]) -> Self {
        let public = [0; STATIC_BYTES];
        let mut key = Self { secret, public };
        key.public = public_key(&key.static_private());
        key
    }

    /// Reads a key's text: base32 (RFC 4648, no padding) in either case; white space around it is
    /// ignored.
    ///
    /// # Errors
    /// When the text is not that of a server's key. Errors never hold a part of the text.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        match AnyKey::parse(text)? {
            AnyKey::Server(key) => Ok(key),
            AnyKey::Client(_) => Err(KeyError::Client),
        }
    }

    /// The text for the server's key file.
    pub fn to_text(&self) -> String {
        text::<{ Self::BYTES + CHECK_BYTES }>("tcpx server key", &self.secret)
    }

    /// What a client needs to connect.
    pub fn client_key(&self) -> ClientKey {
        let mut psk = [0; PSK_BYTES];
        self.derive(b"pre-shared key", &mut psk);
        ClientKey {
            public: self.public,
            psk,
        }
    }

    /// What a server needs of it for each handshake; whoever has its
    /// [`client_key`](Self::client_key) is let in.
    pub fn identity(&self) -> Identity {
        Identity(Arc::new(Parts {
            private: self.static_private(),
            client: self.client_key(),
        }))
    }

    /// What only holders of this key make of bytes that others may read.
    pub fn secret_for(&self, shown: &[u8]) -> Zeroizing<[u8; 32]> {
        let mut secret = Zeroizing::new([0; 32]);
        self.derive(&[b"secret for ", shown].concat(), &mut *secret);
        secret
    }

    /// The private half of the static key pair.
    fn static_private(&self) -> Zeroizing<[u8; STATIC_BYTES]> {
        let mut private = Zeroizing::new([0; STATIC_BYTES]);
        self.derive(b"static key", &mut *private);
        private
    }

    fn derive(&self, label: &[u8], out: &mut [u8]) {
        derive::expand(&derive::extract(b"tcpx key", &self.secret), label, out);
    }
}

/// What a server proves itself with, made once from its key. Clones share it.
#[derive(Clone)]
pub struct Identity(Arc<Parts>);

hidden!(Identity);

struct Parts {
    private: Zeroizing<[u8; STATIC_BYTES]>,
    client: ClientKey,
}

impl Identity {
    pub(crate) fn private(&self) -> &[u8; STATIC_BYTES] {
        &self.0.private
    }

    /// What its clients have.
    pub(crate) fn client(&self) -> &ClientKey {
        &self.0.client
    }
}

/// What of a server's key a client gets: the server's public key and the pre-shared key. With it
/// one can connect to that server, and not serve in its place. Wiped from memory when it is
/// dropped.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct ClientKey {
    public: [u8; STATIC_BYTES],
    psk: [u8; PSK_BYTES],
}

secret!(ClientKey, public, psk);

impl ClientKey {
    /// Bytes of a client's key.
    const BYTES: usize = STATIC_BYTES + PSK_BYTES;
    /// Characters of its text.
    pub const TEXT_CHARACTERS: usize = 84;

    /// The text to give to the other host; anyone who reads it can connect.
    pub fn to_text(&self) -> String {
        let mut bytes = Zeroizing::new([0; Self::BYTES]);
        bytes[..STATIC_BYTES].copy_from_slice(&self.public);
        bytes[STATIC_BYTES..].copy_from_slice(&self.psk);
        text::<{ Self::BYTES + CHECK_BYTES }>("tcpx client key", &*bytes)
    }

    /// Names the server, for people to compare; it is not secret.
    pub fn fingerprint(&self) -> String {
        let digest = derive::hash(&[b"tcpx fingerprint", &self.public]);
        let text = BASE32_NOPAD.encode(&digest[..10]);
        let groups: Vec<&str> = [0, 4, 8, 12].map(|at| &text[at..at + 4]).to_vec();
        groups.join("-")
    }

    pub(crate) fn public(&self) -> &[u8; STATIC_BYTES] {
        &self.public
    }

    /// What the client calls its key in its hello: it derives from the pre-shared key in one
    /// direction, and travels sealed.
    pub(crate) fn id(&self) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        let secret = derive::extract(b"tcpx client key", &self.psk);
        derive::expand(&secret, b"id", &mut id);
        id
    }

    /// The pre-shared key as the handshake takes it.
    pub(crate) fn psk(&self) -> Zeroizing<[u8; STATIC_BYTES]> {
        let mut psk = Zeroizing::new([0; STATIC_BYTES]);
        psk[..PSK_BYTES].copy_from_slice(&self.psk);
        psk
    }
}

/// A key of either side; its length says which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnyKey {
    /// A server's.
    Server(Key),
    /// A client's.
    Client(ClientKey),
}

impl AnyKey {
    /// Reads a key's text: base32 (RFC 4648, no padding) in either case; white space around it is
    /// ignored.
    ///
    /// # Errors
    /// When the text is not that of a generated key. Errors never hold a part of the text.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let text = text.trim().as_bytes();
        if ![Key::TEXT_CHARACTERS, ClientKey::TEXT_CHARACTERS].contains(&text.len()) {
            return Err(KeyError::Length {
                arrived: text.len(),
            });
        }
        if let Some(position) = text.iter().position(|byte| !is_base32(*byte)) {
            return Err(KeyError::Character { position });
        }
        if text.len() == Key::TEXT_CHARACTERS {
            let bytes = decode::<{ Key::BYTES + CHECK_BYTES }>("tcpx server key", text)?;
            let mut secret = Zeroizing::new([0; Key::BYTES]);
            secret.copy_from_slice(&bytes[..Key::BYTES]);
            return Ok(Self::Server(Key::of(*secret)));
        }
        let bytes = decode::<{ ClientKey::BYTES + CHECK_BYTES }>("tcpx client key", text)?;
        let mut key = ClientKey {
            public: [0; STATIC_BYTES],
            psk: [0; PSK_BYTES],
        };
        key.public.copy_from_slice(&bytes[..STATIC_BYTES]);
        key.psk
            .copy_from_slice(&bytes[STATIC_BYTES..ClientKey::BYTES]);
        Ok(Self::Client(key))
    }
}

/// The text of `bytes` and their check.
fn text<const WHOLE: usize>(label: &str, bytes: &[u8]) -> String {
    let mut whole = Zeroizing::new([0; WHOLE]);
    let (held, checked) = whole.split_at_mut(bytes.len());
    held.copy_from_slice(bytes);
    checked.copy_from_slice(&check(label, bytes));
    BASE32_NOPAD.encode(&*whole)
}

/// The bytes of a text whose length and characters were checked.
fn decode<const WHOLE: usize>(
    label: &str,
    text: &[u8],
) -> Result<Zeroizing<[u8; WHOLE]>, KeyError> {
    let mut whole = Zeroizing::new([0; WHOLE]);
    BASE32_NOPAD_NOCASE
        .decode_mut(text, &mut *whole)
        .map_err(|partial| match partial.error.kind {
            DecodeKind::Trailing => KeyError::Check,
            _ => KeyError::Character {
                position: partial.error.position,
            },
        })?;
    let (bytes, checked) = whole.split_at(WHOLE - CHECK_BYTES);
    match bool::from(check(label, bytes).ct_eq(checked)) {
        true => Ok(whole),
        false => Err(KeyError::Check),
    }
}

fn check(label: &str, bytes: &[u8]) -> [u8; CHECK_BYTES] {
    let digest = derive::hash(&[label.as_bytes(), bytes]);
    std::array::from_fn(|at| digest[at])
}

fn is_base32(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || (b'2'..=b'7').contains(&byte)
}

/// A text that is not a key's.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// It is neither a server's key nor a client's.
    #[error(
        "key: expected the 84 characters of a client's key or the 32 of a server's, {arrived} arrived; \
         own words are no key: copy the whole key that the server printed, or make one with `tcpx key`"
    )]
    Length {
        /// Characters that arrived.
        arrived: usize,
    },
    /// A character is not base32.
    #[error(
        "key: expected letters A to Z and digits 2 to 7, byte {position} is another; copy the key from the server"
    )]
    Character {
        /// Where, in bytes from 0.
        position: usize,
    },
    /// It was not generated, or a character of it is another.
    #[error(
        "key: it is mistyped, or own words, which are no key; copy the key that the server printed, or make one \
         with `tcpx key`"
    )]
    Check,
    /// It is a client's key where a server's is needed.
    #[error(
        "key: it is a client's key, with which nobody can serve; give the server its own key file (`tcpx key FILE` \
         makes one)"
    )]
    Client,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(bytes: [u8; 16]) -> Key {
        Key::generate(&mut |out| out.copy_from_slice(&bytes))
    }

    proptest! {
        #[test]
        fn texts_read_back_in_either_case(bytes: [u8; 16]) {
            let key = key(bytes);
            let text = key.to_text();
            prop_assert_eq!(text.len(), Key::TEXT_CHARACTERS);
            prop_assert_eq!(&Key::parse(&text).unwrap(), &key);
            prop_assert_eq!(&Key::parse(&format!(" {}\r\n", text.to_lowercase())).unwrap(), &key);
            let client = key.client_key();
            let text = client.to_text();
            prop_assert_eq!(text.len(), ClientKey::TEXT_CHARACTERS);
            prop_assert_eq!(AnyKey::parse(&text.to_lowercase()), Ok(AnyKey::Client(client)));
            prop_assert_eq!(Key::parse(&text), Err(KeyError::Client));
        }

        #[test]
        fn any_other_text_is_an_error(text in "\\PC{20,90}|[a-z2-7]{32}|[A-Z2-7]{84}") {
            prop_assert!(AnyKey::parse(&text).is_err());
        }

        #[test]
        fn one_wrong_character_is_noticed(bytes: [u8; 16], at in 0usize..84, by in 1usize..32) {
            const LETTERS: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
            let key = key(bytes);
            for text in [key.to_text(), key.client_key().to_text()] {
                let mut text = text.into_bytes();
                let at = at % text.len();
                let was = LETTERS.iter().position(|letter| *letter == text[at]).unwrap();
                text[at] = LETTERS[(was + by) % 32];
                let text = String::from_utf8(text).unwrap();
                prop_assert_eq!(AnyKey::parse(&text), Err(KeyError::Check));
            }
        }
    }

    /// The values were computed from the description in `docs/wire-protocol/` by another program.
    #[test]
    fn the_texts_are_the_documented_ones() {
        let key = key(*b"foobarfoobarfoob");
        assert_eq!(key.to_text(), "MZXW6YTBOJTG633CMFZGM33PMIHEF4NQ");
        assert_eq!(
            key.client_key().to_text(),
            "STQCL3C33JQDWBIOLAFVA7SXUNDD5AGAUN6FSS6YGAIEHXDUYEGWHVQACQKNHIW5H4H4D5VUGXPUTYIVYLYA"
        );
        assert_eq!(key.client_key().fingerprint(), "SUFO-CRT6-3Q5V-GMZW");
    }

    #[test]
    fn own_words_are_refused_with_what_to_do() {
        for words in [
            "",
            "correct horse battery staple",
            "MZXW6YTBOJTG633CMFZGM33PMI",
        ] {
            let error = AnyKey::parse(words).unwrap_err();
            assert!(error.to_string().contains("tcpx key"), "{error}");
        }
        let error = AnyKey::parse(&"A".repeat(32)).unwrap_err();
        assert_eq!(error, KeyError::Check);
        assert!(error.to_string().contains("tcpx key"), "{error}");
        assert_eq!(
            AnyKey::parse(&format!("{}1", "A".repeat(31))),
            Err(KeyError::Character { position: 31 })
        );
    }

    #[test]
    fn debug_hides_the_secrets() {
        let key = key([7; 16]);
        assert_eq!(format!("{key:?}"), "Key(hidden)");
        assert_eq!(format!("{:?}", key.client_key()), "ClientKey(hidden)");
    }
}
