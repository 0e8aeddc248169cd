//! Two processes on one GPU: payload in its memory, of both kinds, is right, fast, and comes back
//! to the GPU.
//!
//! `local_gpu_check contents | speed | kills [--gib N] [--rounds N]`: each prints one line of JSON
//! a row; the exit code is 0 only if all is right. `TCPX_LOCAL=off` has the payload go over TCP.

mod memory;

use std::net::SocketAddr;
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory::{Kind, Memory, free_bytes};
use tcpx::{
    Auth, Connection, Endpoint, Gpu, Key, Options, Region, RegionSlice, Rights, TcpNetwork,
    Transfer, WindowKey,
};
use tcpx_tests::content::Choices;
use tcpx_tests::pair::new_key;

type Outcome<T> = Result<T, String>;

const LONG: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;
const ROLE: &str = "LOCAL_GPU_CHECK_ROLE";

fn text(error: impl std::fmt::Debug) -> String {
    format!("{error:?}")
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, usual: usize| {
        let at = arguments.iter().position(|one| one == name);
        let value = at.and_then(|at| arguments.get(at + 1)?.parse().ok());
        value.unwrap_or(usual)
    };
    let outcome = match (std::env::var(ROLE).as_deref(), arguments.first()) {
        (Ok("peer"), _) => peer(),
        (Ok("owner"), _) => owner(),
        (_, Some(what)) if what == "contents" => contents(),
        (_, Some(what)) if what == "speed" => speed(),
        (_, Some(what)) if what == "kills" => kills(number("--gib", 40), number("--rounds", 20)),
        _ => Err("expected contents, speed or kills".to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("local_gpu_check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn options(key: &str, gpu: &Gpu) -> Outcome<Options> {
    let key = Key::parse(key).map_err(text)?;
    let mut options = Options::new(Arc::new(TcpNetwork::default()), Auth::Key(key));
    options.gpu = Some(gpu.clone());
    Ok(options)
}

fn wait(transfer: Result<Transfer, tcpx::Error>) -> Outcome<()> {
    let ended = transfer.and_then(Transfer::wait);
    ended.map(drop).map_err(|error| error.to_string())
}

/// This process with its memory, connected to another with as much.
struct Pair {
    connection: Connection,
    own: Memory,
    /// The other's.
    window: WindowKey,
    process: Child,
}

fn start(role: &str, key: &str, address: SocketAddr, kind: Kind, bytes: usize) -> Outcome<Child> {
    let program = std::env::current_exe().map_err(text)?;
    let mut command = Command::new(program);
    command.env(ROLE, role).env("KEY", key);
    command.env("ADDRESS", address.to_string());
    command
        .env("KIND", kind.name())
        .env("BYTES", bytes.to_string());
    command.spawn().map_err(text)
}

impl Pair {
    fn new(role: &str, kind: Kind, bytes: usize, own: usize) -> Outcome<Self> {
        let gpu = Gpu::open(0).map_err(text)?;
        let key = new_key().to_text().to_string();
        let any = ([127, 0, 0, 1], 0).into();
        let endpoint = Endpoint::listen(any, options(&key, &gpu)?).map_err(text)?;
        let process = start(role, &key, endpoint.local_addr(), kind, bytes)?;
        let connection = endpoint.accept(LONG).map_err(text)?;
        let own = Memory::new(&gpu, kind, own)?;
        let key = Region::host(WindowKey::BYTES).map_err(text)?;
        wait(connection.receive(key.all(), 1).start())?;
        let window = key.with_bytes(.., WindowKey::from_bytes).map_err(text)?;
        Ok(Self {
            connection,
            own,
            window: window.map_err(text)?,
            process,
        })
    }

    fn part(&self, at: usize, bytes: usize) -> RegionSlice {
        self.own.region.slice(at..at + bytes).expect("inside")
    }

    fn put(&self, bytes: usize) -> Outcome<()> {
        wait(
            self.connection
                .put(self.part(0, bytes), &self.window, 0)
                .start(),
        )
    }

    fn get(&self, bytes: usize) -> Outcome<()> {
        wait(
            self.connection
                .get(self.part(0, bytes), &self.window, 0)
                .start(),
        )
    }

    /// Pieces in an order of their own at both ends; which piece went where.
    fn list(&self, count: usize, piece: usize, puts: bool) -> Outcome<Vec<usize>> {
        let mut order: Vec<usize> = (0..count).collect();
        Choices::new(piece as u64).shuffle(&mut order);
        let mut batch = self.connection.batch();
        for (own, theirs) in order.iter().enumerate() {
            // No two are neighbours.
            let own = self.part(own * 2 * piece, piece);
            let theirs = (theirs * 2 * piece) as u64;
            batch = match puts {
                true => batch.put(own, &self.window, theirs),
                false => batch.get(own, &self.window, theirs),
            };
        }
        wait(batch.start())?;
        Ok(order)
    }

    fn tcp_bytes(&self) -> u64 {
        let statistics = self.connection.statistics();
        statistics.tcp_bytes_sent + statistics.tcp_bytes_received
    }

    fn end(mut self) -> Outcome<()> {
        self.connection.close(LONG).map_err(text)?;
        self.process.wait().map_err(text)?;
        Ok(())
    }
}

fn variable(name: &str) -> Outcome<String> {
    std::env::var(name).map_err(text)
}

fn other(gpu: &Gpu) -> Outcome<(Connection, Memory)> {
    let address: SocketAddr = variable("ADDRESS")?.parse().map_err(text)?;
    let connection = Endpoint::connect(address, &options(&variable("KEY")?, gpu)?);
    let connection = connection.map_err(text)?;
    let kind = Kind::named(&variable("KIND")?)?;
    let bytes = variable("BYTES")?.parse().map_err(text)?;
    Ok((connection, Memory::new(gpu, kind, bytes)?))
}

/// Has its memory read and written until the other ends.
fn peer() -> Outcome<()> {
    let gpu = Gpu::open(0).map_err(text)?;
    let (connection, memory) = other(&gpu)?;
    let window = connection.expose(memory.region.all(), Rights::GetAndPut);
    let window = window.map_err(text)?;
    let key = Region::host(WindowKey::BYTES).map_err(text)?;
    key.write_from(0, &window.key().to_bytes()).map_err(text)?;
    wait(connection.send(key.all(), 1).start())?;
    // Sends and receives what is asked for by length and direction.
    let order = Region::host(16).map_err(text)?;
    while wait(connection.receive(order.all(), 2).start()).is_ok() {
        let words = order.with_bytes(.., |bytes| {
            [0, 8].map(|at| usize::from_ne_bytes(std::array::from_fn(|byte| bytes[at + byte])))
        });
        let [bytes, sends] = words.map_err(text)?;
        let part = memory.region.slice(..bytes).map_err(text)?;
        wait(match sends {
            1 => connection.send(part, 3).start(),
            _ => connection.receive(part, 3).start(),
        })?;
    }
    Ok(())
}

fn ask_peer(pair: &Pair, bytes: usize, sends: bool) -> Outcome<()> {
    let order = Region::host(16).map_err(text)?;
    let words = [bytes, usize::from(sends)].map(usize::to_ne_bytes);
    order.write_from(0, words.as_flattened()).map_err(text)?;
    wait(pair.connection.send(order.all(), 2).start())
}

fn differs(what: String, is_same: bool) -> Outcome<()> {
    match is_same {
        true => Ok(()),
        false => Err(format!("{what}: other bytes came")),
    }
}

/// Fresh random data and poisoned destinations, each time.
fn contents() -> Outcome<()> {
    const MOST: usize = 600 * MIB;
    let sizes = [1, 4096, 100_000, MIB, MIB + 1, 17 * MIB + 3, 300 * MIB];
    for kind in Kind::ALL {
        let pair = Pair::new("peer", kind, MOST, MOST)?;
        println!(
            "{{\"kind\":\"{}\",\"path\":{:?}}}",
            kind.name(),
            pair.connection.path()
        );
        let start = Instant::now();
        pair.put(MOST)?;
        let first = start.elapsed();
        // Until both have what the other offers.
        let until = Instant::now() + LONG;
        loop {
            let before = pair.tcp_bytes();
            pair.put(MOST)?;
            pair.get(MOST)?;
            if pair.tcp_bytes() - before < MIB as u64 {
                break;
            }
            if Instant::now() > until {
                println!("{{\"kind\":\"{}\",\"over\":\"tcp\"}}", kind.name());
                break;
            }
        }
        let mapped = start.elapsed();
        let name = kind.name();
        println!(
            "{{\"kind\":\"{name}\",\"first_ms\":{},\"mapped_ms\":{}}}",
            first.as_millis(),
            mapped.as_millis()
        );
        let content = |bytes: usize| {
            let mut content = vec![0; bytes];
            let read = pair.own.region.read_to(0, &mut content);
            read.map(|()| content).map_err(text)
        };
        let fill = |bytes: &[u8]| pair.own.region.write_from(0, bytes).map_err(text);
        for bytes in sizes {
            for way in ["put and get", "send and receive"] {
                let mut sent = vec![0; bytes];
                getrandom::fill(&mut sent).map_err(text)?;
                fill(&vec![0xA5; bytes])?;
                pair.put(bytes)?;
                fill(&sent)?;
                if way == "put and get" {
                    pair.put(bytes)?;
                } else {
                    ask_peer(&pair, bytes, false)?;
                    wait(pair.connection.send(pair.part(0, bytes), 3).start())?;
                }
                fill(&vec![0x5A; bytes])?;
                if way == "put and get" {
                    pair.get(bytes)?;
                } else {
                    ask_peer(&pair, bytes, true)?;
                    wait(pair.connection.receive(pair.part(0, bytes), 3).start())?;
                }
                differs(format!("{name}, {way}, {bytes}"), content(bytes)? == sent)?;
                // To and from host memory.
                let host = Region::host(bytes).map_err(text)?;
                wait(pair.connection.get(host.all(), &pair.window, 0).start())?;
                let same = host.with_bytes(.., |came| came == sent).map_err(text)?;
                differs(format!("{name}, to host memory, {bytes}"), same)?;
            }
        }
        for (count, piece) in [(8192, 32 << 10), (32_768, 4096), (3000, 12_345)] {
            let all = count * 2 * piece;
            let mut sent = vec![0; all];
            getrandom::fill(&mut sent).map_err(text)?;
            for puts in [true, false] {
                // What is read, and the other memory.
                fill(&vec![0xA5; all])?;
                pair.put(all)?;
                fill(&sent)?;
                if !puts {
                    pair.put(all)?;
                    fill(&vec![0xA5; all])?;
                }
                let order = pair.list(count, piece, puts)?;
                if puts {
                    pair.get(all)?;
                }
                let came = content(all)?;
                let range = |at: usize| at * 2 * piece..(at * 2 + 1) * piece;
                let gap = |at: usize| (at * 2 + 1) * piece..(at * 2 + 2) * piece;
                for (own, theirs) in order.iter().enumerate() {
                    let (from, to) = if puts { (own, *theirs) } else { (*theirs, own) };
                    let same = came[range(to)] == sent[range(from)];
                    let untouched = came[gap(to)].iter().all(|byte| *byte == 0xA5);
                    differs(
                        format!("{name}, {count} pieces of {piece}, {puts}"),
                        same && untouched,
                    )?;
                }
            }
        }
        println!("{{\"kind\":\"{name}\",\"contents\":\"right\"}}");
        pair.end()?;
    }
    Ok(())
}

fn speed() -> Outcome<()> {
    const MOST: usize = 1 << 30;
    let local = std::env::var("TCPX_LOCAL").unwrap_or_default();
    for kind in Kind::ALL {
        let pair = Pair::new("peer", kind, MOST, MOST)?;
        let name = kind.name();
        let row = |case: &str, bytes: usize, times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            println!(
                "{{\"local\":\"{local}\",\"kind\":\"{name}\",\"case\":\"{case}\",\"us\":{:.1},\"best_us\":{:.1},\"gbps\":{:.2}}}",
                median * 1e6,
                times[0] * 1e6,
                bytes as f64 / median / 1e9
            );
        };
        let timed = |rounds: usize, act: &dyn Fn() -> Outcome<()>| -> Outcome<Vec<f64>> {
            let mut times = Vec::new();
            let until = Instant::now() + Duration::from_secs(2);
            while times.len() < rounds && (times.len() < 5 || Instant::now() < until) {
                let start = Instant::now();
                act()?;
                times.push(start.elapsed().as_secs_f64());
            }
            Ok(times)
        };
        // Mapped, and warm.
        for _ in 0..4 {
            pair.put(MOST)?;
            pair.get(MOST)?;
            std::thread::sleep(Duration::from_millis(100));
        }
        for (bytes, rounds) in [
            (1 << 30, 30),
            (256 * MIB, 60),
            (16 * MIB, 300),
            (MIB, 1000),
            (64 << 10, 1000),
            (4096, 2000),
        ] {
            for puts in [true, false] {
                let act = || {
                    if puts {
                        pair.put(bytes)
                    } else {
                        pair.get(bytes)
                    }
                };
                timed(rounds / 5, &act)?;
                let way = if puts { "put" } else { "get" };
                row(
                    &format!("{way} {}", bytes >> 10),
                    bytes,
                    &mut timed(rounds, &act)?,
                );
            }
        }
        for puts in [true, false] {
            let four = || -> Outcome<()> {
                let all: Vec<_> = (0..4)
                    .map(|at| {
                        let (part, offset) = (
                            pair.part(at * 256 * MIB, 256 * MIB),
                            (at * 256 * MIB) as u64,
                        );
                        match puts {
                            true => pair.connection.put(part, &pair.window, offset).start(),
                            false => pair.connection.get(part, &pair.window, offset).start(),
                        }
                    })
                    .collect();
                all.into_iter().try_for_each(wait)
            };
            let way = if puts { "put" } else { "get" };
            row(
                &format!("{way} 4 x 262144"),
                4 * 256 * MIB,
                &mut timed(30, &four)?,
            );
            for (count, piece) in [(8192, 32 << 10), (32_768, 4096)] {
                let list = || pair.list(count, piece, puts).map(drop);
                timed(3, &list)?;
                row(
                    &format!("{way} {count} pieces of {piece}"),
                    count * piece,
                    &mut timed(20, &list)?,
                );
                // Made once, as NIXL makes them.
                let mut order: Vec<usize> = (0..count).collect();
                Choices::new(piece as u64).shuffle(&mut order);
                let mut batch = pair.connection.batch();
                for (own, theirs) in order.iter().enumerate() {
                    let (own, theirs) = (
                        pair.part(own * 2 * piece, piece),
                        (theirs * 2 * piece) as u64,
                    );
                    batch = match puts {
                        true => batch.put(own, &pair.window, theirs),
                        false => batch.get(own, &pair.window, theirs),
                    };
                }
                let prepared = batch.prepare().map_err(text)?;
                let again = || wait(prepared.start());
                timed(3, &again)?;
                row(
                    &format!("{way} {count} pieces of {piece} prepared"),
                    count * piece,
                    &mut timed(20, &again)?,
                );
            }
        }
        pair.end()?;
    }
    Ok(())
}

/// A process whose memory the other reads, until it is killed.
fn owner() -> Outcome<()> {
    let gpu = Gpu::open(0).map_err(text)?;
    let (connection, memory) = other(&gpu)?;
    let window = connection.expose(memory.region.all(), Rights::GetAndPut);
    let key = Region::host(WindowKey::BYTES).map_err(text)?;
    let window = window.map_err(text)?;
    key.write_from(0, &window.key().to_bytes()).map_err(text)?;
    wait(connection.send(key.all(), 1).start())?;
    wait(connection.receive(key.all(), 2).start())
}

/// Owners of much memory are killed amid transfers: it is back soon.
fn kills(gib: usize, rounds: usize) -> Outcome<()> {
    const PART: usize = 256 * MIB;
    let bytes = gib << 30;
    for kind in Kind::ALL {
        let mut longest = Duration::ZERO;
        let mut random = Choices::new(7);
        for round in 0..rounds {
            let gpu = Gpu::open(0).map_err(text)?;
            let before = free_bytes(&gpu)?;
            let mut pair = Pair::new("owner", kind, bytes, PART)?;
            let get = |at: usize| {
                let part = pair.part(0, PART);
                pair.connection.get(part, &pair.window, at as u64).start()
            };
            // Until all of it is mapped.
            let until = Instant::now() + LONG;
            loop {
                let tcp = pair.tcp_bytes();
                wait(get(bytes - PART))?;
                if pair.tcp_bytes() - tcp < MIB as u64 {
                    break;
                }
                if Instant::now() > until {
                    return Err("memory of the owner was not mapped".to_owned());
                }
            }
            let held = free_bytes(&gpu)?;
            let running: Vec<_> = (0..8).map(|at| get(at * PART)).collect();
            std::thread::sleep(Duration::from_micros(random.below(3000)));
            pair.process.kill().map_err(text)?;
            let killed = Instant::now();
            let ends: Vec<_> = running.into_iter().map(|one| wait(one).is_ok()).collect();
            pair.process.wait().map_err(text)?;
            // This side's own part stays.
            while free_bytes(&gpu)? + PART as u64 + (1 << 30) < before {
                if killed.elapsed() > Duration::from_secs(20) {
                    let now = free_bytes(&gpu)?;
                    return Err(format!(
                        "{}: {before} bytes were free, {now} are, {held} were",
                        kind.name()
                    ));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            longest = longest.max(killed.elapsed());
            if round == 0 {
                println!("{{\"kind\":\"{}\",\"ends\":\"{ends:?}\"}}", kind.name());
            }
            let Pair {
                connection, own, ..
            } = pair;
            drop(connection);
            drop(own);
            Region::wait_for_frees(LONG);
        }
        println!(
            "{{\"kind\":\"{}\",\"kills\":{rounds},\"gib\":{gib},\"longest_ms\":{}}}",
            kind.name(),
            longest.as_millis()
        );
        if longest > Duration::from_secs(3) {
            return Err("memory came back late".to_owned());
        }
    }
    Ok(())
}
