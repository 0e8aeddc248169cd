//! The Noise protocol framework (revision 34) as the handshakes use it, by the crate `snow`.

use curve25519_dalek::montgomery::MontgomeryPoint;
use graviola::key_agreement::x25519::{PublicKey, StaticPrivateKey};
use graviola::util::is_cpu_supported;
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::{CryptoResolver, RingResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, HandshakeState};
use zeroize::Zeroizing;

use crate::derive::authenticate;
use crate::key::{ClientKey, Identity, STATIC_BYTES};
use crate::lane_seal::LaneKeys;
use crate::record::Records;

/// Bytes of an ephemeral public key, which begins every message of a handshake.
pub(super) const EPHEMERAL_BYTES: usize = 32;
/// Bytes by which sealing makes something longer.
pub(super) const TAG_BYTES: usize = 16;
/// Bytes of a [`mark`].
pub(super) const MARK_BYTES: usize = 16;
/// Random bytes for one ephemeral key.
pub(super) const ENTROPY_BYTES: usize = 32;

/// The client knows the server's static key, both know a pre-shared key.
const KEYED: &str = "Noise_NKpsk2_25519_AESGCM_SHA256";
/// Nobody knows anything.
const OPEN: &str = "Noise_NN_25519_AESGCM_SHA256";

/// The invariant of every call of `snow` here but reading what a peer sent.
const OWN: &str = "the suite has this pattern and all that it needs, and buffers are large enough";

/// What a side brings to a handshake.
pub(super) enum Secret<'a> {
    /// Nothing.
    None,
    /// A client's key.
    Client(&'a ClientKey),
    /// What a server has.
    Server(&'a Identity),
}

/// The beginning of a handshake; `prologue` is what both sides must have seen alike.
pub(super) fn initiator(
    secret: &Secret<'_>,
    prologue: &[u8],
    entropy: Zeroizing<[u8; ENTROPY_BYTES]>,
) -> HandshakeState {
    build(secret, prologue, entropy, |builder| {
        builder.build_initiator()
    })
}

/// The other side of it.
pub(super) fn responder(
    secret: &Secret<'_>,
    prologue: &[u8],
    entropy: Zeroizing<[u8; ENTROPY_BYTES]>,
) -> HandshakeState {
    build(secret, prologue, entropy, |builder| {
        builder.build_responder()
    })
}

fn build(
    secret: &Secret<'_>,
    prologue: &[u8],
    entropy: Zeroizing<[u8; ENTROPY_BYTES]>,
    finish: impl FnOnce(Builder<'_>) -> Result<HandshakeState, snow::Error>,
) -> HandshakeState {
    let name = match secret {
        Secret::None => OPEN,
        Secret::Client(_) | Secret::Server(_) => KEYED,
    };
    let own = match secret {
        Secret::Server(identity) => *identity.client().public(),
        Secret::None | Secret::Client(_) => [0; STATIC_BYTES],
    };
    let suite = Box::new(Suite { entropy, own });
    let builder = Builder::with_resolver(name.parse().expect(OWN), suite);
    let builder = builder.prologue(prologue).expect(OWN);
    let built = match secret {
        Secret::None => finish(builder),
        Secret::Client(key) => {
            let psk = key.psk();
            let builder = builder.remote_public_key(key.public()).expect(OWN);
            finish(builder.psk(2, &psk).expect(OWN))
        }
        Secret::Server(identity) => {
            // The pre-shared key follows, once the client has said which one it has.
            finish(builder.local_private_key(identity.private()).expect(OWN))
        }
    };
    built.expect(OWN)
}

/// Writes a handshake's next message; `BYTES` is its length.
pub(super) fn write<const BYTES: usize>(state: &mut HandshakeState, payload: &[u8]) -> [u8; BYTES] {
    // A message without a tag needs the room for one all the same.
    let mut room = [0; 128];
    let written = state.write_message(payload, &mut room).expect(OWN);
    debug_assert_eq!(written, BYTES);
    std::array::from_fn(|at| room[at])
}

/// Reads the peer's message; `None`: it is not what the peer would have sent, who knows the secret.
pub(super) fn read<const BYTES: usize>(
    state: &mut HandshakeState,
    message: &[u8],
) -> Option<Zeroizing<[u8; BYTES]>> {
    let mut room = Zeroizing::new([0; 128]);
    let read = state.read_message(message, &mut *room).ok()?;
    (read == BYTES).then(|| Zeroizing::new(std::array::from_fn(|at| room[at])))
}

/// The pre-shared key of the client whose first message was read.
pub(super) fn set_psk(state: &mut HandshakeState, psk: &[u8; STATIC_BYTES]) {
    state.set_psk(2, psk).expect(OWN);
}

/// Seals and opens what follows on a connection whose handshake is complete.
pub(super) fn records(mut state: HandshakeState) -> Records {
    let (from_initiator, from_responder) = state.dangerously_get_raw_split();
    let (from_initiator, from_responder) = (
        Zeroizing::new(from_initiator),
        Zeroizing::new(from_responder),
    );
    Records::new(match state.is_initiator() {
        true => LaneKeys::new(*from_initiator, *from_responder),
        false => LaneKeys::new(*from_responder, *from_initiator),
    })
}

/// Shows at the cost of a hash that whoever sent a hello knows the server's public key, or a lane's
/// the session's secret: the beginning of HMAC-SHA256 over the hello up to here.
pub(super) fn mark(key: &[u8; STATIC_BYTES], hello: &[u8]) -> [u8; MARK_BYTES] {
    let mac = authenticate(key, hello);
    std::array::from_fn(|at| mac[at])
}

/// The public half of a static key pair.
pub(crate) fn public_key(private: &[u8; STATIC_BYTES]) -> [u8; STATIC_BYTES] {
    match is_cpu_supported() {
        true => StaticPrivateKey::from_array(private)
            .public_key()
            .as_bytes(),
        false => MontgomeryPoint::mul_base_clamped(*private).to_bytes(),
    }
}

/// X25519 of RFC 7748; zeros with a public key of small order.
fn shared(
    private: &[u8; STATIC_BYTES],
    public: &[u8; STATIC_BYTES],
) -> Zeroizing<[u8; STATIC_BYTES]> {
    Zeroizing::new(match is_cpu_supported() {
        true => StaticPrivateKey::from_array(private)
            .diffie_hellman(&PublicKey::from_array(public))
            .map_or([0; STATIC_BYTES], |shared| shared.0),
        false => by_any_processor(private, public),
    })
}

fn by_any_processor(
    private: &[u8; STATIC_BYTES],
    public: &[u8; STATIC_BYTES],
) -> [u8; STATIC_BYTES] {
    MontgomeryPoint(*public).mul_clamped(*private).to_bytes()
}

/// X25519 from `graviola`, or from `curve25519-dalek` on a processor that lacks the instructions
/// for it; AES-256-GCM and SHA-256 from `ring`, which uses the processor's instructions.
struct Suite {
    entropy: Zeroizing<[u8; ENTROPY_BYTES]>,
    /// The public half of this side's static key pair, if it has one.
    own: [u8; STATIC_BYTES],
}

impl CryptoResolver for Suite {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Given(Some(self.entropy.clone()))))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        let pair = X25519 {
            public: self.own,
            ..X25519::default()
        };
        matches!(choice, DHChoice::Curve25519).then(|| Box::new(pair) as Box<dyn Dh>)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        RingResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        RingResolver.resolve_cipher(choice)
    }
}

