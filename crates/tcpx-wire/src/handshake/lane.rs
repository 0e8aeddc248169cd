//! Both sides of a lane that joins a session, and of a control connection that takes the place of a
//! broken one: the same messages with another purpose, which both sides must have seen alike.
//!
//! Each connection has keys of its own: they come from the session's secret and from random bytes
//! of both sides.

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::error::Status;
use super::message::{
    Collector, HEAD_BYTES, Head, LANE_ANSWER_BYTES, LANE_CLAIM_BYTES, LANE_HELLO_BYTES,
    LANE_NONCE_BYTES, LANE_PROOF_BYTES, PURPOSE_LANE, PURPOSE_RESUME,
};
use super::noise::{MARK_BYTES, mark};
use super::server::ServerStep;
use super::session::SessionKey;
use super::{Build, HandshakeError, Message, Session, SessionId, Version};
use crate::array;
use crate::derive::{expand, extract};
use crate::frame::Settings;
use crate::lane_seal::LaneKeys;

/// Joins a lane to a session, on the client.
#[derive(Debug)]
pub struct LaneClient {
    lane: u16,
    lanes: u16,
    build: Build,
    hello: [u8; LANE_HELLO_BYTES],
    collector: Collector,
    /// Gone once the handshake ended.
    key: Option<SessionKey>,
}

impl LaneClient {
    /// Bytes of randomness that one needs.
    pub const ENTROPY_BYTES: usize = LANE_NONCE_BYTES;

    /// A handshake for lane `lane` of `lanes` and the first bytes to send.
    ///
    /// `entropy` must be fresh from a cryptographic random source.
    ///
    /// # Errors
    /// [`HandshakeError::LaneOutOfRange`] when `lane` is not below `lanes`, or `lanes` above
    /// [`Settings::MAX_CHANNELS`].
    pub fn new(
        session: &Session,
        lane: u16,
        lanes: u16,
        entropy: [u8; Self::ENTROPY_BYTES],
    ) -> Result<(Self, Message), HandshakeError> {
        in_range(lane, lanes)?;
        Ok(Self::with_purpose(
            PURPOSE_LANE,
            session,
            lane,
            lanes,
            entropy,
        ))
    }

    /// A handshake for a connection that takes the place of the session's control connection, and
    /// the first bytes to send.
    ///
    /// `entropy` must be fresh from a cryptographic random source.
    pub fn resume(session: &Session, entropy: [u8; Self::ENTROPY_BYTES]) -> (Self, Message) {
        Self::with_purpose(PURPOSE_RESUME, session, 0, 1, entropy)
    }

    fn with_purpose(
        purpose: u8,
        session: &Session,
        lane: u16,
        lanes: u16,
        entropy: [u8; Self::ENTROPY_BYTES],
    ) -> (Self, Message) {
        let build = Build::only(session.protocol);
        let mut hello: [u8; LANE_HELLO_BYTES] =
            Head::new(&build, purpose, u8::from(session.authenticated), lane).start();
        hello[LANES_AT..LANES_AT + 2].copy_from_slice(&lanes.to_le_bytes());
        hello[SESSION_AT..LANE_CLAIM_BYTES].copy_from_slice(&session.id.0);
        let (claimed, proof) = hello.split_at_mut(MARK_AT);
        claimed[LANE_CLAIM_BYTES..].copy_from_slice(&entropy);
        proof.copy_from_slice(&mark(&session.key.0, claimed));
        let handshake = Self {
            lane,
            lanes,
            build,
            hello,
            collector: Collector::new(),
            key: Some(session.key.clone()),
        };
        (handshake, Message::from(&hello))
    }

