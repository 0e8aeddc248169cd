//! A connect under way: dial, prove that we hold the handle, become a send comm.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::export::{NetConnect, NetError};
use tcpx_wire::Key;
use tcpx_wire::handshake::{ClientHandshake, Message, Step};

use crate::error::PluginError;
use crate::handle::Handle;
use crate::interfaces::Interface;
use crate::listener::{key, tcp_socket};
use crate::plugin::{Shared, random};
use crate::send::SendComm;
use crate::socket::{self, Moved};
use crate::stall::Stall;

/// The peer must have accepted by then.
const CONNECT_TIME: Duration = Duration::from_secs(120);
/// Pause before dialling again, after the peer dropped an unfinished handshake.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// A connect under way; the host polls it.
#[derive(Debug)]
pub struct Connector {
    shared: Arc<Shared>,
    local: SocketAddr,
    peer: SocketAddr,
    listen_id: u64,
    key: Key,
    started: Instant,
    stall: Stall,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// Not dialled yet, or not before this moment again.
    Idle(Instant),
    /// The SYN is on its way.
    Dialling(TcpStream),
    /// Connected; messages go back and forth.
    Handshake(TcpStream, Box<ClientHandshake>),
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

impl Connector {
    pub(crate) fn new(shared: &Arc<Shared>, interface: &Interface, handle: Handle) -> Self {
        let now = Instant::now();
        Self {
            shared: shared.clone(),
            local: SocketAddr::new(interface.address, 0),
            peer: handle.address,
            listen_id: handle.listen_id,
            key: key(handle.secret),
            started: now,
            stall: Stall::new(),
            phase: Phase::Idle(now),
        }
    }

    fn step(&mut self, now: Instant) -> Result<Option<TcpStream>, Failure> {
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

    fn start(&self, stream: TcpStream) -> Result<Phase, Failure> {
        let nonce = random().map_err(|error| Failure::Final(error.to_string()))?;
        socket::prepare(&stream).map_err(|error| Failure::Retry(error.to_string()))?;
        let (handshake, hello) = ClientHandshake::new(Some(&self.key), nonce, 0);
        send(&stream, &hello)?;
        Ok(Phase::Handshake(stream, Box::new(handshake)))
    }

    fn report_stall(&mut self, now: Instant) {
        if let Some(stalled) = self.stall.waiting(now) {
            self.shared.log.info(&format!(
                "connect to {} (listen comm {} there): waiting {} s for the peer to accept",
                self.peer,
                self.listen_id,
                stalled.as_secs()
            ));
        }
    }
}

impl NetConnect for Connector {
    type Send = SendComm;

    fn poll(&mut self) -> Result<Option<SendComm>, NetError> {
        let now = Instant::now();
        let late = now.saturating_duration_since(self.started) > CONNECT_TIME;
        let failed = |connector: &Self, why: String| {
            Err(PluginError::Connect {
                peer: connector.peer.to_string(),
                why,
            }
            .into())
        };
        match self.step(now) {
            Ok(Some(stream)) => {
                let name = format!("send comm {} to {}", self.shared.number(), self.peer);
                Ok(Some(SendComm::new(self.shared.clone(), stream, name)))
            }
            Ok(None) if late => failed(
                self,
                format!(
                    "not accepted within {} s; see whether the peer still runs and calls accept",
                    CONNECT_TIME.as_secs()
                ),
            ),
            Ok(None) => {
                self.report_stall(now);
                Ok(None)
            }
            Err(Failure::Retry(_)) if !late => {
                self.phase = Phase::Idle(now + RETRY_PAUSE);
                Ok(None)
            }
            Err(Failure::Retry(why) | Failure::Final(why)) => failed(self, why),
        }
    }
}

fn dial(local: SocketAddr, peer: SocketAddr) -> io::Result<TcpStream> {
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
    Ok(socket.into())
}

/// Whether the connection is up.
fn dialled(stream: &TcpStream) -> io::Result<bool> {
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
fn answer(stream: &TcpStream, handshake: &mut ClientHandshake) -> Result<bool, Failure> {
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

fn send(stream: &TcpStream, message: &Message) -> Result<(), Failure> {
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
