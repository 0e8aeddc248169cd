//! Every pair of memories of several processes, by a list of hosts or by what a launcher says. Each
//! serves its memories and connects to rank 0, which has one pair measured after the other.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tcpx::{Connection, Endpoint};
use tcpx_bench::report::{Row, Subject};
use tcpx_bench::{Mode, Op, Run};

use super::client::{self, Work};
use super::world::World;
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::messages::{self, ANSWER, LONGEST_TRANSFER, REQUEST, brief};
use crate::output::json::Told;
use crate::output::say::{self, aside, one_line};
use crate::perf::{MatrixArgs, Place};
use crate::sizes::time;
use crate::{bench, measuring};

/// How long an accept waits before it looks at the clock.
const LOOK: Duration = Duration::from_millis(500);

/// From rank 0 to another one, which says [`Hello`] first: measure this pair, answered with an
/// [`Outcome`], or end.
type Order = Option<Pair>;

/// From a memory by its place in the host's list to where another one receives.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pair {
    from: usize,
    to: SocketAddr,
    bytes: u64,
    iterations: u32,
}

/// What a rank says of itself.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hello {
    rank: usize,
    memories: Vec<Memory>,
    /// Where it reached rank 0.
    reached: IpAddr,
}

/// A memory that takes part: `GPU 0` or `host`, and where it receives.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Memory {
    name: String,
    port: u16,
}

/// 10^9 bytes a second and processor seconds for 10^9 bytes, or why there are none.
type Outcome = Result<(f64, f64), String>;

/// Measures and prints the matrix, or takes part.
pub(super) fn run(args: &MatrixArgs) -> Result<Told, Error> {
    bench::some_bytes(args.size)?;
    let world = World::find(args)?;
    let host = MemoryChoice::host("for control");
    let control = Link::new(&args.link, &host, true)?.for_many();
    if control.has_fresh_key() {
        return Err(Error::usage(
            "several processes need one key, and this one has none",
            "give all of them the same --key-file, or TCPX_KEY with what `tcpx key FILE` wrote into FILE (or --insecure)",
        ));
    }
    let parts = serve(args, &world, control.key())?;
    match world.rank {
        0 => Matrix::gather(args, &world, &control, parts)?.measure(),
        _ => follow(args, &world, &control, &parts).map(|()| Told::Nothing),
    }
}

/// A memory of this host, and how it sends.
struct Part {
    memory: MemoryChoice,
    link: Link,
    port: u16,
}

/// Opens the memories, and serves each at a port of its own: behind this rank's in order where they
/// are free, so that a firewall can know them.
fn serve(args: &MatrixArgs, world: &World, key: Option<tcpx::Key>) -> Result<Vec<Part>, Error> {
    let mut same_key = args.link.clone();
    same_key.own_key = key;
    let devices = Devices::probe();
    let gpus = u32::try_from(devices.count()).unwrap_or(0);
    let wanted = match devices.means_host(&args.memory) || args.memory.gpu.is_some() {
        true => vec![args.memory.clone()],
        false if world.local_size > 1 => vec![Place::Gpu(world.local_rank % gpus).memory()],
        false => (0..gpus).map(|gpu| Place::Gpu(gpu).memory()).collect(),
    };
    let limit = args.link.timeout.0;
    let mut parts = Vec::new();
    let first = world.local_rank as usize * wanted.len() + 1;
    for (behind, memory) in (first..).zip(&wanted) {
        let memory = devices.choose(memory, 0)?;
        let link = Link::new(&same_key, &memory, true)?.for_many();
        let behind = u16::try_from(behind).unwrap_or(u16::MAX);
        let endpoint = link.listen(&same_key, world.port.saturating_add(behind));
        let endpoint = endpoint.or_else(|_| link.listen(&same_key, 0))?;
        let port = endpoint.local_addr().port();
        let serves = memory.clone();
        // Ends with the process.
        std::thread::spawn(move || serve_all(&endpoint, &serves, limit));
        parts.push(Part { memory, link, port });
    }
    Ok(parts)
}

