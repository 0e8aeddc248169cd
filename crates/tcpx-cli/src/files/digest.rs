//! Digests that both ends compare, keyed so that nobody between them can make one.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// A secret of one transfer. The client draws it and sends it in sealed control; contents may
/// travel in the clear beside it.
///
/// BLAKE3 alone finds accidents. Who changes contents on their way can compute it anew, and can
/// keep a CRC32C as it is.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct DigestKey([u8; blake3::KEY_LEN]);

/// Whose last word it is. One side's is not the other one's, so nobody can give it back to who said
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Sender,
    Receiver,
}

impl DigestKey {
    pub(super) fn new() -> Result<Self, Error> {
        let mut key = [0; blake3::KEY_LEN];
        getrandom::fill(&mut key)
            .map_err(|error| std::io::Error::other(error.to_string()))
            .map_err(Error::process("draw a secret"))?;
        Ok(Self(key))
    }

    /// Of one file's contents: `index` is its place in the manifest.
    pub(crate) fn file(&self, index: usize, contents: &blake3::Hash) -> blake3::Hash {
        self.keyed(0, index as u64, contents)
    }

    /// Of the whole transfer, as `side` says it.
    pub(super) fn end(&self, side: Side, all: &blake3::Hash) -> blake3::Hash {
        self.keyed(1 + side as u8, 0, all)
    }

    fn keyed(&self, what: u8, index: u64, digest: &blake3::Hash) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[what]);
        hasher.update(&index.to_le_bytes());
        hasher.update(digest.as_bytes());
        hasher.finalize()
    }
}

impl From<[u8; blake3::KEY_LEN]> for DigestKey {
    fn from(key: [u8; blake3::KEY_LEN]) -> Self {
        Self(key)
    }
}

impl fmt::Debug for DigestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DigestKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_digest_says_what_it_is_of() {
        let contents = blake3::hash(b"contents");
        let digests = [[1; 32], [2; 32]].map(|key| {
            let key = DigestKey::from(key);
            [
                key.file(0, &contents),
                key.file(1, &contents),
                key.end(Side::Sender, &contents),
                key.end(Side::Receiver, &contents),
            ]
        });
        let all = digests.as_flattened();
        for (at, one) in all.iter().enumerate() {
            assert!(!all[at + 1..].contains(one) && *one != contents, "{at}");
        }
    }

    #[test]
    fn the_key_is_shown_nowhere() {
        let key = DigestKey::from([0xab; 32]);
        assert_eq!(format!("{key:?}"), "DigestKey");
    }
}
