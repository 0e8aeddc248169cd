//! A connection under way: dial, prove that we know the secret.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nccl_net::export::fork::PerProcess;
use tcpx_lanes::Congestion;
use tcpx_lanes::interfaces::{InterfaceAddress, addresses};
use tcpx_lanes::sealing::Protection;
use tcpx_lanes::socket_calls::{self as socket, Moved};
use tcpx_lanes::{lock, protocols};
use tcpx_wire::ClientKey;
use tcpx_wire::handshake::{ClientHandshake, Established, Message, SessionId, Step};

use crate::held::Stream;
use crate::link::Link;
use crate::listener::tcp_socket;
use crate::plugin::random;

/// Pause before dialling again, after the peer dropped an unfinished handshake.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// A peer that hangs up only after this was silent before: its process rested, or had no core.
const SILENT_TIME: Duration = Duration::from_secs(1);

/// How long an attempt from the device's own address goes unanswered before the routes choose.
const OWN_ADDRESS_TIME: Duration = Duration::from_secs(3);
/// How long after that the kernel may still hold the peer for unreachable.
const SETTLING_TIME: Duration = Duration::from_secs(10);

/// What works between an own and a peer's address, where the device's interface and address do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Works {
    /// The device's address, over the interface that the routes choose.
    Address,
    /// The address and the interface that the routes choose.
    Routes,
}

type Known = BTreeMap<(IpAddr, IpAddr), Works>;

/// Of pairs of own and peer's addresses.
static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();
/// Most of them that are remembered.
const MOST_KNOWN: usize = 4096;

fn known() -> MutexGuard<'static, Known> {
    lock(KNOWN.get())
}

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub(crate) link: Link,
    /// Names it at both ends.
    pub(crate) session: SessionId,
}

/// A connection under way; whoever wants it polls.
#[derive(Debug)]
pub(crate) struct Dialer {
    /// The device's address; `None`: the routes choose one. A host may drop what comes from an
    /// address of another network than the one it was sent to.
    local: Option<SocketAddr>,
    /// The device's interface, where the routes may choose another one for its address.
    interface: Option<String>,
    /// The device's address, once nothing came of it.
    in_vain: Option<IpAddr>,
    /// Nothing came of its interface.
    is_unbound: bool,
    peer: SocketAddr,
    key: ClientKey,
    protection: Protection,
    until: Instant,
    /// Until then a peer that cannot be reached is dialled again.
    settling: Instant,
    /// When the attempt began.
    began: Instant,
    /// Since when every attempt has soon ended with the peer hanging up.
    hung_up: Option<Instant>,
    /// How long it may do so.
    patience: Option<Duration>,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// Not dialled yet, or not before this moment again.
    Idle(Instant),
    /// The SYN is on its way since then.
    Dialling(Stream, Instant),
    /// Connected; messages go back and forth.
    Handshake(Stream, Box<ClientHandshake>),
    /// Over.
    Ended,
}

