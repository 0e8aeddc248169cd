//! Every pair of memories of several processes: one pair after the other, then all at once.
//!
//! Each process serves its memories and connects to rank 0, which says who measures what. Without a launcher or a
//! list of hosts, two processes of this host are measured.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tcpx::{Connection, Endpoint};

use super::client::{self, Amount, Work};
use super::world::World;
use crate::addresses;
use crate::args::link::{LinkArgs, MemoryArgs};
use crate::args::perf::{MatrixArgs, Place};
use crate::bench::file::{File, Row};
use crate::bench::net::orders::Mode;
use crate::bench::net::server;
use crate::child::Child;
use crate::error::Error;
use crate::key;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::messages::{self, ANSWER, Expected, LONGEST_TRANSFER, REQUEST, brief};
use crate::output::json::{self, Told};
use crate::output::say::{self, aside, one_line, say};
use crate::output::table::{indented, table};
use crate::second_process;
use crate::sizes::{Size, rate, time};

/// How long an accept waits before it looks at the clock, and a rank before it tries again.
const LOOK: Duration = Duration::from_millis(500);

/// What a rank says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hello {
    rank: u16,
    memories: Vec<Memory>,
    /// Where it reached rank 0.
    reached: IpAddr,
}

/// A memory that takes part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Memory {
    /// `GPU 0` or `host`.
    name: String,
    /// Where it receives.
    port: u16,
}

/// From rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
enum Order {
    /// Connect from these memories to these addresses, prove the contents, and say `Proven`.
    Measure {
        pairs: Vec<(u16, SocketAddr)>,
        bytes: u64,
        iterations: u32,
    },
    /// Measure.
    Go,
    /// No more.
    End,
}

/// 10^9 bytes a second and processor seconds for 10^9 bytes, or why there are none.
type Outcome = Result<(f64, f64), String>;

/// A rank's answer: nothing once every byte was compared wherever that was possible, then an outcome for each pair,
/// in their order.
type Reply = Vec<Outcome>;

/// Measures and prints the matrix.
pub(super) fn run(args: &MatrixArgs) -> Result<Told, Error> {
    if args.size.0 == 0 {
        return Err(Error::usage(
            "a size of 0 has no rate",
            "give --size 1 or more",
        ));
    }
    match World::find(args)? {
        Some(world) => take_part(args, &args.link, &world, false),
        None => {
            // Two processes, so that every byte leaves one and reaches another.
            let mut link = args.link.clone();
            link.own_key = Some(key::fresh()?);
            link.insecure = false;
            link.bind = Some(Ipv4Addr::LOCALHOST.into());
            link.port = 0;
            let world = World {
                rank: 0,
                size: 2,
                local_rank: 0,
                local_size: 1,
                leader: None,
            };
            take_part(args, &link, &world, true)
        }
    }
}

/// The part of one rank.
fn take_part(
    args: &MatrixArgs,
    link_args: &LinkArgs,
    world: &World,
    one_host: bool,
) -> Result<Told, Error> {
    let host = MemoryChoice::host("for control");
    let control = Link::new(link_args, &host, true)?.for_many();
    if control.has_fresh_key() {
        return Err(Error::usage(
            "several processes need one key, and this one has none",
            "give all of them the same --key-file, or TCPX_KEY with what `tcpx key FILE` wrote into FILE (or --insecure)",
        ));
    }
    let member = Member::serve(args, link_args, world, control.key())?;
    if world.rank > 0 {
        let leader = world.leader.as_deref().unwrap_or_default();
        return member
            .follow(&control, leader, link_args)
            .map(|()| Told::Nothing);
    }
    // Of a list the port in its first line counts.
    let listed = world.leader.as_deref().filter(|_| args.hosts.is_some());
    let mut port = link_args.port;
    if let Some(first) = listed
        .map(|text| addresses::resolve(text, port))
        .transpose()?
    {
        port = first.first().map_or(port, SocketAddr::port);
    }
    let endpoint = control.listen(link_args, port)?;
    let bound = endpoint.local_addr();
    control.warn(link_args);
    let _second = one_host
        .then(|| second_rank(args, link_args, bound.port(), control.key().as_ref()))
        .transpose()?;
    let own = SocketAddr::new(
        match link_args.bind {
            Some(ip) if !ip.is_unspecified() => ip,
            _ => Ipv4Addr::LOCALHOST.into(),
        },
        bound.port(),
    );
    std::thread::scope(|scope| {
        let followed = scope.spawn(|| member.follow(&control, &own.to_string(), link_args));
        let matrix = Matrix::gather(args, link_args, world, &endpoint, one_host);
        let told = matrix.and_then(|matrix| matrix.run());
        // It ends when its connection does.
        let _ = followed.join();
        told
    })
}

