//! Setting channels up: agreeing on their number, opening two lanes for each, and beginning
//! only when the flows of both sides are steered.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};

use tcpx_lanes::interfaces;

use super::bound::{Flow, FlowRule};
use super::network::NAME;
use tcpx_net::Way;
use tcpx_net::dial::{DialOptions, dial_lane};
use tcpx_net::error::{NetworkError, SocketError};
use tcpx_net::lane_inbox::AcceptedLane;
use tcpx_net::network::{Exchange, Setup, Side};

/// First bytes of the set-up message, then its version and the channels, u16 little endian, and the
/// address that payload lanes are to go to, 16 bytes: IPv6, or IPv4 as IPv6; all zero for the
/// address of the control connection.
const MAGIC: [u8; 4] = *b"TCPD";
const VERSION: u16 = 3;
const MESSAGE_BYTES: usize = 24;

/// What the second round says: ready, or why not.
const READY: u8 = 1;
/// Longest reason that is shown.
const MOST_WORDS: usize = 512;

/// The two lanes of a channel.
#[derive(Debug)]
pub(super) struct Lanes {
    pub(super) payload: TcpStream,
    pub(super) ordinary: TcpStream,
    pub(super) rule: Option<FlowRule>,
}

impl Lanes {
    /// The payload as it arrives here.
    pub(super) fn flow(&self, peer: SocketAddr) -> Result<Flow, NetworkError> {
        let address = |found: std::io::Result<SocketAddr>| {
            found.map(canonical).map_err(|cause| SocketError::Io {
                operation: "reading the addresses of a payload lane",
                address: peer.to_string(),
                cause: cause.into(),
                hint: "; the peer may have closed it: look at its log",
            })
        };
        Ok(Flow {
            local: address(self.payload.local_addr())?,
            remote: Some(address(self.payload.peer_addr())?),
        })
    }
}

