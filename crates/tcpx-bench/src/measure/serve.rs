//! The other end: does its part of each measurement until there is no more.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tcpx::{Congestion, Connection};

use crate::end::{Allocate, Buffers, End};
use crate::orders::{Answer, Op, Order, Run, Talk};
use crate::{Error, iperf3, plain};

/// A person may look at figures between two orders, and other programs have their turns.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a measuring end had this one do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    /// Payload bytes of its measurements, both directions together where there were two.
    pub bytes: u64,
    /// Contents were compared before.
    pub verified: bool,
}

/// Takes the orders of a measuring end until there are no more.
///
/// # Errors
/// Why it could not do its part; the measuring end has been told.
pub fn serve(
    connection: &Connection,
    talk: &mut dyn Talk,
    allocate: Allocate<'_>,
    limit: Duration,
) -> Result<Served, Error> {
    let (mut served, mut buffers) = (Served::default(), Buffers::default());
    loop {
        let order = talk.expect("an order of the benchmark", LONGEST)?;
        let done = match &order {
            Order::End => return talk.say(&Answer::done()).map(|()| served),
            Order::Run { run } => {
                served.verified |= run.seed.is_some();
                if run.seed.is_none() {
                    served.bytes = served.bytes.saturating_add(run.moved());
                }
                take_part(connection, talk, run, &mut buffers, allocate)
            }
            Order::Plain { run, streams } => plain::serve(connection, talk, run, *streams, limit),
            Order::Iperf3 => other_program(connection, talk, limit),
            other => Err(Error::unexpected(
                "an order to measure",
                format!("{other:?}"),
            )),
        };
        answer(talk, done)?;
    }
}

/// Tells what an order came to.
pub(crate) fn answer(talk: &mut dyn Talk, done: Result<Answer, Error>) -> Result<(), Error> {
    match done {
        Ok(answer) => talk.say(&answer),
        Err(error) => {
            let reason = (&error).into();
            // This end's error is the news, also where the other one did not stay to hear it.
            let _ = talk.say(&Answer::Failed { reason });
            Err(error)
        }
    }
}

/// The part in one run.
pub(crate) fn take_part(
    connection: &Connection,
    talk: &mut dyn Talk,
    run: &Run,
    buffers: &mut Buffers,
    allocate: Allocate<'_>,
) -> Result<Answer, Error> {
    run.check()?;
    buffers.fit(run, allocate)?;
    let end = End {
        connection,
        buffers,
        run,
        measures: false,
    };
    if run.op == Op::Send {
        let ready = || talk.say(&Answer::Ready { keys: Vec::new() });
        let cost = end.take_part(ready)?.cost;
        return Ok(Answer::Done { cost });
    }
    let cpu = crate::cost::cpu_us();
    let windows = end.expose()?;
    let keys = windows
        .iter()
        .map(|window| window.key().to_bytes().to_vec());
    talk.say(&Answer::Ready {
        keys: keys.collect(),
    })?;
    match talk.expect("the end of a measurement", LONGEST)? {
        Order::Over => {}
        other => {
            return Err(Error::unexpected(
                "the end of a measurement",
                format!("{other:?}"),
            ));
        }
    }
    let mut cost = crate::cost::Cost::default();
    cost.cpu_us = crate::cost::cpu_us().saturating_sub(cpu);
    end.let_go(windows)?;
    Ok(Answer::Done { cost })
}

/// Where to listen for this peer.
pub(crate) fn reached_from(peer: IpAddr) -> IpAddr {
    match peer {
        loopback if loopback.is_loopback() => loopback,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// What peers' sockets at this end are given: the congestion control that the connection's lanes have.
pub(crate) fn same_congestion(connection: &Connection) -> Congestion {
    match connection.congestion_control() {
        Some(name) => Congestion::Named(name),
        None => Congestion::Automatic,
    }
}

fn other_program(
    connection: &Connection,
    talk: &mut dyn Talk,
    limit: Duration,
) -> Result<Answer, Error> {
    let ip = reached_from(connection.peer().address.ip());
    let (server, port) = iperf3::serve(ip, limit)?;
    talk.say(&Answer::At {
        at: SocketAddr::new(ip, port),
        congestion: connection.congestion_control(),
    })?;
    server.end(limit)?;
    Ok(Answer::done())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_listen_where_the_peer_reaches_them() {
        for (peer, expected) in [
            ("10.0.0.2", "0.0.0.0"),
            ("fd00::2", "::"),
            ("127.0.0.1", "127.0.0.1"),
            ("::1", "::1"),
        ] {
            let peer = peer.parse().expect("an address");
            assert_eq!(reached_from(peer).to_string(), expected);
        }
    }
}
