//! Both sides of a lane that joins a session, and of a control connection that takes the place of a
//! broken one: the same messages with another purpose, which both sides must have seen alike.
//!
//! Each connection has keys of its own: they come from the session's secret and from ephemeral keys of this handshake.

use snow::HandshakeState;
use zeroize::Zeroizing;

use super::client::records;
use super::error::Status;
use super::message::{
    CONFIRM_BYTES, Collector, HEAD_BYTES, Head, LANE_ANSWER_BYTES, LANE_CLAIM_BYTES,
    LANE_HELLO_BYTES, LANE_NOISE_BYTES, PURPOSE_LANE, PURPOSE_RESUME, array,
};
use super::noise::{self, ENTROPY_BYTES, Secret};
use super::server::ServerStep;
use super::session::SessionKey;
use super::{HandshakeError, Message, Session, SessionId, Step};
use crate::frame::Settings;
use crate::lane_seal::LaneKeys;
use crate::record::Records;

/// Joins a lane to a session, on the client.
#[derive(Debug)]
pub struct LaneClient {
    lane: u16,
    lanes: u16,
    collector: Collector,
    /// Gone once the handshake ended.
    state: Option<Box<HandshakeState>>,
}

impl LaneClient {
    /// Bytes of randomness that one needs.
    pub const ENTROPY_BYTES: usize = ENTROPY_BYTES;

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
        entropy: [u8; ENTROPY_BYTES],
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
    pub fn resume(session: &Session, entropy: [u8; ENTROPY_BYTES]) -> (Self, Message) {
        Self::with_purpose(PURPOSE_RESUME, session, 0, 1, entropy)
    }

    fn with_purpose(
        purpose: u8,
        session: &Session,
        lane: u16,
        lanes: u16,
        entropy: [u8; ENTROPY_BYTES],
    ) -> (Self, Message) {
        let mut claim: [u8; LANE_CLAIM_BYTES] =
            Head::ours(purpose, u8::from(session.authenticated), lane).start();
        claim[LANES_AT..LANES_AT + 2].copy_from_slice(&lanes.to_le_bytes());
        claim[SESSION_AT..].copy_from_slice(&session.id.0);
        let secret = Secret::Session(&session.key.0);
        let mut state = noise::initiator(&secret, &claim, Zeroizing::new(entropy));
        let mut hello = [0; LANE_HELLO_BYTES];
        hello[..LANE_CLAIM_BYTES].copy_from_slice(&claim);
        let first = noise::write::<LANE_NOISE_BYTES>(&mut state, &[]);
        hello[LANE_CLAIM_BYTES..].copy_from_slice(&first);
        let handshake = Self {
            lane,
            lanes,
            collector: Collector::new(),
            state: Some(Box::new(state)),
        };
        (handshake, Message::from(&hello))
    }

    /// Takes what the handshake needs from the front of `input`; never yields [`Step::Send`] or [`Step::Done`].
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Step<LaneJoined>, HandshakeError> {
        let mut state = self.state.take().ok_or(HandshakeError::Ended)?;
        let Some(head) = self.collector.head(input)? else {
            self.state = Some(state);
            return Ok(Step::NeedMore);
        };
        head.accepted("lane answer", Some((self.lane, self.lanes)))?;
        let Some(answer) = self.collector.message::<LANE_ANSWER_BYTES>(input) else {
            self.state = Some(state);
            return Ok(Step::NeedMore);
        };
        let forged = HandshakeError::LaneProof { lane: self.lane };
        if (head.auth, head.padding()) != (0, 0) {
            return Err(forged);
        }
        noise::read::<0>(&mut state, &answer[HEAD_BYTES..]).ok_or_else(|| forged.clone())?;
        let keys = noise::lane_keys(&mut state);
        let mut records = records(*state);
        let confirm = records
            .seal_array::<CONFIRM_BYTES>(&[])
            .map_err(|_| forged)?;
        let joined = LaneJoined { records, keys };
        Ok(Step::SendLast(Message::from(&confirm), joined))
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        if self.state.is_none() {
            return HandshakeError::Ended;
        }
        HandshakeError::Truncated {
            message: "lane answer",
            expected: LANE_ANSWER_BYTES,
            arrived: self.collector.held(),
        }
    }
}

