//! Checksums over bytes that arrive in pieces: CRC32C (Castagnoli), and a tag that nobody without
//! the key can keep while the bytes change.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crc_fast::{CrcAlgorithm, Digest};
use zeroize::Zeroizing;

/// A running CRC32C.
#[derive(Debug)]
pub(crate) struct Crc32c(Digest);

impl Crc32c {
    pub(crate) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(&self) -> u32 {
        // The algorithm's width is 32 bits; the upper half is always zero.
        self.0.finalize() as u32
    }
}

/// The key of tags. It is wiped from memory when it is dropped.
#[derive(Clone)]
pub struct TagKey(Zeroizing<[u8; 32]>);

impl TagKey {
    /// A key of these bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }
}

/// The key of a tag, and the tag once its job has ended well: the first 128 bits of keyed BLAKE3.
#[derive(Debug)]
pub struct KeyedTag {
    key: TagKey,
    tag: OnceLock<u128>,
}

impl KeyedTag {
    /// A tag under this key.
    pub fn new(key: &TagKey) -> Self {
        Self {
            key: key.clone(),
            tag: OnceLock::new(),
        }
    }

    /// The tag; `None` before its job has ended well.
    pub fn get(&self) -> Option<u128> {
        self.tag.get().copied()
    }
}

impl fmt::Debug for TagKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TagKey")
    }
}

/// A CRC32C as it runs, and a tag if one is asked for.
pub(crate) struct Checksum {
    crc: Crc32c,
    keyed: Option<Box<(blake3::Hasher, Arc<KeyedTag>)>>,
}

impl Checksum {
    pub(crate) fn new(tag: Option<&Arc<KeyedTag>>) -> Self {
        let keyed = |tag: &Arc<KeyedTag>| {
            Box::new((blake3::Hasher::new_keyed(&tag.key.0), Arc::clone(tag)))
        };
        Self {
            crc: Crc32c::new(),
            keyed: tag.map(keyed),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.crc.update(bytes);
        if let Some(keyed) = &mut self.keyed {
            let (hasher, _) = &mut **keyed;
            hasher.update(bytes);
        }
    }

    /// Leaves the tag, and gives the CRC32C.
    pub(crate) fn finish(&self) -> u32 {
        if let Some((hasher, tag)) = self.keyed.as_deref() {
            let hash = hasher.finalize();
            let (first, _) = hash.as_bytes().split_at(size_of::<u128>());
            let value = first
                .iter()
                .rfold(0, |tag, byte| tag << 8 | u128::from(*byte));
            // The job ends once.
            let _ = tag.tag.set(value);
        }
        self.crc.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_crc32c() {
        let mut crc = Crc32c::new();
        crc.update(b"1234");
        crc.update(b"56789");
        assert_eq!(crc.finish(), 0xE306_9283);
    }

    /// The generator of CRC32C may be added anywhere: the CRC stays, the tag does not.
    #[test]
    fn a_tag_changes_where_a_crc_stays() {
        let sums = |bytes: &[u8], key| {
            let tag = Arc::new(KeyedTag::new(&TagKey::new([key; 32])));
            let mut sum = Checksum::new(Some(&tag));
            bytes.chunks(7).for_each(|part| sum.update(part));
            (sum.finish(), tag.get().unwrap())
        };
        let bytes = [5; 100];
        let mut changed = bytes;
        // Its 33 bits, the lowest in the first byte.
        for (byte, bits) in changed[50..]
            .iter_mut()
            .zip(((0x82F6_3B78_u64 << 1) | 1).to_le_bytes())
        {
            *byte ^= bits;
        }
        let (same, other) = (sums(&bytes, 1), sums(&changed, 1));
        assert_eq!(same.0, other.0);
        assert_ne!(same.1, other.1);
        assert_ne!(same.1, sums(&bytes, 2).1);
        let known = blake3::keyed_hash(&[1; 32], &bytes);
        assert_eq!(same.1.to_le_bytes(), known.as_bytes()[..16]);
    }
}
