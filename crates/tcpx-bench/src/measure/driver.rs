//! The driver of `cargo xtask gate`: two processes that run cases of speed on command.
//!
//! `tcpx-bench run PLUGIN_FILE` starts `tcpx-bench serve PLUGIN_FILE` as its other end, reads one
//! case a line (JSON) from its standard input, runs it with the other end, and answers with one
//! line of JSON. It uses public interfaces only, so that the same source builds against earlier
//! commits.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tcpx::{Auth, Connection, Deadlines, Endpoint, Gpu, Key, Options, Region, TcpNetwork};
use tcpx_net::TcpOptions;

use crate::cost::has_now;
use crate::end::{Buffers, depth};
use crate::meter::{Sample, calibrate};
use crate::orders::{Answer, Link, Mode, Order, Run, Talk};
use crate::plugin::Comms;
use crate::process::{self, Child, Figures, Metric, Process};
use crate::statistics::median;
use crate::{Error, Meter, serve};

const DRIVER_ANSWER_LIMIT: Duration = Duration::from_secs(60);

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
    /// Messages.
    Run(Run),
    /// The same beside processes that only take time from a core.
    Busy(Run),
    /// So many connections, made one after the other, that nobody uses: how long one takes, and
    /// what both ends then have for each.
    Connections(usize),
    /// Messages through the tables of an NCCL plugin, of so many comms at once.
    Plugin(Run, usize),
}

