//! The client's half of a handshake on one connection.

use std::borrow::Borrow;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use tcpx_wire::handshake::{
    ClientHandshake, Established, HandshakeError, LaneClient, Message, Step,
};
use tcpx_wire::lane_seal::LaneKeys;

use super::Way;
use crate::error::SocketError;
use crate::hello::{receive_message, send_message};
use crate::socket::{self, DialOptions};

/// A connection as its owner keeps it.
pub trait Stream: Borrow<TcpStream> + From<TcpStream> {}

impl<S: Borrow<TcpStream> + From<TcpStream>> Stream for S {}

/// What a client makes of what has come.
#[derive(Debug)]
pub enum Heard<T> {
    /// More must come.
    Nothing,
    /// This is to be said, and more must come.
    Answer(Message),
    /// The peer has proved itself. With the message, if there is one, so does this side; it ends
    /// the handshake.
    Answered(Option<Message>, T),
}

/// The client's side of a handshake.
pub trait ClientSide {
    /// What it leads to.
    type Outcome;
    /// Takes what it needs from the front of `input`.
    ///
    /// # Errors
    /// The handshake failed.
    fn receive(&mut self, input: &mut &[u8]) -> Result<Heard<Self::Outcome>, HandshakeError>;
    /// What it means that the peer closed the connection now.
    fn closed(&self) -> HandshakeError;
}

/// Up to its proof: the server's welcome is a record that its owner reads.
impl ClientSide for ClientHandshake {
    type Outcome = Established;

    fn receive(&mut self, input: &mut &[u8]) -> Result<Heard<Established>, HandshakeError> {
        Ok(match self.receive(input)? {
            Step::Send(proof) => match self.take_unwelcomed() {
                Some(established) => Heard::Answered(Some(proof), established),
                None => Heard::Nothing,
            },
            _ => Heard::Nothing,
        })
    }

    fn closed(&self) -> HandshakeError {
        self.closed()
    }
}

/// A client that waits for its server's welcome too.
#[derive(Debug)]
pub struct Welcomed(pub ClientHandshake);

impl ClientSide for Welcomed {
    type Outcome = Established;

    fn receive(&mut self, input: &mut &[u8]) -> Result<Heard<Established>, HandshakeError> {
        Ok(match self.0.receive(input)? {
            Step::NeedMore => Heard::Nothing,
            Step::Send(proof) => Heard::Answer(proof),
            Step::Done(established) => Heard::Answered(None, established),
        })
    }

    fn closed(&self) -> HandshakeError {
        self.0.closed()
    }
}

impl ClientSide for LaneClient {
    type Outcome = LaneKeys;

    fn receive(&mut self, input: &mut &[u8]) -> Result<Heard<LaneKeys>, HandshakeError> {
        Ok(match self.receive(input)? {
            Some((proof, keys)) => Heard::Answered(Some(proof), keys),
            None => Heard::Nothing,
        })
    }

    fn closed(&self) -> HandshakeError {
        self.closed()
    }
}

/// What is left to be said, and what the handshake has led to.
pub(super) type Answered<T> = (Option<Message>, T);

/// A client's half of a handshake, from when its stream begins to connect.
pub struct Client<C, S = TcpStream> {
    pub(super) stream: S,
    pub(super) deadline: Instant,
    pub(super) way: Way,
    side: C,
    started: Instant,
    /// Until it is connected.
    first: Option<Message>,
    heard: bool,
    /// The peer may have taken it.
    pub(super) proved: bool,
}

impl<C: ClientSide, S: Stream> Client<C, S> {
    /// Begins to connect.
    ///
    /// # Errors
    /// The system refuses at once, or the handshake cannot begin.
    pub(super) fn begin(
        way: &Way,
        options: &DialOptions,
        side: &mut impl FnMut(SocketAddr) -> Result<(C, Message), SocketError>,
    ) -> Result<Self, SocketError> {
        let peer = way.peer;
        let started = Instant::now();
        let stream = socket::begin_connect(way, &options.congestion)?.into();
        // While it connects.
        let (side, first) = side(peer)?;
        Ok(Self {
            stream,
            deadline: options.deadline,
            way: way.clone(),
            side,
            started,
            first: Some(first),
            heard: false,
            proved: false,
        })
    }

    /// Takes what has come.
    ///
    /// # Errors
    /// It failed, or it is too late.
    pub(super) fn advance(
        &mut self,
        now: Instant,
    ) -> Result<Option<Answered<C::Outcome>>, SocketError> {
        let peer = self.way.peer;
        let stream = self.stream.borrow();
        if let Some(first) = &self.first {
            if !socket::is_connected(stream, peer, self.started)? {
                return self.more(now);
            }
            send_message(stream, first).map_err(|_| SocketError::CutOff { peer })?;
            self.first = None;
        }
        loop {
            let heard = match receive_message(stream, |input| self.side.receive(input)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.more(now),
                Ok(Some(heard)) => heard,
                Ok(None) | Err(_) if !self.heard => return Err(SocketError::CutOff { peer }),
                Ok(None) | Err(_) => Err(self.side.closed()),
            };
            self.heard = true;
            match heard.map_err(|error| SocketError::Handshake { peer, error })? {
                Heard::Nothing => return self.more(now),
                Heard::Answer(message) => {
                    send_message(stream, &message).map_err(|_| SocketError::CutOff { peer })?;
                    self.proved = true;
                }
                Heard::Answered(proof, outcome) => return Ok(Some((proof, outcome))),
            }
        }
    }

    /// More must come, in time.
    fn more<T>(&self, now: Instant) -> Result<Option<T>, SocketError> {
        let peer = self.way.peer;
        match self.first {
            _ if now < self.deadline => Ok(None),
            Some(_) => Err(SocketError::ConnectTimedOut {
                peer,
                waited: self.started.elapsed(),
            }),
            None => Err(SocketError::Unanswered { peer }),
        }
    }

    /// Whether the connection is there.
    pub(super) fn is_open(&self) -> bool {
        self.first.is_none()
    }

    /// What to wait for before it goes on.
    pub(super) fn watched(&self) -> PollFd<'_> {
        let awaits = match self.first {
            Some(_) => PollFlags::OUT,
            None => PollFlags::IN,
        };
        PollFd::new(self.stream.borrow(), awaits)
    }
}

impl<C, S> fmt::Debug for Client<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("way", &self.way)
            .field("heard", &self.heard)
            .finish_non_exhaustive()
    }
}
