//! A connect under way: the connection that introduces the comm, the lanes that it shares, its own
//! pair of connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_net::ResultCode;
use nccl_net::export::{NetConnect, NetError};
use tcpx_lanes::sealing::Protection;
use tcpx_wire::ClientKey;

use crate::dialer::{Dialer, Dialled};
use crate::handle::{Door, Handle};
use crate::interfaces::Interface;
use crate::lanes::lane_set::{Connecting, Peer};
use crate::lanes::send_path::{Route, SendPath};
use crate::link::Link;
use crate::plugin::ProcessState;
use crate::resume::Resume;
use crate::send::{Comeback, SendComm};
use crate::stall::Stall;

/// The peer must have accepted by then.
const CONNECT_TIME: Duration = Duration::from_secs(120);

/// A connect under way; the host polls it.
#[derive(Debug)]
pub struct Connector {
    shared: Arc<ProcessState>,
    local: SocketAddr,
    peer: SocketAddr,
    door: Door,
    listen_id: u64,
    started: Instant,
    stall: Stall,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// The connection that introduces the comm to its receiver.
    First(Box<Dialer>),
    /// The lanes, with that at hand.
    Lanes(Dialled, Route),
    /// The comm's own pair.
    Pair(Dialled, Option<SendPath>, Box<Resume>),
    /// Over.
    Ended,
}

impl Connector {
    pub(crate) fn new(
        shared: &Arc<ProcessState>,
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
            phase: Phase::First(Box::new(dialer)),
        }
    }

    fn step(&mut self, now: Instant) -> Result<Option<SendComm>, String> {
        loop {
            match std::mem::replace(&mut self.phase, Phase::Ended) {
                Phase::First(mut dialer) => {
                    match dialer.poll(now).map_err(|error| error.to_string())? {
                        None => {
                            self.phase = Phase::First(dialer);
                            return Ok(None);
                        }
                        Some(first) => {
                            if let Some(local) = first.in_vain {
                                self.shared.log.info(&format!(
                                "{} cannot be reached from {local}: the routes choose from where to connect to it",
                                self.peer.ip()
                            ));
                            }
                            self.phase = match self.lanes() {
                                None => self.pair(first, None),
                                Some(route) => Phase::Lanes(first, route),
                            };
                        }
                    }
                }
                Phase::Lanes(first, route) => match route.set.connect(now) {
                    Connecting::Waits => {
                        self.phase = Phase::Lanes(first, route);
                        return Ok(None);
                    }
                    Connecting::Ready(is_news) => {
                        if is_news {
                            self.shared.log.info(&format!(
                                "{} lanes to the process of {}, for the large messages of all comms",
                                route.set.lanes(),
                                self.peer
                            ));
                        }
                        // The last comm may have closed the set since we got it: then another one.
                        self.phase = match SendPath::new(route, self.shared.config.chunk_bytes) {
                            Some(send_path) => self.pair(first, Some(send_path)),
                            None => match self.lanes() {
                                None => self.pair(first, None),
                                Some(route) => Phase::Lanes(first, route),
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
                        self.phase = self.pair(first, None);
                    }
                },
                Phase::Pair(first, send_path, mut resume) => match resume.step(now, false) {
                    Ok(None) => {
                        self.phase = Phase::Pair(first, send_path, resume);
                        return Ok(None);
                    }
                    Ok(Some(links)) => {
                        let comm = self.comm(first, send_path, *resume, links);
                        return comm.map(Some).map_err(|error| error.to_string());
                    }
                    Err(why) => {
                        return Err(format!(
                            "its process cannot be reached at port {}: {why}; see whether a firewall drops connections to \
                             that host's ports (TCPX_PORT_RANGE chooses them)",
                            self.door.port
                        ));
                    }
                },
                Phase::Ended => return Err("it has failed before".to_owned()),
            }
        }
    }

    /// The lanes to the peer's process, unless one side has none.
    fn lanes(&self) -> Option<Route> {
        match self.shared.lanes_to(self.process(), &self.door) {
            Ok(lanes) => lanes,
            Err(error) => {
                self.shared.log.warn(&format!("no lanes: {error}"));
                None
            }
        }
    }

    /// Goes on to the comm's own pair.
    fn pair(&self, first: Dialled, send_path: Option<SendPath>) -> Phase {
        let resume = Resume::new(self.process(), first.session);
        Phase::Pair(first, send_path, Box::new(resume))
    }

    fn comm(
        &self,
        first: Dialled,
        send_path: Option<SendPath>,
        resume: Resume,
        links: [Link; 2],
    ) -> Result<SendComm, NetError> {
        let number = self.shared.number();
        let name = format!("send comm {number} to {}", self.peer);
        let runtime = self.shared.runtime()?;
        let local = self.local.ip();
        // The peer finds our door where the connection comes from, if that is the device's address.
        let is_there = links[0].local_addr().is_ok_and(|ours| ours.ip() == local);
        let own_door = is_there.then(|| runtime.door(&self.shared, local));
        let comeback = Comeback {
            resume,
            first: first.link,
            door: own_door.and_then(Result::ok).map_or(0, |door| door.port),
            runtime,
        };
        SendComm::new(
            self.shared.clone(),
            links,
            number,
            name,
            send_path,
            comeback,
        )
    }

    /// The peer's process.
    fn process(&self) -> Peer {
        let config = &self.shared.config;
        Peer {
            local: self.local,
            address: SocketAddr::new(self.peer.ip(), self.door.port),
            key: config.handshake_key(&self.door.secret).0.client_key(),
            protection: config.protection(),
        }
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