/// Rank 1 on this host.
fn second_rank(
    args: &MatrixArgs,
    link: &LinkArgs,
    port: u16,
    key: Option<&tcpx::Key>,
) -> Result<Child, Error> {
    let memory = match args.memory {
        MemoryArgs {
            gpu: Some(number), ..
        } => Some(format!("--gpu={number}")),
        MemoryArgs { host: true, .. } => Some("--host".to_owned()),
        MemoryArgs { .. } => None,
    };
    second_process::start(
        second_process::own_program(&["perf"], port, link, key)
            .args(memory)
            .envs([
                ("RANK", "1"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
            ])
            .stdout(Stdio::null()),
    )
}

/// A memory of this rank, and how it sends.
struct Part {
    memory: MemoryChoice,
    link: Link,
    port: u16,
}

/// What a rank does for others.
struct Member {
    rank: u16,
    parts: Vec<Part>,
    limit: Duration,
}

impl Member {
    /// Opens the memories, and serves each at a port of its own: behind `port` in order where they are free, so
    /// that a firewall can know them.
    fn serve(
        args: &MatrixArgs,
        link: &LinkArgs,
        world: &World,
        key: Option<tcpx::Key>,
    ) -> Result<Self, Error> {
        let mut same_key = link.clone();
        same_key.own_key = key;
        let devices = Devices::probe();
        let gpus = u32::try_from(devices.count()).unwrap_or(0);
        let wanted = if devices.means_host(&args.memory) {
            vec![Place::Host.memory()]
        } else if args.memory.gpu.is_some() {
            vec![args.memory.clone()]
        } else if world.local_size > 1 {
            vec![Place::Gpu(u32::from(world.local_rank) % gpus).memory()]
        } else {
            (0..gpus).map(|gpu| Place::Gpu(gpu).memory()).collect()
        };
        let limit = link.timeout.0;
        let first = 1 + usize::from(world.local_rank) * wanted.len();
        let mut parts = Vec::new();
        for (index, memory) in wanted.iter().enumerate() {
            let memory = devices.choose(memory, 0)?;
            let link = Link::new(&same_key, &memory, true)?.for_many();
            let behind = u16::try_from(first + index).unwrap_or(0);
            let port = match same_key.port {
                0 => 0,
                port => port.saturating_add(behind),
            };
            let endpoint = link.listen(&same_key, port);
            let endpoint = endpoint.or_else(|_| link.listen(&same_key, 0))?;
            let port = endpoint.local_addr().port();
            let serves = memory.clone();
            // Ends with the process.
            std::thread::spawn(move || serve_all(&endpoint, &serves, limit));
            parts.push(Part { memory, link, port });
        }
        Ok(Self {
            rank: world.rank,
            parts,
            limit,
        })
    }

    /// Connects to rank 0, which may start later, and does what it says.
    fn follow(&self, control: &Link, leader: &str, args: &LinkArgs) -> Result<(), Error> {
        let started = Instant::now();
        let (connection, at) = loop {
            let tried = addresses::resolve(leader, args.port).and_then(|found| {
                let mut tried = found
                    .into_iter()
                    .map(|at| Ok((control.connect_to(at)?, at)));
                let first = tried.next();
                let first = first.unwrap_or_else(|| Err(nowhere(leader)));
                tried.find(Result::is_ok).map_or(first, |later| later)
            });
            match tried {
                Ok(connected) => break connected,
                Err(error) if started.elapsed() >= args.wait.0 => return Err(error),
                Err(error) => tracing::debug!(error = error.what(), "rank 0 is not there yet"),
            }
            std::thread::sleep(LOOK);
        };
        let memory = |part: &Part| Memory {
            name: short(part.memory.name()).to_owned(),
            port: part.port,
        };
        let hello = Hello {
            rank: self.rank,
            memories: self.parts.iter().map(memory).collect(),
            reached: at.ip(),
        };
        let obeyed =
            messages::tell(&connection, REQUEST, &hello).and_then(|()| self.obey(&connection));
        link::part_after(connection, obeyed)
    }

    fn obey(&self, connection: &Connection) -> Result<(), Error> {
        loop {
            match next_order(connection)?.wait("an order")? {
                Order::End => return Ok(()),
                Order::Go => return Err(unexpected("an order to measure", &"the order to go")),
                Order::Measure {
                    pairs,
                    bytes,
                    iterations,
                } => {
                    let work = Work {
                        bytes: bytes.max(1),
                        mode: Mode::One,
                        in_flight: 1,
                        amount: Amount::Transfers(iterations.max(1)),
                        interval: None,
                        warm_up: Duration::ZERO,
                        limit: self.limit,
                    };
                    let outcomes = self.measure(connection, &pairs, &work)?;
                    messages::tell::<Reply>(connection, ANSWER, &outcomes)?;
                }
            }
        }
    }

    /// Has all pairs proven, waits for the order to go, and measures them together.
    fn measure(
        &self,
        connection: &Connection,
        pairs: &[(u16, SocketAddr)],
        work: &Work,
    ) -> Result<Vec<Outcome>, Error> {
        std::thread::scope(|scope| {
            // Each thread drops its sender when its contents are proven, or it failed; it goes on when the
            // other end of its own channel is dropped.
            let (proven, all_proven) = mpsc::channel::<()>();
            let mut held = Vec::new();
            let mut running = Vec::new();
            for &(from, to) in pairs {
                let (hold, go) = mpsc::channel::<()>();
                held.push(hold);
                let proven = proven.clone();
                let ready = move || {
                    drop(proven);
                    let _ = go.recv();
                    Ok(())
                };
                running.push(scope.spawn(move || {
                    let part = self.parts.get(usize::from(from));
                    let part = part.ok_or_else(|| unexpected("a memory's number", &from))?;
                    client::one(part.link.connect_to(to)?, &part.memory, work, ready)
                }));
            }
            drop(proven);
            let _ = all_proven.recv();
            let order = next_order(connection)?;
            messages::tell(connection, ANSWER, &Reply::new())?;
            match order.wait("the order to go")? {
                Order::Go => drop(held),
                other => return Err(unexpected("the order to go", &other)),
            }
            let outcomes = running.into_iter().map(|thread| match thread.join() {
                Ok(Ok(summary)) => Ok((summary.gb_per_second, summary.cpu_seconds_per_gb)),
                Ok(Err(error)) => Err(brief(&error.what())),
                Err(_) => Err("a measuring thread ended before its time".to_owned()),
            });
            Ok(outcomes.collect())
        })
    }
}

/// Has a thread serve each client.
fn serve_all(endpoint: &Endpoint, memory: &MemoryChoice, limit: Duration) {
    loop {
        let connection = match endpoint.accept(LOOK) {
            Ok(connection) => connection,
            // Nobody came, or whoever came did not finish the set-up: the log says who.
            Err(error) => {
                tracing::debug!(%error, "no session");
                continue;
            }
        };
        let memory = memory.clone();
        std::thread::spawn(move || {
            let peer = connection.peer().address;
            let served = server::serve(&connection, &memory, limit);
            if let Err(error) = link::part_after(connection, served) {
                aside!("{peer}: {}", one_line(&error.what()));
            }
        });
    }
}

fn next_order(connection: &Connection) -> Result<Expected, Error> {
    messages::expect(connection, REQUEST, LONGEST_TRANSFER)
}

fn unexpected(expected: &'static str, arrived: &dyn std::fmt::Debug) -> Error {
    Error::unexpected(expected, brief(&format!("{arrived:?}")))
}

fn nowhere(leader: &str) -> Error {
    Error::Address {
        address: leader.to_owned(),
        why: "the name has no address".into(),
    }
}

/// A memory of a rank.
struct End {
    rank: u16,
    /// Place in the rank's list.
    index: u16,
    at: SocketAddr,
    name: String,
}

/// What rank 0 knows and measures.
struct Matrix<'a> {
    args: &'a MatrixArgs,
    limit: Duration,
    one_host: bool,
    connections: Vec<(u16, Connection)>,
    ends: Vec<End>,
    /// Ranks that did not come.
    absent: Vec<u16>,
}

