//! Setting a channel up: agreeing on the number of lanes, opening them, handing them to the loops.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::NAME;
use super::event_loop::{Loops, Source};
use super::receive_lane::ReceiveLane;
use super::shared::{LaneSocket, MAX_LANES, Shared};
use super::staging::Staging;
use super::tcp_channel::TcpChannel;
use super::transmit_lane::TransmitLane;
use super::wakers::LaneRemotes;
use crate::dial::{DialOptions, dial_lane};
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

/// All lanes, by number.
pub(super) fn open(
    lanes: u16,
    setup: &Setup<'_>,
    interface: Option<&str>,
) -> Result<Vec<TcpStream>, NetworkError> {
    match setup.side {
        Side::Client => {
            let options = DialOptions {
                deadline: setup.deadline,
                interface: interface.map(str::to_owned),
                capabilities: 0,
            };
            (0..lanes)
                .map(|lane| dial_lane(setup.peer, setup.session, lane, lanes, &options))
                .collect()
        }
        Side::Server => collect(lanes, setup),
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

/// Hands the lanes to the event loops.
pub(super) fn start(
    streams: Vec<TcpStream>,
    peer: SocketAddr,
    window: u16,
    staging: Staging,
) -> Result<TcpChannel, NetworkError> {
    let fail = |operation, cause: IoError| NetworkError::Io {
        operation,
        address: peer.to_string(),
        cause,
        hint: "; raise the limits on threads and descriptors",
    };
    let loops = Loops::get().map_err(|cause| fail("starting the event loops", cause))?;
    let count = streams.len();
    let plural = if count == 1 { "lane" } else { "lanes" };
    let name = format!("{NAME}, {count} {plural} to {peer}");
    let shared = Shared::new(name, window, staging)
        .map_err(|error| fail("eventfd", std::io::Error::from(error).into()))?;
    let shared = Arc::new(shared);

    let mut halves: Vec<[Box<dyn Source>; 2]> = Vec::with_capacity(count);
    let mut sockets = Vec::with_capacity(count);
    for (lane, stream) in (0u16..).zip(streams) {
        let peer = stream.peer_addr().unwrap_or(peer);
        let socket = Arc::new(LaneSocket {
            descriptor: stream.into(),
            peer,
            lane,
        });
        sockets.push(Arc::downgrade(&socket));
        let transmit = TransmitLane::new(Arc::clone(&shared), Arc::clone(&socket));
        let receive = ReceiveLane::new(Arc::clone(&shared), socket);
        halves.push([Box::new(transmit), Box::new(receive)]);
    }
    shared.sockets.get_or_init(|| sockets.into());
    // Everything that can fail is done; the lanes find the remotes set.
    let places: Vec<_> = halves
        .iter()
        .map(|_| (loops.transmit(), loops.receive()))
        .collect();
    let remotes: Box<[LaneRemotes]> = places
        .iter()
        .map(|(transmit, receive)| LaneRemotes {
            transmit: transmit.remote(),
            receive: receive.remote(),
        })
        .collect();
    shared.halves.store(2 * count, Ordering::Release);
    let remotes = shared.wakers.lanes.get_or_init(|| remotes);
    for (([transmit, receive], place), remote) in halves.into_iter().zip(&places).zip(remotes) {
        place.0.add(transmit, &remote.transmit);
        place.1.add(receive, &remote.receive);
    }
    Ok(TcpChannel::new(shared, window))
}

fn mismatch(setup: &Setup<'_>, expected: String, arrived: String) -> NetworkError {
    NetworkError::Mismatch {
        network: NAME.to_owned(),
        peer: setup.peer,
        expected,
        arrived,
    }
}