/// Runs the driver with these arguments.
///
/// # Errors
/// It cannot be started; what goes wrong in a case is its answer.
pub fn main(arguments: &[String]) -> Result<(), Error> {
    match arguments.split_first() {
        Some((word, [plugin])) if word == "run" => run(plugin),
        Some((word, [plugin])) if word == "serve" => Other {
            plugin: plugin.into(),
            ..Other::default()
        }
        .serve(),
        _ => Err(Error::failed(
            "usage: tcpx-bench run PLUGIN_FILE",
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

/// The other end; the gate ends this process where it does not answer.
impl Talk for Process {
    fn send_message(&mut self, message: Value) -> Result<(), Error> {
        Self::send_line(self, &message).map_err(Error::system("reach the other end"))
    }

    fn next_message(&mut self, limit: Duration) -> Result<Value, Error> {
        Self::next_line(self, limit).map_err(Error::system("hear the other end"))
    }
}

/// The measuring process, by this one's own input and output.
struct Standard;

impl Talk for Standard {
    fn send_message(&mut self, message: Value) -> Result<(), Error> {
        print(&message)
    }

    fn next_message(&mut self, _limit: Duration) -> Result<Value, Error> {
        let line = std::io::stdin().lines().next();
        let line = line.ok_or_else(|| missing("other end any more"))?;
        parse(&line.map_err(Error::system("hear the other end"))?)
    }
}

fn parse<T: DeserializeOwned>(line: &str) -> Result<T, Error> {
    serde_json::from_str(line).map_err(|error| Error::failed(error.to_string(), line))
}

fn run(plugin: &str) -> Result<(), Error> {
    let own = std::env::current_exe().map_err(Error::system("find this program"))?;
    let mut other = Command::new(own);
    other.args(["serve", plugin]);
    let mut driver = Driver {
        plugin: plugin.into(),
        other: Process::start(&mut other).map_err(Error::system("start the other end"))?,
        open: None,
        comms: None,
    };
    for line in std::io::stdin().lines() {
        let line = line.map_err(Error::system("hear the gate"))?;
        let mut answer = process::Answer::default();
        match parse(&line).and_then(|case| driver.case(&case)) {
            Ok(figures) => answer.figures = figures,
            Err(error) => {
                driver.open = None;
                answer.error = Some(error.to_string());
            }
        }
        print(&json!(answer))?;
    }
    Ok(())
}

/// A connection to the other end.
struct Open {
    link: Link,
    connection: Connection,
    /// Of the other end.
    address: SocketAddr,
    options: Options,
}

struct Driver {
    plugin: PathBuf,
    other: Process,
    open: Option<Open>,
    comms: Option<Comms>,
}

impl Driver {
    fn case(&mut self, case: &Case) -> Result<Figures, Error> {
        match &case.what {
            What::Run(run) => self.messages(case, run),
            What::Busy(run) => {
                let _busy = busy()?;
                self.messages(case, run)
            }
            What::Connections(count) => self.connections(case, *count),
            What::Plugin(run, comms) => self.plugin(case, run, *comms),
        }
    }

    /// A connection like this, new where the last one is unlike.
    fn open(&mut self, link: &Link) -> Result<(&Open, &mut Process), Error> {
        if self.open.as_ref().is_none_or(|open| open.link != *link) {
            self.open = None;
            let open = self.connect(link)?;
            self.open = Some(open);
        }
        let open = self.open.as_ref().ok_or_else(|| missing("connection"))?;
        Ok((open, &mut self.other))
    }

    fn connect(&mut self, link: &Link) -> Result<Open, Error> {
        let talk: &mut dyn Talk = &mut self.other;
        let key = tcpx::generate_key()?.to_text();
        talk.send_order(&Order::Listen {
            link: link.clone(),
            key: key.clone(),
        })?;
        let Answer::At { at: address } = talk.answer(DRIVER_ANSWER_LIMIT)? else {
            return Err(missing("address of the other end"));
        };
        let options = options(link, &key, 0)?;
        let connection = Endpoint::connect(address, &options)?;
        talk.done(DRIVER_ANSWER_LIMIT)?;
        Ok(Open {
            link: link.clone(),
            connection,
            address,
            options,
        })
    }

    fn messages(&mut self, case: &Case, run: &Run) -> Result<Figures, Error> {
        let (open, other) = self.open(&case.link)?;
        let span = Duration::from_millis(case.ms);
        let allocate = |bytes| region(open.options.gpu.as_ref(), bytes);
        let mut meter = Meter::new(&open.connection, other, &allocate, DRIVER_ANSWER_LIMIT);
        let run = Run {
            depth: depth(run.bytes, run.depth),
            ..*run
        };
        let run = calibrate(&run, span, |run| meter.run(run, span))?;
        let sample = meter.run(&enough(run), span)?;
        Ok(sample.figures(run.mode))
    }

    fn connections(&mut self, case: &Case, count: usize) -> Result<Figures, Error> {
        let (open, other) = self.open(&case.link)?;
        let talk: &mut dyn Talk = other;
        let before = both_have(talk)?;
        talk.send_order(&Order::Keep { count })?;
        let (mut kept, mut times) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let started = Instant::now();
            kept.push(Endpoint::connect(open.address, &open.options)?);
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        talk.done(DRIVER_ANSWER_LIMIT)?;
        let after = both_have(talk)?;
        talk.send_order(&Order::Close)?;
        for connection in kept {
            connection.close(DRIVER_ANSWER_LIMIT)?;
        }
        talk.done(DRIVER_ANSWER_LIMIT)?;
        let [memory, descriptors] = [0, 1].map(|at| (after[at] - before[at]) / count as f64);
        Ok(Figures::from([
            (Metric::P50, median(&times)),
            (Metric::Memory, (memory / 1024.0).max(0.1)),
            (Metric::Descriptors, descriptors.max(0.1)),
        ]))
    }

    fn plugin(&mut self, case: &Case, run: &Run, count: usize) -> Result<Figures, Error> {
        let own = loaded(&mut self.comms, &self.plugin)?;
        let talk: &mut dyn Talk = &mut self.other;
        talk.send_order(&Order::Comms { count })?;
        let Answer::Handles { handles } = talk.answer(DRIVER_ANSWER_LIMIT)? else {
            return Err(missing("handles"));
        };
        let bytes = usize::try_from(run.bytes * u64::from(run.depth)).unwrap_or(usize::MAX);
        let bytes = bytes.max(4096);
        let back = own.listen(count)?;
        talk.send_order(&Order::Connect { back, bytes })?;
        own.connect(&handles, bytes)?;
        talk.done(DRIVER_ANSWER_LIMIT)?;
        let mut through = |run: &Run| {
            talk.send_order(&Order::Through { run: *run })?;
            let started = Instant::now();
            let part = own.take_part(run, true);
            let theirs = talk.done(DRIVER_ANSWER_LIMIT);
            let mut sample = Sample::of(part, theirs, run.moved() * count as u64)?;
            // This end's last call says little of what has arrived.
            sample.part.elapsed = started.elapsed();
            Ok(sample)
        };
        let run = enough(calibrate(
            run,
            Duration::from_millis(case.ms),
            &mut through,
        )?);
        let sample = through(&run)?;
        talk.send_order(&Order::Close)?;
        own.close();
        talk.done(DRIVER_ANSWER_LIMIT)?;
        Ok(sample.figures(run.mode))
    }
}

/// A run with as many times as a 99th percentile takes, also on a busy host.
fn enough(run: Run) -> Run {
    let least = if run.mode == Mode::Latency { 100 } else { 1 };
    let count = run.count.max(least);
    Run { count, ..run }
}

/// Bytes of memory and descriptors of both processes.
fn both_have(talk: &mut dyn Talk) -> Result<[f64; 2], Error> {
    talk.send_order(&Order::Has)?;
    let Answer::Has { has } = talk.answer(DRIVER_ANSWER_LIMIT)? else {
        return Err(missing("word of what the other end has"));
    };
    let own = has_now()?;
    Ok([0, 1].map(|at| (own[at] + has[at]) as f64))
}

/// The comms of a plugin file, which is loaded when a case first needs it.
fn loaded<'a>(comms: &'a mut Option<Comms>, plugin: &Path) -> Result<&'a mut Comms, Error> {
    match comms {
        Some(comms) => Ok(comms),
        none => Ok(none.insert(Comms::load(plugin, DRIVER_ANSWER_LIMIT)?)),
    }
}

fn region(gpu: Option<&Gpu>, bytes: u64) -> Result<Region, Error> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let made = match gpu {
        Some(gpu) => Region::cuda(gpu, bytes),
        None => Region::host(bytes),
    };
    made.map_err(Error::memory("allocate memory"))
}

fn options(link: &Link, key: &str, end: usize) -> Result<Options, Error> {
    let network = TcpNetwork::new(TcpOptions {
        stage_host: link.staged,
        ..TcpOptions::default()
    });
    let key = Key::parse(key).map_err(|error| Error::failed(error.to_string(), ""))?;
    let mut options = Options::new(Arc::new(network), Auth::Key(key));
    options.connect_timeout = DRIVER_ANSWER_LIMIT;
    options.deadlines = Deadlines {
        stall: DRIVER_ANSWER_LIMIT,
        total: None,
    };
    let gpu = link.gpus.map(|gpus| Gpu::open(gpus[end])).transpose();
    options.gpu = gpu.map_err(|error| Error::memory("open the GPU")(error.into()))?;
    Ok(options)
}

/// A process that only takes time from a core.
fn busy() -> Result<Child, Error> {
    let mut command = Command::new("sh");
    command.args(["-c", "while :; do :; done"]);
    let started = command.spawn().map(Child);
    started.map_err(Error::system("start a busy process"))
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
        while let Ok(order) = talk.expect("an order", DRIVER_ANSWER_LIMIT) {
            let answer = self.obey(talk, order);
            talk.send_order(&answer.unwrap_or_else(|error| Answer::Failed {
                reason: (&error).into(),
            }))?;
        }
        Ok(())
    }

    fn obey(&mut self, talk: &mut dyn Talk, order: Order) -> Result<Answer, Error> {
        match order {
            Order::Listen { link, key } => {
                (self.connection, self.buffers) = (None, Buffers::default());
                let options = options(&link, &key, 1)?;
                self.gpu.clone_from(&options.gpu);
                let endpoint = Endpoint::listen((Ipv4Addr::LOCALHOST, 0).into(), options)?;
                let at = endpoint.local_addr();
                talk.send_order(&Answer::At { at })?;
                self.connection = Some(endpoint.accept(DRIVER_ANSWER_LIMIT)?);
                self.endpoint = Some(endpoint);
            }
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
                let endpoint = self.endpoint.as_ref();
                let endpoint = endpoint.ok_or_else(|| missing("endpoint"))?;
                for _ in 0..count {
                    self.kept.push(endpoint.accept(DRIVER_ANSWER_LIMIT)?);
                }
            }
            Order::Close => {
                if let Some(comms) = &mut self.comms {
                    comms.close();
                }
                for connection in self.kept.drain(..) {
                    // The peer has said its goodbye; what is left is no news.
                    let _ = connection.close(DRIVER_ANSWER_LIMIT);
                }
            }
            Order::Has => {
                return Ok(Answer::Has { has: has_now()? });
            }
            Order::Comms { count } => {
                let handles = self.comms()?.listen(count)?;
                return Ok(Answer::Handles { handles });
            }
            Order::Connect { back, bytes } => self.comms()?.connect(&back, bytes)?,
            Order::Through { run } => {
                let cost = self.comms()?.take_part(&run, false)?.cost;
                return Ok(Answer::Done { cost });
            }
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
}
