//! A connect under way: the comm's own connection, then the lanes that it shares.

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
use crate::lanes::carriage::{Carriage, Route};
use crate::lanes::lane_set::{Peer, Standing};
use crate::plugin::Shared;
use crate::resume::Redial;
use crate::send::{Comeback, SendComm};
use crate::stall::Stall;

/// The peer must have accepted by then.
const CONNECT_TIME: Duration = Duration::from_secs(120);

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
    /// Over.
    Ended,
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
                Phase::Own(mut dialer) => match dialer.poll(now)? {
                    None => {
                        self.phase = Phase::Own(dialer);
                        return Ok(None);
                    }
                    Some(own) => {
                        if let Some(local) = dialer.in_vain() {
                            self.shared.log.info(&format!(
                                "{} cannot be reached from {local}: the routes choose from where to connect to it",
                                self.peer.ip()
                            ));
                        }
                        match self.lanes() {
                            None => return self.comm(own, None).map(Some),
                            Some(route) => self.phase = Phase::Lanes(own, route),
                        }
                    }
                },
                Phase::Lanes(own, route) => match route.set.connect(now) {
                    Standing::Connecting => {
                        self.phase = Phase::Lanes(own, route);
                        return Ok(None);
                    }
                    Standing::Ready(first) => {
                        if first {
                            self.shared.log.info(&format!(
                                "{} lanes to the process of {}, for the large messages of all comms",
                                route.set.lanes(),
                                self.peer
                            ));
                        }
                        // The last comm may have closed the set since we got it: then another one.
                        match Carriage::new(route, self.shared.config.chunk_bytes) {
                            Some(carriage) => return self.comm(own, Some(carriage)).map(Some),
                            None => match self.lanes() {
                                None => return self.comm(own, None).map(Some),
                                Some(route) => self.phase = Phase::Lanes(own, route),
                            },
                        }
                    }
                    Standing::Failed(why) => {
                        self.shared.log.warn(&format!(
                            "no lanes to {}: {why}; large messages go through NCCL's thread on one \
                             connection a channel, which is slower; see whether a firewall drops \
                             connections to that host's ports (TCPX_PORT_RANGE chooses them)",
                            self.peer
                        ));
                        return self.comm(own, None).map(Some);
                    }
                },
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

    fn comm(&self, own: Dialled, carriage: Option<Carriage>) -> Result<SendComm, String> {
        let number = self.shared.number();
        let name = format!("send comm {number} to {}", self.peer);
        let comeback = self.comeback(&own);
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

    /// What brings the comm's connection back, unless one side has no door.
    fn comeback(&self, own: &Dialled) -> Option<Comeback> {
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
            redial: Redial::new(self.process(&door), own.session),
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