impl<'a> Matrix<'a> {
    /// Waits for all ranks, this one among them.
    fn gather(
        args: &'a MatrixArgs,
        link: &LinkArgs,
        world: &World,
        endpoint: &Endpoint,
        one_host: bool,
    ) -> Result<Self, Error> {
        let (limit, until) = (link.timeout.0, Instant::now() + link.wait.0);
        let mut came: Vec<(Hello, Connection)> = Vec::new();
        while came.len() < usize::from(world.size) && Instant::now() < until {
            let Ok(connection) = endpoint.accept(LOOK) else {
                continue;
            };
            let peer = connection.peer().address;
            let hello = messages::expect(&connection, REQUEST, limit)
                .and_then(|hello| hello.wait_at_most::<Hello>(limit, "a rank's memories"));
            match hello {
                Ok(hello) if came.iter().any(|(known, _)| known.rank == hello.rank) => {
                    aside!("{peer}: there is a rank {} already", hello.rank);
                }
                Ok(hello) if hello.rank < world.size => came.push((hello, connection)),
                Ok(hello) => aside!("{peer}: there is no rank {} of {}", hello.rank, world.size),
                Err(error) => aside!("{peer}: {}", one_line(&error.what())),
            }
        }
        let is_here = |rank: &u16| came.iter().any(|(hello, _)| hello.rank == *rank);
        let absent: Vec<u16> = (0..world.size).filter(|rank| !is_here(rank)).collect();
        if came.len() < 2 {
            return Err(Error::failed(
                format!(
                    "no other rank of {} came within {}",
                    world.size,
                    time(link.wait.0)
                ),
                "start the same command on every host, with the same key and this host as MASTER_ADDR; --wait allows more time",
            ));
        }
        came.sort_by_key(|(hello, _)| hello.rank);
        // Whoever is on this host is reached where others reached it.
        let outside = came.iter().find(|(_, connection)| !is_loopback(connection));
        let here = outside.map(|(hello, _)| hello.reached);
        let mut ends = Vec::new();
        for (hello, connection) in &came {
            let seen = connection.peer().address.ip().to_canonical();
            let ip = match here {
                Some(here) if seen.is_loopback() => here,
                _ => seen,
            };
            let end = |(index, memory): (u16, &Memory)| End {
                rank: hello.rank,
                index,
                at: SocketAddr::new(ip, memory.port),
                // What a peer writes must not drive the terminal.
                name: one_line(&memory.name),
            };
            ends.extend((0u16..).zip(&hello.memories).map(end));
        }
        let connections = came
            .into_iter()
            .map(|(hello, connection)| (hello.rank, connection));
        Ok(Self {
            args,
            limit,
            one_host,
            connections: connections.collect(),
            ends,
            absent,
        })
    }

