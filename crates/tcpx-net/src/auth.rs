//! Who may connect, and the client's half of a handshake on a socket.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::ops::Deref;
use std::path::Path;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tcpx_lanes::socket;
use tcpx_wire::handshake::{
    ClientHandshake, Established, HandshakeError, LaneClient, Message, Step,
};
use tcpx_wire::key::{AnyKey, ClientKey, Key, KeyError};
use tcpx_wire::lane_seal::LaneKeys;

use crate::error::NetworkError;
use crate::key_ring::{self, KeyRing, KeyRingError};

/// Most bytes of a handshake that are looked at in one call.
pub(crate) const PEEK_BYTES: usize = 512;

/// How peers prove that they may talk to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Auth {
    /// A server's key: with it this side can serve, and connect to any server that has the same.
    Key(Key),
    /// A server's key and the clients that it lets in, by name: with it this side can serve, and connect as the server.
    Ring(KeyRing),
    /// A client's key: with it this side can connect to the server that it is of.
    Client(ClientKey),
    /// Nobody proves anything; both sides must say so.
    Insecure,
}

impl Auth {
    /// Reads a key's text; its length says whose it is.
    ///
    /// # Errors
    /// When the text is not that of a generated key. Errors never hold a part of the text.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        Ok(match AnyKey::parse(text)? {
            AnyKey::Server(key) => Self::Key(key),
            AnyKey::Client(key) => Self::Client(key),
        })
    }

    /// Reads a key file, or the folder of a server's key ring as [`KeyRing::of_folder`] does.
    ///
    /// # Errors
    /// A file or the folder cannot be read, or holds no key.
    pub fn of_file(path: &Path) -> Result<Self, KeyRingError> {
        if path.is_dir() {
            return KeyRing::of_folder(path).map(Self::Ring);
        }
        Ok(match key_ring::read_key(path)? {
            AnyKey::Server(key) => Self::Key(key),
            AnyKey::Client(key) => Self::Client(key),
        })
    }

    /// What this side connects with.
    pub fn client_key(&self) -> Option<ClientKey> {
        match self {
            Self::Key(key) => Some(key.client_key()),
            Self::Ring(ring) => Some(ring.server().client_key()),
            Self::Client(key) => Some(key.clone()),
            Self::Insecure => None,
        }
    }
}