/// Addresses as packets carry them: IPv4 on a socket for both kinds is IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// One round with the peer, and then the connections of all channels, by number.
pub(super) fn open(
    wanted: u16,
    interface: Option<&str>,
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<Vec<Lanes>, NetworkError> {
    let ours = interface.and_then(|name| address_of(name, setup.local.ip()));
    let theirs = exchange.exchange(&hello(wanted, ours), &mut ())?;
    let (count, address) = read_hello(&theirs).ok_or_else(|| {
        let start = theirs.get(..16).unwrap_or(&theirs);
        mismatch(
            setup,
            format!("a set-up message of version {VERSION} and {MESSAGE_BYTES} bytes"),
            format!(
                "{} bytes that begin \"{}\"",
                theirs.len(),
                start.escape_ascii()
            ),
        )
    })?;
    if count == 0 {
        return Err(mismatch(setup, "at least 1 channel".into(), "0".into()));
    }
    let count = count.min(wanted);
    match setup.side {
        Side::Client => dial_all(count, interface, address, setup),
        Side::Server => collect(count, setup, exchange),
    }
}

fn hello(channels: u16, address: Option<IpAddr>) -> [u8; MESSAGE_BYTES] {
    let mut message = [0; MESSAGE_BYTES];
    message[..4].copy_from_slice(&MAGIC);
    message[4..6].copy_from_slice(&VERSION.to_le_bytes());
    message[6..8].copy_from_slice(&channels.to_le_bytes());
    if let Some(address) = address {
        let octets = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        message[8..].copy_from_slice(&octets);
    }
    message
}

fn read_hello(message: &[u8]) -> Option<(u16, Option<IpAddr>)> {
    let message: &[u8; MESSAGE_BYTES] = message.try_into().ok()?;
    let [m0, m1, m2, m3, v0, v1, c0, c1, octets @ ..] = *message;
    if [m0, m1, m2, m3] != MAGIC || u16::from_le_bytes([v0, v1]) != VERSION {
        return None;
    }
    let address = Ipv6Addr::from(octets);
    let named = (!address.is_unspecified()).then_some(IpAddr::V6(address).to_canonical());
    Some((u16::from_le_bytes([c0, c1]), named))
}

/// An address of the interface, of the same kind as that of the control connection.
fn address_of(interface: &str, like: IpAddr) -> Option<IpAddr> {
    let like = like.to_canonical();
    let found = interfaces::interfaces().ok()?;
    let addresses = found
        .into_iter()
        .find(|one| one.name == interface)?
        .addresses;
    if addresses.contains(&like) {
        return Some(like);
    }
    addresses
        .into_iter()
        .find(|address| address.is_ipv4() == like.is_ipv4())
}

/// Even lanes carry payload, to the server's interface; odd ones go the way of the control
/// connection.
fn dial_all(
    count: u16,
    interface: Option<&str>,
    address: Option<IpAddr>,
    setup: &Setup<'_>,
) -> Result<Vec<Lanes>, NetworkError> {
    let lanes = count * 2;
    let to = |ip: IpAddr| SocketAddr::new(ip, setup.peer.port());
    let payload = Way {
        interface: interface.map(str::to_owned),
        ..Way::to(address.map_or(setup.peer, to))
    };
    let options = DialOptions {
        congestion: setup.congestion.clone(),
        deadline: setup.deadline,
    };
    (0..count)
        .map(|channel| {
            let lane = channel * 2;
            let dial = |way, lane| {
                dial_lane(way, setup.session, lane, lanes, &options).map(|dialled| dialled.stream)
            };
            Ok(Lanes {
                payload: dial(payload.clone(), lane)?,
                ordinary: dial(Way::to(setup.peer), lane + 1)?,
                rule: None,
            })
        })
        .collect()
}

fn collect(
    count: u16,
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<Vec<Lanes>, NetworkError> {
    let Some(inbox) = &setup.lanes else {
        return Err(mismatch(
            setup,
            "the listener's lane inbox in the set-up".to_owned(),
            "none".to_owned(),
        ));
    };
    let lanes = count * 2;
    let mut streams: Vec<Option<AcceptedLane>> = (0..lanes).map(|_| None).collect();
    for _ in 0..lanes {
        let Some(arrived) = inbox.take(exchange, setup.deadline)? else {
            return Err(NetworkError::TimedOut {
                peer: setup.peer,
                operation: "opening the payload lanes",
            });
        };
        match streams.get_mut(usize::from(arrived.lane)) {
            Some(place @ None) if arrived.lanes == lanes => *place = Some(arrived),
            _ => {
                return Err(mismatch(
                    setup,
                    format!("each of {lanes} lanes once"),
                    format!("lane {} of {}", arrived.lane, arrived.lanes),
                ));
            }
        }
    }
    let mut streams = streams.into_iter().flatten().map(|lane| lane.stream);
    let mut channels = Vec::with_capacity(usize::from(count));
    while let (Some(payload), Some(ordinary)) = (streams.next(), streams.next()) {
        channels.push(Lanes {
            payload,
            ordinary,
            rule: None,
        });
    }
    Ok(channels)
}

/// The second round: both sides say that payload may come, or why it may not. Payload that came
/// before its flow was steered would not land in the pool.
pub(super) fn agree_on_start(
    steered: Result<(), NetworkError>,
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<(), NetworkError> {
    let ours = match &steered {
        Ok(()) => vec![READY],
        Err(error) => {
            let mut words = vec![0];
            words.extend(error.to_string().bytes().take(MOST_WORDS));
            words
        }
    };
    let theirs = exchange.exchange(&ours, &mut ());
    steered?;
    match theirs?.as_slice() {
        [READY] => Ok(()),
        [0, words @ ..] => {
            let words = String::from_utf8_lossy(words.get(..MOST_WORDS).unwrap_or(words));
            let words: String = words.chars().filter(|one| !one.is_control()).collect();
            Err(NetworkError::Control {
                reason: format!("{} could not steer its payload: {words}", setup.peer),
            })
        }
        other => Err(mismatch(
            setup,
            "the word that payload may come".to_owned(),
            format!("{} bytes", other.len()),
        )),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_reads_back() {
        for address in [
            None,
            Some(IpAddr::from([10, 0, 0, 2])),
            Some(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2])),
        ] {
            assert_eq!(read_hello(&hello(3, address)), Some((3, address)));
        }
    }

    #[test]
    fn a_hello_of_another_length_magic_or_version_is_refused() {
        let good = hello(1, None);
        assert!(read_hello(&good[..MESSAGE_BYTES - 1]).is_none());
        for at in [0, 3, 4, 5] {
            let mut bad = good;
            bad[at] ^= 0x10;
            assert!(read_hello(&bad).is_none(), "byte {at}");
        }
    }
}
