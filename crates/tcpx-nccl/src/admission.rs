//! Strangers at a listening socket, until they prove that they know its secret.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nccl_net::export::{Log, NetError};
use tcpx_lanes::Congestion;
use tcpx_lanes::protocols;
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket_calls::{self as socket, Moved};
use tcpx_wire::handshake::{Established, ServerHandshake, ServerStep, SessionId};
use tcpx_wire::{Identity, Key};

use crate::held::{Listener, Stream};
use crate::link::Link;
use crate::plugin::random;

/// Connections taken from the kernel in one call.
const MAX_ACCEPTS: usize = 16;
/// Time for a handshake, which the other side polls like we do.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// A listening socket with the connections that are in their handshake.
#[derive(Debug)]
pub(crate) struct Admission {
    socket: Listener,
    key: Identity,
    protection: Protection,
    pending: Vec<Pending>,
    /// With as many, one makes room for one more.
    limit: usize,
    /// The last accept failed for want of something, mostly open files.
    choked: bool,
}

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) link: Link,
    pub(crate) peer: SocketAddr,
    /// Names it at both ends.
    pub(crate) session: SessionId,
}

/// A connection in its handshake.
#[derive(Debug)]
struct Pending {
    stream: Stream,
    peer: SocketAddr,
    deadline: Instant,
    handshake: ServerHandshake,
    /// Any byte has arrived.
    has_spoken: bool,
}

/// How a handshake stands.
enum Outcome {
    Waiting,
    Authenticated(Box<Established>),
    Refused(String),
    /// It ended without a word: somebody looked whether this process lives.
    Silent,
}

impl Admission {
    pub(crate) fn new(
        socket: Listener,
        (key, protection): (&Key, Protection),
        limit: usize,
    ) -> Self {
        Self {
            socket,
            key: key.identity(),
            protection,
            pending: Vec::new(),
            limit,
            choked: false,
        }
    }

    pub(crate) const fn listener(&self) -> &Listener {
        &self.socket
    }

    /// Whether nothing could be taken from the backlog although something waits there: who polls the
    /// listener then would find it ready again and again.
    pub(crate) const fn is_choked(&self) -> bool {
        self.choked
    }

    /// The connections in their handshake.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &Stream> {
        self.pending.iter().map(|pending| &pending.stream)
    }

    /// The next connection that proved itself; `None`: none now. `name` is for the log.
    pub(crate) fn next(&mut self, log: &Log, name: &str) -> Result<Option<Admitted>, NetError> {
        self.admit(log, name)?;
        let now = Instant::now();
        let mut at = 0;
        while let Some(pending) = self.pending.get_mut(at) {
            match pending.step(now) {
                Outcome::Waiting => at += 1,
                Outcome::Refused(why) => {
                    let peer = pending.peer;
                    self.pending.remove(at);
                    log.warn(&format!("{name}: refused {peer}: {why}"));
                }
                Outcome::Silent => {
                    self.pending.remove(at);
                }
                Outcome::Authenticated(established) => {
                    let Pending { stream, peer, .. } = self.pending.remove(at);
                    let Established {
                        session, records, ..
                    } = *established;
                    return Ok(Some(Admitted {
                        link: Link::new(stream, Some(records), self.protection),
                        peer,
                        session: session.id,
                    }));
                }
            }
        }
        Ok(None)
    }

    /// Takes new connections from the kernel, as many as are bounded.
    fn admit(&mut self, log: &Log, name: &str) -> Result<(), NetError> {
        self.choked = false;
        for _ in 0..MAX_ACCEPTS {
            let (stream, peer) = match self.socket.accept() {
                Ok((stream, peer)) => (Stream::new(stream), peer),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        // Mostly too many open files: our peer may wait in the backlog, so this is
                        // no end, but it must be seen.
                        log.warn(&format!("{name}: accept: {error}"));
                        self.choked = true;
                        break;
                    }
                },
            };
            let congestion = Congestion::Automatic.apply_to_accepted(&stream);
            if congestion.is_err() || tcpx_lanes::socket::prepare_comm(&stream).is_err() {
                continue;
            }
            if self.pending.len() >= self.limit {
                let dropped = self.make_room()?;
                log.warn(&format!(
                    "{name}: too many connections wait for their handshake; dropped {}",
                    dropped.peer
                ));
            }
            self.pending.push(Pending {
                stream,
                peer,
                deadline: Instant::now() + HANDSHAKE_TIME,
                handshake: ServerHandshake::new(Some(&self.key), protocols::own_build(), random()?),
                has_spoken: false,
            });
        }
        Ok(())
    }

    /// Takes one of those that have said nothing, or of all, drawn at random: who connects fast enough would have the
    /// oldest, a peer far away, dropped again and again.
    fn make_room(&mut self) -> Result<Pending, NetError> {
        let silent = (0..self.pending.len()).filter(|at| !self.pending[*at].has_spoken);
        let mut among: Vec<usize> = silent.collect();
        if among.is_empty() {
            among.extend(0..self.pending.len());
        }
        let drawn = u64::from_ne_bytes(random()?) % among.len() as u64;
        Ok(self.pending.remove(among[drawn as usize]))
    }
}