/// Serves one client after the other.
fn serve_all(endpoint: &Endpoint, memory: &MemoryChoice, limit: Duration) {
    loop {
        // Without one: nobody came, or whoever came did not finish the set-up; the log says who.
        let Ok(connection) = endpoint.accept(LOOK) else {
            continue;
        };
        let peer = connection.peer().address;
        let served = measuring::serve(&connection, memory, limit);
        if let Err(error) = link::part_after(connection, served) {
            aside!("{peer}: {}", one_line(&error.what()));
        }
    }
}

fn memories(parts: &[Part]) -> Vec<Memory> {
    let memory = |part: &Part| Memory {
        name: short(part.memory.name()).to_owned(),
        port: part.port,
    };
    parts.iter().map(memory).collect()
}

/// Connects to rank 0, which may start later, and does what it says.
fn follow(args: &MatrixArgs, world: &World, control: &Link, parts: &[Part]) -> Result<(), Error> {
    let wait = args.link.wait.0;
    let connection = control.connect_within(&args.link, &world.leader, wait, |error| {
        !error.is_interrupted()
    })?;
    let hello = Hello {
        rank: world.rank,
        memories: memories(parts),
        reached: connection.peer().address.ip(),
    };
    let obeyed = messages::send_message(&connection, ANSWER, &hello)
        .and_then(|()| obey(&connection, parts, args.link.timeout.0));
    link::part_after(connection, obeyed)
}

fn obey(connection: &Connection, parts: &[Part], limit: Duration) -> Result<(), Error> {
    loop {
        let order = messages::expect(connection, REQUEST, LONGEST_TRANSFER)?;
        let Some(pair) = order.wait::<Order>("an order")? else {
            return Ok(());
        };
        messages::send_message(connection, ANSWER, &measure(parts, pair, limit))?;
    }
}

/// Measures one pair from a memory of this host.
fn measure(parts: &[Part], pair: Pair, limit: Duration) -> Outcome {
    let part = parts.get(pair.from).ok_or("there is no such memory")?;
    let (bytes, count) = (pair.bytes.max(1), pair.iterations.max(1));
    let work = Work {
        run: Run::new(Mode::One, Op::Send, bytes, count, 1),
        time: Duration::MAX,
        interval: None,
        warm_up: Duration::ZERO,
        limit,
    };
    let connection = part.link.connect_to(pair.to);
    let measured = connection.and_then(|connection| client::one(connection, &part.memory, &work));
    let figures = measured.map(|(whole, ..)| (whole.rate(), whole.cpu()));
    figures.map_err(|error| brief(&error.what()))
}

/// A memory of a rank, for rank 0.
struct End {
    rank: usize,
    index: usize,
    at: SocketAddr,
    name: String,
}

/// What rank 0 knows and measures.
struct Matrix<'a> {
    args: &'a MatrixArgs,
    parts: Vec<Part>,
    /// Kept until the end: a control connection that broke comes back to it.
    _endpoint: Endpoint,
    /// By rank; none for this one, and for those that did not come.
    others: Vec<Option<Connection>>,
    ends: Vec<End>,
    missing: Vec<String>,
}

