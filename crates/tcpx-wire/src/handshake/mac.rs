//! The proofs: HMAC-SHA256 over labelled transcripts, and the keys for them.

use std::fmt;

use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use super::message::{CLIENT_HELLO_BYTES, NONCE_AT, SERVER_HELLO_BYTES};
use super::session::{SessionId, SessionKey};
use super::{NONCE_BYTES, message};
use crate::key::Key;

pub(super) const MAC_BYTES: usize = 32;

/// Part of the server hello that the server's proof covers.
pub(super) const SERVER_HELLO_SIGNED: usize = SERVER_HELLO_BYTES - MAC_BYTES;

/// The two hellos of a control connection, as they were on the wire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hellos<'a> {
    pub(super) client: &'a [u8; CLIENT_HELLO_BYTES],
    pub(super) server: &'a [u8; SERVER_HELLO_BYTES],
}

impl Hellos<'_> {
    pub(super) fn server_proof(&self, key: Option<&Key>) -> [u8; MAC_BYTES] {
        let signed = &self.server[..SERVER_HELLO_SIGNED];
        mac(&key_bytes(key), &[b"tcpx server", self.client, signed])
    }

    pub(super) fn client_proof(&self, key: Option<&Key>) -> [u8; MAC_BYTES] {
        mac(&key_bytes(key), &[b"tcpx client", self.client, self.server])
    }

    /// The session's id and key; the whole transcript goes in.
    pub(super) fn session(&self, key: Option<&Key>) -> (SessionId, SessionKey) {
        let mut salt = [0; 2 * NONCE_BYTES];
        salt[..NONCE_BYTES].copy_from_slice(&message::array::<NONCE_BYTES>(self.client, NONCE_AT));
        salt[NONCE_BYTES..].copy_from_slice(&message::array::<NONCE_BYTES>(self.server, NONCE_AT));
        let expander = Hkdf::<Sha256>::new(Some(&salt), &key_bytes(key));
        let expand = |label: &[u8], out: &mut [u8]| {
            expander
                .expand_multi_info(&[label, self.client, self.server], out)
                .expect("HKDF-SHA256 yields up to 8160 bytes and at most 32 are asked for");
        };
        let mut session_key = [0; SessionKey::BYTES];
        expand(b"tcpx session", &mut session_key);
        let mut id = [0; SessionId::BYTES];
        expand(b"tcpx session id", &mut id);
        (SessionId(id), SessionKey(session_key))
    }
}

/// Proof over the parts one after the other; every part has a fixed length, so the parts cannot
/// be cut differently.
pub(super) fn mac(key: &[u8; 32], parts: &[&[u8]]) -> [u8; MAC_BYTES] {
    // HMAC pads a short key with zeros to the block of its hash.
    let mut block = [0; 64];
    block[..32].copy_from_slice(key);
    let mut mac = <Hmac<Sha256> as KeyInit>::new(&block.into());
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// Compares proofs, or messages that hold one, in constant time.
pub(super) fn equal<const BYTES: usize>(left: &[u8; BYTES], right: &[u8; BYTES]) -> bool {
    left.as_slice().ct_eq(right.as_slice()).into()
}

/// A proof that is waited for; `Debug` hides it, because it is secret until it arrives.
pub(super) struct Proof(pub(super) [u8; MAC_BYTES]);

impl Proof {
    pub(super) fn is(&self, arrived: &[u8; MAC_BYTES]) -> bool {
        equal(&self.0, arrived)
    }
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Proof(hidden)")
    }
}

/// The shared key as HMAC key; all zero when neither side has one.
fn key_bytes(key: Option<&Key>) -> [u8; 32] {
    let mut bytes = [0; 32];
    if let Some(key) = key {
        bytes[..Key::BYTES].copy_from_slice(key.as_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_hmac_sha256_of_the_joined_parts() {
        // RFC 4231, test case 2: key "Jefe", padded as HMAC pads it.
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        let proof = mac(&key, &[b"what do ya want ", b"for nothing?"]);
        let text: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            text,
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }
}