/// Why an attempt ended.
enum Failure {
    /// Dial again.
    Retry(String),
    /// The peer, or what stands in its place, answered and hung up: dial again for a while.
    HungUp(String),
    /// No use in trying again.
    Final(String),
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
        // An address of one family, or of loopback, reaches no other.
        let fits = local.is_ipv4() == peer.is_ipv4()
            && local.ip().is_loopback() == peer.ip().is_loopback();
        let works = known().get(&(local.ip(), peer.ip())).copied();
        let interface = || shared_network(&addresses().ok()?, local.ip(), peer.ip());
        Self {
            local: (fits && works != Some(Works::Routes)).then_some(local),
            interface: (fits && works.is_none()).then(interface).flatten(),
            in_vain: None,
            is_unbound: false,
            peer,
            key,
            protection,
            until,
            settling: now,
            began: now,
            hung_up: None,
            patience: None,
            phase: Phase::Idle(now),
        }
    }

    /// Gives up once the peer has hung up on every attempt for so long. A peer that is silent in between rests, and is
    /// not judged by what it did before.
    pub(crate) fn hung_up_for(self, patience: Duration) -> Self {
        Self {
            patience: Some(patience),
            ..self
        }
    }

    /// The device's address, where another one had to take its place.
    pub(crate) fn in_vain(&self) -> Option<IpAddr> {
        self.in_vain
    }

    /// The authenticated connection; `None`: not yet; an error says why there will be none.
    pub(crate) fn poll(&mut self, now: Instant) -> Result<Option<Dialled>, String> {
        match self.step(now) {
            Ok(found) => Ok(found),
            Err(Failure::HungUp(why)) if self.is_turned_away(now) => Err(why),
            Err(Failure::Retry(_) | Failure::HungUp(_)) if now < self.until => {
                self.phase = Phase::Idle(now + RETRY_PAUSE);
                Ok(None)
            }
            Err(Failure::Retry(why) | Failure::HungUp(why) | Failure::Final(why)) => Err(why),
        }
    }

    /// The peer has hung up, and has done nothing else for too long.
    fn is_turned_away(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.began) > SILENT_TIME {
            self.hung_up = None;
        }
        let since = *self.hung_up.get_or_insert(now);
        self.patience
            .is_some_and(|patience| now.saturating_duration_since(since) >= patience)
    }

    fn step(&mut self, now: Instant) -> Result<Option<Dialled>, Failure> {
        loop {
            self.phase = match std::mem::replace(&mut self.phase, Phase::Ended) {
                Phase::Idle(until) if now < until => {
                    self.phase = Phase::Idle(until);
                    return Ok(None);
                }
                Phase::Idle(_) => {
                    self.began = now;
                    let dialling = dial(self.local, self.interface.as_deref(), self.peer);
                    Phase::Dialling(dialling.map_err(|error| self.undialled(error, now))?, now)
                }
                Phase::Dialling(stream, since) => match dialled(&stream) {
                    Ok(true) => self.start(stream)?,
                    Ok(false) if self.local.is_some() && now >= since + OWN_ADDRESS_TIME => {
                        return Err(self.undialled(io::ErrorKind::TimedOut.into(), now));
                    }
                    Ok(false) => {
                        self.phase = Phase::Dialling(stream, since);
                        return Ok(None);
                    }
                    Err(error) => return Err(self.undialled(error, now)),
                },
                Phase::Handshake(stream, mut handshake) => {
                    if let Some(Established {
                        session, records, ..
                    }) = answer(&stream, &mut handshake)?
                    {
                        let link = Link::new(stream, Some(records), self.protection);
                        let session = session.id;
                        return Ok(Some(Dialled { link, session }));
                    }
                    self.phase = Phase::Handshake(stream, handshake);
                    return Ok(None);
                }
                Phase::Ended => return Err(Failure::Final("it has failed before".to_owned())),
            };
        }
    }

    /// What a failed attempt means: the next one leaves the choice of the address to the routes, if
    /// that can help.
    fn undialled(&mut self, error: io::Error, now: Instant) -> Failure {
        let is_unreachable = matches!(
            error.kind(),
            io::ErrorKind::TimedOut
                | io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable
                | io::ErrorKind::AddrNotAvailable
        );
        if is_unreachable && self.interface.take().is_some() {
            self.is_unbound = true;
            self.settling = now + SETTLING_TIME;
        } else if is_unreachable && let Some(local) = self.local.take() {
            self.in_vain = Some(local.ip());
            self.settling = now + SETTLING_TIME;
        }
        if is_unreachable && now < self.settling {
            return Failure::Retry(error.to_string());
        }
        Failure::Final(format!(
            "{error}; see whether the peer still listens and no firewall is between"
        ))
    }

    fn start(&self, stream: Stream) -> Result<Phase, Failure> {
        let own = self.local.map(|local| local.ip());
        let found = match (self.in_vain, own) {
            (Some(local), _) => Some((local, Works::Routes)),
            (None, Some(local)) if self.is_unbound => Some((local, Works::Address)),
            _ => None,
        };
        if let Some((local, works)) = found {
            let mut known = known();
            if known.len() < MOST_KNOWN {
                known.insert((local, self.peer.ip()), works);
            }
        }
        let entropy = random().map_err(|error| Failure::Final(error.to_string()))?;
        tcpx_lanes::socket::prepare_comm(&stream)
            .map_err(|error| Failure::Retry(error.to_string()))?;
        let (handshake, hello) =
            ClientHandshake::new(Some(&self.key), protocols::own_build(), entropy);
        send(&stream, &hello)?;
        Ok(Phase::Handshake(stream, Box::new(handshake)))
    }
}

