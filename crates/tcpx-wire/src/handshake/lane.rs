//! Both sides of a lane that joins a session, and of a control connection that takes the place of a
//! broken one: the same messages with another purpose, which the proofs cover.

use super::error::Status;
use super::mac::{self, MAC_BYTES, Proof};
use super::message::{
    Collector, HEAD_BYTES, Head, LANE_CHALLENGE_BYTES, LANE_HELLO_BYTES, PURPOSE_LANE,
    PURPOSE_RESUME, array,
};
use super::server::ServerStep;
use super::session::SessionKey;
use super::{HandshakeError, Message, NONCE_BYTES, Session, SessionId, Step, Version};
use crate::frame::Settings;

/// Joins a lane to a session, on the client.
#[derive(Debug)]
pub struct LaneClient {
    key: SessionKey,
    lane: u16,
    lanes: u16,
    hello: [u8; LANE_HELLO_BYTES],
    collector: Collector,
    state: State,
}

impl LaneClient {
    /// A handshake for lane `lane` of `lanes` and the first bytes to send.
    ///
    /// `nonce` must be fresh from a cryptographic random source.
    ///
    /// # Errors
    /// [`HandshakeError::LaneOutOfRange`] when `lane` is not below `lanes`, or `lanes` above
    /// [`Settings::MAX_CHANNELS`].
    pub fn new(
        session: &Session,
        lane: u16,
        lanes: u16,
        nonce: [u8; NONCE_BYTES],
    ) -> Result<(Self, Message), HandshakeError> {
        in_range(lane, lanes)?;
        Ok(Self::with_purpose(
            PURPOSE_LANE,
            session,
            lane,
            lanes,
            nonce,
        ))
    }

    /// A handshake for a connection that takes the place of the session's control connection, and
    /// the first bytes to send.
    ///
    /// `nonce` must be fresh from a cryptographic random source.
    pub fn resume(session: &Session, nonce: [u8; NONCE_BYTES]) -> (Self, Message) {
        Self::with_purpose(PURPOSE_RESUME, session, 0, 1, nonce)
    }

    fn with_purpose(
        purpose: u8,
        session: &Session,
        lane: u16,
        lanes: u16,
        nonce: [u8; NONCE_BYTES],
    ) -> (Self, Message) {
        let mut hello: [u8; LANE_HELLO_BYTES] =
            Head::ours(purpose, u8::from(session.authenticated), lane).start();
        hello[LANES_AT..LANES_AT + 2].copy_from_slice(&lanes.to_le_bytes());
        hello[SESSION_AT..HELLO_NONCE_AT].copy_from_slice(&session.id.0);
        hello[HELLO_NONCE_AT..].copy_from_slice(&nonce);
        let handshake = Self {
            key: session.key.clone(),
            lane,
            lanes,
            hello,
            collector: Collector::new(),
            state: State::Challenge,
        };
        let first = Message::from(&handshake.hello);
        (handshake, first)
    }

