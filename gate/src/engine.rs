//! Cases of the engine: connections of the crate `tcpx` between the two processes.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tcpx::{Auth, Connection, Deadlines, Endpoint, Key, Options, Region, TcpNetwork, Transfer};
use tcpx_net::TcpOptions;

use crate::OtherEnd;
use crate::case::{Answer, Case, Figures, Kind, Link, Part};
use crate::facts::{facts, percentiles};
use crate::relay::Relay;

const PATIENCE: Duration = Duration::from_secs(60);
/// Messages of a calibration, per message in flight.
const CALIBRATION: usize = 8;

fn options(link: &Link, key: &str) -> Result<Options> {
    let network = TcpNetwork::new(TcpOptions {
        stage_host: link.staged,
        lanes: link.lanes,
        ..TcpOptions::default()
    });
    let mut options = Options::new(Arc::new(network), Auth::Key(Key::parse(key)?));
    options.connect_timeout = PATIENCE;
    options.deadlines = Deadlines {
        stall: PATIENCE,
        total: None,
    };
    Ok(options)
}

fn fresh_key() -> Result<String> {
    let mut bytes = [0; Key::BYTES];
    getrandom::fill(&mut bytes)?;
    let key = Key::generate(&mut |out| out.copy_from_slice(&bytes));
    Ok(key.to_text())
}

/// One way of messages: what both ends agree on.
#[derive(Clone, Copy)]
struct Flow {
    size: usize,
    depth: usize,
    count: usize,
    tags: u64,
}

/// Sends or receives `flow.count` messages, `flow.depth` of them in flight.
fn flow(connection: &Connection, flow: Flow, first_tag: u64, sends: bool) -> Result<()> {
    let regions: Vec<Region> = (0..flow.depth)
        .map(|_| Region::host(flow.size))
        .collect::<Result<_, _>>()?;
    let mut running: VecDeque<Transfer> = VecDeque::with_capacity(flow.depth);
    for at in 0..flow.count {
        if running.len() == flow.depth
            && let Some(oldest) = running.pop_front()
        {
            oldest.wait()?;
        }
        let (slice, tag) = (
            regions[at % flow.depth].all(),
            first_tag + at as u64 % flow.tags,
        );
        running.push_back(match sends {
            true => connection.send(slice, tag).start()?,
            false => connection.receive(slice, tag).start()?,
        });
    }
    running
        .into_iter()
        .try_for_each(|transfer| transfer.wait().map(drop))?;
    Ok(())
}

/// First tags of what goes each way and of each thread.
const TO_SERVER: u64 = 1000;
const TO_CLIENT: u64 = 2_000_000;
const THREAD_TAGS: u64 = 1000;

/// All flows of one end at once.
fn flows(
    connection: &Connection,
    out: Option<Flow>,
    back: Option<Flow>,
    threads: u64,
    is_client: bool,
) -> Result<()> {
    let first = |sends: bool| {
        if sends == is_client {
            TO_SERVER
        } else {
            TO_CLIENT
        }
    };
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        for thread in 0..threads {
            for (one, sends) in [(out, true), (back, false)] {
                if let Some(one) = one {
                    let tag = first(sends) + thread * THREAD_TAGS;
                    running.push(scope.spawn(move || flow(connection, one, tag, sends)));
                }
            }
        }
        running
            .into_iter()
            .try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(_) => bail!("a thread panicked"),
            })
    })
}

/// The end that measures.
#[derive(Default)]
pub(crate) struct Client {
    open: Option<Open>,
}

struct Open {
    link: Link,
    connection: Connection,
    /// Where connections go: the relay, or the other end.
    address: SocketAddr,
    options: Options,
    relay: Option<Relay>,
}

impl Client {
    pub(crate) fn run(&mut self, case: &Case, other: &mut OtherEnd) -> Result<Figures> {
        if self.open.as_ref().is_none_or(|open| open.link != case.link) {
            self.open = None;
            self.open = Some(Self::connect(&case.link, other)?);
        }
        let open = self.open.as_ref().context("no connection")?;
        let limit = Duration::from_millis(case.ms);
        let outcome = match case.kind {
            Kind::RoundTrip { size, busy } => {
                let _busy = Busy::start(busy)?;
                round_trip(open, other, size, limit)
            }
            Kind::Stream {
                size,
                depth,
                room,
                tags,
                threads,
                both,
                reset_ms,
            } => {
                let room = if room == 0 { size } else { room };
                let shape = Shape {
                    size,
                    depth,
                    room,
                    tags,
                    threads,
                    both,
                    reset_ms,
                };
                shape.measure(open, other, limit)
            }
            Kind::SetUp => set_up(open, other, limit),
            Kind::Idle { connections } => idle(open, other, connections),
            Kind::Plugin { .. } => bail!("a case of the plugin"),
        };
        if outcome.is_err() {
            self.open = None;
        }
        outcome
    }

