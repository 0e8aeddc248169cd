//! A listening comm: accepts connections, lets only holders of the handle in.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nccl_net::export::{Accepted, NetError, NetListen, PeerHandle};
use socket2::{Domain, Protocol, Socket, Type};
use tcpx_wire::Key;
use tcpx_wire::handshake::{ServerHandshake, ServerStep};

use crate::error::PluginError;
use crate::handle::Handle;
use crate::interfaces::Interface;
use crate::plugin::{Shared, random};
use crate::receive::RecvComm;
use crate::socket::{self, Moved};

/// Connections that may be in their handshake at once; the oldest makes room.
const MAX_PENDING: usize = 16;
/// Connections taken from the kernel in one call of accept.
const MAX_ACCEPTS: usize = 16;
/// Time for a handshake, which the other side polls like we do.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
const BACKLOG: i32 = 128;

/// A listening comm.
#[derive(Debug)]
pub struct ListenComm {
    shared: Arc<Shared>,
    name: String,
    key: Key,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    socket: TcpListener,
    pending: Vec<Pending>,
}

/// A connection in its handshake.
#[derive(Debug)]
struct Pending {
    stream: TcpStream,
    peer: SocketAddr,
    deadline: Instant,
    handshake: ServerHandshake,
}

/// How a handshake stands.
enum Outcome {
    Waiting,
    Authenticated,
    Refused(String),
}

impl ListenComm {
    pub(crate) fn bind(
        shared: &Arc<Shared>,
        interface: &Interface,
    ) -> Result<(PeerHandle, Self), PluginError> {
        let socket = bind(shared, interface)?;
        let address = socket.local_addr().map_err(|error| {
            PluginError::system("reading the listening address", &error, "retry")
        })?;
        let secret = random::<{ Key::BYTES }>()?;
        let listen_id = shared.number();
        let handle = Handle {
            address,
            secret,
            listen_id,
        };
        let comm = Self {
            shared: shared.clone(),
            name: format!("listen comm {listen_id} on {address}"),
            key: key(secret),
            state: Mutex::new(State {
                socket,
                pending: Vec::with_capacity(MAX_PENDING),
            }),
        };
        Ok((handle.encode(), comm))
    }

    /// Takes new connections from the kernel, as many as are bounded.
    fn admit(&self, state: &mut State) -> Result<(), PluginError> {
        for _ in 0..MAX_ACCEPTS {
            let (stream, peer) = match state.socket.accept() {
                Ok(accepted) => accepted,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        // Mostly too many open files: our peer may wait in the backlog, so this is
                        // no end, but it must be seen.
                        self.shared
                            .log
                            .warn(&format!("{}: accept: {error}", self.name));
                        break;
                    }
                },
            };
            if socket::prepare(&stream).is_err() {
                continue;
            }
            if state.pending.len() >= MAX_PENDING {
                let oldest = state.pending.remove(0);
                self.shared.log.warn(&format!(
                    "{}: too many connections wait for their handshake; dropped {}",
                    self.name, oldest.peer
                ));
            }
            state.pending.push(Pending {
                stream,
                peer,
                deadline: Instant::now() + HANDSHAKE_TIME,
                handshake: ServerHandshake::new(Some(&self.key), random()?, 0),
            });
        }
        Ok(())
    }
}

impl NetListen for ListenComm {
    type Recv = RecvComm;

    fn accept(&self, device_queue: bool) -> Result<Option<Accepted<RecvComm>>, NetError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.admit(&mut state)?;
        let now = Instant::now();
        let mut at = 0;
        while let Some(pending) = state.pending.get_mut(at) {
            match pending.step(now) {
                Outcome::Waiting => at += 1,
                Outcome::Refused(why) => {
                    let peer = pending.peer;
                    state.pending.remove(at);
                    self.shared
                        .log
                        .warn(&format!("{}: refused {peer}: {why}", self.name));
                }
                Outcome::Authenticated => {
                    let Pending { stream, peer, .. } = state.pending.remove(at);
                    let name = format!("receive comm {} from {peer}", self.shared.number());
                    let (comm, device_queue) =
                        RecvComm::new(self.shared.clone(), stream, name, device_queue)?;
                    return Ok(Some(Accepted { comm, device_queue }));
                }
            }
        }
        Ok(None)
    }
}

