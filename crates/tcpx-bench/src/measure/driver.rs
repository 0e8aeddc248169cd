//! The driver of `cargo xtask gate`: two processes that run cases of speed on command.
//!
//! `tcpx-bench run PLUGIN_FILE` starts `tcpx-bench serve PLUGIN_FILE` as its other end, reads one case a line (JSON) from its standard input,
//! runs it with the other end, and answers with one line of JSON. It uses public interfaces only, so that the same
//! source builds against earlier commits.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};
use tcpx::{Auth, Connection, Deadlines, Endpoint, Gpu, Key, Options, Region, TcpNetwork};
use tcpx_net::TcpOptions;

use crate::cost::{Cost, Has, Latency, cpu_us};
use crate::end::{Buffers, depth};
use crate::orders::{Answer, Link, Mode, Order, Run, Talk};
use crate::plugin::Comms;
use crate::relay::Relay;
use crate::{Error, Meter, serve};

const PATIENCE: Duration = Duration::from_secs(60);

/// One case, as the gate asks for it.
#[derive(Debug, Deserialize)]
struct Case {
    #[serde(flatten)]
    what: What,
    /// Milliseconds to measure for, about.
    ms: u64,
    /// How the two ends are connected.
    #[serde(default)]
    link: Link,
}

/// What is measured.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum What {
    /// Messages: `p50` and `p99` of half a round trip in microseconds, or `rate` in GB/s and `cpu`.
    Run(Run),
    /// The same beside processes that only take time from a core.
    Busy(Run),
    /// The same while a lane is reset every so many milliseconds, by the relay.
    Resets(Run, u64),
    /// Connections made and closed one after the other: `p50` in microseconds.
    SetUp,
    /// So many connections that nobody uses: `memory` in KiB and `descriptors` of both ends, for each.
    Idle(usize),
    /// Messages through the tables of an NCCL plugin: a round trip with `window` 0, else one way.
    Plugin {
        bytes: usize,
        comms: usize,
        window: usize,
    },
}

/// Runs the driver with these arguments.
///
/// # Errors
/// It cannot be started; what goes wrong in a case is its answer.
pub fn main(arguments: &[String]) -> Result<(), Error> {
    match arguments.split_first() {
        Some((word, [plugin, prefix @ ..])) if word == "run" => run(plugin, prefix),
        Some((word, [plugin])) if word == "serve" => Other {
            plugin: plugin.into(),
            ..Other::default()
        }
        .serve(),
        _ => Err(Error::failed(
            "usage: tcpx-bench run PLUGIN_FILE [PREFIX OF THE OTHER END'S COMMAND...]",
            "`cargo xtask gate` runs it",
        )),
    }
}

fn missing(what: &'static str) -> Error {
    Error::failed(format!("no {what}"), "report this as a defect of tcpx")
}

/// Writes a line at once.
fn print(value: &Value) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}")
        .and_then(|()| out.flush())
        .map_err(Error::system("answer"))
}

