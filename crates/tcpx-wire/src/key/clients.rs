//! Several clients at one server, each with a key of its own and a name.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::ClientKey;

/// What a client calls its key in its hello: it derives from the pre-shared key in one direction.
/// It travels sealed, so that nobody on the path can tell one client from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(pub [u8; Self::BYTES]);

impl KeyId {
    /// Bytes of an id.
    pub const BYTES: usize = 16;
}

/// The name that a server gives to a client's key: 1 to 32 letters, digits, `-`, `_` and `.`, and
/// no `.` in front.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyName {
    bytes: [u8; Self::LONGEST],
    length: u8,
}

impl KeyName {
    /// Most characters of a name.
    pub const LONGEST: usize = 32;

    /// The name.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.length)])
            .expect("`from_str` takes ASCII alone")
    }
}

impl FromStr for KeyName {
    type Err = KeyNameError;

    fn from_str(text: &str) -> Result<Self, KeyNameError> {
        let is_usual = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_name = (1..=Self::LONGEST).contains(&text.len())
            && !text.starts_with('.')
            && text.bytes().all(is_usual);
        if !is_name {
            return Err(KeyNameError);
        }
        let mut bytes = [0; Self::LONGEST];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Self {
            bytes,
            length: text.len() as u8,
        })
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// A text that cannot name a key.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a key's name has 1 to 32 letters, digits, `-`, `_` and `.`, and no `.` in front")]
pub struct KeyNameError;

/// A client that a server lets in.
#[derive(Clone, Debug)]
pub struct KnownClient {
    /// The name of its key, where keys have names.
    pub name: Option<KeyName>,
    /// Its key.
    pub key: ClientKey,
}

/// The clients that a server lets in. Asked once for each client that knows the server's public
/// key, on the thread that accepts; a client that is not found is answered as one whose key is
/// wrong.
pub trait Clients: Send + Sync {
    /// Whose key this is; `None` when nobody with it is let in, or no longer.
    fn find(&self, id: &KeyId) -> Option<KnownClient>;
}

/// One client without a name.
pub(super) struct Only {
    id: KeyId,
    key: ClientKey,
}

impl Only {
    pub(super) fn new(key: ClientKey) -> Self {
        Self { id: key.id(), key }
    }
}

impl Clients for Only {
    fn find(&self, id: &KeyId) -> Option<KnownClient> {
        (*id == self.id).then(|| KnownClient {
            name: None,
            key: self.key.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_read_back_or_are_refused(text in "\\PC{0,40}|[a-zA-Z0-9._-]{0,40}") {
            match text.parse::<KeyName>() {
                Ok(name) => prop_assert_eq!(name.as_str(), text),
                Err(KeyNameError) => prop_assert!(
                    text.is_empty()
                        || text.len() > KeyName::LONGEST
                        || text.starts_with('.')
                        || text.chars().any(|one| !one.is_ascii_alphanumeric() && !"-_.".contains(one))
                ),
            }
        }
    }
}
