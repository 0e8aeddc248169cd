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
use crate::messages::{self, Answer, REQUEST, Request, VERDICT};
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
    orders::ready(connection)?;
    let (mut served, mut buffers) = (Served::default(), None);
    loop {
        // A person may look at figures between two orders, and other programs have their turns.
        let order = messages::expect(connection, REQUEST, messages::LONGEST_TRANSFER)?
            .wait("an order of the benchmark")?;
        let done = match order {
            Order::End => {
                orders::ready(connection)?;
                return Ok(served);
            }
            Order::Verify {
                op,
                bytes,
                depth,
                seed,
            } => verify(connection, memory, &mut buffers, (op, bytes, depth, seed))
                .inspect(|_| served.verified = true),
            Order::Run(run) => check(&run).and_then(|()| {
                let buffers = sized(memory, &mut buffers, run.bytes, run.depth)?;
                let end = End {
                    connection,
                    buffers,
                    memory,
                };
                let cost = end.serve(&run, || orders::ready(connection))?;
                served.bytes = served.bytes.saturating_add(run.moved());
                Ok(cost)
            }),
            Order::Raw(run) => check(&run.run).and_then(|()| plain_loops(connection, &run, limit)),
            Order::Iperf3 => other_program(connection, limit),
        };
        let reply = match &done {
            Ok(cost) => Reply::Done(*cost),
            Err(error) => Reply::Failed {
                why: messages::brief(&error.what()),
                hint: messages::brief(&error.hint()),
            },
        };
        if let Err(error) = done {
            // Whichever of the two the measuring end waits for.
            let refusal = Answer::Refused {
                why: messages::brief(&error.what()),
                hint: messages::brief(&error.hint()),
            };
            let _ = messages::tell(connection, VERDICT, &reply);
            return Err(messages::refused(connection, &refusal, error));
        }
        messages::tell(connection, VERDICT, &reply)?;
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
        return Err(Error::Unexpected {
            expected: "a measurement of 1 to 1,000,000 messages of as many pieces at most, with 1 to 64 in flight",
            arrived: format!("{run:?}"),
        });
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

/// Seed of what the serving end sends, made from the one for the measuring end.
pub(super) const fn back(seed: u64) -> u64 {
    seed.rotate_left(32) ^ 0x5bd1_e995_5bd1_e995
}

fn verify(
    connection: &Connection,
    memory: &MemoryChoice,
    buffers: &mut Option<Buffers>,
    (op, bytes, count, seed): (Op, u64, u16, u64),
) -> Result<Cost, Error> {
    let run = Run {
        mode: Mode::Both,
        op,
        bytes,
        count: count.into(),
        depth: count,
        at_once: false,
        pieces: None,
    };
    check(&run)?;
    let buffers = sized(memory, buffers, bytes, count)?;
    buffers.prepare(back(seed))?;
    let cost = End {
        connection,
        buffers,
        memory,
    }
    .serve(&run, || orders::ready(connection))?;
    buffers.compare(seed, count)?;
    Ok(cost)
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
        return Err(Error::Unexpected {
            expected: "1 to 64 plain streams",
            arrived: run.streams.to_string(),
        });
    }
    let peer = connection.peer().address.ip();
    let any = reached_from(peer);
    let congestion = orders::same_congestion(connection);
    let listener =
        plain::listen(SocketAddr::new(any, 0), &congestion).map_err(tcpx::Error::from)?;
    let port = listener.local_addr().map_err(|source| Error::Process {
        doing: "look at the listening socket",
        source,
    })?;
    let mut memory = raw::Memory::new(run, false);
    orders::ready(connection)?;
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
    let (server, port) = iperf3::Server::start(any, limit)?;
    orders::ready(connection)?;
    let at = At {
        port,
        congestion: connection.congestion_control(),
    };
    orders::meet_at(connection, &at)?;
    server.end(limit)?;
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
