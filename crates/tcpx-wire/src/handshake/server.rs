//! The server's side: every accepted connection begins here.

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::error::Status;
use super::message::{
    CONFIRM_BYTES, Collector, HEAD_BYTES, Head, KEYED_BYTES, LANE_HELLO_BYTES, MARKED_BYTES,
    OPEN_BYTES, PURPOSE_CONTROL, PURPOSE_LANE, PURPOSE_RESUME, SECOND_BYTES, SERVER_HELLO_BYTES,
    SESSION_BYTES,
};
use super::noise::{self, MARK_BYTES, Secret};
use super::session::SessionKey;
use super::{
    Build, Established, HandshakeError, LaneRequest, Message, Session, SessionId, Version, lane,
};
use crate::array;
use crate::key::{ID_BYTES, Identity};

/// Answers one accepted connection.
pub struct ServerHandshake {
    key: Option<Identity>,
    build: Build,
    entropy: Zeroizing<[u8; Self::ENTROPY_BYTES]>,
    busy: bool,
    collector: Collector,
    state: State,
}

/// What to do after the server received bytes.
#[derive(Debug)]
pub enum ServerStep {
    /// All input is used; wait for more.
    NeedMore,
    /// Send these bytes, then go on receiving.
    Send(Message),
    /// A session came about: send [`welcome`](Established::welcome) or
    /// [`turn_away`](Established::turn_away). Input that is left belongs to the session.
    Done(Box<Established>),
    /// The connection wants to be a lane: look its session up, then accept or refuse it. Input
    /// that is left belongs to the lane's handshake.
    Lane(LaneRequest),
    /// Send these bytes, which tell the peer why, then close the connection.
    Refuse {
        /// The answer to the peer.
        send: Message,
        /// Why.
        error: HandshakeError,
    },
}

impl ServerHandshake {
    /// Bytes of randomness that one needs: an ephemeral key, a session's id and its secret.
    pub const ENTROPY_BYTES: usize = noise::ENTROPY_BYTES + SessionId::BYTES + SessionKey::BYTES;

    /// A handshake that waits for a client's hello.
    ///
    /// `entropy` must be fresh from a cryptographic random source; without a key nobody is
    /// authenticated, and clients must have none either.
    pub fn new(key: Option<&Identity>, build: &Build, entropy: [u8; Self::ENTROPY_BYTES]) -> Self {
        Self {
            key: key.cloned(),
            build: *build,
            entropy: Zeroizing::new(entropy),
            busy: false,
            collector: Collector::new(),
            state: State::Hello,
        }
    }

    /// Takes no new session: a control connection is refused as busy, a lane is not.
    #[must_use]
    pub fn busy(mut self) -> Self {
        self.busy = true;
        self
    }

