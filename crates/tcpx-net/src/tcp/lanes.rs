//! Setting a channel up: agreeing on the number of lanes, opening them, handing them to the loops.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::NAME;
use super::event_loop::Loops;
use super::receive_lane::ReceiveLane;
use super::repair::{Arrivals, Dialler, Repair};
use super::route::Route;
use super::shared::{LaneSocket, MAX_LANES, Parts, Shared, lock};
use super::tcp_channel::TcpChannel;
use super::transmit_lane::TransmitLane;
use super::wakers::LaneRemotes;
use super::watch;
use crate::error::{IoError, NetworkError};
use crate::network::{Exchange, Setup, Side};

/// First bytes of the set-up message, then its version and the sender's lanes, both u16 little
/// endian.
const MAGIC: [u8; 4] = *b"TCPL";
const VERSION: u16 = 1;
const MESSAGE_BYTES: usize = 8;

/// One round with the peer: the smaller of both wishes.
pub(super) fn agree(
    wanted: u16,
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<u16, NetworkError> {
    let [v0, v1] = VERSION.to_le_bytes();
    let [l0, l1] = wanted.to_le_bytes();
    let [m0, m1, m2, m3] = MAGIC;
    let theirs = exchange.exchange(&[m0, m1, m2, m3, v0, v1, l0, l1])?;
    let lanes = match <[u8; MESSAGE_BYTES]>::try_from(theirs.as_slice()) {
        Ok([m0, m1, m2, m3, v0, v1, l0, l1])
            if [m0, m1, m2, m3] == MAGIC && u16::from_le_bytes([v0, v1]) == VERSION =>
        {
            u16::from_le_bytes([l0, l1])
        }
        _ => {
            let start = theirs.get(..16).unwrap_or(&theirs);
            return Err(mismatch(
                setup,
                format!("a set-up message of version {VERSION} and {MESSAGE_BYTES} bytes"),
                format!(
                    "{} bytes that begin \"{}\"",
                    theirs.len(),
                    start.escape_ascii()
                ),
            ));
        }
    };
    if !(1..=MAX_LANES).contains(&lanes) {
        return Err(mismatch(
            setup,
            format!("1 to {MAX_LANES} lanes"),
            format!("{lanes}"),
        ));
    }
    Ok(lanes.min(wanted))
}

/// All lanes, by number, and how they come back when they die.
pub(super) fn open(
    lanes: u16,
    setup: &Setup<'_>,
    interface: Option<&str>,
) -> Result<(Vec<TcpStream>, Repair), NetworkError> {
    match setup.side {
        Side::Client => {
            let route = Route {
                local: None,
                interface: interface.map(str::to_owned),
                peer: setup.peer,
            };
            let routes = (0..lanes).map(|_| route.clone()).collect();
            let dialler = Dialler::new(setup.session.clone(), routes);
            let streams = (0..lanes)
                .map(|lane| dialler.open(lane, setup.deadline))
                .collect::<Result<_, _>>()?;
            Ok((streams, Repair::Dial(Arc::new(dialler))))
        }
        Side::Server => {
            let streams = collect(lanes, setup)?;
            let inbox = setup.lanes.clone();
            let repair = inbox.map_or(Repair::Never, |inbox| Repair::Take(Arrivals::new(inbox)));
            Ok((streams, repair))
        }
    }
}

fn collect(lanes: u16, setup: &Setup<'_>) -> Result<Vec<TcpStream>, NetworkError> {
    let Some(inbox) = &setup.lanes else {
        return Err(mismatch(
            setup,
            "the listener's lane inbox in the set-up".to_owned(),
            "none".to_owned(),
        ));
    };
    let mut streams: Vec<Option<TcpStream>> = (0..lanes).map(|_| None).collect();
    for _ in 0..lanes {
        let Some(arrived) = inbox.take(setup.deadline) else {
            return Err(NetworkError::TimedOut {
                peer: setup.peer,
                operation: "opening the lanes",
            });
        };
        let place = streams.get_mut(usize::from(arrived.lane));
        match place {
            Some(place @ None) if arrived.lanes == lanes => *place = Some(arrived.stream),
            _ => {
                return Err(mismatch(
                    setup,
                    format!("each of {lanes} lanes once"),
                    format!("lane {} of {}", arrived.lane, arrived.lanes),
                ));
            }
        }
    }
    Ok(streams.into_iter().flatten().collect())
}

/// How errors and logs call the channel.
pub(super) fn name(lanes: u16, peer: SocketAddr) -> String {
    let plural = if lanes == 1 { "lane" } else { "lanes" };
    format!("{NAME}, {lanes} {plural} to {peer}")
}

/// Hands the lanes to the event loops.
pub(super) fn start(
    streams: Vec<TcpStream>,
    peer: SocketAddr,
    parts: Parts,
) -> Result<TcpChannel, NetworkError> {
    let fail = |operation, cause: IoError| NetworkError::Io {
        operation,
        address: peer.to_string(),
        cause,
        hint: "; raise the limits on threads and descriptors",
    };
    let loops = Loops::get().map_err(|cause| fail("starting the event loops", cause))?;
    let (window, resend) = (parts.window, parts.resend);
    let shared =
        Shared::new(parts).map_err(|error| fail("eventfd", std::io::Error::from(error).into()))?;
    let shared = Arc::new(shared);
    if resend {
        watch::register(&shared)
            .map_err(|cause| fail("starting the watching thread", cause.into()))?;
    }
    // Everything that can fail is done. All lanes have joined before the first one starts, so that
    // the first that dies is not the last.
    let joined: Vec<_> = (0u16..)
        .zip(streams)
        .map(|(lane, stream)| {
            let socket = lane_socket(lane, stream, peer);
            shared.roster.join(&socket);
            socket
        })
        .collect();
    for socket in joined {
        Shared::run_lane(&shared, loops, &socket);
    }
    Ok(TcpChannel::new(shared, window))
}

fn lane_socket(lane: u16, stream: TcpStream, peer: SocketAddr) -> Arc<LaneSocket> {
    let peer = stream.peer_addr().unwrap_or(peer);
    Arc::new(LaneSocket {
        descriptor: stream.into(),
        peer,
        lane,
    })
}

impl Shared {
    /// Gives the halves of a lane that has joined to loops.
    fn run_lane(shared: &Arc<Self>, loops: &Loops, socket: &Arc<LaneSocket>) {
        let (transmit, receive) = (loops.transmit(), loops.receive());
        let remotes = LaneRemotes {
            transmit: transmit.remote(),
            receive: receive.remote(),
        };
        shared.halves.fetch_add(2, Ordering::AcqRel);
        shared.wakers.set(socket.lane, remotes.clone());
        let sending = TransmitLane::new(Arc::clone(shared), Arc::clone(socket));
        let receiving = ReceiveLane::new(Arc::clone(shared), Arc::clone(socket));
        transmit.add(Box::new(sending), &remotes.transmit);
        receive.add(Box::new(receiving), &remotes.receive);
    }

    /// Brings a dead lane back with a new stream; gives that back while halves of the old one are
    /// still there. A channel that has ended drops it.
    pub(super) fn restore(shared: &Arc<Self>, lane: u16, stream: TcpStream) -> Option<TcpStream> {
        let _adding = lock(&shared.membership);
        let Ok(loops) = Loops::get() else { return None };
        if shared.is_over() {
            return None;
        }
        if !shared.roster.is_vacant(lane) {
            return Some(stream);
        }
        let peer = SocketAddr::from(([0, 0, 0, 0], 0));
        let socket = lane_socket(lane, stream, peer);
        if shared.roster.join(&socket) {
            shared
                .counters
                .lanes_restored
                .fetch_add(1, Ordering::Relaxed);
            tracing::info!(channel = %shared.name, lane, peer = %socket.peer, "a lane is back");
            Self::run_lane(shared, loops, &socket);
        }
        None
    }
}

fn mismatch(setup: &Setup<'_>, expected: String, arrived: String) -> NetworkError {
    NetworkError::Mismatch {
        network: NAME.to_owned(),
        peer: setup.peer,
        expected,
        arrived,
    }
}
