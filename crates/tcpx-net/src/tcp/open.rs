//! Opening the lanes: the client tries each way, the server takes what comes.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use tcpx_lanes::arrival;

use super::advert::Advert;
use super::agree::{Agreed, Cards, mismatch, plain};
use super::dials::Dials;
use super::repair::{Dialler, Repair, Restores};
use crate::channel::Way;
use crate::dial::JoinedLane;
use crate::error::NetworkError;
use crate::network::{Exchange, Setup, Side};

/// Lanes that the client opens early have this long.
const TRY: Duration = Duration::from_millis(1500);

/// Lanes that the client opens while the server's wish is still under way to it: as many as this
/// wish needs at once, the way of the control connection, unless they will take others.
pub(super) fn early((ours, cards): &(Advert, Cards), setup: &Setup<'_>) -> Dials {
    let lanes = ours.at_first(ours);
    let waits = setup.side == Side::Server || cards.bind();
    let plain = vec![plain(setup); usize::from(lanes)];
    let soon = setup.deadline.min(Instant::now() + TRY);
    let mut dials = Dials::new(Dialler::new(setup, plain.clone()), soon);
    for (lane, way) in (0..lanes).zip(plain).filter(|_| !waits) {
        dials.want(lane, vec![way], true);
    }
    dials
}