    /// Takes what the handshake needs from the front of `input`. Once the answer has come: the
    /// proof, with whose sending the lane joins, and the secrets of what follows it.
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(
        &mut self,
        input: &mut &[u8],
    ) -> Result<Option<(Message, LaneKeys)>, HandshakeError> {
        let key = self.key.take().ok_or(HandshakeError::Ended)?;
        let Some(head) = self.collector.head(input)? else {
            self.key = Some(key);
            return Ok(None);
        };
        head.accepted("lane answer", &self.build, Some((self.lane, self.lanes)))?;
        let Some(answer) = self.collector.message::<LANE_ANSWER_BYTES>(input) else {
            self.key = Some(key);
            return Ok(None);
        };
        let (said, proof) = answer.split_at(ANSWER_PROOF_AT);
        let derived = derive(&key, &self.hello, said);
        let proved: bool = derived[..CLIENT_PROOF_AT].ct_eq(proof).into();
        if !proved || (head.auth, head.padding()) != (0, 0) {
            return Err(HandshakeError::LaneProof { lane: self.lane });
        }
        let proof: [u8; LANE_PROOF_BYTES] = array(&*derived, CLIENT_PROOF_AT);
        let keys = LaneKeys::new(array(&*derived, CLIENT_AT), array(&*derived, SERVER_AT));
        Ok(Some((Message::from(&proof), keys)))
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        if self.key.is_none() {
            return HandshakeError::Ended;
        }
        HandshakeError::Truncated {
            message: "lane answer",
            expected: LANE_ANSWER_BYTES,
            arrived: self.collector.held(),
        }
    }
}

/// What derives from a session's secret and all that both sides have said: a proof of the server
/// and one of the client, a secret for what the client sends and one for what the server does.
fn derive(
    key: &SessionKey,
    hello: &[u8; LANE_HELLO_BYTES],
    answer: &[u8],
) -> Zeroizing<[u8; 2 * LANE_PROOF_BYTES + 64]> {
    let both = [&hello[..], answer].concat();
    let mut out = Zeroizing::new([0; 2 * LANE_PROOF_BYTES + 64]);
    expand(&extract(&key.0[..], &both), b"tcpx lane", &mut *out);
    out
}

/// A connection that wants to be a lane, on the server; not proved yet.
pub struct LaneRequest {
    session: SessionId,
    protocol: Version,
    lane: u16,
    lanes: u16,
    resumes: bool,
    hello: [u8; LANE_HELLO_BYTES],
    /// Sent as it is.
    nonce: [u8; LANE_NONCE_BYTES],
}

impl LaneRequest {
    /// Lets a connection that knows the session's secret go on; send the message, then feed what
    /// arrives to the [`LaneServer`].
    ///
    /// # Errors
    /// It does not know the secret; send the message, then close the connection.
    pub fn accept(
        self,
        key: &SessionKey,
    ) -> Result<(LaneServer, Message), Box<(Message, HandshakeError)>> {
        let (claimed, proof) = self.hello.split_at(MARK_AT);
        if !bool::from(mark(&key.0, claimed).ct_eq(proof)) {
            let error = HandshakeError::LaneProof { lane: self.lane };
            return Err(Box::new((refused(Status::WrongKey, self.protocol), error)));
        }
        let mut answer: [u8; LANE_ANSWER_BYTES] = head(Status::Ok, self.protocol).start();
        let (said, proof) = answer.split_at_mut(ANSWER_PROOF_AT);
        said[HEAD_BYTES..].copy_from_slice(&self.nonce);
        let derived = derive(key, &self.hello, said);
        proof.copy_from_slice(&derived[..CLIENT_PROOF_AT]);
        let server = LaneServer {
            expected: array(&*derived, CLIENT_PROOF_AT),
            accepted: Some(LaneAccepted {
                session: self.session,
                lane: self.lane,
                lanes: self.lanes,
                resumes: self.resumes,
                keys: LaneKeys::new(array(&*derived, SERVER_AT), array(&*derived, CLIENT_AT)),
            }),
            collector: Collector::new(),
        };
        Ok((server, Message::from(&answer)))
    }

    /// There is no such session; send the message, then close the connection.
    pub fn refuse(self) -> (Message, HandshakeError) {
        (
            refused(Status::UnknownSession, self.protocol),
            HandshakeError::UnknownSession,
        )
    }

    /// What only who knows the session's secret can have made, as [accepting](Self::accept) it
    /// says; another one each time.
    pub fn mark(&self) -> [u8; MARK_BYTES] {
        array(&self.hello, MARK_AT)
    }

    /// The session it claims.
    pub fn session(&self) -> SessionId {
        self.session
    }
}

/// Waits for a lane's proof, on the server.
pub struct LaneServer {
    /// The proof.
    expected: [u8; LANE_PROOF_BYTES],
    /// Gone once the handshake ended.
    accepted: Option<LaneAccepted>,
    collector: Collector,
}

