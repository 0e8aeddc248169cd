//! Who may connect, and the client's half of a handshake on a socket.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tcpx_lanes::socket;
use tcpx_wire::handshake::{
    ClientHandshake, Established, HandshakeError, LaneClient, Message, Step,
};
use tcpx_wire::key::{AnyKey, ClientKey, Key, KeyError};
use tcpx_wire::lane_seal::LaneKeys;

use crate::error::{NetworkError, SocketError};
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

/// The client's side of either handshake, up to its proof, which ends it: the server's welcome is a record.
pub(crate) trait ClientSide {
    type Outcome;
    fn receive(&mut self, input: &mut &[u8]) -> Received<Self::Outcome>;
    fn closed(&self) -> HandshakeError;
}

type Received<T> = Result<Option<(Message, T)>, HandshakeError>;

impl ClientSide for ClientHandshake {
    type Outcome = Established;

    fn receive(&mut self, input: &mut &[u8]) -> Received<Established> {
        match self.receive(input)? {
            Step::Send(proof) => Ok(self.take_unwelcomed().map(|session| (proof, session))),
            _ => Ok(None),
        }
    }

    fn closed(&self) -> HandshakeError {
        self.closed()
    }
}

impl ClientSide for LaneClient {
    type Outcome = LaneKeys;

    fn receive(&mut self, input: &mut &[u8]) -> Received<LaneKeys> {
        self.receive(input)
    }

    fn closed(&self) -> HandshakeError {
        self.closed()
    }
}

/// A client's half of a handshake, from when its stream begins to connect.
pub(crate) struct Client<S> {
    pub(crate) stream: TcpStream,
    pub(crate) deadline: Instant,
    pub(crate) peer: SocketAddr,
    side: S,
    started: Instant,
    /// Until it is connected.
    first: Option<Message>,
    heard: bool,
}

impl<S: ClientSide> Client<S> {
    /// A stream that connects to `peer`, and the first message to it.
    pub(crate) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        (side, first): (S, Message),
        deadline: Instant,
    ) -> Self {
        Self {
            stream,
            deadline,
            peer,
            side,
            started: Instant::now(),
            first: Some(first),
            heard: false,
        }
    }

    /// Runs it up to the proof, which it does not send.
    pub(crate) fn run(mut self) -> Result<(Self, Message, S::Outcome), NetworkError> {
        loop {
            let waited = socket::wait(&self.stream, self.awaits(), self.deadline);
            if !waited.map_err(|cause| self.io(cause))? {
                return Err(self.overdue());
            }
            if let Some((proof, outcome)) = self.advance()? {
                return Ok((self, proof, outcome));
            }
        }
    }

    /// What to wait for before it goes on.
    fn awaits(&self) -> PollFlags {
        match self.first {
            Some(_) => PollFlags::OUT,
            None => PollFlags::IN,
        }
    }

    /// The same, for a caller that waits for others too.
    pub(crate) fn watched(&self) -> PollFd<'_> {
        PollFd::new(&self.stream, self.awaits())
    }

    /// Takes what has come, if something has; an error once it is too late.
    pub(crate) fn advance_if(
        &mut self,
        is_ready: bool,
    ) -> Result<Option<(Message, S::Outcome)>, NetworkError> {
        match is_ready {
            true => self.advance(),
            false if Instant::now() >= self.deadline => Err(self.overdue()),
            false => Ok(None),
        }
    }

    fn advance(&mut self) -> Result<Option<(Message, S::Outcome)>, NetworkError> {
        if let Some(first) = self.first.take() {
            socket::connected(&self.stream, self.peer, self.started)?;
            return match send_message(&self.stream, &first) {
                Ok(()) => Ok(None),
                Err(_) => Err(NetworkError::CutOff { peer: self.peer }),
            };
        }
        let step = match receive_message(&self.stream, |input| self.side.receive(input)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Ok(Some(step)) => step,
            Ok(None) | Err(_) if !self.heard => {
                return Err(NetworkError::CutOff { peer: self.peer });
            }
            Ok(None) => Err(self.side.closed()),
            Err(error) => return Err(self.io(error)),
        };
        self.heard = true;
        let peer = self.peer;
        step.map_err(|error| NetworkError::Handshake { peer, error })
    }

    pub(crate) fn send(&self, message: &Message) -> Result<(), NetworkError> {
        send_message(&self.stream, message).map_err(|cause| self.io(cause))
    }

    /// What it means that the deadline has passed.
    fn overdue(&self) -> NetworkError {
        match self.first {
            Some(_) => NetworkError::Socket(SocketError::ConnectTimedOut {
                peer: self.peer,
                waited: self.started.elapsed(),
            }),
            None => NetworkError::TimedOut {
                peer: self.peer,
                operation: "the handshake",
            },
        }
    }

    pub(crate) fn io(&self, cause: io::Error) -> NetworkError {
        NetworkError::Socket(SocketError::Io {
            operation: "handshake",
            address: self.peer.to_string(),
            cause: cause.into(),
            hint: "; the peer may have been overloaded or stopped: look at its log and try again",
        })
    }
}
