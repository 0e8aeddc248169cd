//! Keys out of keys, and hashes: HKDF, HMAC and SHA-256 of `ring`.

use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use ring::{digest, hmac};

/// Bytes of a SHA-256, and of a secret that is as long.
pub(crate) const HASH_BYTES: usize = 32;

/// How many bytes are asked for.
struct Bytes(usize);

impl KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// HKDF's first step.
pub(crate) fn extract(salt: &[u8], secret: &[u8]) -> Prk {
    Salt::new(HKDF_SHA256, salt).extract(secret)
}

/// A secret that is as good as one which [`extract`] gave.
pub(crate) fn uniform(secret: &[u8; HASH_BYTES]) -> Prk {
    Prk::new_less_safe(HKDF_SHA256, secret)
}

/// HKDF's second step.
pub(crate) fn expand(secret: &Prk, label: &[u8], out: &mut [u8]) {
    secret
        .expand(&[label], Bytes(out.len()))
        .and_then(|key| key.fill(out))
        .expect("HKDF-SHA256 yields up to 8160 bytes and at most 128 are asked for");
}

/// HMAC-SHA256.
pub(crate) fn authenticate(key: &[u8], bytes: &[u8]) -> [u8; HASH_BYTES] {
    whole(hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), bytes).as_ref())
}

/// SHA-256 of all parts, one behind the other.
pub(crate) fn hash(parts: &[&[u8]]) -> [u8; HASH_BYTES] {
    let mut hash = digest::Context::new(&digest::SHA256);
    parts.iter().for_each(|part| hash.update(part));
    whole(hash.finish().as_ref())
}

fn whole(hash: &[u8]) -> [u8; HASH_BYTES] {
    hash.try_into().expect("a SHA-256 has 32 bytes")
}

#[cfg(test)]
mod tests {
    use data_encoding::HEXLOWER;

    use super::*;

    /// RFC 5869, A.1 and A.3; its PRK of A.1 is also HMAC-SHA256 of RFC 2104.
    #[test]
    fn keys_derive_as_the_standard_says() {
        let hex = |text: &str| HEXLOWER.decode(text.as_bytes()).unwrap();
        let (secret, salt) = ([0x0b; 22], hex("000102030405060708090a0b0c"));
        let mut out = [0; 42];
        let prk = extract(&salt, &secret);
        expand(&prk, &hex("f0f1f2f3f4f5f6f7f8f9"), &mut out);
        let known =
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865";
        assert_eq!(out[..], hex(known));
        let prk = authenticate(&salt, &secret);
        let known = "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5";
        assert_eq!(prk[..], hex(known));
        let mut same = [0; 42];
        expand(&uniform(&prk), &hex("f0f1f2f3f4f5f6f7f8f9"), &mut same);
        assert_eq!(same, out);
        expand(&extract(&[], &secret), &[], &mut out);
        let known =
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8";
        assert_eq!(out[..], hex(known));
    }

    #[test]
    fn parts_are_hashed_as_one_text() {
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(HEXLOWER.encode(&hash(&[b"a", b"", b"bc"])), known);
    }
}
