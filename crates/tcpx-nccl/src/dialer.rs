//! A connection under way to a process of the plugin: over the device's interface and address, or
//! over what works in their place.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nccl_net::export::fork::PerProcess;
use tcpx_lanes::dial::{Dial, Patience, Way, Welcomed};
use tcpx_lanes::interfaces::{InterfaceAddress, addresses, same_network};
use tcpx_lanes::redial::{ATTEMPT, Attempt};
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket::{DialOptions, prepare_lane};
use tcpx_lanes::{SocketError, lock, protocols};
use tcpx_wire::ClientKey;
use tcpx_wire::handshake::{ClientHandshake, SessionId};

use crate::held::Stream;
use crate::link::Link;

/// How long an attempt from the device's own address goes unanswered before the routes choose.
const OWN_ADDRESS_TIME: Duration = Duration::from_secs(3);
/// How long after that the kernel may still hold the peer for unreachable.
const SETTLING_TIME: Duration = Duration::from_secs(16);
/// What an attempt to open a pair of connections anew may take, over every way.
pub(crate) const AGAIN_TIME: Duration = OWN_ADDRESS_TIME.saturating_mul(2).saturating_add(ATTEMPT);

/// What works between an own and a peer's address, by the place of the [way](ways), and since when
/// that is known.
type Known = BTreeMap<(IpAddr, IpAddr), (usize, Instant)>;

/// Of pairs of own and peer's addresses.
static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();
/// Most of them that are remembered, and for how long: a packet may have been lost, no card.
const MOST_KNOWN: usize = 4096;
const KNOWN_TIME: Duration = Duration::from_secs(300);

fn known(now: Instant) -> MutexGuard<'static, Known> {
    let mut known = lock(KNOWN.get());
    known.retain(|_, (_, since)| now.saturating_duration_since(*since) < KNOWN_TIME);
    known
}

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub(crate) link: Link,
    /// Names it at both ends.
    pub(crate) session: SessionId,
    /// The device's address, where another one had to take its place.
    pub(crate) in_vain: Option<IpAddr>,
}

/// A connection under way; whoever wants it polls.
#[derive(Debug)]
pub(crate) struct Dialer {
    local: SocketAddr,
    peer: SocketAddr,
    /// The first ones that are not tried.
    skipped: usize,
    protection: Protection,
    dial: Dial<Welcomed, Stream>,
}

/// The device's address over its interface, the address over the interface that the routes choose,
/// and what the routes choose. A host may drop what comes from an address of another network than
/// the one it was sent to.
fn ways(local: SocketAddr, peer: SocketAddr) -> [Option<Way>; 3] {
    // An address of one family, or of loopback, reaches no other.
    let fits =
        local.is_ipv4() == peer.is_ipv4() && local.ip().is_loopback() == peer.ip().is_loopback();
    let own = fits.then_some(Way {
        local: Some(local.ip()),
        ..Way::to(peer)
    });
    let interface = || shared_network(&addresses().ok()?, local.ip(), peer.ip());
    let bound = own.clone().and_then(|own| {
        let interface = Some(interface()?);
        Some(Way { interface, ..own })
    });
    [bound, own, Some(Way::to(peer))]
}

impl Dialer {
    /// Dials `peer` from `local`, again and again until `until` where that can help.
    pub(crate) fn new(
        local: SocketAddr,
        peer: SocketAddr,
        (key, protection): (ClientKey, Protection),
        until: Instant,
    ) -> Self {
        let now = Instant::now();
        let patience = Patience {
            head_start: OWN_ADDRESS_TIME,
            opens: true,
            hung_up: until.saturating_duration_since(now),
            unreachable: SETTLING_TIME,
        };
        let known = known(now).get(&(local.ip(), peer.ip())).copied();
        let skipped = known.map_or(0, |(works, _)| works);
        let ways = ways(local, peer).into_iter().skip(skipped).flatten();
        let options = DialOptions::until(until);
        let dial = Dial::new(ways.collect(), options, patience, move |entropy| {
            let build = protocols::own_build();
            let (client, hello) = ClientHandshake::new(Some(&key), build, entropy);
            Ok((Welcomed(client), hello))
        });
        Self {
            local,
            peer,
            skipped,
            protection,
            dial,
        }
    }

    /// The authenticated connection; `None`: not yet; an error says why there will be none.
    pub(crate) fn poll(&mut self, now: Instant) -> Result<Option<Dialled>, SocketError> {
        let opened = Attempt::poll(&mut self.dial, now);
        // A host has at least the way that its routes choose.
        let opened = opened.map_err(|mut errors| errors.swap_remove(errors.len() - 1))?;
        let Some((stream, way, established)) = opened else {
            return Ok(None);
        };
        prepare_lane(&stream).map_err(|cause| SocketError::Io {
            operation: "preparing a connection",
            address: way.peer.to_string(),
            cause: cause.into(),
            hint: "",
        })?;
        let in_vain = self.learn(&way, now);
        Ok(Some(Dialled {
            link: Link::new(stream, Some(established.records), self.protection),
            session: established.session.id,
            in_vain,
        }))
    }

    /// Remembers which way works; the address in whose place another one does, if that is news.
    fn learn(&self, way: &Way, now: Instant) -> Option<IpAddr> {
        let ways = ways(self.local, self.peer);
        let first = ways.iter().position(Option::is_some)?;
        let at = ways.iter().position(|one| one.as_ref() == Some(way))?;
        let is_news = at > first && at > self.skipped;
        let mut known = known(now);
        if is_news && known.len() < MOST_KNOWN {
            known.insert((self.local.ip(), self.peer.ip()), (at, now));
        }
        (is_news && way.local.is_none()).then(|| self.local.ip())
    }
}

