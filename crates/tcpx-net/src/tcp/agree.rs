//! What both sides come to before lanes are opened: how many, and over which cards.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use tcpx_lanes::interfaces::{
    Choice, InterfaceFilter, Nic, PciPlace, SYSFS, Wish, choose, interfaces, same_network,
};

use super::NAME;
use super::advert::{Advert, NicAddress};
use super::pairs::pair_up;
use crate::channel::Way;
use crate::error::NetworkError;
use crate::network::{Exchange, Meanwhile, Setup, Side};

/// What both sides agreed on.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) lanes: u16,
    /// Those of them that are opened now.
    pub(super) at_first: u16,
    /// Client: the ways to try, at least one.
    pub(super) routes: Vec<Way>,
    /// Our cards.
    pub(super) cards: Cards,
    /// Both sides let a peer on the same host prove itself.
    pub(super) has_door: bool,
}

/// The cards of this side that carry lanes.
#[derive(Debug, Clone, Default)]
pub(super) struct Cards {
    pub(super) nics: Vec<Nic>,
    /// What the user allows, if he said: lanes take no other way.
    pub(super) filter: Option<InterfaceFilter>,
    /// The peer is on this host: nothing leaves through a card, whatever addresses say.
    within_host: bool,
}

impl Cards {
    /// The card with this address.
    pub(super) fn card_at(&self, address: IpAddr) -> Option<&Nic> {
        let address = address.to_canonical();
        let has = |nic: &&Nic| nic.addresses.iter().any(|(own, _)| *own == address);
        self.nics.iter().find(has)
    }

    /// Whether a card of this name is one of them.
    pub(super) fn has(&self, name: &str) -> bool {
        self.nics.iter().any(|nic| nic.name == name)
    }

    /// Whether other cards of this side have the network of this way too, and may carry its lanes.
    pub(super) fn share_network(&self, way: &Way) -> bool {
        let peer = way.peer.ip();
        let near = |nic: &&Nic| {
            let mut networks = nic.addresses.iter();
            networks.any(|(own, prefix)| same_network(*own, peer, *prefix))
        };
        self.filter.is_none() && self.nics.iter().filter(near).count() > 1
    }

    /// Whether sockets are bound to their cards. With one card that nobody asked for, the routes
    /// say the same.
    pub(super) fn bind(&self) -> bool {
        !self.within_host && (self.nics.len() > 1 || self.filter.is_some())
    }

    /// The filter that forbids lanes at this address of ours, if one does.
    pub(super) fn forbids(&self, address: IpAddr) -> Option<&InterfaceFilter> {
        let filter = self.filter.as_ref().filter(|_| !self.within_host)?;
        self.card_at(address).is_none().then_some(filter)
    }
}

/// What this side wishes.
pub(super) fn wish(
    (lanes, asked): (u16, bool),
    filter: Option<&str>,
    has_door: bool,
    setup: &Setup<'_>,
) -> Result<(Advert, Cards), NetworkError> {
    let cards = our_cards(filter, setup)?;
    let ours = Advert {
        lanes,
        asked,
        encrypt: setup.encrypt,
        has_door,
        addresses: addresses_for_peer(&cards.nics, setup.listening),
    };
    Ok((ours, cards))
}

/// The way of the control connection.
pub(super) fn plain(setup: &Setup<'_>) -> Way {
    Way {
        local: None,
        interface: None,
        peer: setup.peer,
    }
}