/// Fresh random bytes for a handshake.
pub(crate) fn entropy<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Sends a whole handshake message; a fresh socket has room for it.
pub(crate) fn send_message(stream: &TcpStream, message: &[u8]) -> io::Result<()> {
    let sent = send(stream, message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    if sent == message.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Shows what has arrived to `read`, and takes from the socket what `read` used. What follows the
/// handshake stays in the socket. `None`: the peer has closed.
pub(crate) fn receive_message<T>(
    stream: &TcpStream,
    read: impl FnOnce(&mut &[u8]) -> T,
) -> io::Result<Option<T>> {
    let mut bytes = [0; PEEK_BYTES];
    let (_, arrived) = recv(stream, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    if arrived == 0 {
        return Ok(None);
    }
    let mut input = bytes.get(..arrived).unwrap_or_default();
    let outcome = read(&mut input);
    let used = arrived - input.len();
    if used > 0 {
        let mut used_bytes = [0; PEEK_BYTES];
        // These bytes were seen a moment ago and nobody else reads this socket.
        let (_, taken) = recv(stream, &mut used_bytes[..used], RecvFlags::DONTWAIT)?;
        if taken != used {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(Some(outcome))
}

/// The client's side of either handshake.
pub(crate) trait ClientSide {
    type Outcome;
    fn receive(&mut self, input: &mut &[u8]) -> Result<Step<Self::Outcome>, HandshakeError>;
    fn closed(&self) -> HandshakeError;
}

/// A client that does not wait for its welcome: what it says next goes out right behind its proof.
pub(crate) struct Unwelcomed(pub(crate) Option<ClientHandshake>);

impl ClientSide for Unwelcomed {
    type Outcome = Established;

    fn receive(&mut self, input: &mut &[u8]) -> Result<Step<Established>, HandshakeError> {
        let side = self.0.as_mut().ok_or(HandshakeError::Ended)?;
        match side.receive(input)? {
            Step::Send(proof) => {
                let unwelcomed = self.0.take().and_then(ClientHandshake::into_unwelcomed);
                let established = unwelcomed.ok_or(HandshakeError::Ended)?;
                Ok(Step::SendLast(proof, established))
            }
            other => Ok(other),
        }
    }

    fn closed(&self) -> HandshakeError {
        self.0
            .as_ref()
            .map_or(HandshakeError::Ended, ClientHandshake::closed)
    }
}

impl ClientSide for LaneClient {
    type Outcome = LaneKeys;

    fn receive(&mut self, input: &mut &[u8]) -> Result<Step<LaneKeys>, HandshakeError> {
        Self::receive(self, input)
    }

    fn closed(&self) -> HandshakeError {
        Self::closed(self)
    }
}

/// A lane's client that keeps its proof back.
pub(crate) struct Unproved(pub(crate) LaneClient);

impl ClientSide for Unproved {
    type Outcome = (Message, LaneKeys);

    fn receive(&mut self, input: &mut &[u8]) -> Result<Step<Self::Outcome>, HandshakeError> {
        Ok(match self.0.receive(input)? {
            Step::NeedMore => Step::NeedMore,
            Step::SendLast(proof, joined) => Step::Done((proof, joined)),
            // A lane's client yields neither.
            Step::Send(_) | Step::Done(_) => return Err(HandshakeError::Ended),
        })
    }

    fn closed(&self) -> HandshakeError {
        self.0.closed()
    }
}

/// Runs a client's handshake on a connected stream.
pub(crate) fn run_client<S: ClientSide>(
    stream: &TcpStream,
    peer: SocketAddr,
    mut side: S,
    first: impl Deref<Target = [u8]>,
    deadline: Instant,
) -> Result<S::Outcome, NetworkError> {
    let io = |cause: io::Error| NetworkError::Io {
        operation: "handshake",
        address: peer.to_string(),
        cause: cause.into(),
        hint: "; the peer may have been overloaded or stopped: look at its log and try again",
    };
    let cut_off = |heard: bool| (!heard).then_some(NetworkError::CutOff { peer });
    if send_message(stream, &first).is_err() {
        return Err(NetworkError::CutOff { peer });
    }
    let mut heard = false;
    loop {
        if !socket::wait(stream, PollFlags::IN, deadline).map_err(io)? {
            return Err(NetworkError::TimedOut {
                peer,
                operation: "the handshake",
            });
        }
        let step = match receive_message(stream, |input| side.receive(input)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(cut_off(heard).unwrap_or_else(|| io(error))),
            Ok(None) => match cut_off(heard) {
                Some(error) => return Err(error),
                None => Err(side.closed()),
            },
            Ok(Some(step)) => {
                heard = true;
                step
            }
        };
        match step.map_err(|error| handshake_error(peer, &error))? {
            Step::NeedMore => {}
            Step::Send(message) => send_message(stream, &message).map_err(io)?,
            Step::SendLast(message, outcome) => {
                send_message(stream, &message).map_err(io)?;
                return Ok(outcome);
            }
            Step::Done(outcome) => return Ok(outcome),
        }
    }
}

fn handshake_error(peer: SocketAddr, error: &HandshakeError) -> NetworkError {
    match error {
        HandshakeError::NotTcpx { first_bytes } => NetworkError::NotTcpx {
            peer,
            arrived: first_bytes.to_string(),
        },
        HandshakeError::Version { ours, theirs } => NetworkError::Version {
            peer,
            ours: ours.to_string(),
            theirs: theirs.to_string(),
        },
        HandshakeError::WrongKey => NetworkError::WrongKey { peer },
        HandshakeError::KeyRequired => NetworkError::KeyRequired { peer },
        HandshakeError::KeyNotExpected => NetworkError::KeyNotExpected { peer },
        HandshakeError::Busy => NetworkError::Busy { peer },
        other => NetworkError::Handshake {
            peer,
            reason: other.to_string(),
        },
    }
}