/// A lane that proved itself.
#[derive(Debug)]
pub struct LaneAccepted {
    /// Its session.
    pub session: SessionId,
    /// Its number.
    pub lane: u16,
    /// Lanes of the session.
    pub lanes: u16,
    /// It is no lane, but takes the place of the control connection.
    pub resumes: bool,
    /// The secrets of what follows.
    pub keys: LaneKeys,
}

impl LaneServer {
    /// Takes what the handshake needs from the front of `input`; a lane, once its proof has come.
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Option<LaneAccepted>, HandshakeError> {
        let accepted = self.accepted.take().ok_or(HandshakeError::Ended)?;
        let Some(proof) = self.collector.message::<LANE_PROOF_BYTES>(input) else {
            self.accepted = Some(accepted);
            return Ok(None);
        };
        match self.expected.ct_eq(&proof).into() {
            true => Ok(Some(accepted)),
            false => Err(HandshakeError::LaneProof {
                lane: accepted.lane,
            }),
        }
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        if self.accepted.is_none() {
            return HandshakeError::Ended;
        }
        HandshakeError::Truncated {
            message: "lane proof",
            expected: LANE_PROOF_BYTES,
            arrived: self.collector.held(),
        }
    }
}

/// Checks a lane hello that arrived whole.
pub(super) fn request(
    head: Head,
    protocol: Version,
    hello: [u8; LANE_HELLO_BYTES],
    nonce: [u8; LANE_NONCE_BYTES],
) -> Result<ServerStep, HandshakeError> {
    let value = |field, expected, arrived: u64| {
        HandshakeError::value("lane hello", field, expected, arrived)
    };
    if head.auth > 1 {
        return Err(value("authentication", "0 or 1", head.auth.into()));
    }
    if head.zero != 0 {
        return Err(value("padding", "0", head.zero.into()));
    }
    let padding: [u8; 6] = array(&hello, LANES_AT + 2);
    if let Some(byte) = padding.into_iter().find(|byte| *byte != 0) {
        return Err(value("padding", "0", byte.into()));
    }
    let lane = head.extra;
    let lanes = u16::from_le_bytes(array(&hello, LANES_AT));
    if head.kind == PURPOSE_RESUME && (lane, lanes) != (0, 1) {
        return Err(value("lanes", "lane 0 of 1", lanes.into()));
    }
    if let Err(error) = in_range(lane, lanes) {
        return Ok(ServerStep::Refuse {
            send: refused(Status::LaneOutOfRange, protocol),
            error,
        });
    }
    Ok(ServerStep::Lane(LaneRequest {
        session: SessionId(array(&hello, SESSION_AT)),
        protocol,
        lane,
        lanes,
        resumes: head.kind == PURPOSE_RESUME,
        hello,
        nonce,
    }))
}

hidden!(LaneServer);
hidden!(LaneRequest);

/// The answer that ends a lane's handshake.
fn refused(status: Status, protocol: Version) -> Message {
    let answer: [u8; LANE_ANSWER_BYTES] = head(status, protocol).start();
    Message::from(&answer)
}

/// The beginning of the answer to a lane, whose session has agreed on this version.
fn head(status: Status, protocol: Version) -> Head {
    Head::new(&Build::only(protocol), status as u8, 0, 0)
}

fn in_range(lane: u16, lanes: u16) -> Result<(), HandshakeError> {
    if lanes > Settings::MAX_CHANNELS || lane >= lanes {
        return Err(HandshakeError::LaneOutOfRange { lane, lanes });
    }
    Ok(())
}

// Places in the lane hello, and in its answer.
const LANES_AT: usize = HEAD_BYTES;
const SESSION_AT: usize = HEAD_BYTES + 8;
const MARK_AT: usize = LANE_CLAIM_BYTES + LANE_NONCE_BYTES;
const ANSWER_PROOF_AT: usize = HEAD_BYTES + LANE_NONCE_BYTES;
const _: () = assert!(SESSION_AT + SessionId::BYTES == LANE_CLAIM_BYTES);
const _: () = assert!(MARK_AT + MARK_BYTES == LANE_HELLO_BYTES);

// Places in what derives; the server's proof comes first.
const CLIENT_PROOF_AT: usize = LANE_PROOF_BYTES;
const CLIENT_AT: usize = 2 * LANE_PROOF_BYTES;
const SERVER_AT: usize = CLIENT_AT + 32;
