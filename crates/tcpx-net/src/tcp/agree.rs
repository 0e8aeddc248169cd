//! What both sides come to before lanes are opened: how many, and over which cards.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use super::NAME;
use super::advert::{Advert, NicAddress};
use super::pairs::pair_up;
use crate::channel::Way;
use crate::error::NetworkError;
use crate::interfaces::{Choice, InterfaceFilter, Nic, PciPlace, SYSFS, Wish, choose, interfaces};
use crate::network::{Exchange, Setup, Side};

/// What both sides agreed on.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) lanes: u16,
    /// Client: the ways to try, at least one.
    pub(super) routes: Vec<Way>,
    /// Our cards.
    pub(super) nics: Vec<Nic>,
}

/// One round with the peer.
pub(super) fn agree(
    (lanes, asked): (u16, bool),
    filter: Option<&str>,
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<Agreed, NetworkError> {
    let nics = our_nics(filter, setup)?;
    let ours = Advert {
        lanes,
        asked,
        addresses: told(&nics, setup.listening),
    };
    let arrived = exchange.exchange(&ours.encode())?;
    let theirs = Advert::decode(&arrived)
        .map_err(|(expected, arrived)| mismatch(setup, expected, arrived))?;
    let plain = Way {
        local: None,
        interface: None,
        peer: setup.peer,
    };
    let routes = match setup.side {
        Side::Server => vec![plain],
        Side::Client => {
            let port = setup.peer.port();
            let routes = pair_up(&ours.addresses, &theirs.addresses, port);
            let is_plain = |route: &Way| {
                route.local == Some(setup.local.ip()) && route.peer.ip() == setup.peer.ip()
            };
            match routes.as_slice() {
                // The control connection came this way without being told to.
                [] => vec![plain],
                [only] if is_plain(only) => vec![plain],
                _ => routes,
            }
        }
    };
    Ok(Agreed {
        lanes: ours.agree(&theirs),
        routes,
        nics,
    })
}

fn our_nics(filter: Option<&str>, setup: &Setup<'_>) -> Result<Vec<Nic>, NetworkError> {
    if setup.local.ip().to_canonical().is_loopback() {
        // Within this host there is nothing to choose.
        return Ok(Vec::new());
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
        Err(error) => return Err(error),
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
    Ok(choice.nics)
}

/// The addresses that the peer may open lanes from or to.
fn told(nics: &[Nic], listening: Option<SocketAddr>) -> Vec<NicAddress> {
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
