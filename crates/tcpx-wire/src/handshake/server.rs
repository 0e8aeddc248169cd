//! The server's side: every accepted connection begins here.

use super::error::Status;
use super::mac::{self, Hellos, MAC_BYTES, Proof};
use super::message::{
    CAPABILITIES_AT, CLIENT_HELLO_BYTES, Collector, Head, LANE_HELLO_BYTES, NONCE_AT,
    PURPOSE_CONTROL, PURPOSE_LANE, PURPOSE_RESUME, SERVER_HELLO_BYTES, WELCOME_BYTES, array,
};
use super::session::SessionKey;
use super::{HandshakeError, LaneRequest, Message, NONCE_BYTES, Session, SessionId, Version, lane};
use crate::key::Key;

/// Answers one accepted connection.
#[derive(Debug)]
pub struct ServerHandshake {
    key: Option<Key>,
    nonce: [u8; NONCE_BYTES],
    capabilities: u64,
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
    /// A session came about: send these bytes. Input that is left belongs to the session.
    Done {
        /// The session.
        session: Session,
        /// The last message of the handshake.
        send: Message,
    },
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
    /// Whether a client's hello has come and its proof is what is missing.
    pub fn has_hello(&self) -> bool {
        matches!(self.state, State::Proof(_))
    }

    /// A handshake that waits for a client's hello.
    ///
    /// `nonce` must be fresh from a cryptographic random source; without a key nobody is
    /// authenticated, and clients must have none either.
    pub fn new(key: Option<&Key>, nonce: [u8; NONCE_BYTES], capabilities: u64) -> Self {
        Self {
            key: key.cloned(),
            nonce,
            capabilities,
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
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Hello => self.receive_hello(input),
            State::Proof(pending) => self.receive_proof(input, pending),
            State::Ended => Err(HandshakeError::Ended),
        }
    }

    /// What it means that the peer closed the connection now.
    pub fn closed(&self) -> HandshakeError {
        let (message, expected) = match &self.state {
            State::Hello => ("client hello", CLIENT_HELLO_BYTES),
            State::Proof(pending)
                if pending.session.authenticated && self.collector.held() == 0 =>
            {
                return HandshakeError::LeftAtProof;
            }
            State::Proof(_) => ("client proof", MAC_BYTES),
            State::Ended => return HandshakeError::Ended,
        };
        HandshakeError::Truncated {
            message,
            expected,
            arrived: self.collector.held(),
        }
    }

    fn receive_hello(&mut self, input: &mut &[u8]) -> Result<ServerStep, HandshakeError> {
        let Some(head) = self.collector.head(input)? else {
            self.state = State::Hello;
            return Ok(ServerStep::NeedMore);
        };
        if head.version.major != Version::OURS.major {
            let error = HandshakeError::Version {
                ours: Version::OURS,
                theirs: head.version,
            };
            return Ok(self.refuse(Status::Version, error));
        }
        match head.kind {
            PURPOSE_CONTROL => {
                if let Some(hello) = self.collector.message(input) {
                    return self.answer(head, &hello);
                }
            }
            PURPOSE_LANE | PURPOSE_RESUME => {
                if let Some(hello) = self.collector.message::<LANE_HELLO_BYTES>(input) {
                    return lane::request(head, hello, self.nonce);
                }
            }
            other => {
                return Err(HandshakeError::Value {
                    message: "hello",
                    field: "purpose",
                    expected: "0 (control), 1 (lane) or 2 (control again)",
                    arrived: other.into(),
                });
            }
        }
        self.state = State::Hello;
        Ok(ServerStep::NeedMore)
    }

    fn answer(
        &mut self,
        head: Head,
        client: &[u8; CLIENT_HELLO_BYTES],
    ) -> Result<ServerStep, HandshakeError> {
        let value = |field, expected, arrived| HandshakeError::Value {
            message: "client hello",
            field,
            expected,
            arrived,
        };
        let padding = u64::from_le_bytes(array(client, NONCE_AT + NONCE_BYTES));
        if head.extra != 0 || padding != 0 {
            return Err(value("padding", "0", padding | u64::from(head.extra)));
        }
        match (self.key.is_some(), head.auth) {
            (true, 1) | (false, 0) => {}
            (true, 0) => return Ok(self.refuse(Status::KeyRequired, HandshakeError::KeyRequired)),
            (false, 1) => {
                return Ok(self.refuse(Status::KeyNotExpected, HandshakeError::KeyNotExpected));
            }
            (_, arrived) => return Err(value("authentication", "0 or 1", arrived.into())),
        }
        if self.busy {
            return Ok(self.refuse(Status::Busy, HandshakeError::Busy));
        }

        let mut server: [u8; SERVER_HELLO_BYTES] = self.hello_head(Status::Ok).start();
        server[CAPABILITIES_AT..NONCE_AT].copy_from_slice(&self.capabilities.to_le_bytes());
        server[NONCE_AT..NONCE_AT + NONCE_BYTES].copy_from_slice(&self.nonce);
        let key = self.key.as_ref();
        let proof = Hellos {
            client,
            server: &server,
        }
        .server_proof(key);
        server[mac::SERVER_HELLO_SIGNED..].copy_from_slice(&proof);

        let hellos = Hellos {
            client,
            server: &server,
        };
        let (id, session_key) = hellos.session(key);
        let theirs = u64::from_le_bytes(array(client, CAPABILITIES_AT));
        self.state = State::Proof(Pending {
            proof: Proof(hellos.client_proof(key)),
            session: Session {
                id,
                key: session_key,
                capabilities: theirs & self.capabilities,
                authenticated: key.is_some(),
            },
        });
        Ok(ServerStep::Send(Message::from(&server)))
    }

    fn receive_proof(
        &mut self,
        input: &mut &[u8],
        pending: Pending,
    ) -> Result<ServerStep, HandshakeError> {
        let Some(arrived) = self.collector.message(input) else {
            self.state = State::Proof(pending);
            return Ok(ServerStep::NeedMore);
        };
        let Pending { proof, session } = pending;
        if !proof.is(&arrived) {
            return Err(HandshakeError::WrongKey);
        }
        let send = Message::from(&welcome(session.id, &session.key, session.capabilities));
        Ok(ServerStep::Done { session, send })
    }

    fn refuse(&self, status: Status, error: HandshakeError) -> ServerStep {
        // No nonce and no proof: nothing for a stranger to learn from.
        let hello: [u8; SERVER_HELLO_BYTES] = self.hello_head(status).start();
        ServerStep::Refuse {
            send: Message::from(&hello),
            error,
        }
    }

    fn hello_head(&self, status: Status) -> Head {
        Head::ours(status as u8, u8::from(self.key.is_some()), 0)
    }
}

#[derive(Debug)]
enum State {
    Hello,
    Proof(Pending),
    Ended,
}

/// What becomes valid once the client proved itself.
#[derive(Debug)]
struct Pending {
    proof: Proof,
    session: Session,
}

/// The last message: id, capabilities of both sides, proof under the session's key.
pub(super) fn welcome(id: SessionId, key: &SessionKey, capabilities: u64) -> [u8; WELCOME_BYTES] {
    let capabilities = capabilities.to_le_bytes();
    let mut welcome = [0; WELCOME_BYTES];
    welcome[..16].copy_from_slice(&id.0);
    welcome[16..24].copy_from_slice(&capabilities);
    let proof = mac::mac(&key.0, &[b"tcpx welcome", &id.0, &capabilities]);
    welcome[24..].copy_from_slice(&proof);
    welcome
}
