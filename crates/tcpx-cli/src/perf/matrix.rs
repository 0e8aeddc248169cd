//! Every pair of memories of several hosts. Each host runs this with the same list: it serves its memories, and does
//! what the first host of the list says, which has one pair measured after the other.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tcpx::{Connection, Endpoint};
use tcpx_bench::report::{Row, Subject};
use tcpx_bench::{Mode, Op, Run};

use super::client::{self, Amount, Work};
use crate::args::perf::{MatrixArgs, Place};
use crate::error::Error;
use crate::link::{self, Link};
use crate::memory_choice::{Devices, MemoryChoice, short};
use crate::messages::{self, ANSWER, LONGEST_TRANSFER, REQUEST, brief};
use crate::output::json::Told;
use crate::output::say::{self, aside, one_line};
use crate::sizes::time;
use crate::{addresses, bench, measuring};

/// Most hosts that are measured together.
const MOST: usize = 256;

/// How long an accept waits before it looks at the clock, and the first host before it tries again.
const LOOK: Duration = Duration::from_millis(500);

/// From the first host to another one, which answers with memories, an outcome, or nothing.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
enum Order {
    Memories,
    Measure {
        /// The place of a memory in its host's list.
        from: usize,
        to: SocketAddr,
        bytes: u64,
        iterations: u32,
    },
    End,
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
    let Some(path) = &args.hosts else {
        return Err(Error::usage(
            "there is nobody to measure with",
            "give --hosts FILE on every host of that list, or say `perf server` and `perf client`; `tcpx bench net` measures this host alone",
        ));
    };
    let hosts = listed(path, args.link.port)?;
    let own = own_place(path, &hosts)?;
    let host = MemoryChoice::host("for control");
    let control = Link::new(&args.link, &host, true)?.for_many();
    if control.has_fresh_key() {
        return Err(Error::usage(
            "several hosts need one key, and this one has none",
            "give all of them the same --key-file, or TCPX_KEY with what `tcpx key FILE` wrote into FILE (or --insecure)",
        ));
    }
    let parts = serve(args, hosts[own].1.port(), control.key())?;
    match own {
        0 => Matrix::gather(args, &control, hosts, parts)?.measure(),
        own => follow(args, &control, hosts[own].1.port(), &parts).map(|()| Told::Nothing),
    }
}

/// A memory of this host, and how it sends.
struct Part {
    memory: MemoryChoice,
    link: Link,
    port: u16,
}

