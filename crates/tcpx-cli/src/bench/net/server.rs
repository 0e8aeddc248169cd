//! The other end: does its part of each measurement until there is no more.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use serde::Serialize;
use tcpx::Connection;
use tcpx_net::plain;
use tcpx_wire::pieces::MAX_PIECES;

use super::engine::{Buffers, End, depth};
use super::iperf3;
use super::orders::{self, At, Cost, MOST_MESSAGES, Mode, Op, Order, RawRun, Reply, Run};
use super::raw;
use crate::args::bench::NetArgs;
use crate::args::perf::Place;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice};
use crate::messages::{self, REQUEST, Reason, Request, VERDICT};
use crate::output::say::say;

/// Most streams of plain loops.
const MOST_STREAMS: u16 = 64;

/// Listens, and serves one benchmark.
pub(super) fn run(args: &NetArgs, place: Place) -> Result<(), Error> {
    let memory = Devices::probe().choose(&place.memory(), 0)?;
    let link = Link::new(&args.link, &memory, true)?;
    let connection = link.serve(&args.link, "bench net --server SERVER_IP")?;
    say!("{}", link.describe(&connection, &memory));
    let served = serve(&connection, &memory, args.link.timeout.0);
    link::part_after(connection, served).map(drop)
}

/// What a measuring end had this one do.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Served {
    /// Payload bytes of its measurements, both directions together where there were two.
    pub(crate) bytes: u64,
    /// Contents were compared before.
    pub(crate) verified: bool,
}

/// Takes the orders of a measuring end until there are no more.
pub(crate) fn serve(
    connection: &Connection,
    memory: &MemoryChoice,
    limit: Duration,
) -> Result<Served, Error> {
    let request = messages::expect(connection, REQUEST, limit)?.wait("a request to measure")?;
    if request != Request::Measure {
        let expected = "a request to measure";
        return Err(messages::refuse(
            connection,
            expected,
            &request,
            "tcpx transfer server",
        ));
    }
    messages::tell_ready(connection)?;
    let (mut served, mut buffers) = (Served::default(), None);
    loop {
        // A person may look at figures between two orders, and other programs have their turns.
        let order = messages::expect(connection, REQUEST, messages::LONGEST_TRANSFER)?
            .wait("an order of the benchmark")?;
        let done = match order {
            Order::End => {
                messages::tell_ready(connection)?;
                return Ok(served);
            }
            Order::Run(run) => check(&run).and_then(|()| {
                let end = End {
                    connection,
                    buffers: sized(memory, &mut buffers, run.bytes, run.depth)?,
                    memory,
                };
                let part = end.take_part(&run, false, || messages::tell_ready(connection))?;
                match run.seed {
                    Some(_) => served.verified = true,
                    None => served.bytes = served.bytes.saturating_add(run.moved()),
                }
                Ok(part.cost)
            }),
            Order::Raw(run) => check(&run.run).and_then(|()| plain_loops(connection, &run, limit)),
            Order::Iperf3 => other_program(connection, limit),
        };
        match done {
            Ok(cost) => messages::tell(connection, VERDICT, &Reply::Ok(cost))?,
            Err(error) => {
                // Whichever of the two the measuring end waits for.
                let reason = Reason::from(&error);
                let _ = messages::tell(connection, VERDICT, &Reply::Err(reason.clone()));
                return Err(messages::refused(connection, reason, error));
            }
        }
    }
}

/// What the peer asks for must be something.
fn check(run: &Run) -> Result<(), Error> {
    if run.bytes == 0
        || run.count == 0
        || run.count > MOST_MESSAGES
        || run.depth == 0
        || run.depth > 64
        || (run.mode == Mode::Back && run.op != Op::Send)
        || (run.mode == Mode::Latency && run.op.is_batch())
        || run.cut().bytes == 0
        || run.bytes.div_ceil(run.cut().bytes.max(1)) > u64::from(MAX_PIECES)
    {
        return Err(Error::unexpected(
            "a measurement of 1 to 1,000,000 messages of as many pieces at most, with 1 to 64 in flight",
            format!("{run:?}"),
        ));
    }
    Ok(())
}

/// Memory of the right size, kept while the size stays the same.
pub(super) fn sized<'a>(
    memory: &MemoryChoice,
    buffers: &'a mut Option<Buffers>,
    bytes: u64,
    asked: u16,
) -> Result<&'a Buffers, Error> {
    let depth = depth(bytes, asked);
    if !buffers.as_ref().is_some_and(|had| had.fits(bytes, depth)) {
        // The old memory goes first: both might not fit.
        *buffers = None;
    }
    match buffers {
        Some(buffers) => Ok(buffers),
        empty => Ok(empty.insert(Buffers::new(memory, bytes, depth)?)),
    }
}

/// Where to listen for this peer.
fn reached_from(peer: IpAddr) -> IpAddr {
    match peer {
        loopback if loopback.is_loopback() => loopback,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn plain_loops(connection: &Connection, run: &RawRun, limit: Duration) -> Result<Cost, Error> {
    if run.streams == 0 || run.streams > MOST_STREAMS {
        return Err(Error::unexpected(
            "1 to 64 plain streams",
            run.streams.to_string(),
        ));
    }
    let peer = connection.peer().address.ip();
    let any = reached_from(peer);
    let congestion = orders::same_congestion(connection);
    let listener =
        plain::listen(SocketAddr::new(any, 0), &congestion).map_err(tcpx::Error::from)?;
    let port = listener
        .local_addr()
        .map_err(Error::process("look at the listening socket"))?;
    let mut memory = raw::Memory::new(run, false);
    messages::tell_ready(connection)?;
    let at = At {
        port: port.port(),
        congestion: plain::congestion_control(&listener),
    };
    orders::meet_at(connection, &at)?;
    raw::serve(run, &mut memory, &listener, peer, limit)
}

fn other_program(connection: &Connection, limit: Duration) -> Result<Cost, Error> {
    let peer = connection.peer().address.ip();
    let any = reached_from(peer);
    let (server, port) = iperf3::serve(any, limit)?;
    messages::tell_ready(connection)?;
    let at = At {
        port,
        congestion: connection.congestion_control(),
    };
    orders::meet_at(connection, &at)?;
    iperf3::end(server, limit)?;
    Ok(Cost::default())
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