/// The other process, by its pipes; killed when dropped.
struct Pipes {
    child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Pipes {
    fn start(plugin: &str, prefix: &[String]) -> Result<Self, Error> {
        let own = std::env::current_exe().map_err(Error::system("find this program"))?;
        let mut command = match prefix.split_first() {
            Some((program, rest)) => {
                let mut command = Command::new(program);
                command.args(rest).arg(own);
                command
            }
            None => Command::new(own),
        };
        command
            .args(["serve", plugin])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(Error::system("start the other end"))?;
        let to = child
            .stdin
            .take()
            .ok_or_else(|| missing("pipe to the other end"))?;
        let from = child
            .stdout
            .take()
            .ok_or_else(|| missing("pipe from the other end"))?;
        Ok(Self {
            child,
            to,
            from: BufReader::new(from).lines(),
        })
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Talk for Pipes {
    fn tell(&mut self, message: Value) -> Result<(), Error> {
        writeln!(self.to, "{message}").map_err(Error::system("reach the other end"))
    }

    /// Its own waits end; and the gate ends this process where they do not.
    fn hear(&mut self, _limit: Duration) -> Result<Value, Error> {
        parse(self.from.next())
    }
}

/// The measuring process, by this one's own input and output.
struct Standard;

impl Talk for Standard {
    fn tell(&mut self, message: Value) -> Result<(), Error> {
        print(&message)
    }

    fn hear(&mut self, _limit: Duration) -> Result<Value, Error> {
        parse(std::io::stdin().lines().next())
    }
}

fn parse(line: Option<std::io::Result<String>>) -> Result<Value, Error> {
    let line = line.ok_or_else(|| missing("other end any more"))?;
    let line = line.map_err(Error::system("hear the other end"))?;
    serde_json::from_str(&line).map_err(|error| Error::failed(error.to_string(), line))
}

fn run(plugin: &str, prefix: &[String]) -> Result<(), Error> {
    let mut driver = Driver {
        plugin: plugin.into(),
        pipes: Pipes::start(plugin, prefix)?,
        open: None,
        comms: None,
    };
    for line in std::io::stdin().lines() {
        let line = line.map_err(Error::system("hear the gate"))?;
        let case =
            serde_json::from_str(&line).map_err(|error| Error::failed(error.to_string(), line));
        let figures = case.and_then(|case| driver.case(&case));
        print(&match figures {
            Ok(figures) => json!({ "figures": figures }),
            Err(error) => {
                driver.open = None;
                json!({ "error": error.to_string() })
            }
        })?;
    }
    Ok(())
}

/// A connection to the other end.
struct Open {
    link: Link,
    connection: Connection,
    /// Where connections go: the relay, or the other end.
    address: SocketAddr,
    options: Options,
    relay: Option<Relay>,
    gpu: Option<Gpu>,
}

struct Driver {
    plugin: PathBuf,
    pipes: Pipes,
    open: Option<Open>,
    comms: Option<Comms>,
}

impl Driver {
    fn case(&mut self, case: &Case) -> Result<Value, Error> {
        let span = Duration::from_millis(case.ms);
        match &case.what {
            What::Run(run) => self.messages(case, run, 0),
            What::Busy(run) => {
                let _busy = Busy::start()?;
                self.messages(case, run, 0)
            }
            What::Resets(run, every) => self.messages(case, run, *every),
            What::SetUp => self.set_up(case, span),
            What::Idle(count) => self.idle(case, *count),
            What::Plugin {
                bytes,
                comms,
                window,
            } => self.plugin(*bytes, *comms, *window, span),
        }
    }

    /// A connection like this, new where the last one is unlike.
    fn open(&mut self, link: &Link) -> Result<(&Open, &mut Pipes), Error> {
        if self.open.as_ref().is_none_or(|open| open.link != *link) {
            self.open = None;
            let open = self.connect(link)?;
            self.open = Some(open);
        }
        let open = self.open.as_ref().ok_or_else(|| missing("connection"))?;
        Ok((open, &mut self.pipes))
    }

    fn connect(&mut self, link: &Link) -> Result<Open, Error> {
        let talk: &mut dyn Talk = &mut self.pipes;
        let key = tcpx::generate_key()?.to_text();
        talk.say(&Order::Listen {
            link: link.clone(),
            key: key.clone(),
        })?;
        let Answer::At { at, .. } = talk.answer(PATIENCE)? else {
            return Err(missing("address of the other end"));
        };
        let listening = match &link.host {
            Some(host) => {
                SocketAddr::new(host.parse().map_err(|_| missing("such host"))?, at.port())
            }
            None => at,
        };
        let relay = match link.relay_us {
            Some(us) => Some(
                Relay::start(listening, Duration::from_micros(us))
                    .map_err(Error::system("relay"))?,
            ),
            None => None,
        };
        let address = relay.as_ref().map_or(listening, Relay::address);
        let (options, gpu) = options(link, &key, 0)?;
        talk.say(&Order::Accept)?;
        let connection = Endpoint::connect(address, &options)?;
        talk.done(PATIENCE)?;
        Ok(Open {
            link: link.clone(),
            connection,
            address,
            options,
            relay,
            gpu,
        })
    }

    fn messages(&mut self, case: &Case, run: &Run, reset_ms: u64) -> Result<Value, Error> {
        let (open, pipes) = self.open(&case.link)?;
        let span = Duration::from_millis(case.ms);
        let allocate = |bytes| region(open.gpu.as_ref(), bytes);
        let mut meter = Meter::new(&open.connection, pipes, &allocate, PATIENCE);
        let mut run = Run {
            depth: depth(run.bytes, run.depth),
            ..*run
        };
        run.count = meter.calibrate(&run, span)?;
        let resets = match (reset_ms, &open.relay) {
            (0, _) => None,
            (every, Some(relay)) => Some(relay.reset_every(Duration::from_millis(every))),
            (_, None) => return Err(missing("relay that resets lanes")),
        };
        let sample = meter.run(&run, span)?;
        drop(resets);
        Ok(match run.mode {
            Mode::Latency => percentiles(sample.latency()),
            _ => json!({ "rate": sample.rate(), "cpu": sample.cpu() }),
        })
    }

    fn set_up(&mut self, case: &Case, span: Duration) -> Result<Value, Error> {
        let (open, pipes) = self.open(&case.link)?;
        let talk: &mut dyn Talk = pipes;
        let mut times = Vec::new();
        let began = Instant::now();
        while times.len() < 5 || began.elapsed() < span {
            talk.say(&Order::Keep { count: 1 })?;
            let started = Instant::now();
            let connection = Endpoint::connect(open.address, &open.options)?;
            times.push(started.elapsed());
            talk.done(PATIENCE)?;
            talk.say(&Order::Close)?;
            connection.close(PATIENCE)?;
            talk.done(PATIENCE)?;
        }
        // Too few for a 99th percentile.
        Ok(json!({ "p50": Latency::of(&times).map(|latency| latency.p50) }))
    }

    fn idle(&mut self, case: &Case, count: usize) -> Result<Value, Error> {
        let (open, pipes) = self.open(&case.link)?;
        let talk: &mut dyn Talk = pipes;
        let before = both_have(talk)?;
        talk.say(&Order::Keep { count })?;
        let kept = (0..count).map(|_| Endpoint::connect(open.address, &open.options));
        let kept = kept.collect::<Result<Vec<_>, _>>()?;
        talk.done(PATIENCE)?;
        let after = both_have(talk)?;
        talk.say(&Order::Close)?;
        for connection in kept {
            connection.close(PATIENCE)?;
        }
        talk.done(PATIENCE)?;
        let [memory, descriptors] = [0, 1].map(|at| (after[at] - before[at]) / count as f64);
        Ok(json!({ "memory": (memory / 1024.0).max(0.1), "descriptors": descriptors.max(0.1) }))
    }

    fn plugin(
        &mut self,
        bytes: usize,
        comms: usize,
        window: usize,
        span: Duration,
    ) -> Result<Value, Error> {
        let own = loaded(&mut self.comms, &self.plugin)?;
        let talk: &mut dyn Talk = &mut self.pipes;
        talk.say(&Order::Comms { count: comms })?;
        let Answer::Handles { handles } = talk.answer(PATIENCE)? else {
            return Err(missing("handles"));
        };
        let room = (bytes * window.max(1)).max(4096);
        let back = own.listen(comms)?;
        talk.say(&Order::Connect { back, bytes: room })?;
        own.connect(&handles, room)?;
        talk.done(PATIENCE)?;
        let mut some = |count: usize| -> Result<(Vec<Duration>, f64, Cost), Error> {
            talk.say(&Order::Through {
                bytes,
                window,
                count,
            })?;
            let cpu = cpu_us();
            let started = Instant::now();
            let times = own.take_part(bytes, window, count, true)?;
            let mut cost = talk.done(PATIENCE)?;
            let seconds = started.elapsed().as_secs_f64();
            cost.cpu_us += cpu_us().saturating_sub(cpu);
            Ok((times, seconds, cost))
        };
        let few = (4 * window).max(20);
        let each = some(few)?.1 / few as f64;
        let count = ((span.as_secs_f64() / each) as usize).clamp(few, 50_000);
        let (times, seconds, cost) = some(count)?;
        talk.say(&Order::Close)?;
        own.close();
        talk.done(PATIENCE)?;
        if window == 0 {
            return Ok(percentiles(Latency::of(&times)));
        }
        let gigabytes = (bytes * count * comms) as f64 / 1e9;
        let cpu = cost.cpu_us as f64 / 1e6 / gigabytes;
        Ok(json!({ "rate": gigabytes / seconds, "cpu": cpu }))
    }
}

/// Memory and descriptors of both processes.
fn both_have(talk: &mut dyn Talk) -> Result<[f64; 2], Error> {
    talk.say(&Order::Has)?;
    let here = Has::now().map_err(Error::system("look at this process"))?;
    let Answer::Has(there) = talk.answer(PATIENCE)? else {
        return Err(missing("word of what the other end has"));
    };
    let sums = [
        here.memory + there.memory,
        here.descriptors + there.descriptors,
    ];
    Ok(sums.map(|sum| sum as f64))
}

/// The comms of a plugin file, which is loaded when a case first needs it.
fn loaded<'a>(comms: &'a mut Option<Comms>, plugin: &Path) -> Result<&'a mut Comms, Error> {
    match comms {
        Some(comms) => Ok(comms),
        none => Ok(none.insert(Comms::load(plugin, PATIENCE)?)),
    }
}

fn percentiles(latency: Option<Latency>) -> Value {
    let (p50, p99) = (latency.map(|one| one.p50), latency.and_then(|one| one.p99));
    json!({ "p50": p50, "p99": p99 })
}

fn region(gpu: Option<&Gpu>, bytes: u64) -> Result<Region, Error> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let made = match gpu {
        Some(gpu) => Region::cuda(gpu, bytes),
        None => Region::host(bytes),
    };
    made.map_err(Error::memory("allocate memory"))
}