    /// Every ordered pair of memories of different ranks. Of one host the first process sends and the second
    /// receives, each memory to the others, or to itself where it is the only one.
    fn pairs(&self) -> Vec<(&End, &End)> {
        let is_single = self.ends.len() <= 2;
        let is_pair = |from: &End, to: &End| match self.one_host {
            true => (from.rank, to.rank) == (0, 1) && (is_single || from.index != to.index),
            false => from.rank != to.rank,
        };
        let pairs = self.ends.iter().flat_map(|from| {
            let receivers = self.ends.iter().filter(move |to| is_pair(from, to));
            receivers.map(move |to| (from, to))
        });
        pairs.collect()
    }

    fn run(&self) -> Result<Told, Error> {
        let measured = self.measure_all();
        for (_, connection) in &self.connections {
            // Whoever is gone does not wait for it.
            let _ = messages::tell(connection, REQUEST, &Order::End);
        }
        measured
    }

    fn measure_all(&self) -> Result<Told, Error> {
        let pairs = self.pairs();
        let mut alone = Vec::new();
        for &(from, to) in &pairs {
            if !say::is_json() {
                aside!("measuring {} -> {}", self.title(from), self.title(to));
            }
            let (mut outcome, _) = self.measure(&[(from, to)]);
            alone.extend(outcome.pop());
        }
        if !say::is_json() {
            aside!("measuring all {} pairs at once", pairs.len());
        }
        let (at_once, span) = self.measure(&pairs);
        let moved = at_once.iter().filter(|one| one.is_ok()).count() as u64;
        let bytes = self.args.size.0 * u64::from(self.args.rounds);
        let sum = rate(bytes.saturating_mul(moved), span).unwrap_or_default();
        let missing = self.missing(&pairs, [&alone, &at_once]);
        if say::is_json() {
            let file = self.file(&pairs, [&alone, &at_once], sum, &missing);
            if missing.is_empty() {
                json::print_text(&file.text())?;
                return Ok(Told::Nothing);
            }
            return Ok(Told::Bad(json!({ "measured": file }), incomplete(&missing)));
        }
        say!(
            "{} transfers of {} each, contents verified; GB/s, rows send to columns",
            self.args.rounds,
            Size(self.args.size.0)
        );
        say!("{}", self.table("alone", &pairs, &alone).trim_end());
        say!("{}", self.table("all at once", &pairs, &at_once).trim_end());
        say!(
            "sum of all at once: {sum:.2} GB/s, from the first start to the last end; a cell counts its own time\n\
             alone, so cells add up to more where pairs do not run all the time"
        );
        match missing.is_empty() {
            true => Ok(Told::Nothing),
            false => Err(incomplete(&missing)),
        }
    }

