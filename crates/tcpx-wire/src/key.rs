//! The secret that two hosts share.

use std::fmt;
use std::str::FromStr;

use data_encoding::{BASE32_NOPAD, BASE32_NOPAD_NOCASE, DecodeKind};
use subtle::ConstantTimeEq;
use thiserror::Error;

/// A 128-bit secret; its text is base32 (RFC 4648) of 26 characters, without padding.
///
/// It has no `Display`, and `Debug` hides it: it is printed only where [`Key::to_text`] is called.
#[derive(Clone)]
pub struct Key([u8; Self::BYTES]);

impl Key {
    /// Bytes of a key.
    pub const BYTES: usize = 16;
    /// Characters of a key's text.
    pub const TEXT_CHARACTERS: usize = 26;

    /// A new key; `fill` must fill all the bytes it gets from a cryptographic random source.
    pub fn generate(fill: &mut dyn FnMut(&mut [u8])) -> Self {
        let mut bytes = [0; Self::BYTES];
        fill(&mut bytes);
        Self(bytes)
    }

    /// Reads a key's text, in either case; white space around it is ignored.
    ///
    /// # Errors
    /// When the text is not that of a key. Errors never hold a part of the text.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let text = text.trim().as_bytes();
        if let Some(position) = text.iter().position(|byte| !is_base32(*byte)) {
            return Err(KeyError::Character { position });
        }
        if text.len() != Self::TEXT_CHARACTERS {
            return Err(KeyError::Length {
                arrived: text.len(),
            });
        }
        let mut bytes = [0; Self::BYTES];
        BASE32_NOPAD_NOCASE
            .decode_mut(text, &mut bytes)
            .map_err(|partial| match partial.error.kind {
                DecodeKind::Trailing => KeyError::TrailingBits,
                _ => KeyError::Character {
                    position: partial.error.position,
                },
            })?;
        if bytes == [0; Self::BYTES] {
            return Err(KeyError::Zero);
        }
        Ok(Self(bytes))
    }

    /// The text to give to the other host; anyone who reads it can connect.
    pub fn to_text(&self) -> String {
        BASE32_NOPAD.encode(&self.0)
    }

    pub(crate) fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl FromStr for Key {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        Self::parse(text)
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(hidden)")
    }
}

fn is_base32(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || (b'2'..=b'7').contains(&byte)
}

/// A text that is not a key's.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// It is too short or too long.
    #[error("key: expected 26 characters, {arrived} arrived; copy the whole key from the server")]
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
    /// The last character carries bits beyond the key.
    #[error(
        "key: the last character is not one a key can end with; copy the key from the server again"
    )]
    TrailingBits,
    /// The key is all zero, which protects nothing.
    #[error("key: expected a random key, all bits are zero; use the key that the server printed")]
    Zero,
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
        fn text_reads_back_in_either_case(mut bytes: [u8; 16]) {
            bytes[0] |= 1;
            let key = key(bytes);
            let text = key.to_text();
            prop_assert_eq!(text.len(), Key::TEXT_CHARACTERS);
            prop_assert_eq!(&Key::parse(&text).unwrap(), &key);
            prop_assert_eq!(&Key::parse(&format!(" {}\r\n", text.to_lowercase())).unwrap(), &key);
        }

        #[test]
        fn any_text_is_a_key_or_an_error(text in "\\PC{20,30}|[a-z2-7]{24,28}") {
            if let Ok(key) = Key::parse(&text) {
                prop_assert_eq!(key.to_text(), text.trim().to_uppercase());
            }
        }
    }

    #[test]
    fn the_text_is_rfc_4648() {
        assert_eq!(
            key(*b"foobarfoobarfoob").to_text(),
            "MZXW6YTBOJTG633CMFZGM33PMI"
        );
    }

    #[test]
    fn each_error_is_named_without_the_text() {
        assert_eq!(Key::parse(""), Err(KeyError::Length { arrived: 0 }));
        assert_eq!(Key::parse("ABCD"), Err(KeyError::Length { arrived: 4 }));
        assert_eq!(
            Key::parse("MZXW6YTBOJTG633CMFZGM33PM1"),
            Err(KeyError::Character { position: 25 })
        );
        assert_eq!(
            Key::parse("MZXW6YTBOJTG633CMFZGM33PMJ"),
            Err(KeyError::TrailingBits)
        );
        assert_eq!(Key::parse(&"A".repeat(26)), Err(KeyError::Zero));
    }

    #[test]
    fn debug_hides_the_secret() {
        assert_eq!(format!("{:?}", key([7; 16])), "Key(hidden)");
    }
}