impl Pending {
    /// Reads what has arrived and answers it.
    fn step(&mut self, now: Instant) -> Outcome {
        let mut buffer = [0; 512];
        loop {
            let arrived = match socket::receive_bytes(&self.stream, &mut buffer) {
                Ok(Moved::Bytes(bytes)) => bytes,
                Ok(Moved::WouldBlock) if now < self.deadline => return Outcome::Waiting,
                Ok(Moved::WouldBlock) => {
                    return Outcome::Refused(format!(
                        "no handshake within {} s",
                        HANDSHAKE_TIME.as_secs()
                    ));
                }
                Ok(Moved::End) if !self.has_spoken => {
                    return Outcome::Silent;
                }
                Ok(Moved::End) => return Outcome::Refused(self.handshake.closed().to_string()),
                Err(error) => return Outcome::Refused(error.to_string()),
            };
            self.has_spoken = true;
            let mut input = &buffer[..arrived];
            // Each round uses up input or ends the loop.
            loop {
                let (answer, end) = match self.handshake.receive(&mut input) {
                    Ok(ServerStep::NeedMore) => break,
                    Ok(ServerStep::Send(answer)) => (answer, None),
                    Ok(ServerStep::Done(mut established)) if input.is_empty() => {
                        let welcome = established.welcome();
                        (welcome, Some(Outcome::Authenticated(established)))
                    }
                    Ok(ServerStep::Done(_)) => {
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
                    Ok(Moved::Bytes(sent)) if sent == answer.len() => {}
                    Err(error) => return Outcome::Refused(error.to_string()),
                    _ => return Outcome::Refused("it takes no answer".to_owned()),
                }
                if let Some(end) = end {
                    return end;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use nccl_net::export::HostLogger;

    use super::*;
    use crate::listener::listen_on;

    #[test]
    fn silent_strangers_drop_nobody_who_has_spoken() {
        let socket = listen_on(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = socket.local_addr().unwrap();
        let mut admission = Admission::new(
            socket,
            (&Key::generate(&mut |bytes| bytes.fill(7)), Protection::None),
            4,
        );
        let log = Log::new(HostLogger::default(), c"TCPX");
        let mut good = TcpStream::connect(address).unwrap();
        good.write_all(b"T").unwrap();
        let name = good.local_addr().unwrap();
        let until = Instant::now() + HANDSHAKE_TIME / 2;
        let has_spoken = |admission: &Admission| {
            let mut pending = admission.pending.iter();
            pending.any(|one| one.peer == name && one.has_spoken)
        };
        while !has_spoken(&admission) {
            assert!(Instant::now() < until);
            assert!(admission.next(&log, "a test").unwrap().is_none());
        }
        let strangers: Vec<_> = (0..40)
            .map(|_| {
                let stranger = TcpStream::connect(address).unwrap();
                assert!(admission.next(&log, "a test").unwrap().is_none());
                stranger
            })
            .collect();
        assert!(has_spoken(&admission) && admission.pending.len() == 4);
        drop(strangers);
    }
}