/// Random bytes that the caller brought, for one ephemeral key and no second one.
struct Given(Option<Zeroizing<[u8; ENTROPY_BYTES]>>);

impl Random for Given {
    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), snow::Error> {
        let given = self.0.take().ok_or(snow::Error::Rng)?;
        if out.len() != given.len() {
            return Err(snow::Error::Rng);
        }
        out.copy_from_slice(&*given);
        Ok(())
    }
}

/// A key pair of RFC 7748; its private half is wiped from memory when it is dropped.
#[derive(Default)]
struct X25519 {
    private: Zeroizing<[u8; STATIC_BYTES]>,
    public: [u8; STATIC_BYTES],
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        STATIC_BYTES
    }

    fn priv_len(&self) -> usize {
        STATIC_BYTES
    }

    fn set(&mut self, private: &[u8]) {
        // The suite has given the public half.
        self.private.copy_from_slice(private);
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), snow::Error> {
        rng.try_fill_bytes(&mut *self.private)?;
        self.public = public_key(&self.private);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        &*self.private
    }

    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let public = public.first_chunk().ok_or(snow::Error::Dh)?;
        out[..STATIC_BYTES].copy_from_slice(&*shared(&self.private, public));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Points of small order, of the twist, and coordinates that are not reduced: RFC 7748 has all
    /// of them multiplied.
    fn unusual() -> impl Strategy<Value = [u8; STATIC_BYTES]> {
        let small = |first| std::array::from_fn(|at| if at == 0 { first } else { 0 });
        let beyond = |first| {
            std::array::from_fn(|at| match at {
                0 => first,
                31 => 0x7F,
                _ => 0xFF,
            })
        };
        prop_oneof![
            (0..=9u8).prop_map(small),
            (0xEC..=0xFFu8).prop_map(beyond),
            Just([0xFF; STATIC_BYTES])
        ]
    }

    proptest! {
        #[test]
        fn every_processor_computes_the_same(
            private: [u8; STATIC_BYTES],
            public in prop_oneof![any::<[u8; STATIC_BYTES]>(), unusual()],
        ) {
            prop_assert_eq!(*shared(&private, &public), by_any_processor(&private, &public));
            let base = std::array::from_fn(|at| if at == 0 { 9 } else { 0 });
            prop_assert_eq!(public_key(&private), by_any_processor(&private, &base));
        }
    }

    /// RFC 7748, 5.2.
    #[test]
    fn the_known_answer_comes() {
        let bytes = |text: &str| -> [u8; STATIC_BYTES] {
            let bytes = data_encoding::HEXLOWER.decode(text.as_bytes()).unwrap();
            bytes.try_into().unwrap()
        };
        let private = bytes("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4");
        let public = bytes("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c");
        let expected = bytes("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552");
        assert_eq!(*shared(&private, &public), expected);
        assert_eq!(by_any_processor(&private, &public), expected);
    }
}