/// What a client's connection has once it has joined.
#[derive(Debug)]
pub struct LaneJoined {
    /// Seals and opens what follows, if it took the place of the control connection.
    pub records: Records,
    /// The secrets of what follows, if it is a lane.
    pub keys: LaneKeys,
}

/// A connection that wants to be a lane, on the server; not proved yet.
pub struct LaneRequest {
    session: SessionId,
    lane: u16,
    lanes: u16,
    resumes: bool,
    hello: [u8; LANE_HELLO_BYTES],
    entropy: Zeroizing<[u8; ENTROPY_BYTES]>,
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
    /// Lets a connection that knows the session's secret go on; send the message, then feed what arrives to the
    /// [`LaneServer`].
    ///
    /// # Errors
    /// It does not know the secret; send the message, then close the connection.
    pub fn accept(
        self,
        key: &SessionKey,
    ) -> Result<(LaneServer, Message), Box<(Message, HandshakeError)>> {
        let (claim, first) = self.hello.split_at(LANE_CLAIM_BYTES);
        let mut state = noise::responder(&Secret::Session(&key.0), claim, self.entropy);
        if noise::read::<0>(&mut state, first).is_none() {
            let error = HandshakeError::LaneProof { lane: self.lane };
            return Err(Box::new((refused(Status::WrongKey), error)));
        }
        let mut answer: [u8; LANE_ANSWER_BYTES] = Head::ours(Status::Ok as u8, 0, 0).start();
        let second = noise::write::<LANE_NOISE_BYTES>(&mut state, &[]);
        answer[HEAD_BYTES..].copy_from_slice(&second);
        let keys = noise::lane_keys(&mut state);
        let joined = LaneJoined {
            records: records(state),
            keys,
        };
        let server = LaneServer {
            session: self.session,
            lane: self.lane,
            lanes: self.lanes,
            resumes: self.resumes,
            joined: Some(joined),
            collector: Collector::new(),
        };
        Ok((server, Message::from(&answer)))
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
        (refused(status), error)
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
    joined: Option<LaneJoined>,
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
    /// What it has.
    pub joined: LaneJoined,
}

impl LaneServer {
    /// Takes what the handshake needs from the front of `input`; never has anything to send.
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Step<LaneAccepted>, HandshakeError> {
        let mut joined = self.joined.take().ok_or(HandshakeError::Ended)?;
        let Some(confirm) = self.collector.message::<CONFIRM_BYTES>(input) else {
            self.joined = Some(joined);
            return Ok(Step::NeedMore);
        };
        joined
            .records
            .open_array::<0>(&confirm)
            .map_err(|_| HandshakeError::LaneProof { lane: self.lane })?;
        Ok(Step::Done(LaneAccepted {
            session: self.session,
            lane: self.lane,
            lanes: self.lanes,
            resumes: self.resumes,
            joined,
        }))
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        if self.joined.is_none() {
            return HandshakeError::Ended;
        }
        HandshakeError::Truncated {
            message: "lane proof",
            expected: CONFIRM_BYTES,
            arrived: self.collector.held(),
        }
    }
}

/// Checks a lane hello that arrived whole.
pub(super) fn request(
    head: Head,
    hello: [u8; LANE_HELLO_BYTES],
    entropy: Zeroizing<[u8; ENTROPY_BYTES]>,
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
            send: refused(Status::LaneOutOfRange),
            error,
        });
    }
    Ok(ServerStep::Lane(LaneRequest {
        session: SessionId(array(&hello, SESSION_AT)),
        lane,
        lanes,
        resumes: head.kind == PURPOSE_RESUME,
        hello,
        entropy,
    }))
}

impl std::fmt::Debug for LaneRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LaneRequest")
            .field("session", &self.session)
            .field("lane", &self.lane)
            .field("lanes", &self.lanes)
            .field("resumes", &self.resumes)
            .finish_non_exhaustive()
    }
}

/// The answer that ends a lane's handshake.
fn refused(status: Status) -> Message {
    let answer: [u8; LANE_ANSWER_BYTES] = Head::ours(status as u8, 0, 0).start();
    Message::from(&answer)
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
const _: () = assert!(SESSION_AT + SessionId::BYTES == LANE_CLAIM_BYTES);