impl<'a> Matrix<'a> {
    /// Waits for every other rank.
    fn gather(
        args: &'a MatrixArgs,
        world: &World,
        control: &Link,
        parts: Vec<Part>,
    ) -> Result<Self, Error> {
        let endpoint = control.listen(&args.link, world.port)?;
        let (limit, until) = (args.link.timeout.0, Instant::now() + args.link.wait.0);
        let mut others: Vec<_> = (0..world.size).map(|_| None).collect();
        let mut hellos: Vec<(Hello, IpAddr)> = Vec::new();
        while hellos.len() + 1 < world.size && Instant::now() < until {
            // Without one: nobody came, or whoever came did not finish the set-up; the log says
            // who.
            let Ok(connection) = endpoint.accept(LOOK) else {
                continue;
            };
            let peer = connection.peer().address;
            let hello = messages::expect(&connection, ANSWER, limit)
                .and_then(|hello| hello.wait_at_most::<Hello>(limit, "a rank's first word"));
            match hello {
                Ok(hello) if hello.rank > 0 && matches!(others.get(hello.rank), Some(None)) => {
                    others[hello.rank] = Some(connection);
                    hellos.push((hello, peer.ip().to_canonical()));
                }
                Ok(hello) => aside!("{peer}: nobody waits for a rank {}", hello.rank),
                Err(error) => aside!("{peer}: {}", one_line(&error.what())),
            }
        }
        let absent = (1..world.size).filter(|rank| others[*rank].is_none());
        let missing: Vec<_> = absent
            .map(|rank| format!("{} did not come", world.title(rank)))
            .collect();
        let Some((first, _)) = hellos.first() else {
            return Err(Error::failed(
                format!(
                    "no other host answered within {}: {}",
                    time(args.link.wait.0),
                    missing.join("; ")
                ),
                "run the same command on every host, with the same list or rank 0's host as MASTER_ADDR, and the same key; --wait allows more time",
            ));
        };
        // Whoever is on rank 0's host is reached where others reached it.
        let outside = hellos.iter().find(|(_, seen)| !seen.is_loopback());
        let here = outside.map_or(first.reached, |(hello, _)| hello.reached);
        let own = Hello {
            rank: 0,
            memories: memories(&parts),
            reached: here,
        };
        hellos.push((own, here));
        hellos.sort_by_key(|(hello, _)| hello.rank);
        let mut ends = Vec::new();
        for (hello, seen) in hellos {
            let seen = if seen.is_loopback() { here } else { seen };
            let ip = world.hosts.get(hello.rank).map_or(seen, |(_, at)| at.ip());
            let of_rank = hello.memories.into_iter().enumerate();
            ends.extend(of_rank.map(|(index, memory)| End {
                rank: hello.rank,
                index,
                at: SocketAddr::new(ip, memory.port),
                // What a peer writes must not drive the terminal.
                name: format!("{}: {ip} {}", hello.rank, one_line(&memory.name)),
            }));
        }
        Ok(Self {
            args,
            parts,
            _endpoint: endpoint,
            others,
            ends,
            missing,
        })
    }

    /// Has every ordered pair of memories of different ranks measured.
    fn measure(mut self) -> Result<Told, Error> {
        let mut rows = Vec::new();
        for from in &self.ends {
            for to in self.ends.iter().filter(|to| to.rank != from.rank) {
                let name = format!("{} -> {}", from.name, to.name);
                if !say::is_json() {
                    aside!("measuring {name}");
                }
                match self.pair(from, to) {
                    Ok((rate, cpu)) => rows.push(Row::of(name, "GB/s", &[rate]).cpu(&[cpu])),
                    Err(why) => self.missing.push(format!("{name}: {}", one_line(&why))),
                }
            }
        }
        for connection in self.others.drain(..).flatten() {
            // Whoever is gone does not wait for it.
            let end = messages::send_message(&connection, REQUEST, &Order::None);
            let _ = link::part_after(connection, end);
        }
        let machine = bench::machine(&self.parts[0].memory, &Devices::probe());
        let notes = vec![
            "One pair after the other; contents were verified before. Each figure is one measurement of several transfers.".to_owned(),
        ];
        let subject = Subject::new("Every pair of hosts", machine, rows, notes);
        if self.missing.is_empty() {
            return bench::show(&subject).map(|()| Told::Nothing);
        }
        let incomplete = Error::failed(
            format!("not everything was measured: {}", self.missing.join("; ")),
            "correct what is named, or leave it out, then run it again",
        );
        if say::is_json() {
            return Ok(Told::Bad(json!({ "measured": subject }), incomplete));
        }
        bench::show(&subject).and(Err(incomplete))
    }

    fn pair(&self, from: &End, to: &End) -> Outcome {
        let (bytes, limit) = (self.args.size.0, self.args.link.timeout.0);
        let pair = Pair {
            from: from.index,
            to: to.at,
            bytes,
            iterations: self.args.rounds,
        };
        let Some(connection) = &self.others[from.rank] else {
            return measure(&self.parts, pair, limit);
        };
        // 100 MB/s is slow enough for any host.
        let moved = bytes.saturating_mul(u64::from(self.args.rounds) + 4);
        let patience = limit * 4 + Duration::from_secs(moved / 100_000_000);
        let outcome = messages::expect(connection, ANSWER, LONGEST_TRANSFER).and_then(|reply| {
            messages::send_message(connection, REQUEST, &Some(pair))?;
            reply.wait_at_most(patience, "a rank's outcome")
        });
        outcome.map_err(|error| error.what())?
    }
}
