//! A connection under way: dial, prove that we know the secret.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tcpx_wire::Key;
use tcpx_wire::handshake::{ClientHandshake, Message, Step};

use crate::listener::{key, tcp_socket};
use crate::plugin::random;
use crate::socket::{self, Moved, Stream};

/// Pause before dialling again, after the peer dropped an unfinished handshake.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// A connection under way; whoever wants it polls.
#[derive(Debug)]
pub(crate) struct Dialer {
    local: SocketAddr,
    peer: SocketAddr,
    key: Key,
    until: Instant,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// Not dialled yet, or not before this moment again.
    Idle(Instant),
    /// The SYN is on its way.
    Dialling(Stream),
    /// Connected; messages go back and forth.
    Handshake(Stream, Box<ClientHandshake>),
    /// Over.
    Ended,
}

/// Why an attempt ended.
enum Failure {
    /// Dial again.
    Retry(String),
    /// No use in trying again.
    Final(String),
}

impl Dialer {
    /// Dials `peer` from `local`, again and again until `until` where that can help.
    pub(crate) fn new(
        local: SocketAddr,
        peer: SocketAddr,
        secret: [u8; Key::BYTES],
        until: Instant,
    ) -> Self {
        Self {
            local,
            peer,
            key: key(secret),
            until,
            phase: Phase::Idle(Instant::now()),
        }
    }

    /// The authenticated connection; `None`: not yet; an error says why there will be none.
    pub(crate) fn poll(&mut self, now: Instant) -> Result<Option<Stream>, String> {
        match self.step(now) {
            Ok(found) => Ok(found),
            Err(Failure::Retry(_)) if now < self.until => {
                self.phase = Phase::Idle(now + RETRY_PAUSE);
                Ok(None)
            }
            Err(Failure::Retry(why) | Failure::Final(why)) => Err(why),
        }
    }

    fn step(&mut self, now: Instant) -> Result<Option<Stream>, Failure> {
        loop {
            self.phase = match std::mem::replace(&mut self.phase, Phase::Ended) {
                Phase::Idle(until) if now < until => {
                    self.phase = Phase::Idle(until);
                    return Ok(None);
                }
                Phase::Idle(_) => Phase::Dialling(dial(self.local, self.peer).map_err(fatal)?),
                Phase::Dialling(stream) => match dialled(&stream).map_err(fatal)? {
                    false => {
                        self.phase = Phase::Dialling(stream);
                        return Ok(None);
                    }
                    true => self.start(stream)?,
                },
                Phase::Handshake(stream, mut handshake) => {
                    if answer(&stream, &mut handshake)? {
                        return Ok(Some(stream));
                    }
                    self.phase = Phase::Handshake(stream, handshake);
                    return Ok(None);
                }
                Phase::Ended => return Err(Failure::Final("it has failed before".to_owned())),
            };
        }
    }

    fn start(&self, stream: Stream) -> Result<Phase, Failure> {
        let nonce = random().map_err(|error| Failure::Final(error.to_string()))?;
        socket::prepare(&stream).map_err(|error| Failure::Retry(error.to_string()))?;
        let (handshake, hello) = ClientHandshake::new(Some(&self.key), nonce, 0);
        send(&stream, &hello)?;
        Ok(Phase::Handshake(stream, Box::new(handshake)))
    }
}

fn dial(local: SocketAddr, peer: SocketAddr) -> io::Result<Stream> {
    let socket = tcp_socket(peer)?;
    // The device is the caller's choice of interface, wherever its address can reach the peer.
    if local.is_ipv4() == peer.is_ipv4() && local.ip().is_loopback() == peer.ip().is_loopback() {
        socket.bind(&local.into())?;
    }
    match socket.connect(&peer.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(Stream::new(socket.into()))
}

/// Whether the connection is up.
fn dialled(stream: &Stream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads what has arrived and answers it; `true` at the end of the handshake.
fn answer(stream: &Stream, handshake: &mut ClientHandshake) -> Result<bool, Failure> {
    let mut buffer = [0; 512];
    loop {
        let arrived = match socket::receive_bytes(stream, &mut buffer) {
            Moved::Bytes(bytes) => bytes,
            Moved::Later => return Ok(false),
            // A crowded listener drops the oldest connection; there is room again soon.
            Moved::End => return Err(Failure::Retry(handshake.closed().to_string())),
            Moved::Broken(error) => return Err(Failure::Retry(error.to_string())),
        };
        let mut input = &buffer[..arrived];
        loop {
            match handshake.receive(&mut input) {
                Ok(Step::NeedMore) => break,
                Ok(Step::Send(message)) => send(stream, &message)?,
                Ok(Step::Done(_)) if input.is_empty() => return Ok(true),
                Ok(Step::Done(_)) => {
                    let why = "bytes behind the handshake; both sides must run the same plugin";
                    return Err(Failure::Final(why.to_owned()));
                }
                Err(error) => return Err(Failure::Final(error.to_string())),
            }
        }
    }
}

fn send(stream: &Stream, message: &Message) -> Result<(), Failure> {
    // A few hundred bytes on a fresh connection always fit its buffer.
    match socket::send_bytes(stream, message) {
        Moved::Bytes(sent) if sent == message.len() => Ok(()),
        Moved::Broken(error) => Err(Failure::Retry(error.to_string())),
        _ => Err(Failure::Final(
            "the fresh connection takes no bytes".to_owned(),
        )),
    }
}

fn fatal(error: io::Error) -> Failure {
    Failure::Final(format!(
        "{error}; see whether the peer still listens and no firewall is between"
    ))
}
