//! The client's side of a control connection.

use super::error::Status;
use super::mac::{self, Hellos};
use super::message::{
    CAPABILITIES_AT, CLIENT_HELLO_BYTES, Collector, Head, NONCE_AT, PURPOSE_CONTROL,
    SERVER_HELLO_BYTES, WELCOME_BYTES, array,
};
use super::session::SessionKey;
use super::{HandshakeError, Message, NONCE_BYTES, Session, SessionId, Step, Version, server};
use crate::key::Key;

/// Opens a session.
#[derive(Debug)]
pub struct ClientHandshake {
    key: Option<Key>,
    hello: [u8; CLIENT_HELLO_BYTES],
    collector: Collector,
    state: State,
}

impl ClientHandshake {
    /// A handshake and the first bytes to send.
    ///
    /// `nonce` must be fresh from a cryptographic random source; without a key nobody is
    /// authenticated, and the server must have none either.
    pub fn new(key: Option<&Key>, nonce: [u8; NONCE_BYTES], capabilities: u64) -> (Self, Message) {
        let mut hello: [u8; CLIENT_HELLO_BYTES] =
            Head::ours(PURPOSE_CONTROL, u8::from(key.is_some()), 0).start();
        hello[CAPABILITIES_AT..NONCE_AT].copy_from_slice(&capabilities.to_le_bytes());
        hello[NONCE_AT..NONCE_AT + NONCE_BYTES].copy_from_slice(&nonce);
        let handshake = Self {
            key: key.cloned(),
            hello,
            collector: Collector::new(),
            state: State::Hello,
        };
        let first = Message::from(&handshake.hello);
        (handshake, first)
    }

    /// Takes what the handshake needs from the front of `input`.
    ///
    /// # Errors
    /// When the handshake failed; further calls fail too.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<Step<Session>, HandshakeError> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Hello => self.receive_hello(input),
            State::Welcome { id, key } => self.receive_welcome(input, id, key),
            State::Ended => Err(HandshakeError::Ended),
        }
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        let (message, expected) = match self.state {
            State::Hello => ("server hello", SERVER_HELLO_BYTES),
            State::Welcome { .. } => ("welcome", WELCOME_BYTES),
            State::Ended => return HandshakeError::Ended,
        };
        HandshakeError::Truncated {
            message,
            expected,
            arrived: self.collector.held(),
        }
    }

    fn receive_hello(&mut self, input: &mut &[u8]) -> Result<Step<Session>, HandshakeError> {
        let Some(head) = self.collector.head(input)? else {
            self.state = State::Hello;
            return Ok(Step::NeedMore);
        };
        // Before the rest, which may differ in another version.
        refusal(head)?;
        let Some(server) = self.collector.message(input) else {
            self.state = State::Hello;
            return Ok(Step::NeedMore);
        };
        match (self.key.is_some(), head.auth) {
            (true, 1) | (false, 0) => {}
            (true, 0) => return Err(HandshakeError::KeyNotExpected),
            (false, 1) => return Err(HandshakeError::KeyRequired),
            (_, arrived) => return Err(value("authentication", "0 or 1", arrived.into())),
        }
        if head.extra != 0 {
            return Err(value("padding", "0", head.extra.into()));
        }
        let hellos = Hellos {
            client: &self.hello,
            server: &server,
        };
        let key = self.key.as_ref();
        let arrived = array(&server, mac::SERVER_HELLO_SIGNED);
        if !mac::equal(&arrived, &hellos.server_proof(key)) {
            return Err(HandshakeError::WrongKey);
        }
        let proof = hellos.client_proof(key);
        let (id, key) = hellos.session(key);
        self.state = State::Welcome { id, key };
        Ok(Step::Send(Message::from(&proof)))
    }

    fn receive_welcome(
        &mut self,
        input: &mut &[u8],
        id: SessionId,
        key: SessionKey,
    ) -> Result<Step<Session>, HandshakeError> {
        let Some(welcome) = self.collector.message::<WELCOME_BYTES>(input) else {
            self.state = State::Welcome { id, key };
            return Ok(Step::NeedMore);
        };
        let capabilities = u64::from_le_bytes(array(&welcome, SessionId::BYTES));
        // The id is inside the proof and must be the one that both sides derived.
        if !mac::equal(&welcome, &server::welcome(id, &key, capabilities)) {
            return Err(HandshakeError::WrongKey);
        }
        let ours = u64::from_le_bytes(array(&self.hello, CAPABILITIES_AT));
        Ok(Step::Done(Session {
            id,
            key,
            // A server that claims more gets no more.
            capabilities: capabilities & ours,
            authenticated: self.key.is_some(),
        }))
    }
}

#[derive(Debug)]
enum State {
    Hello,
    Welcome { id: SessionId, key: SessionKey },
    Ended,
}

/// The error that a server's head stands for, if any.
fn refusal(head: Head) -> Result<(), HandshakeError> {
    let version = HandshakeError::Version {
        ours: Version::OURS,
        theirs: head.version,
    };
    if head.version.major != Version::OURS.major {
        return Err(version);
    }
    match Status::parse("server hello", head.kind)? {
        Status::Ok => Ok(()),
        Status::Version => Err(version),
        Status::KeyRequired => Err(HandshakeError::KeyRequired),
        Status::KeyNotExpected => Err(HandshakeError::KeyNotExpected),
        Status::Busy => Err(HandshakeError::Busy),
        Status::UnknownSession | Status::LaneOutOfRange => {
            Err(value("status", "0 to 4", head.kind.into()))
        }
    }
}

fn value(field: &'static str, expected: &'static str, arrived: u64) -> HandshakeError {
    HandshakeError::Value {
        message: "server hello",
        field,
        expected,
        arrived,
    }
}