/// Opens the memories, and serves each at a port of its own: behind `port` in order where they are free, so that a
/// firewall can know them.
fn serve(args: &MatrixArgs, port: u16, key: Option<tcpx::Key>) -> Result<Vec<Part>, Error> {
    let mut same_key = args.link.clone();
    same_key.own_key = key;
    let devices = Devices::probe();
    let gpus = u32::try_from(devices.count()).unwrap_or(0);
    let wanted = match devices.means_host(&args.memory) || args.memory.gpu.is_some() {
        true => vec![args.memory.clone()],
        false => (0..gpus).map(|gpu| Place::Gpu(gpu).memory()).collect(),
    };
    let limit = args.link.timeout.0;
    let mut parts = Vec::new();
    for (behind, memory) in (1u16..).zip(&wanted) {
        let memory = devices.choose(memory, 0)?;
        let link = Link::new(&same_key, &memory, true)?.for_many();
        let endpoint = link.listen(&same_key, port.saturating_add(behind));
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

/// Waits for the first host, and does what it says.
fn follow(args: &MatrixArgs, control: &Link, port: u16, parts: &[Part]) -> Result<(), Error> {
    let endpoint = control.listen(&args.link, port)?;
    let until = Instant::now() + args.link.wait.0;
    let connection = loop {
        match endpoint.accept(LOOK) {
            Ok(connection) => break connection,
            Err(error) if Instant::now() >= until => return Err(error.into()),
            Err(error) => tracing::debug!(%error, "the first host is not there yet"),
        }
    };
    let obeyed = obey(&connection, parts, args.link.timeout.0);
    link::part_after(connection, obeyed)
}

fn obey(connection: &Connection, parts: &[Part], limit: Duration) -> Result<(), Error> {
    loop {
        let order = messages::expect(connection, REQUEST, LONGEST_TRANSFER)?;
        match order.wait::<Order>("an order")? {
            Order::End => return Ok(()),
            Order::Memories => messages::tell(connection, ANSWER, &memories(parts))?,
            order => messages::tell(connection, ANSWER, &measure(parts, order, limit))?,
        }
    }
}

/// Measures one pair from a memory of this host.
fn measure(parts: &[Part], order: Order, limit: Duration) -> Outcome {
    let Order::Measure {
        from,
        to,
        bytes,
        iterations,
    } = order
    else {
        return Err("not an order to measure".to_owned());
    };
    let part = parts.get(from).ok_or("there is no such memory")?;
    let work = Work {
        run: Run::new(Mode::One, Op::Send, bytes.max(1), 1, 1),
        amount: Amount::Transfers(iterations.max(1)),
        interval: None,
        warm_up: Duration::ZERO,
        limit,
    };
    let connection = part.link.connect_to(to);
    let measured = connection.and_then(|connection| client::one(connection, &part.memory, &work));
    let figures = measured.and_then(|measured| measured.rate_and_cpu());
    figures.map_err(|error| brief(&error.what()))
}

/// A memory of a host, for the first one.
struct End {
    host: usize,
    index: usize,
    at: SocketAddr,
    name: String,
}

/// What the first host knows and measures.
struct Matrix<'a> {
    args: &'a MatrixArgs,
    parts: Vec<Part>,
    /// By host; none for this one, and for those that did not answer.
    others: Vec<Option<Connection>>,
    ends: Vec<End>,
    missing: Vec<String>,
}

impl<'a> Matrix<'a> {
    /// Connects to every host.
    fn gather(
        args: &'a MatrixArgs,
        control: &Link,
        hosts: Vec<(String, SocketAddr)>,
        parts: Vec<Part>,
    ) -> Result<Self, Error> {
        let until = Instant::now() + args.link.wait.0;
        let (mut others, mut ends, mut missing) = (vec![None], Vec::new(), Vec::new());
        let mut add = |host: usize, ip: SocketAddr, memories: Vec<Memory>| {
            ends.extend(memories.into_iter().enumerate().map(|(index, memory)| End {
                host,
                index,
                at: SocketAddr::new(ip.ip(), memory.port),
                // What a peer writes must not drive the terminal.
                name: format!("{host}: {} {}", ip.ip(), one_line(&memory.name)),
            }));
        };
        add(0, hosts[0].1, memories(&parts));
        for (host, (line, at)) in hosts.iter().enumerate().skip(1) {
            let connection = loop {
                match control.connect_to(*at) {
                    Err(_) if Instant::now() < until => std::thread::sleep(LOOK),
                    connected => break connected,
                }
            };
            let asked = connection.and_then(|connection| {
                let limit = args.link.timeout.0;
                Ok((
                    ask::<Vec<Memory>>(&connection, Order::Memories, limit)?,
                    connection,
                ))
            });
            others.push(match asked {
                Ok((memories, connection)) => {
                    add(host, *at, memories);
                    Some(connection)
                }
                Err(error) => {
                    missing.push(format!("{host}: {line}: {}", one_line(&error.what())));
                    None
                }
            });
        }
        if others.iter().flatten().next().is_none() {
            return Err(Error::failed(
                format!(
                    "no other host answered within {}: {}",
                    time(args.link.wait.0),
                    missing.join("; ")
                ),
                "run the same command on every host, with the same list and the same key; --wait allows more time",
            ));
        }
        Ok(Self {
            args,
            parts,
            others,
            ends,
            missing,
        })
    }

    /// Has every ordered pair of memories of different hosts measured.
    fn measure(mut self) -> Result<Told, Error> {
        let mut rows = Vec::new();
        for from in &self.ends {
            for to in self.ends.iter().filter(|to| to.host != from.host) {
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
            let end = messages::tell(&connection, REQUEST, &Order::End);
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
        let order = Order::Measure {
            from: from.index,
            to: to.at,
            bytes,
            iterations: self.args.rounds,
        };
        match &self.others[from.host] {
            None => measure(&self.parts, order, limit),
            Some(connection) => {
                // 100 MB/s is slow enough for any host.
                let moved = bytes.saturating_mul(u64::from(self.args.rounds) + 4);
                let patience = limit * 4 + Duration::from_secs(moved / 100_000_000);
                ask::<Outcome>(connection, order, patience).map_err(|error| error.what())?
            }
        }
    }
}

fn ask<T: serde::de::DeserializeOwned>(
    connection: &Connection,
    order: Order,
    limit: Duration,
) -> Result<T, Error> {
    let reply = messages::expect(connection, ANSWER, LONGEST_TRANSFER)?;
    messages::tell(connection, REQUEST, &order)?;
    reply.wait_at_most(limit, "a host's answer")
}

/// The hosts of a list, with the first address of each.
fn listed(path: &Path, port: u16) -> Result<Vec<(String, SocketAddr)>, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let hosts = parse(&text).map_err(|what| {
        Error::usage(
            format!("{}: {what}", path.display()),
            "write one address a line, with `:PORT` if it is not the default, and each once",
        )
    })?;
    let resolve = |host: String| {
        let found = addresses::resolve(&host, port)?;
        let why = || "the name has no address".to_owned();
        let address = found.first().copied();
        address
            .map(|at| (host.clone(), at))
            .ok_or_else(|| Error::Address {
                address: host,
                why: why(),
            })
    };
    hosts.into_iter().map(resolve).collect()
}

/// The place of this host in the list: its `RANK`, else the line that is an address of this host.
fn own_place(path: &Path, hosts: &[(String, SocketAddr)]) -> Result<usize, Error> {
    let rank = std::env::var("RANK")
        .ok()
        .and_then(|text| text.parse().ok());
    // Whether this host can listen there.
    let is_own = |at: &SocketAddr| UdpSocket::bind((at.ip(), 0)).is_ok();
    let own: Vec<usize> = match rank {
        Some(rank) => (rank < hosts.len()).then_some(rank).into_iter().collect(),
        None => (0..hosts.len())
            .filter(|at| is_own(&hosts[*at].1))
            .collect(),
    };
    match own[..] {
        [own] => Ok(own),
        _ => Err(Error::usage(
            format!(
                "{}: {} of its lines are addresses of this host",
                path.display(),
                own.len()
            ),
            "list each host once, by an address that it has, or set RANK to its place, counted from 0",
        )),
    }
}

/// The addresses; empty lines and what follows a `#` do not count.
fn parse(text: &str) -> Result<Vec<String>, String> {
    let mut hosts: Vec<String> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let host = line.split('#').next().unwrap_or_default().trim();
        if host.contains(char::is_whitespace) {
            return Err(format!("line {number} holds more than an address"));
        }
        if hosts.iter().any(|known| known == host) {
            return Err(format!("line {number} names {host} again"));
        }
        if !host.is_empty() {
            hosts.push(host.to_owned());
        }
    }
    match hosts.len() {
        0 => Err("it names no host".into()),
        1 => Err(format!(
            "it lists {} alone, which has nobody to talk to",
            hosts[0]
        )),
        2..=MOST => Ok(hosts),
        _ => Err(format!("more than {MOST} hosts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_line_by_line() {
        assert_eq!(
            parse("10.0.0.1\n\n # all\n host-2:4000 # two\n").expect("a list"),
            ["10.0.0.1", "host-2:4000"]
        );
        for (text, complaint) in [
            ("# none\n", "no host"),
            ("a\n", "a alone"),
            ("a b\n", "line 1"),
            ("a\nb\na\n", "line 3 names a again"),
        ] {
            let error = parse(text).expect_err("no list");
            assert!(error.contains(complaint), "{error}");
        }
    }
}