fn options(link: &Link, key: &str, end: usize) -> Result<(Options, Option<Gpu>), Error> {
    let network = TcpNetwork::new(TcpOptions {
        stage_host: link.staged,
        lanes: link.lanes,
        ..TcpOptions::default()
    });
    let key = Key::parse(key).map_err(|error| Error::failed(error.to_string(), ""))?;
    let mut options = Options::new(Arc::new(network), Auth::Key(key));
    options.connect_timeout = PATIENCE;
    options.deadlines = Deadlines {
        stall: PATIENCE,
        total: None,
    };
    let gpu = link.gpus.map(|gpus| Gpu::open(gpus[end])).transpose();
    let gpu = gpu.map_err(|error| Error::memory("open the GPU")(error.into()))?;
    options.gpu.clone_from(&gpu);
    Ok((options, gpu))
}

/// A process that only takes time from a core.
struct Busy(Child);

impl Busy {
    fn start() -> Result<Self, Error> {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do :; done"]);
        command
            .spawn()
            .map(Self)
            .map_err(Error::system("start a busy process"))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other end.
#[derive(Default)]
struct Other {
    plugin: PathBuf,
    endpoint: Option<Endpoint>,
    connection: Option<Connection>,
    gpu: Option<Gpu>,
    buffers: Buffers,
    kept: Vec<Connection>,
    comms: Option<Comms>,
}

impl Other {
    fn serve(mut self) -> Result<(), Error> {
        let talk: &mut dyn Talk = &mut Standard;
        // Its input ends with the measuring process.
        while let Ok(order) = talk.expect("an order", PATIENCE) {
            let answer = self.obey(talk, order);
            talk.say(&answer.unwrap_or_else(|error| Answer::Failed {
                reason: (&error).into(),
            }))?;
        }
        Ok(())
    }

    fn obey(&mut self, talk: &mut dyn Talk, order: Order) -> Result<Answer, Error> {
        match order {
            Order::Listen { link, key } => {
                (self.connection, self.buffers) = (None, Buffers::default());
                // Lanes come to other addresses of the host than the first connection does.
                let ip = match link.host {
                    Some(_) => Ipv4Addr::UNSPECIFIED,
                    None => Ipv4Addr::LOCALHOST,
                };
                let (options, gpu) = options(&link, &key, 1)?;
                let endpoint = Endpoint::listen(SocketAddr::new(IpAddr::V4(ip), 0), options)?;
                let at = endpoint.local_addr();
                (self.endpoint, self.gpu) = (Some(endpoint), gpu);
                return Ok(Answer::At {
                    at,
                    congestion: None,
                });
            }
            Order::Accept => self.connection = Some(self.accept()?),
            Order::Run { run } => {
                let connection = self
                    .connection
                    .as_ref()
                    .ok_or_else(|| missing("connection"))?;
                let gpu = self.gpu.as_ref();
                let allocate = |bytes| region(gpu, bytes);
                return serve::take_part(connection, talk, &run, &mut self.buffers, &allocate);
            }
            Order::Keep { count } => {
                for _ in 0..count {
                    let accepted = self.accept()?;
                    self.kept.push(accepted);
                }
            }
            Order::Close => {
                if let Some(comms) = &mut self.comms {
                    comms.close();
                }
                for connection in self.kept.drain(..) {
                    // The peer has said its goodbye; what is left is no news.
                    let _ = connection.close(PATIENCE);
                }
            }
            Order::Has => {
                return Ok(Answer::Has(
                    Has::now().map_err(Error::system("look at this process"))?,
                ));
            }
            Order::Comms { count } => {
                let handles = self.comms()?.listen(count)?;
                return Ok(Answer::Handles { handles });
            }
            Order::Connect { back, bytes } => self.comms()?.connect(&back, bytes)?,
            Order::Through {
                bytes,
                window,
                count,
            } => return self.comms()?.serve(bytes, window, count),
            Order::End => {}
            other => {
                return Err(Error::failed(
                    format!("an order {other:?}"),
                    "run both of one build",
                ));
            }
        }
        Ok(Answer::done())
    }

    fn comms(&mut self) -> Result<&mut Comms, Error> {
        loaded(&mut self.comms, &self.plugin)
    }

    fn accept(&self) -> Result<Connection, Error> {
        let endpoint = self.endpoint.as_ref().ok_or_else(|| missing("endpoint"))?;
        Ok(endpoint.accept(PATIENCE)?)
    }
}