    /// Takes what the handshake needs from the front of `input`.
    ///
    /// # Errors
    /// When the handshake failed and the peer gets no answer; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<ServerStep, HandshakeError> {
        self.receive_fresh(input, &mut |_| true)
    }

    /// The same; a client's hello whose mark is not `fresh` ends it, before it costs more than a
    /// hash.
    ///
    /// # Errors
    /// As there, and [`HandshakeError::Replayed`].
    pub fn receive_fresh(
        &mut self,
        input: &mut &[u8],
        fresh: &mut dyn FnMut(&[u8; MARK_BYTES]) -> bool,
    ) -> Result<ServerStep, HandshakeError> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Hello => self.receive_hello(input, fresh),
            State::Confirm(established) => self.receive_confirm(input, established),
            State::Ended => Err(HandshakeError::Ended),
        }
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        let (message, expected) = match &self.state {
            State::Hello => ("client hello", HEAD_BYTES + self.first_bytes()),
            State::Confirm(established)
                if established.session.authenticated && self.collector.held() == 0 =>
            {
                return HandshakeError::LeftAtProof;
            }
            State::Confirm(_) => ("client proof", CONFIRM_BYTES),
            State::Ended => return HandshakeError::Ended,
        };
        HandshakeError::Truncated {
            message,
            expected,
            arrived: self.collector.held(),
        }
    }

    fn receive_hello(
        &mut self,
        input: &mut &[u8],
        fresh: &mut dyn FnMut(&[u8; MARK_BYTES]) -> bool,
    ) -> Result<ServerStep, HandshakeError> {
        let Some(head) = self.collector.head(input)? else {
            self.state = State::Hello;
            return Ok(ServerStep::NeedMore);
        };
        let protocol = match self.build.agree(&head.build) {
            Ok(protocol) => protocol,
            Err(error) => return Ok(self.refuse(Status::Version, error)),
        };
        match head.kind {
            PURPOSE_CONTROL => {
                // Another kind of hello may be shorter than what this side waits for.
                if let Some(refused) = self.refuse_auth(head)? {
                    return Ok(refused);
                }
                let whole = HEAD_BYTES + self.first_bytes();
                if let Some(hello) = self.collector.bytes(input, whole) {
                    let mut message = [0; HEAD_BYTES + MARKED_BYTES];
                    message[..whole].copy_from_slice(hello);
                    return self.answer(head, protocol, &message[..whole], fresh);
                }
            }
            PURPOSE_LANE | PURPOSE_RESUME => {
                if let Some(hello) = self.collector.message::<LANE_HELLO_BYTES>(input) {
                    return lane::request(head, protocol, hello, array(&*self.entropy, 0));
                }
            }
            other => {
                let known = "0 (control), 1 (lane) or 2 (control again)";
                return Err(HandshakeError::value("hello", "purpose", known, other));
            }
        }
        self.state = State::Hello;
        Ok(ServerStep::NeedMore)
    }

    /// Bytes of a client hello behind its beginning.
    fn first_bytes(&self) -> usize {
        match self.key {
            None => OPEN_BYTES,
            Some(_) => MARKED_BYTES,
        }
    }

    /// The answer to a client that has no key where this side has one, or the other way round.
    fn refuse_auth(&self, head: Head) -> Result<Option<ServerStep>, HandshakeError> {
        let (status, error) = match (self.key.is_some(), head.auth) {
            (true, 1) | (false, 0) => return Ok(None),
            (true, 0) => (Status::KeyRequired, HandshakeError::KeyRequired),
            (false, 1) => (Status::KeyNotExpected, HandshakeError::KeyNotExpected),
            (_, arrived) => {
                return Err(HandshakeError::value(
                    MESSAGE,
                    "authentication",
                    "0 or 1",
                    arrived,
                ));
            }
        };
        Ok(Some(self.refuse(status, error)))
    }

    fn answer(
        &mut self,
        head: Head,
        protocol: Version,
        hello: &[u8],
        fresh: &mut dyn FnMut(&[u8; MARK_BYTES]) -> bool,
    ) -> Result<ServerStep, HandshakeError> {
        if head.padding() != 0 {
            return Err(HandshakeError::value(
                MESSAGE,
                "padding",
                "0",
                head.padding(),
            ));
        }
        if self.busy {
            return Ok(self.refuse(Status::Busy, HandshakeError::Busy));
        }
        let (prologue, first) = hello.split_at(HEAD_BYTES);
        let first = match &self.key {
            None => first,
            Some(identity) => {
                let (first, mark) = first.split_at(KEYED_BYTES);
                let expected = noise::mark(
                    identity.client().public(),
                    &hello[..HEAD_BYTES + KEYED_BYTES],
                );
                if !bool::from(expected.ct_eq(mark)) {
                    // Before anything that costs more than a hash.
                    return Ok(self.refuse(Status::WrongKey, HandshakeError::WrongKey));
                }
                if !fresh(&expected) {
                    return Err(HandshakeError::Replayed);
                }
                first
            }
        };
        let entropy = Zeroizing::new(array(&*self.entropy, 0));
        let secret = self.key.as_ref().map_or(Secret::None, Secret::Server);
        let mut state = noise::responder(&secret, prologue, entropy);
        let is_known = match &self.key {
            None => noise::read::<0>(&mut state, first).is_some(),
            Some(identity) => noise::read::<ID_BYTES>(&mut state, first).is_some_and(|id| {
                let client = identity.client();
                noise::set_psk(&mut state, &client.psk());
                client.id().ct_eq(&*id).into()
            }),
        };
        if !is_known {
            return Ok(self.refuse(Status::WrongKey, HandshakeError::WrongKey));
        }
        let session = Session {
            id: SessionId(array(&*self.entropy, noise::ENTROPY_BYTES)),
            key: SessionKey(array(
                &*self.entropy,
                noise::ENTROPY_BYTES + SessionId::BYTES,
            )),
            authenticated: self.key.is_some(),
            protocol,
        };
        // The client may not be one yet. Whoever does not know the pre-shared key cannot open this.
        let mut payload = Zeroizing::new([0; SESSION_BYTES]);
        let (id, rest) = payload.split_at_mut(SessionId::BYTES);
        let (key, build) = rest.split_at_mut(SessionKey::BYTES);
        id.copy_from_slice(&session.id.0);
        key.copy_from_slice(&session.key.0);
        // What the beginning says openly, nobody changes on the way.
        build.copy_from_slice(&self.build.encode());
        let mut server: [u8; SERVER_HELLO_BYTES] = self.hello_head(Status::Ok).start();
        let second = noise::write::<SECOND_BYTES>(&mut state, &*payload);
        server[HEAD_BYTES..].copy_from_slice(&second);
        self.state = State::Confirm(Box::new(Established {
            session,
            records: noise::records(state),
        }));
        Ok(ServerStep::Send(Message::from(&server)))
    }

    fn receive_confirm(
        &mut self,
        input: &mut &[u8],
        mut established: Box<Established>,
    ) -> Result<ServerStep, HandshakeError> {
        let Some(confirm) = self.collector.message::<CONFIRM_BYTES>(input) else {
            self.state = State::Confirm(established);
            return Ok(ServerStep::NeedMore);
        };
        established
            .records
            .open_array::<0>(&confirm)
            .map_err(|_| HandshakeError::WrongKey)?;
        Ok(ServerStep::Done(established))
    }

    fn refuse(&self, status: Status, error: HandshakeError) -> ServerStep {
        // Nothing behind the beginning: nothing for a stranger to learn from.
        let hello: [u8; SERVER_HELLO_BYTES] = self.hello_head(status).start();
        ServerStep::Refuse {
            send: Message::from(&hello),
            error,
        }
    }

    fn hello_head(&self, status: Status) -> Head {
        Head::new(&self.build, status as u8, u8::from(self.key.is_some()), 0)
    }
}

hidden!(ServerHandshake);

const MESSAGE: &str = "client hello";

#[derive(Debug)]
enum State {
    Hello,
    /// The client has our hello; becomes valid once it has proved itself.
    Confirm(Box<Established>),
    Ended,
}
