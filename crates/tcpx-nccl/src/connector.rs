//! A connect under way: the comm's own connection, then the lanes that it shares.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::ResultCode;
use nccl_net::export::{NetConnect, NetError};
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket_calls::{self as socket, Moved};
use tcpx_wire::ClientKey;

use crate::dialer::{Dialer, Dialled, Unreached};
use crate::handle::{Door, Handle};
use crate::header::{FROM_RECEIVER, HEADER_BYTES, Header, Record};
use crate::interfaces::Interface;
use crate::lanes::carriage::{Carriage, Route};
use crate::lanes::hello::{Greeting, Part, Resumption};
use crate::lanes::lane_set::{Connecting, Peer};
use crate::link::Link;
use crate::plugin::Shared;
use crate::resume::Resume;
use crate::send::{Comeback, SendComm};
use crate::stall::Stall;

/// The peer must have accepted by then.
const CONNECT_TIME: Duration = Duration::from_secs(120);
/// The door of its process answers by itself.
const DOOR_TIME: Duration = Duration::from_secs(15);

/// A connect under way; the host polls it.
#[derive(Debug)]
pub struct Connector {
    shared: Arc<Shared>,
    local: SocketAddr,
    peer: SocketAddr,
    door: Option<Door>,
    listen_id: u64,
    started: Instant,
    stall: Stall,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// The comm's own connection.
    Own(Box<Dialer>),
    /// The lanes, with the comm's connection at hand.
    Lanes(Dialled, Route),
    /// The connection for its answers, with the others at hand; there is none without a door that can be reached.
    Answers(Dialled, Option<Carriage>, Option<Box<Dialer>>),
    /// The receiver's word that it has that.
    Word(Dialled, Option<Carriage>, Box<Answers>),
    /// Over.
    Ended,
}

/// The connection for answers, and the first of them as far as it came.
#[derive(Debug)]
struct Answers {
    link: Link,
    word: [u8; HEADER_BYTES],
    have: usize,
}

impl Answers {
    /// A connection to the door of the receiver's process, for the answers to a comm's first one.
    fn new(Dialled { link, .. }: Dialled, own: &Dialled) -> Result<Self, String> {
        let resumption = Resumption {
            session: own.session,
            epoch: 0,
        };
        Greeting::Comm(resumption).send(Part::Answers, &link)?;
        Ok(Self {
            link,
            word: [0; HEADER_BYTES],
            have: 0,
        })
    }

    /// Whether the receiver has answered.
    fn poll(&mut self) -> Result<bool, String> {
        match self.link.receive_bytes(&mut self.word[self.have..]) {
            Ok(Moved::WouldBlock) => return Ok(false),
            Ok(Moved::Bytes(bytes)) => self.have += bytes,
            Ok(Moved::End) => return Err("the peer closed the connection".to_owned()),
            Err(error) => return Err(error.to_string()),
        }
        if self.have < HEADER_BYTES {
            return Ok(false);
        }
        match Header::decode(&FROM_RECEIVER, &self.word) {
            Ok((Record::Read, Header { sequence: 0, .. })) => Ok(true),
            found => Err(format!(
                "expected a receiver that has read nothing, got {found:?}"
            )),
        }
    }
}