    /// Takes what the handshake needs from the front of `input`.
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Step<()>, HandshakeError> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Challenge => {
                let Some(head) = self.collector.head(input)? else {
                    self.state = State::Challenge;
                    return Ok(Step::NeedMore);
                };
                self.refusal(head)?;
                let Some(challenge) = self.collector.message(input) else {
                    self.state = State::Challenge;
                    return Ok(Step::NeedMore);
                };
                let proofs = Proofs::new(&self.key, &self.hello, &challenge);
                self.state = State::Accept(proofs.server);
                Ok(Step::Send(Message::from(&proofs.client.0)))
            }
            State::Accept(proof) => match self.collector.message(input) {
                None => {
                    self.state = State::Accept(proof);
                    Ok(Step::NeedMore)
                }
                Some(arrived) if proof.is(&arrived) => Ok(Step::Done(())),
                Some(_) => Err(HandshakeError::LaneProof { lane: self.lane }),
            },
            State::Ended => Err(HandshakeError::Ended),
        }
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        let (message, expected) = match self.state {
            State::Challenge => ("lane challenge", LANE_CHALLENGE_BYTES),
            State::Accept(_) => ("lane accept", MAC_BYTES),
            State::Ended => return HandshakeError::Ended,
        };
        HandshakeError::Truncated {
            message,
            expected,
            arrived: self.collector.held(),
        }
    }

    /// The error that a server's head stands for, if any.
    fn refusal(&self, head: Head) -> Result<(), HandshakeError> {
        let version = HandshakeError::Version {
            ours: Version::OURS,
            theirs: head.version,
        };
        if head.version.major != Version::OURS.major {
            return Err(version);
        }
        match Status::parse("lane challenge", head.kind)? {
            Status::Ok => Ok(()),
            Status::Version => Err(version),
            Status::Busy => Err(HandshakeError::Busy),
            Status::UnknownSession => Err(HandshakeError::UnknownSession),
            Status::LaneOutOfRange => Err(HandshakeError::LaneOutOfRange {
                lane: self.lane,
                lanes: self.lanes,
            }),
            Status::KeyRequired => Err(HandshakeError::KeyRequired),
            Status::KeyNotExpected => Err(HandshakeError::KeyNotExpected),
        }
    }
}

/// A connection that wants to be a lane, on the server; not proved yet.
#[derive(Debug)]
pub struct LaneRequest {
    session: SessionId,
    lane: u16,
    lanes: u16,
    resumes: bool,
    hello: [u8; LANE_HELLO_BYTES],
    nonce: [u8; NONCE_BYTES],
}

/// Why the server refuses a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneRefusal {
    /// No such session.
    UnknownSession,
    /// The session has fewer lanes, or another number of them.
    LaneOutOfRange,
    /// The lane is already there.
    Busy,
}

impl LaneRequest {
    /// Challenges the connection to prove that it belongs to the session with this key; send the
    /// message, then feed what arrives to the [`LaneServer`].
    pub fn accept(self, key: &SessionKey) -> (LaneServer, Message) {
        let challenge = challenge(Status::Ok, self.nonce);
        let proofs = Proofs::new(key, &self.hello, &challenge);
        let server = LaneServer {
            session: self.session,
            lane: self.lane,
            lanes: self.lanes,
            resumes: self.resumes,
            proofs: Some(proofs),
            collector: Collector::new(),
        };
        (server, Message::from(&challenge))
    }

    /// Refuses the connection; send the message, then close it.
    pub fn refuse(self, refusal: LaneRefusal) -> (Message, HandshakeError) {
        let (status, error) = match refusal {
            LaneRefusal::UnknownSession => (Status::UnknownSession, HandshakeError::UnknownSession),
            LaneRefusal::LaneOutOfRange => (
                Status::LaneOutOfRange,
                HandshakeError::LaneOutOfRange {
                    lane: self.lane,
                    lanes: self.lanes,
                },
            ),
            LaneRefusal::Busy => (Status::Busy, HandshakeError::Busy),
        };
        (Message::from(&challenge(status, [0; NONCE_BYTES])), error)
    }

    /// The session it claims.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// The lane it wants to be; below [`Self::lanes`].
    pub fn lane(&self) -> u16 {
        self.lane
    }

    /// It wants to take the place of the control connection instead.
    pub fn resumes(&self) -> bool {
        self.resumes
    }

    /// The number of lanes it believes the session to have; 1 to [`Settings::MAX_CHANNELS`].
    pub fn lanes(&self) -> u16 {
        self.lanes
    }
}

/// Waits for a lane's proof, on the server.
#[derive(Debug)]
pub struct LaneServer {
    session: SessionId,
    lane: u16,
    lanes: u16,
    resumes: bool,
    /// Gone once the handshake ended.
    proofs: Option<Proofs>,
    collector: Collector,
}

