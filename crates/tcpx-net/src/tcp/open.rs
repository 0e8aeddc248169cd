//! Opening the lanes: the client tries each way, the server takes what comes.

use std::fmt::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::agree::{Agreed, mismatch};
use super::repair::{Arrivals, Dialler, Repair};
use crate::channel::Way;
use crate::error::NetworkError;
use crate::interfaces::Nic;
use crate::network::{Setup, Side};

/// A way that no lane could be opened over for this long is not used.
const TRY: Duration = Duration::from_millis(1500);

/// All lanes by number, how they come back when they die, and the ways they take, for a person.
pub(super) fn open(
    agreed: Agreed,
    setup: &Setup<'_>,
) -> Result<(Vec<TcpStream>, Repair, String), NetworkError> {
    let Agreed {
        lanes,
        routes,
        nics,
    } = agreed;
    match setup.side {
        Side::Client => {
            let (streams, dialler) = dial(lanes, &routes, setup)?;
            let ways = describe(&streams, &nics);
            Ok((streams, Repair::Dial(Arc::new(dialler)), ways))
        }
        Side::Server => {
            let streams = collect(lanes, setup)?;
            for stream in &streams {
                bind_to_card(stream, &nics);
            }
            let ways = describe(&streams, &nics);
            let repair = setup.lanes.clone().map_or(Repair::Never, |inbox| {
                Repair::Take(Arrivals::new(inbox, nics))
            });
            Ok((streams, repair, ways))
        }
    }
}

fn dial(
    lanes: u16,
    routes: &[Way],
    setup: &Setup<'_>,
) -> Result<(Vec<TcpStream>, Dialler), NetworkError> {
    let spread = |routes: &[&Way]| -> Vec<Way> {
        let spread = (0..lanes).zip(routes.iter().copied().cycle());
        spread.map(|(_, route)| route.clone()).collect()
    };
    let every: Vec<&Way> = routes.iter().collect();
    let first = Dialler::new(setup, spread(&every));
    let tried = routes.len().min(usize::from(lanes));
    let plain = Way {
        local: None,
        interface: None,
        peer: setup.peer,
    };
    // The first lane over each way shows whether it works; that of the control connection has to.
    let deadline = if routes == [plain.clone()] {
        setup.deadline
    } else {
        setup.deadline.min(Instant::now() + TRY)
    };
    let mut streams: Vec<Option<TcpStream>> = (0..lanes).map(|_| None).collect();
    let mut good = Vec::new();
    let mut last = None;
    let opened: Vec<_> = std::thread::scope(|scope| {
        let dialler = &first;
        let threads: Vec<_> = (0u16..)
            .take(tried)
            .map(|lane| scope.spawn(move || dialler.open(lane, deadline)))
            .collect();
        threads
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect()
    });
    for ((route, opened), place) in routes.iter().zip(opened).zip(&mut streams) {
        match opened {
            Ok(Ok(stream)) => {
                good.push(route);
                *place = Some(stream);
            }
            Ok(Err(error)) => {
                tracing::warn!(peer = %route.peer, interface = route.interface, %error, "no lane this way");
                last = Some(error);
            }
            Err(_) => {
                last = Some(NetworkError::Control {
                    reason: "the thread that opens a lane panicked".to_owned(),
                });
            }
        }
    }
    if good.is_empty() {
        match last {
            Some(error) if routes == [plain.clone()] => return Err(error),
            // It works whatever the cards say.
            _ => good.push(&plain),
        }
    }
    // Lanes that are open stay where they are; the others go where there are fewest.
    let mut taken: Vec<Way> = Vec::with_capacity(streams.len());
    let mut uses = vec![0u32; good.len()];
    for (index, place) in streams.iter().enumerate() {
        let own = place.as_ref().and_then(|_| {
            let route = routes.get(index)?;
            good.iter().position(|one| *one == route)
        });
        let fewest = || (0..good.len()).min_by_key(|at| uses[*at]).unwrap_or(0);
        let chosen = own.unwrap_or_else(fewest);
        uses[chosen] += 1;
        taken.push(good[chosen].clone());
    }
    let dialler = Dialler::new(setup, taken);
    let streams = (0u16..)
        .zip(streams)
        .map(|(lane, stream)| stream.map_or_else(|| dialler.open(lane, setup.deadline), Ok))
        .collect::<Result<_, _>>()?;
    Ok((streams, dialler))
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
    while streams.iter().any(Option::is_none) {
        let Some(arrived) = inbox.take(setup.deadline) else {
            return Err(NetworkError::TimedOut {
                peer: setup.peer,
                operation: "opening the lanes",
            });
        };
        match streams.get_mut(usize::from(arrived.lane)) {
            // A second stream of one lane: the client gave the first one up.
            Some(place) if arrived.lanes == lanes => *place = Some(arrived.stream),
            _ => {
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

/// What an accepted lane sends leaves through the card that it came to, whatever the routes say.
pub(super) fn bind_to_card(stream: &TcpStream, nics: &[Nic]) {
    if nics.len() < 2 {
        return;
    }
    let Some(name) = card_of(stream, nics) else {
        return;
    };
    if let Err(error) = socket2::SockRef::from(stream).bind_device(Some(name.as_bytes())) {
        tracing::debug!(interface = name, %error, "a lane is bound by address alone");
    }
}

/// The name of the card that has the stream's local address.
fn card_of<'a>(stream: &TcpStream, nics: &'a [Nic]) -> Option<&'a str> {
    let local = stream.local_addr().ok()?.ip().to_canonical();
    let has = |nic: &&Nic| nic.addresses.iter().any(|(own, _)| *own == local);
    Some(nics.iter().find(has)?.name.as_str())
}

/// The ways of the lanes, where there is more than one.
fn describe(streams: &[TcpStream], nics: &[Nic]) -> String {
    let mut ways: Vec<(String, u32)> = Vec::new();
    for stream in streams {
        let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else {
            continue;
        };
        let name = card_of(stream, nics).map_or_else(String::new, |name| format!("{name} "));
        let way = format!("{name}{} to {}", local.ip(), peer.ip());
        match ways.iter_mut().find(|(known, _)| *known == way) {
            Some((_, count)) => *count += 1,
            None => ways.push((way, 1)),
        }
    }
    if ways.len() < 2 {
        return String::new();
    }
    let mut text = String::from(" over");
    for (index, (way, count)) in ways.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        // Writing to a string does not fail.
        let _ = write!(text, "{comma} {way} ({count})");
    }
    text
}