impl Connector {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        interface: &Interface,
        handle: &Handle,
        key: (ClientKey, Protection),
    ) -> Self {
        let now = Instant::now();
        let local = SocketAddr::new(interface.address, 0);
        let dialer = Dialer::new(local, handle.address, key, now + CONNECT_TIME);
        Self {
            shared: shared.clone(),
            local,
            peer: handle.address,
            door: handle.door,
            listen_id: handle.listen_id,
            started: now,
            stall: Stall::new(),
            phase: Phase::Own(Box::new(dialer)),
        }
    }

    fn step(&mut self, now: Instant) -> Result<Option<SendComm>, String> {
        loop {
            match std::mem::replace(&mut self.phase, Phase::Ended) {
                Phase::Own(mut dialer) => match dialer.poll(now).map_err(String::from)? {
                    None => {
                        self.phase = Phase::Own(dialer);
                        return Ok(None);
                    }
                    Some(own) => {
                        if let Some(local) = own.in_vain {
                            self.shared.log.info(&format!(
                                "{} cannot be reached from {local}: the routes choose from where to connect to it",
                                self.peer.ip()
                            ));
                        }
                        self.phase = match self.lanes() {
                            None => self.answers(own, None, now),
                            Some(route) => Phase::Lanes(own, route),
                        };
                    }
                },
                Phase::Lanes(own, route) => match route.set.connect(now) {
                    Connecting::Waits => {
                        self.phase = Phase::Lanes(own, route);
                        return Ok(None);
                    }
                    Connecting::Ready(first) => {
                        if first {
                            self.shared.log.info(&format!(
                                "{} lanes to the process of {}, for the large messages of all comms",
                                route.set.lanes(),
                                self.peer
                            ));
                        }
                        // The last comm may have closed the set since we got it: then another one.
                        self.phase = match Carriage::new(route, self.shared.config.chunk_bytes) {
                            Some(carriage) => self.answers(own, Some(carriage), now),
                            None => match self.lanes() {
                                None => self.answers(own, None, now),
                                Some(route) => Phase::Lanes(own, route),
                            },
                        };
                    }
                    Connecting::Failed(why) => {
                        self.shared.log.warn(&format!(
                            "no lanes to {}: {why}; large messages go through NCCL's thread on one \
                             connection a channel, which is slower; see whether a firewall drops \
                             connections to that host's ports (TCPX_PORT_RANGE chooses them)",
                            self.peer
                        ));
                        self.phase = self.answers(own, None, now);
                    }
                },
                Phase::Answers(own, _, None) => return self.comm(own, None, None).map(Some),
                Phase::Answers(own, carriage, Some(mut dialer)) => match dialer.poll(now) {
                    Ok(None) => {
                        self.phase = Phase::Answers(own, carriage, Some(dialer));
                        return Ok(None);
                    }
                    Ok(Some(dialled)) => {
                        self.phase = match Answers::new(dialled, &own) {
                            Ok(answers) => Phase::Word(own, carriage, Box::new(answers)),
                            Err(_) => self.answers(own, carriage, now),
                        };
                    }
                    Err(Unreached { why, .. }) => {
                        self.shared.log.warn(&format!(
                            "the process of {} cannot be reached at its door: {why}; connections that break do not come \
                             back; see whether a firewall drops connections to that host's ports (TCPX_PORT_RANGE \
                             chooses them)",
                            self.peer
                        ));
                        self.shared
                            .unreachable(self.door.map(|door| self.process(&door)), now);
                        self.phase = Phase::Answers(own, None, None);
                    }
                },
                Phase::Word(own, carriage, mut answers) => {
                    // A receiver that is gone says so on its first connection.
                    let moved = socket::receive_bytes(&own.link, &mut [0]);
                    if matches!(moved, Ok(Moved::End) | Err(_)) {
                        return Err("the peer closed the connection".to_owned());
                    }
                    match answers.poll() {
                        Ok(true) => return self.comm(own, carriage, Some(answers.link)).map(Some),
                        Ok(false) => {
                            self.phase = Phase::Word(own, carriage, answers);
                            return Ok(None);
                        }
                        // It broke, and the first one did not.
                        Err(_) => self.phase = self.answers(own, carriage, now),
                    }
                }
                Phase::Ended => return Err("it has failed before".to_owned()),
            }
        }
    }

    /// The lanes to the peer's process, unless one side has none.
    fn lanes(&self) -> Option<Route> {
        let door = self.door?;
        match self.shared.lanes_to(self.process(&door), &door) {
            Ok(lanes) => lanes,
            Err(error) => {
                self.shared.log.warn(&format!("no lanes: {error}"));
                None
            }
        }
    }

    /// Goes on to the connection for answers.
    fn answers(&self, own: Dialled, carriage: Option<Carriage>, now: Instant) -> Phase {
        let peer = self.door.map(|door| self.process(&door));
        let peer = peer.filter(|peer| !self.shared.is_unreachable(peer, now));
        let dialer = peer.map(|peer| Box::new(peer.dialer(now + DOOR_TIME)));
        Phase::Answers(own, carriage, dialer)
    }

    fn comm(
        &self,
        own: Dialled,
        carriage: Option<Carriage>,
        answers: Option<Link>,
    ) -> Result<SendComm, String> {
        let number = self.shared.number();
        let name = format!("send comm {number} to {}", self.peer);
        let comeback = answers.and_then(|answers| self.comeback(&own, answers));
        let shared = self.shared.clone();
        SendComm::new(shared, own.link, number, name, carriage, comeback)
            .map_err(|error| error.to_string())
    }

    /// The peer's process.
    fn process(&self, door: &Door) -> Peer {
        let config = &self.shared.config;
        Peer {
            local: self.local,
            address: SocketAddr::new(self.peer.ip(), door.port),
            key: config.handshake_key(&door.secret).0.client_key(),
            protection: config.protection(),
        }
    }

    /// What brings the comm's connections back.
    fn comeback(&self, own: &Dialled, answers: Link) -> Option<Comeback> {
        let door = self.door?;
        let runtime = self.shared.runtime();
        let runtime = runtime
            .inspect_err(|error| self.shared.log.warn(&error.to_string()))
            .ok()?;
        let local = self.local.ip();
        // The peer finds our door where the connection comes from, if that is the device's address.
        let is_there = own.link.local_addr().is_ok_and(|ours| ours.ip() == local);
        let own_door = is_there.then(|| runtime.door(&self.shared, local));
        Some(Comeback {
            resume: Resume::new(self.process(&door), own.session),
            answers,
            door: own_door.and_then(Result::ok).map_or(0, |door| door.port),
            runtime,
        })
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
        let why = match self.step(now) {
            Ok(Some(comm)) => return Ok(Some(comm)),
            Ok(None) if !late => {
                self.report_stall(now);
                return Ok(None);
            }
            Ok(None) => format!(
                "not accepted within {} s; see whether the peer still runs and calls accept",
                CONNECT_TIME.as_secs()
            ),
            Err(why) => why,
        };
        let why = format!("connect to {}: {why}", self.peer);
        Err(NetError::new(ResultCode::SystemError, why))
    }
}