    /// Has these pairs proven, and then measured together; the time from the start to the last report.
    fn measure(&self, pairs: &[(&End, &End)]) -> (Vec<Outcome>, Duration) {
        let bytes = self.args.size.0;
        // 100 MB/s is slow enough for any host.
        let patience = self.limit * 4 + Duration::from_secs(bytes / 10_000_000);
        let proving = self.connections.iter().filter_map(|(rank, connection)| {
            let own = pairs.iter().filter(|(from, _)| from.rank == *rank);
            let own: Vec<_> = own.map(|(from, to)| (from.index, to.at)).collect();
            let order = Order::Measure {
                pairs: own.clone(),
                bytes,
                iterations: self.args.rounds,
            };
            (!own.is_empty()).then(|| (*rank, connection, ask(connection, &order)))
        });
        let proving: Vec<_> = proving.collect();
        let proven = proving.into_iter().map(|(rank, connection, asked)| {
            let reply = asked.and_then(|reply| reply.wait_at_most(patience, "a rank's answer"));
            (rank, connection, reply.map(drop::<Reply>))
        });
        let proven: Vec<_> = proven.collect();
        let started = Instant::now();
        let going = proven.into_iter().map(|(rank, connection, proven)| {
            (rank, proven.and_then(|()| ask(connection, &Order::Go)))
        });
        let going: Vec<_> = going.collect();
        let mut figures: Vec<(u16, Result<std::vec::IntoIter<Outcome>, String>)> = going
            .into_iter()
            .map(|(rank, asked)| {
                let measured = asked.and_then(|reply| reply.wait::<Reply>("figures"));
                let measured = measured.map(Vec::into_iter);
                (rank, measured.map_err(|error| error.what()))
            })
            .collect();
        let span = started.elapsed();
        let outcomes = pairs.iter().map(|(from, _)| {
            let of_rank = figures.iter_mut().find(|(rank, _)| *rank == from.rank);
            match of_rank.map(|(_, figures)| figures) {
                Some(Ok(figures)) => figures.next().unwrap_or_else(|| Err("no figure".into())),
                Some(Err(why)) => Err(why.clone()),
                None => Err("its rank is not there".into()),
            }
        });
        (outcomes.collect(), span)
    }

    fn title(&self, end: &End) -> String {
        match self.one_host {
            true => end.name.clone(),
            false => format!("{}: {} {}", end.rank, end.at.ip(), end.name),
        }
    }