    fn connect(link: &Link, other: &mut OtherEnd) -> Result<Open> {
        let key = fresh_key()?;
        other.tell(&Part::Listen {
            link: link.clone(),
            key: key.clone(),
        })?;
        let Answer::Listening(listening) = other.hear()? else {
            bail!("the other end does not listen");
        };
        let listening = match &link.host {
            Some(host) => SocketAddr::new(host.parse()?, listening.port()),
            None => listening,
        };
        let relay = match link.relay_us {
            Some(delay) => Some(Relay::start(listening, Duration::from_micros(delay))?),
            None => None,
        };
        let address = relay.as_ref().map_or(listening, Relay::address);
        let options = options(link, &key)?;
        other.tell(&Part::Accept)?;
        let connection = Endpoint::connect(address, &options)?;
        done(other)?;
        Ok(Open {
            link: link.clone(),
            connection,
            address,
            options,
            relay,
        })
    }
}

fn done(other: &mut OtherEnd) -> Result<()> {
    match other.hear()? {
        Answer::Done => Ok(()),
        Answer::Failed(why) => bail!("the other end: {why}"),
        answer => bail!("the other end said {answer:?}"),
    }
}

fn facts_of(other: &mut OtherEnd) -> Result<crate::case::Facts> {
    other.tell(&Part::Facts)?;
    match other.hear()? {
        Answer::Facts(facts) => Ok(facts),
        answer => bail!("the other end said {answer:?}"),
    }
}

fn round_trip(open: &Open, other: &mut OtherEnd, size: usize, limit: Duration) -> Result<Figures> {
    let (there, back) = (Region::host(size)?, Region::host(size)?);
    let once = || -> Result<f64> {
        let started = Instant::now();
        let answer = open.connection.receive(back.all(), 2).start()?;
        let sent = open.connection.send(there.all(), 1).start()?;
        answer.wait()?;
        let took = started.elapsed().as_secs_f64() * 1e6;
        sent.wait()?;
        Ok(took)
    };
    let warm_up = 20;
    other.tell(&Part::Echo {
        size,
        count: warm_up,
    })?;
    let mut samples = (0..warm_up).map(|_| once()).collect::<Result<Vec<_>>>()?;
    done(other)?;
    samples.sort_by(f64::total_cmp);
    let count = ((limit.as_secs_f64() * 1e6 / samples[warm_up / 2]) as usize).clamp(50, 50_000);
    other.tell(&Part::Echo { size, count })?;
    let mut samples = (0..count).map(|_| once()).collect::<Result<Vec<_>>>()?;
    done(other)?;
    Ok(percentiles(&mut samples))
}

struct Shape {
    size: usize,
    depth: usize,
    room: usize,
    tags: u64,
    threads: u64,
    both: bool,
    reset_ms: u64,
}

impl Shape {
    fn run(&self, open: &Open, other: &mut OtherEnd, count: usize) -> Result<()> {
        let Self {
            size,
            depth,
            room,
            tags,
            threads,
            both,
            ..
        } = *self;
        other.tell(&Part::Sink {
            size,
            room,
            depth,
            count,
            tags,
            threads,
            both,
        })?;
        let out = Flow {
            size,
            depth,
            count,
            tags,
        };
        let back = both.then_some(Flow { size: room, ..out });
        flows(&open.connection, Some(out), back, threads, true)?;
        done(other)
    }

    fn measure(&self, open: &Open, other: &mut OtherEnd, limit: Duration) -> Result<Figures> {
        let few = (self.depth * CALIBRATION).max(8);
        let started = Instant::now();
        self.run(open, other, few)?;
        let each = started.elapsed().as_secs_f64() / few as f64;
        let count = ((limit.as_secs_f64() / each) as usize).clamp(few, 200_000);
        let before = (facts()?, facts_of(other)?);
        let resets = match (self.reset_ms, &open.relay) {
            (0, _) => None,
            (every, Some(relay)) => Some(relay.reset_every(Duration::from_millis(every))),
            (_, None) => bail!("lanes are reset by a relay: give relay_us"),
        };
        let started = Instant::now();
        self.run(open, other, count)?;
        let seconds = started.elapsed().as_secs_f64();
        drop(resets);
        let after = (facts()?, facts_of(other)?);
        let bytes =
            (self.size * count) as f64 * self.threads as f64 * if self.both { 2.0 } else { 1.0 };
        let cpu =
            after.0.cpu_seconds - before.0.cpu_seconds + after.1.cpu_seconds - before.1.cpu_seconds;
        Ok([("rate", bytes / seconds), ("cpu", cpu / (bytes / 1e9))].into())
    }
}