/// Two connections under way, which are of use together.
#[derive(Debug)]
pub(crate) struct PairDialer {
    dialers: [Dialer; 2],
    links: [Option<Link>; 2],
}

impl PairDialer {
    pub(crate) const fn new(dialers: [Dialer; 2]) -> Self {
        Self {
            dialers,
            links: [None, None],
        }
    }

    /// As [`Dialer::poll`].
    pub(crate) fn poll(&mut self, now: Instant) -> Result<Option<[Link; 2]>, String> {
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

/// The interface of an own address that another one shares the peer's network with: for packets from there the routes
/// choose either.
fn shared_network(all: &[InterfaceAddress], local: IpAddr, peer: IpAddr) -> Option<String> {
    let own = all.iter().find(|one| one.address == local)?;
    let reaches = |one: &&InterfaceAddress| is_in_network(peer, one.address, one.prefix);
    let mut reaching = all.iter().filter(reaches);
    let is_shared = reaching.any(|one| one.interface != own.interface);
    (is_shared && reaches(&own)).then(|| own.interface.clone())
}

/// Whether an address is in the network of another one.
fn is_in_network(address: IpAddr, of: IpAddr, prefix: u8) -> bool {
    let (differ, bits) = match (address, of) {
        (IpAddr::V4(one), IpAddr::V4(other)) => {
            (u128::from(one.to_bits() ^ other.to_bits()), 32_u32)
        }
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits(), 128),
        _ => return false,
    };
    let rest = bits.saturating_sub(prefix.into());
    differ.checked_shr(rest).unwrap_or(0) == 0
}

pub(crate) fn dial(
    local: Option<SocketAddr>,
    interface: Option<&str>,
    peer: SocketAddr,
) -> io::Result<Stream> {
    let socket = tcp_socket(peer)?;
    let congestion = Congestion::Automatic.apply_to_dial(&socket, peer);
    congestion.map_err(io::Error::other)?;
    if let Some(interface) = interface {
        // Old systems keep it from ordinary users: then the address alone decides.
        let bound = socket.bind_device(Some(interface.as_bytes()));
        if let Err(error) = bound
            && error.kind() != io::ErrorKind::PermissionDenied
        {
            return Err(error);
        }
    }
    // The device is the caller's choice of interface, wherever its address can reach the peer.
    if let Some(local) = local {
        socket.bind(&local.into())?;
    }
    match socket.connect(&peer.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(Stream::new(socket.into()))
}

/// Whether the connection is up.
pub(crate) fn dialled(stream: &Stream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads what has arrived and answers it; at the end of the handshake, the session.
fn answer(
    stream: &Stream,
    handshake: &mut ClientHandshake,
) -> Result<Option<Established>, Failure> {
    let mut buffer = [0; 512];
    loop {
        let arrived = match socket::receive_bytes(stream, &mut buffer) {
            Ok(Moved::Bytes(bytes)) => bytes,
            Ok(Moved::WouldBlock) => return Ok(None),
            // A crowded listener drops some; there is room again soon.
            Ok(Moved::End) => return Err(Failure::HungUp(handshake.closed().to_string())),
            Err(error) => return Err(Failure::HungUp(error.to_string())),
        };
        let mut input = &buffer[..arrived];
        loop {
            match handshake.receive(&mut input) {
                Ok(Step::NeedMore) => break,
                Ok(Step::Send(message)) => send(stream, &message)?,
                Ok(Step::Done(established)) if input.is_empty() => {
                    return Ok(Some(established));
                }
                Ok(Step::Done(_)) => {
                    let why = "bytes behind the handshake; both sides must run the same plugin";
                    return Err(Failure::Final(why.to_owned()));
                }
                Err(error) => return Err(Failure::Final(error.to_string())),
            }
        }
    }
}

fn send(stream: &Stream, message: &Message) -> Result<(), Failure> {
    // A few hundred bytes on a fresh connection always fit its buffer.
    match socket::send_bytes(stream, message) {
        Ok(Moved::Bytes(sent)) if sent == message.len() => Ok(()),
        Err(error) => Err(Failure::Retry(error.to_string())),
        _ => Err(Failure::Final(
            "the fresh connection takes no bytes".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
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
    fn a_device_keeps_its_interface_where_another_has_the_same_network() {
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
    fn an_address_that_cannot_be_dialled_from_leaves_the_choice_to_the_routes() {
        let Some(own) = own_address() else {
            // Not eprintln: the harness hides that.
            let name = "an_address_that_cannot_be_dialled_from_leaves_the_choice_to_the_routes";
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
        let mut now = Instant::now();
        while !matches!(dialer.phase, Phase::Handshake(..)) {
            assert!(now < until, "{dialer:?}");
            assert!(dialer.poll(now).unwrap().is_none());
            now = Instant::now();
        }
        assert_eq!(listener.accept().unwrap().1.ip(), own);
        // The next one knows.
        assert_eq!(Dialer::new(local, peer, key(), until).local, None);
    }

    /// Dials a listener that hangs up on every attempt, each of which takes so long by the clock of the dialler; after
    /// which time it gave up.
    fn hung_up_on(each: Duration, until: Duration) -> Option<Duration> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        let local = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let start = Instant::now();
        let patience = Duration::from_secs(3);
        let mut dialer = Dialer::new(local, peer, key(), start + 2 * until);
        dialer = dialer.hung_up_for(patience);
        let mut now = start + RETRY_PAUSE;
        while now < start + until {
            while !matches!(dialer.phase, Phase::Handshake(..)) {
                assert!(dialer.poll(now).unwrap().is_none());
            }
            drop(listener.accept().unwrap());
            now += each;
            loop {
                match dialer.poll(now) {
                    Ok(None) if matches!(dialer.phase, Phase::Idle(_)) => break,
                    Ok(None) => {}
                    Ok(Some(_)) => panic!("nobody answered"),
                    Err(_) => return Some(now - start),
                }
            }
            now += RETRY_PAUSE;
        }
        None
    }

    #[test]
    fn a_peer_that_hangs_up_again_and_again_is_given_up_and_one_that_is_silent_is_not() {
        let (short, long) = (Duration::from_millis(50), Duration::from_secs(20));
        let after = hung_up_on(short, long).unwrap();
        assert!(after < Duration::from_secs(4), "{after:?}");
        assert_eq!(hung_up_on(SILENT_TIME + short, long), None);
    }

    #[test]
    fn a_peer_that_refuses_is_not_asked_again_from_another_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        drop(listener);
        let until = Instant::now() + Duration::from_secs(60);
        let local = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let mut dialer = Dialer::new(local, peer, key(), until);
        let error = loop {
            assert!(Instant::now() < until);
            if let Err(error) = dialer.poll(Instant::now()) {
                break error;
            }
        };
        assert!(error.contains("refused"), "{error}");
    }
}