/// A lane that proved itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneAccepted {
    /// Its session.
    pub session: SessionId,
    /// Its number.
    pub lane: u16,
    /// Lanes of the session.
    pub lanes: u16,
    /// It is no lane, but takes the place of the control connection.
    pub resumes: bool,
    /// The last message of the handshake, to be sent.
    pub send: Message,
}

impl LaneServer {
    /// Takes what the handshake needs from the front of `input`; never yields [`Step::Send`].
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Step<LaneAccepted>, HandshakeError> {
        let Some(proofs) = &self.proofs else {
            return Err(HandshakeError::Ended);
        };
        let Some(arrived) = self.collector.message(input) else {
            return Ok(Step::NeedMore);
        };
        let genuine = proofs.client.is(&arrived);
        let send = Message::from(&proofs.server.0);
        self.proofs = None;
        if !genuine {
            return Err(HandshakeError::LaneProof { lane: self.lane });
        }
        Ok(Step::Done(LaneAccepted {
            session: self.session,
            lane: self.lane,
            lanes: self.lanes,
            resumes: self.resumes,
            send,
        }))
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        if self.proofs.is_none() {
            return HandshakeError::Ended;
        }
        HandshakeError::Truncated {
            message: "lane proof",
            expected: MAC_BYTES,
            arrived: self.collector.held(),
        }
    }
}

/// Checks a lane hello that arrived whole.
pub(super) fn request(
    head: Head,
    hello: [u8; LANE_HELLO_BYTES],
    nonce: [u8; NONCE_BYTES],
) -> Result<ServerStep, HandshakeError> {
    let value = |field, expected, arrived| HandshakeError::Value {
        message: "lane hello",
        field,
        expected,
        arrived,
    };
    if head.auth > 1 {
        return Err(value("authentication", "0 or 1", head.auth.into()));
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
            send: Message::from(&challenge(Status::LaneOutOfRange, [0; NONCE_BYTES])),
            error,
        });
    }
    Ok(ServerStep::Lane(LaneRequest {
        session: SessionId(array(&hello, SESSION_AT)),
        lane,
        lanes,
        resumes: head.kind == PURPOSE_RESUME,
        hello,
        nonce,
    }))
}

/// The proofs of both sides of a lane.
#[derive(Debug)]
struct Proofs {
    client: Proof,
    server: Proof,
}

impl Proofs {
    fn new(
        key: &SessionKey,
        hello: &[u8; LANE_HELLO_BYTES],
        challenge: &[u8; LANE_CHALLENGE_BYTES],
    ) -> Self {
        Self {
            client: Proof(mac::mac(&key.0, &[b"tcpx lane client", hello, challenge])),
            server: Proof(mac::mac(&key.0, &[b"tcpx lane server", hello, challenge])),
        }
    }
}

#[derive(Debug)]
enum State {
    Challenge,
    /// Holds the server's proof, which must arrive.
    Accept(Proof),
    Ended,
}

fn challenge(status: Status, nonce: [u8; NONCE_BYTES]) -> [u8; LANE_CHALLENGE_BYTES] {
    let mut challenge: [u8; LANE_CHALLENGE_BYTES] = Head::ours(status as u8, 0, 0).start();
    challenge[HEAD_BYTES..].copy_from_slice(&nonce);
    challenge
}

fn in_range(lane: u16, lanes: u16) -> Result<(), HandshakeError> {
    if lanes > Settings::MAX_CHANNELS || lane >= lanes {
        return Err(HandshakeError::LaneOutOfRange { lane, lanes });
    }
    Ok(())
}

// Places in the lane hello.
const LANES_AT: usize = HEAD_BYTES;
const SESSION_AT: usize = 24;
const HELLO_NONCE_AT: usize = SESSION_AT + SessionId::BYTES;
const _: () = assert!(HELLO_NONCE_AT + NONCE_BYTES == LANE_HELLO_BYTES);
const _: () = assert!(HEAD_BYTES + NONCE_BYTES == LANE_CHALLENGE_BYTES);
