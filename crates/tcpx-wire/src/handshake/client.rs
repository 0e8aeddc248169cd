//! The client's side of a control connection.

use snow::HandshakeState;
use zeroize::Zeroizing;

use super::message::{
    Collector, HEAD_BYTES, Head, KEYED_BYTES, MARKED_BYTES, OPEN_BYTES, PURPOSE_CONTROL,
    SERVER_HELLO_BYTES, SESSION_BYTES, WELCOME_BYTES,
};
use super::noise::{self, Secret};
use super::session::SessionKey;
use super::{Build, Established, HandshakeError, Message, Session, SessionId, Step};
use crate::array;
use crate::key::ClientKey;

/// Opens a session.
#[derive(Debug)]
pub struct ClientHandshake {
    authenticated: bool,
    build: Build,
    collector: Collector,
    state: State,
}

impl ClientHandshake {
    /// Bytes of randomness that one needs.
    pub const ENTROPY_BYTES: usize = noise::ENTROPY_BYTES;

    /// A handshake and the first bytes to send.
    ///
    /// `entropy` must be fresh from a cryptographic random source; without a key nobody is
    /// authenticated, and the server must have none either.
    pub fn new(
        key: Option<&ClientKey>,
        build: &Build,
        entropy: [u8; Self::ENTROPY_BYTES],
    ) -> (Self, Message) {
        let head = Head::new(build, PURPOSE_CONTROL, u8::from(key.is_some()), 0);
        let prologue: [u8; HEAD_BYTES] = head.start();
        let secret = key.map_or(Secret::None, Secret::Client);
        let mut state = noise::initiator(&secret, &prologue, Zeroizing::new(entropy));
        let first = match key {
            None => {
                let mut hello: [u8; HEAD_BYTES + OPEN_BYTES] = head.start();
                let noise = noise::write::<OPEN_BYTES>(&mut state, &[]);
                hello[HEAD_BYTES..].copy_from_slice(&noise);
                Message::from(&hello)
            }
            Some(key) => {
                let mut hello: [u8; HEAD_BYTES + MARKED_BYTES] = head.start();
                let (marked, mark) = hello.split_at_mut(HEAD_BYTES + KEYED_BYTES);
                let noise = noise::write::<KEYED_BYTES>(&mut state, &key.id());
                marked[HEAD_BYTES..].copy_from_slice(&noise);
                mark.copy_from_slice(&noise::mark(key.public(), marked));
                Message::from(&hello)
            }
        };
        let handshake = Self {
            authenticated: key.is_some(),
            build: *build,
            collector: Collector::new(),
            state: State::Hello(Box::new(state)),
        };
        (handshake, first)
    }

    /// Takes what the handshake needs from the front of `input`.
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Step<Established>, HandshakeError> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Hello(state) => self.receive_hello(input, state),
            State::Welcome(established) => self.receive_welcome(input, established),
            State::Ended => Err(HandshakeError::Ended),
        }
    }

    /// The session, from when the proof is to be sent until its welcome comes. What is sealed with
    /// it may go out right behind the proof; the first record to open is the welcome, and
    /// [`Established::read_welcome`] says what it means.
    pub fn take_unwelcomed(&mut self) -> Option<Established> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Welcome(established) if self.collector.held() == 0 => Some(*established),
            _ => None,
        }
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        let (message, expected) = match self.state {
            State::Hello(_) => ("server hello", SERVER_HELLO_BYTES),
            State::Welcome(_) => ("welcome", WELCOME_BYTES),
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
        mut state: Box<HandshakeState>,
    ) -> Result<Step<Established>, HandshakeError> {
        let Some(head) = self.collector.head(input)? else {
            self.state = State::Hello(state);
            return Ok(Step::NeedMore);
        };
        // Before the rest, which may differ in another version.
        let protocol = head.accepted("server hello", &self.build, None)?;
        let Some(hello) = self.collector.message::<SERVER_HELLO_BYTES>(input) else {
            self.state = State::Hello(state);
            return Ok(Step::NeedMore);
        };
        match (self.authenticated, head.auth) {
            (true, 1) | (false, 0) => {}
            (true, 0) => return Err(HandshakeError::KeyNotExpected),
            (false, 1) => return Err(HandshakeError::KeyRequired),
            (_, arrived) => {
                return Err(HandshakeError::value(
                    MESSAGE,
                    "authentication",
                    "0 or 1",
                    arrived,
                ));
            }
        }
        if head.padding() != 0 {
            return Err(HandshakeError::value(
                MESSAGE,
                "padding",
                "0",
                head.padding(),
            ));
        }
        let payload = noise::read::<SESSION_BYTES>(&mut state, &hello[HEAD_BYTES..])
            .ok_or(HandshakeError::WrongKey)?;
        if array(&*payload, SessionId::BYTES + SessionKey::BYTES) != head.build.encode() {
            return Err(HandshakeError::Changed);
        }
        let mut established = Established {
            session: Session {
                id: SessionId(array(&*payload, 0)),
                key: SessionKey(array(&*payload, SessionId::BYTES)),
                authenticated: self.authenticated,
                protocol,
            },
            records: noise::records(*state),
        };
        let confirm = established.confirm();
        self.state = State::Welcome(Box::new(established));
        Ok(Step::Send(confirm))
    }

    fn receive_welcome(
        &mut self,
        input: &mut &[u8],
        mut established: Box<Established>,
    ) -> Result<Step<Established>, HandshakeError> {
        let Some(welcome) = self.collector.message::<WELCOME_BYTES>(input) else {
            self.state = State::Welcome(established);
            return Ok(Step::NeedMore);
        };
        let status: [u8; 1] = established
            .records
            .open_array(&welcome)
            .map_err(|_| HandshakeError::WrongKey)?;
        Established::read_welcome(&status).map(|()| Step::Done(*established))
    }
}

#[derive(Debug)]
enum State {
    Hello(Box<HandshakeState>),
    Welcome(Box<Established>),
    Ended,
}

const MESSAGE: &str = "server hello";