/// Two connections under way, which are of use together.
#[derive(Debug)]
pub(crate) struct PairDialer {
    dialers: [Dialer; 2],
    links: [Option<Link>; 2],
}

impl PairDialer {
    pub(crate) fn new(dialer: impl Fn() -> Dialer) -> Self {
        Self {
            dialers: [dialer(), dialer()],
            links: [None, None],
        }
    }
}

impl Attempt for PairDialer {
    type Link = [Link; 2];
    type Error = SocketError;

    fn poll(&mut self, now: Instant) -> Result<Option<[Link; 2]>, SocketError> {
        for (dialer, link) in self.dialers.iter_mut().zip(&mut self.links) {
            if link.is_none() {
                *link = dialer.poll(now)?.map(|dialled| dialled.link);
            }
        }
        match std::mem::take(&mut self.links) {
            [Some(one), Some(other)] => Ok(Some([one, other])),
            links => {
                self.links = links;
                Ok(None)
            }
        }
    }
}

/// The interface of an own address that another one shares the peer's network with: for packets
/// from there the routes choose either.
fn shared_network(all: &[InterfaceAddress], local: IpAddr, peer: IpAddr) -> Option<String> {
    let own = all.iter().find(|one| one.address == local)?;
    let reaches = |one: &&InterfaceAddress| same_network(peer, one.address, one.prefix);
    let mut reaching = all.iter().filter(reaches);
    let is_shared = reaching.any(|one| one.interface != own.interface);
    (is_shared && reaches(&own)).then(|| own.interface.clone())
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::net::{Ipv4Addr, TcpListener, UdpSocket};

    use tcpx_wire::Key;

    use super::*;

    fn key() -> (ClientKey, Protection) {
        let key = Key::generate(&mut |bytes| bytes.fill(7)).client_key();
        (key, Protection::None)
    }

    /// An address of this host that is not loopback. No packet is sent.
    fn own_address() -> Option<Ipv4Addr> {
        let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
        socket.connect("192.0.2.1:9").ok()?;
        match socket.local_addr().ok()?.ip() {
            IpAddr::V4(address) if !address.is_loopback() => Some(address),
            _ => None,
        }
    }

    #[test]
    fn a_device_keeps_its_interface_beside_a_like_network() {
        let all = [
            ("card1", "192.168.3.15", 20),
            ("card2", "192.168.5.15", 20),
            ("card3", "10.0.0.1", 24),
            ("lo", "127.0.0.1", 8),
            ("card1", "fd00::1", 64),
            ("card4", "fd00::2", 64),
        ];
        let all = all.map(|(interface, address, prefix)| InterfaceAddress {
            interface: interface.to_owned(),
            address: address.parse().unwrap(),
            prefix,
        });
        let chosen = |local: &str, peer: &str| {
            let (local, peer) = (local.parse().unwrap(), peer.parse().unwrap());
            shared_network(&all, local, peer)
        };
        assert_eq!(
            chosen("192.168.5.15", "192.168.3.16").as_deref(),
            Some("card2")
        );
        assert_eq!(
            chosen("192.168.5.15", "192.168.16.1"),
            None,
            "over a router"
        );
        assert_eq!(chosen("10.0.0.1", "10.0.0.2"), None, "there is one way");
        assert_eq!(
            chosen("10.0.0.1", "192.168.3.16"),
            None,
            "it is in no network there"
        );
        assert_eq!(chosen("fd00::2", "fd00::9").as_deref(), Some("card4"));
        assert_eq!(
            chosen("10.9.9.9", "10.0.0.2"),
            None,
            "no address of this host"
        );
    }

    #[test]
    fn an_unusable_address_leaves_the_choice_to_routes() {
        let Some(own) = own_address() else {
            // Not eprintln: the harness hides that.
            let name = "an_unusable_address_leaves_the_choice_to_routes";
            let _ = writeln!(io::stderr(), "skipped: {name}: there is no route");
            return;
        };
        let listener = TcpListener::bind((own, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let peer = listener.local_addr().unwrap();
        // Nobody's: for documents.
        let local = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 7).into(), 0);
        let until = Instant::now() + Duration::from_secs(60);
        let mut dialer = Dialer::new(local, peer, key(), until);
        let from = loop {
            assert!(Instant::now() < until, "{dialer:?}");
            assert!(dialer.poll(Instant::now()).unwrap().is_none());
            if let Ok((_, from)) = listener.accept() {
                break from.ip();
            }
        };
        assert_eq!(from, own);
        let (now, routes) = (Instant::now(), Way::to(peer));
        assert_eq!(dialer.learn(&routes, now), Some(local.ip()));
        // The next one knows, until a packet that was lost would be forgotten.
        assert_eq!(Dialer::new(local, peer, key(), until).skipped, 2);
        assert!(!known(now + KNOWN_TIME / 2).is_empty());
        assert!(known(now + KNOWN_TIME).is_empty());
        assert_eq!(Dialer::new(local, peer, key(), until).skipped, 0);
    }

    #[test]
    fn a_peer_that_refuses_is_given_up_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        drop(listener);
        let until = Instant::now() + Duration::from_secs(60);
        let local = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let mut dialer = Dialer::new(local, peer, key(), until);
        let unreached = loop {
            assert!(Instant::now() < until);
            if let Err(unreached) = dialer.poll(Instant::now()) {
                break unreached;
            }
        };
        assert!(
            matches!(unreached, SocketError::Refused { .. }),
            "{unreached:?}"
        );
    }
}