/// One round with the peer; `early` goes on meanwhile.
pub(super) fn agree(
    (ours, cards): (Advert, Cards),
    setup: &Setup<'_>,
    early: &mut dyn Meanwhile,
    exchange: &mut dyn Exchange,
) -> Result<Agreed, NetworkError> {
    let arrived = exchange.exchange(&ours.encode(), early)?;
    let theirs = Advert::decode(&arrived)
        .map_err(|(expected, arrived)| mismatch(setup, expected, arrived))?;
    if ours.encrypt != theirs.encrypt {
        return Err(NetworkError::EncryptionDiffers {
            peer: setup.peer,
            ours: ours.encrypt,
        });
    }
    let plain = plain(setup);
    let routes = match setup.side {
        Side::Server => vec![plain],
        Side::Client => {
            let port = setup.peer.port();
            let mut routes = pair_up(&ours.addresses, &theirs.addresses, port);
            for route in &mut routes {
                let nic = route.local.and_then(|local| cards.card_at(local));
                route
                    .interface
                    .take_if(|_| nic.is_some_and(|nic| !nic.carries));
            }
            let is_plain = |route: &Way| {
                route.local == Some(setup.local.ip()) && route.peer.ip() == setup.peer.ip()
            };
            match routes.as_slice() {
                [] => {
                    if let Some(filter) = cards.forbids(setup.local.ip()) {
                        return Err(NetworkError::NoWay {
                            peer: setup.peer,
                            filter: filter.to_string(),
                            found: "the peer has no address that they reach".to_owned(),
                        });
                    }
                    vec![plain]
                }
                // The control connection came this way without being told to.
                [only] if is_plain(only) && !cards.bind() => vec![plain],
                _ => routes,
            }
        }
    };
    Ok(Agreed {
        lanes: ours.agree(&theirs),
        at_first: ours.at_first(&theirs),
        routes,
        has_door: ours.has_door && theirs.has_door,
        cards,
    })
}

fn our_cards(filter: Option<&str>, setup: &Setup<'_>) -> Result<Cards, NetworkError> {
    if setup.local.ip().to_canonical().is_loopback() {
        // Within this host there is nothing to choose.
        return Ok(Cards::default());
    }
    let filter = filter.and_then(InterfaceFilter::parse);
    let gpu = setup
        .workers
        .iter()
        .find_map(|worker| PciPlace::of(Path::new(SYSFS), &worker.gpu()?.info().pci));
    let all = match interfaces() {
        Ok(all) => all,
        // Without sysfs there is still the way of the control connection.
        Err(error) if filter.is_none() => {
            tracing::debug!(%error, "lanes go the way of the control connection");
            Vec::new()
        }
        Err(error) => return Err(error.into()),
    };
    let choice: Choice = choose(
        &all,
        &Wish {
            filter: filter.as_ref(),
            gpu: gpu.as_ref(),
            local: setup.local.ip().to_canonical(),
            peer: setup.peer.ip().to_canonical(),
        },
    )?;
    tracing::info!(peer = %setup.peer, interfaces = %choice, "interfaces chosen");
    Ok(Cards {
        nics: choice.nics,
        filter,
        within_host: choice.within_host,
    })
}

/// The addresses that the peer may open lanes from or to.
fn addresses_for_peer(nics: &[Nic], listening: Option<SocketAddr>) -> Vec<NicAddress> {
    let bound = listening.map(|address| address.ip());
    let reachable = |address: IpAddr| {
        bound.is_none_or(|bound| {
            if !bound.is_unspecified() {
                return bound == address;
            }
            // A listener on every IPv4 address has no IPv6 one; the other way round there may be.
            bound.is_ipv6() || address.is_ipv4()
        })
    };
    (0u8..=u8::MAX)
        .zip(nics)
        .flat_map(|(card, nic)| {
            nic.addresses
                .iter()
                .map(move |(address, prefix)| NicAddress {
                    card,
                    name: nic.name.clone(),
                    address: *address,
                    prefix: *prefix,
                })
        })
        .filter(|entry| reachable(entry.address))
        .collect()
}

pub(super) fn mismatch(setup: &Setup<'_>, expected: String, arrived: String) -> NetworkError {
    NetworkError::Mismatch {
        network: NAME.to_owned(),
        peer: setup.peer,
        expected,
        arrived,
    }
}