impl Pending {
    /// Reads what has arrived and answers it.
    fn step(&mut self, now: Instant) -> Outcome {
        let mut buffer = [0; 512];
        loop {
            let arrived = match socket::receive_bytes(&self.stream, &mut buffer) {
                Moved::Bytes(bytes) => bytes,
                Moved::Later if now < self.deadline => return Outcome::Waiting,
                Moved::Later => {
                    return Outcome::Refused(format!(
                        "no handshake within {} s",
                        HANDSHAKE_TIME.as_secs()
                    ));
                }
                Moved::End => return Outcome::Refused(self.handshake.closed().to_string()),
                Moved::Broken(error) => return Outcome::Refused(error.to_string()),
            };
            let mut input = &buffer[..arrived];
            // Each round uses up input or ends the loop.
            loop {
                let (answer, end) = match self.handshake.receive(&mut input) {
                    Ok(ServerStep::NeedMore) => break,
                    Ok(ServerStep::Send(answer)) => (answer, None),
                    Ok(ServerStep::Done { send, .. }) if input.is_empty() => {
                        (send, Some(Outcome::Authenticated))
                    }
                    Ok(ServerStep::Done { .. }) => {
                        let why = "bytes behind the handshake, before it was answered";
                        return Outcome::Refused(why.to_owned());
                    }
                    Ok(ServerStep::Lane(_)) => {
                        return Outcome::Refused("a lane of the embedded network".to_owned());
                    }
                    Ok(ServerStep::Refuse { send, error }) => {
                        (send, Some(Outcome::Refused(error.to_string())))
                    }
                    Err(error) => return Outcome::Refused(error.to_string()),
                };
                // A few hundred bytes on a fresh connection always fit its buffer.
                match socket::send_bytes(&self.stream, &answer) {
                    Moved::Bytes(sent) if sent == answer.len() => {}
                    Moved::Broken(error) => return Outcome::Refused(error.to_string()),
                    _ => return Outcome::Refused("it takes no answer".to_owned()),
                }
                if let Some(end) = end {
                    return end;
                }
            }
        }
    }
}

/// The handshake's key for a handle's secret.
pub(crate) fn key(secret: [u8; Key::BYTES]) -> Key {
    Key::generate(&mut |bytes| bytes.copy_from_slice(&secret))
}

/// A TCP socket with the congestion control that bulk transfers need.
pub(crate) fn tcp_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_nonblocking(true)?;
    // Hosts may default to a control made for the open internet, at a fraction of the speed.
    if socket.set_tcp_congestion(b"cubic").is_err() {
        let _ = socket.set_tcp_congestion(b"reno");
    }
    Ok(socket)
}

fn bind(shared: &Shared, interface: &Interface) -> Result<TcpListener, PluginError> {
    let Some(ports) = shared.config.ports.clone() else {
        return listen_on(SocketAddr::new(interface.address, 0)).map_err(|error| {
            let operation = format!("listening on {}", interface.address);
            PluginError::system(operation, &error, "check that the interface is up")
        });
    };
    // Listeners of one process start looking at different places.
    let span = u64::from(ports.end() - ports.start()) + 1;
    let first = shared.number() % span;
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for step in 0..span {
        // Below the end of the range.
        let port = ports.start() + ((first + step) % span) as u16;
        match listen_on(SocketAddr::new(interface.address, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(PluginError::system(
        format!(
            "listening on {} ports {}-{} (TCPX_PORT_RANGE)",
            interface.address,
            ports.start(),
            ports.end()
        ),
        &last,
        "widen the range or free its ports",
    ))
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = tcp_socket(address)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