    /// Ranks and pairs without figures, with the reason.
    fn missing(&self, pairs: &[(&End, &End)], measured: [&Vec<Outcome>; 2]) -> Vec<String> {
        let mut missing: Vec<String> = self
            .absent
            .iter()
            .map(|rank| format!("rank {rank} did not come"))
            .collect();
        for (when, outcomes) in ["alone", "all at once"].iter().zip(measured) {
            for ((from, to), outcome) in pairs.iter().zip(outcomes) {
                if let Err(why) = outcome {
                    let (from, to) = (self.title(from), self.title(to));
                    missing.push(format!("{from} -> {to}, {when}: {}", one_line(why)));
                }
            }
        }
        missing
    }

    fn table(&self, title: &str, pairs: &[(&End, &End)], outcomes: &[Outcome]) -> String {
        let numbers: Vec<String> = match self.one_host {
            true => self.ends.iter().map(|end| end.name.clone()).collect(),
            false => self.ends.iter().map(|end| end.rank.to_string()).collect(),
        };
        let is_in = |end: &End, which: fn(&(&End, &End)) -> (u16, u16)| {
            pairs
                .iter()
                .any(|pair| which(pair) == (end.rank, end.index))
        };
        let columns: Vec<usize> = (0..self.ends.len())
            .filter(|at| is_in(&self.ends[*at], |(_, to)| (to.rank, to.index)))
            .collect();
        let header = columns.iter().map(|at| numbers[*at].as_str());
        let header: Vec<&str> = std::iter::once(title).chain(header).collect();
        let right: Vec<usize> = (1..header.len()).collect();
        let mut out = table(&header, &right);
        for from in &self.ends {
            if !is_in(from, |(from, _)| (from.rank, from.index)) {
                continue;
            }
            let cells = columns.iter().map(|at| {
                let to = &self.ends[*at];
                let place = pairs
                    .iter()
                    .position(|pair| std::ptr::eq(pair.0, from) && std::ptr::eq(pair.1, to));
                match place.and_then(|place| outcomes.get(place)) {
                    None => "-".to_owned(),
                    Some(Ok((rate, _))) => format!("{rate:.2}"),
                    Some(Err(_)) => "failed".to_owned(),
                }
            });
            out.add_row(std::iter::once(self.title(from)).chain(cells));
        }
        indented(&out, "  ")
    }

    fn file(
        &self,
        pairs: &[(&End, &End)],
        measured: [&Vec<Outcome>; 2],
        sum: f64,
        missing: &[String],
    ) -> File {
        let mut rows = Vec::new();
        for (when, outcomes) in ["alone", "all at once"].iter().zip(measured) {
            for ((from, to), outcome) in pairs.iter().zip(outcomes) {
                if let Ok((rate, cpu)) = outcome {
                    let name = format!("{} -> {}, {when}", self.title(from), self.title(to));
                    let mut row = Row::of(name, "GB/s", &[*rate], String::new());
                    row.cpu_seconds_per_gb = (*when == "alone").then_some(*cpu);
                    rows.push(row);
                }
            }
        }
        let name = "sum of all at once".to_owned();
        rows.push(Row::of(name, "GB/s", &[sum], String::new()));
        let devices = match Devices::probe().count() {
            0 => "host memory".to_owned(),
            devices => format!("{devices} GPUs"),
        };
        let mut notes = vec![
            "Contents of every pair were compared before anything was timed. Each figure is one measurement of several transfers.".to_owned(),
        ];
        notes.extend(missing.iter().map(|one| format!("Not measured: {one}.")));
        File::new("Every pair", &devices, rows, notes)
    }
}

fn is_loopback(connection: &Connection) -> bool {
    connection.peer().address.ip().to_canonical().is_loopback()
}

fn ask(connection: &Connection, order: &Order) -> Result<Expected, Error> {
    let reply = messages::expect(connection, ANSWER, LONGEST_TRANSFER)?;
    messages::tell(connection, REQUEST, order)?;
    Ok(reply)
}

fn incomplete(missing: &[String]) -> Error {
    Error::failed(
        format!("not everything was measured: {}", missing.join("; ")),
        "correct what is named, or leave it out, then run it again",
    )
}