/// The lanes that are opened at first by number, how they come back when they die, and the ways
/// they take, for a person.
pub(super) fn open(
    agreed: Agreed,
    early: Dials,
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<(Vec<JoinedLane>, Repair, String), NetworkError> {
    let Agreed {
        lanes,
        at_first,
        routes,
        cards,
        has_door: _,
    } = agreed;
    match setup.side {
        Side::Client => {
            let lanes = (lanes, at_first);
            let (streams, dialler) = dial(lanes, early, (&routes, &cards), setup, exchange)?;
            let ways = describe(&streams, &cards);
            Ok((streams, Repair::new(Restores::Dials(dialler)), ways))
        }
        Side::Server => {
            let streams = collect(at_first, setup, exchange)?;
            for joined in &streams {
                accept_on_card(&joined.stream, &cards, setup)?;
            }
            let ways = describe(&streams, &cards);
            let side = setup.lanes.clone();
            let side = side.map_or(Restores::Never, |inbox| Restores::Takes(inbox, cards));
            Ok((streams, Repair::new(side), ways))
        }
    }
}

/// Opens the lanes that are opened at first: each over a route of its own, or over what works in
/// its place.
fn dial(
    (lanes, at_first): (u16, u16),
    mut dials: Dials,
    (routes, cards): (&[Way], &Cards),
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<(Vec<JoinedLane>, Dialler), NetworkError> {
    let plain = plain(setup);
    let is_plain = routes == [plain.clone()];
    let spread = |routes: &[Way]| -> Vec<Way> {
        routes.iter().cycle().take(lanes.into()).cloned().collect()
    };
    let first = Dialler::new(setup, spread(routes));
    match is_plain {
        true => dials.agreed(first, setup.deadline),
        // The early ones took the way of the control connection.
        false => dials = Dials::new(first, setup.deadline),
    }
    let filter = cards.forbids(setup.local.ip());
    for lane in dials.count()..at_first.into() {
        let (before, own) = routes.split_at(lane % routes.len());
        let mut ways: Vec<Way> = own.iter().chain(before).cloned().collect();
        if cards.share_network(&ways[0]) {
            let interface = None;
            ways.insert(
                1,
                Way {
                    interface,
                    ..ways[0].clone()
                },
            );
        }
        // It works whatever the cards say.
        ways.extend(filter.is_none().then(|| plain.clone()));
        ways.dedup();
        dials.want(lane as u16, ways, false);
    }
    let (mut streams, mut ways) = (Vec::new(), Vec::new());
    for opened in dials.finish(at_first.into(), exchange)? {
        let (stream, way) = opened.map_err(|error| match filter {
            Some(filter) if !is_plain => NetworkError::NoWay {
                peer: setup.peer,
                filter: filter.to_string(),
                // Without that error's own advice.
                found: error
                    .to_string()
                    .split("; ")
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
            },
            _ => error,
        })?;
        streams.push(stream);
        ways.push(way);
    }
    Ok((streams, Dialler::new(setup, spread(&ways))))
}

fn collect(
    lanes: u16,
    setup: &Setup<'_>,
    exchange: &mut dyn Exchange,
) -> Result<Vec<JoinedLane>, NetworkError> {
    let Some(inbox) = &setup.lanes else {
        return Err(mismatch(
            setup,
            "the listener's lane inbox in the set-up".to_owned(),
            "none".to_owned(),
        ));
    };
    let mut streams: Vec<Option<JoinedLane>> = (0..lanes).map(|_| None).collect();
    while streams.iter().any(Option::is_none) {
        let Some(arrived) = inbox.take(exchange, setup.deadline)? else {
            return Err(NetworkError::TimedOut {
                peer: setup.peer,
                operation: "opening the lanes",
            });
        };
        match streams.get_mut(usize::from(arrived.lane)) {
            // A second stream of one lane: the client gave the first one up.
            Some(place) => {
                let (stream, keys) = (arrived.stream, arrived.keys);
                *place = Some(JoinedLane { stream, keys });
            }
            None => {
                return Err(mismatch(
                    setup,
                    format!("{lanes} lanes"),
                    format!("lane {} of {}", arrived.lane, arrived.lanes),
                ));
            }
        }
    }
    Ok(streams.into_iter().flatten().collect())
}

/// As [`bind_to_card`], for a lane of the set-up: one that came to a card which the user does not
/// allow, or through one, is an error.
fn accept_on_card(
    stream: &TcpStream,
    cards: &Cards,
    setup: &Setup<'_>,
) -> Result<(), NetworkError> {
    let through = bind_to_card(stream, cards);
    let Ok(local) = stream.local_addr() else {
        return Ok(());
    };
    let by_address = cards
        .forbids(local.ip())
        .map(|filter| (filter, local.ip().to_string()));
    let filter = cards.filter.as_ref();
    let by_arrival = || filter.zip(through.filter(|name| !cards.has(name)));
    let Some((filter, place)) = by_address.or_else(by_arrival) else {
        return Ok(());
    };
    Err(NetworkError::NoWay {
        peer: setup.peer,
        filter: filter.to_string(),
        found: format!("the peer came to {place} instead"),
    })
}

/// What an accepted lane sends leaves through the card that it came to, whatever the routes say. A
/// lane that came in through another one than its address is of stays unbound, for a socket that is
/// bound to a card hears nothing from others; the answer is which one that was.
pub(super) fn bind_to_card(stream: &TcpStream, cards: &Cards) -> Option<String> {
    let local = stream.local_addr().ok()?.ip();
    let nic = cards.card_at(local).filter(|nic| nic.carries);
    let nic = nic.filter(|_| cards.bind())?;
    let through = arrival::interface(stream);
    if let Some(other) = through.filter(|name| *name != nic.name) {
        tracing::warn!(
            address = %local, interface = nic.name, through = other,
            "a lane came in through another card than its address is of, so all may share one: where cards have one network, set net.ipv4.conf.all.arp_ignore=1 and net.ipv4.conf.all.arp_announce=2"
        );
        return Some(other);
    }
    if let Err(error) = socket2::SockRef::from(stream).bind_device(Some(nic.name.as_bytes())) {
        tracing::debug!(interface = nic.name, %error, "a lane is bound by address alone");
    }
    None
}

/// The ways of the lanes: between which addresses, through which cards, and how many where they
/// differ.
fn describe(lanes: &[JoinedLane], cards: &Cards) -> String {
    let mut ways: Vec<(String, u32)> = Vec::new();
    for JoinedLane { stream, .. } in lanes {
        let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else {
            continue;
        };
        let (local, peer) = (local.ip().to_canonical(), peer.ip().to_canonical());
        let nic = cards.card_at(local);
        let name = nic.map_or_else(String::new, |nic| format!("{} ", nic.name));
        let way = format!("{name}{local} to {peer}");
        match ways.iter_mut().find(|(known, _)| *known == way) {
            Some((_, count)) => *count += 1,
            None => ways.push((way, 1)),
        }
    }
    match ways.as_slice() {
        [] => String::new(),
        // Within a host nothing was chosen.
        [_] if cards.nics.is_empty() => String::new(),
        [(way, _)] => format!(" over {way}"),
        several => {
            let each = several
                .iter()
                .map(|(way, count)| format!("{way} ({count})"));
            format!(" over {}", each.collect::<Vec<_>>().join(", "))
        }
    }
}