fn set_up(open: &Open, other: &mut OtherEnd, limit: Duration) -> Result<Figures> {
    let mut samples = Vec::new();
    let began = Instant::now();
    while samples.len() < 5 || began.elapsed() < limit {
        other.tell(&Part::Keep { count: 1 })?;
        let started = Instant::now();
        let connection = Endpoint::connect(open.address, &open.options)?;
        samples.push(started.elapsed().as_secs_f64() * 1e6);
        done(other)?;
        other.tell(&Part::Close)?;
        connection.close(PATIENCE)?;
        done(other)?;
    }
    let mut figures = percentiles(&mut samples);
    // Too few for a 99th percentile.
    figures.remove("p99");
    Ok(figures)
}

fn idle(open: &Open, other: &mut OtherEnd, connections: usize) -> Result<Figures> {
    ensure!(connections > 0, "no connections");
    let before = (facts()?, facts_of(other)?);
    other.tell(&Part::Keep { count: connections })?;
    let kept = (0..connections)
        .map(|_| Endpoint::connect(open.address, &open.options))
        .collect::<Result<Vec<_>, _>>()?;
    done(other)?;
    let after = (facts()?, facts_of(other)?);
    other.tell(&Part::Close)?;
    for connection in kept {
        connection.close(PATIENCE)?;
    }
    done(other)?;
    let each = |of: fn(&crate::case::Facts) -> f64| {
        (of(&after.0) - of(&before.0) + of(&after.1) - of(&before.1)).max(1.0) / connections as f64
    };
    Ok([
        ("memory", each(|facts| facts.memory)),
        ("descriptors", each(|facts| facts.descriptors)),
    ]
    .into())
}

/// Processes that only take time from a core.
struct Busy(Vec<Child>);

impl Busy {
    fn start(count: usize) -> Result<Self> {
        let start = || {
            Command::new("sh")
                .args(["-c", "while :; do :; done"])
                .spawn()
        };
        Ok(Self((0..count).map(|_| start()).collect::<Result<_, _>>()?))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The other end.
#[derive(Default)]
pub(crate) struct Server {
    endpoint: Option<Endpoint>,
    connection: Option<Connection>,
    kept: Vec<Connection>,
}

impl Server {
    pub(crate) fn run(&mut self, part: Part) -> Result<Answer> {
        match part {
            Part::Listen { link, key } => {
                self.connection = None;
                // Lanes come to other addresses of the host than the first connection does.
                let every = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
                let host = link
                    .host
                    .as_ref()
                    .map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |_| every);
                let address = SocketAddr::new(host, 0);
                let endpoint = Endpoint::listen(address, options(&link, &key)?)?;
                let address = endpoint.local_addr();
                self.endpoint = Some(endpoint);
                return Ok(Answer::Listening(address));
            }
            Part::Accept => self.connection = Some(self.accept()?),
            Part::Close => {
                for connection in self.kept.drain(..) {
                    // The peer has said its goodbye; what is left is no news.
                    let _ = connection.close(PATIENCE);
                }
            }
            Part::Echo { size, count } => {
                let (there, back) = (Region::host(size)?, Region::host(size)?);
                let connection = self.connection()?;
                let mut last: Option<Transfer> = None;
                for _ in 0..count {
                    connection.receive(there.all(), 1).start()?.wait()?;
                    let sent = connection.send(back.all(), 2).start()?;
                    if let Some(before) = last.replace(sent) {
                        before.wait()?;
                    }
                }
                if let Some(last) = last {
                    last.wait()?;
                }
            }
            Part::Sink {
                size,
                room,
                depth,
                count,
                tags,
                threads,
                both,
            } => {
                let back = Flow {
                    size: room,
                    depth,
                    count,
                    tags,
                };
                let out = both.then_some(Flow { size, ..back });
                flows(self.connection()?, out, Some(back), threads, false)?;
            }
            Part::Keep { count } => {
                for _ in 0..count {
                    let accepted = self.accept()?;
                    self.kept.push(accepted);
                }
            }
            Part::Facts => return Ok(Answer::Facts(facts()?)),
            Part::Plugin(_) => bail!("a part of the plugin"),
        }
        Ok(Answer::Done)
    }

    fn accept(&self) -> Result<Connection> {
        let endpoint = self.endpoint.as_ref().context("not listening")?;
        Ok(endpoint.accept(PATIENCE)?)
    }

    fn connection(&self) -> Result<&Connection> {
        self.connection.as_ref().context("not connected")
    }
}
