//! The two processes: the leader starts the other, tells it each case over a pipe, and reports.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tcpx::{Auth, Endpoint, Gpu, Key, Options, TcpNetwork};

use crate::arguments::{Arguments, Case};
use crate::cases::{Figures, Side};
use crate::threads::Threads;
use crate::{Outcome, cases, copies, plain, text};

/// Longest set-up, and longest goodbye.
const LONG: Duration = Duration::from_secs(30);
const KEY: &str = "TCP_SPEED_KEY";

/// The words that go between the processes, a line each.
pub(crate) struct Pipe<R, W> {
    lines: Lines<BufReader<R>>,
    to: W,
}

impl<R: std::io::Read, W: Write> Pipe<R, W> {
    fn new(from: R, to: W) -> Self {
        Self {
            lines: BufReader::new(from).lines(),
            to,
        }
    }

    pub(crate) fn tell(&mut self, words: &str) -> Outcome<()> {
        writeln!(self.to, "{words}").map_err(text)?;
        self.to.flush().map_err(text)
    }

    pub(crate) fn hear(&mut self) -> Outcome<String> {
        let line = self.lines.next().ok_or("the other process ended")?;
        line.map_err(text)
    }

    /// Both processes are at the same place.
    pub(crate) fn meet(&mut self) -> Outcome<()> {
        self.tell("here")?;
        match self.hear()?.as_str() {
            "here" => Ok(()),
            other => Err(format!("the other process says: {other}")),
        }
    }
}

/// One round, as the process that sends.
pub(crate) fn lead(arguments: &Arguments, round: u32) -> Outcome<()> {
    let key = Key::generate(&mut |bytes| getrandom::fill(bytes).expect("randomness"));
    let mut child = Command::new(std::env::current_exe().map_err(text)?)
        .arg("--child")
        .args(std::env::args().skip(1))
        .env(KEY, key.to_text())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(text)?;
    let led = lead_child(&mut child, arguments, round, key);
    if led.is_err() {
        // Ours to end: it may wait for words that will not come.
        drop(child.kill());
    }
    let status = child.wait().map_err(text)?;
    led?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("the other process ended with {status}"))
    }
}

fn lead_child(child: &mut Child, arguments: &Arguments, round: u32, key: Key) -> Outcome<()> {
    let ends: (Option<ChildStdout>, Option<ChildStdin>) = (child.stdout.take(), child.stdin.take());
    let (Some(from), Some(to)) = ends else {
        return Err("the other process has no pipes".to_owned());
    };
    let mut pipe = Pipe::new(from, to);
    let gpu = arguments.gpus[0].map(Gpu::open).transpose().map_err(text)?;
    let address: SocketAddr = pipe.hear()?.parse().map_err(text)?;
    let options = options(arguments, gpu.clone(), key);
    let connection = Endpoint::connect(address, &options).map_err(text)?;
    eprintln!("{}", connection.path());
    let side = Side {
        connection: &connection,
        gpu: gpu.as_ref(),
        after: arguments.after,
        leads: true,
    };
    for (name, case) in &arguments.cases {
        if let (Case::Copies { bytes, count }, Some(gpu)) = (case, &gpu) {
            copies::run(gpu, *bytes, *count)?;
            continue;
        }
        let figures = run(&side, &mut pipe, *case)?;
        report(arguments, name, round, &figures)?;
    }
    connection.close(LONG).map_err(text)
}

/// The process that receives.
pub(crate) fn serve(arguments: &Arguments) -> Outcome<()> {
    let key = std::env::var(KEY).map_err(text)?;
    let key = Key::parse(&key).map_err(text)?;
    let gpu = arguments.gpus[1].map(Gpu::open).transpose().map_err(text)?;
    let options = options(arguments, gpu.clone(), key);
    let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), options).map_err(text)?;
    let mut pipe = Pipe::new(std::io::stdin(), std::io::stdout());
    pipe.tell(&endpoint.local_addr().to_string())?;
    let connection = endpoint.accept(LONG).map_err(text)?;
    let side = Side {
        connection: &connection,
        gpu: gpu.as_ref(),
        after: arguments.after,
        leads: false,
    };
    let served = arguments
        .cases
        .iter()
        .filter(|(_, case)| !matches!(case, Case::Copies { .. }))
        .try_for_each(|(_, case)| run(&side, &mut pipe, *case).map(drop));
    if let Err(error) = served {
        pipe.tell(&error)?;
        return Err(error);
    }
    connection.close(LONG).map_err(text)
}

fn run<R: std::io::Read, W: Write>(
    side: &Side<'_>,
    pipe: &mut Pipe<R, W>,
    case: Case,
) -> Outcome<Figures> {
    let threads = Threads::watch();
    let figures = match case {
        Case::Stream(load) => cases::stream(side, pipe, load),
        Case::Both(load) => cases::both(side, pipe, load),
        Case::Ping { bytes, count } => cases::ping(side, pipe, bytes, count),
        Case::Copies { .. } => Err("copies need a GPU".to_owned()),
        Case::Plain {
            lanes,
            call,
            bytes,
            set,
        } => plain::run(side.leads, pipe, [lanes, call, bytes, set]),
    };
    if let Some(threads) = threads {
        threads.print(if side.leads { "sender  " } else { "receiver" });
    }
    figures
}

fn options(arguments: &Arguments, gpu: Option<Gpu>, key: Key) -> Options {
    let network = TcpNetwork::new(arguments.tcp.clone());
    let mut options = Options::new(Arc::new(network), Auth::Key(key));
    options.chunk_bytes = arguments.chunk;
    options.gpu = gpu;
    options
}

fn report(arguments: &Arguments, name: &str, round: u32, figures: &Figures) -> Outcome<()> {
    let mut value = json!({
        "case": name,
        "round": round,
        "gb_per_second": figures.gb_per_second,
        "cpu_seconds_per_gb": figures.cpu_seconds_per_gb,
        "verified": true,
    });
    if let Some((p50, p99)) = figures.latency_us {
        value["latency_us"] = json!({ "p50": p50, "p99": p99 });
    }
    println!("{value}");
    if let Some(out) = &arguments.out {
        let file = out.join(format!("{name}.{round}.json"));
        std::fs::write(&file, Value::to_string(&value)).map_err(text)?;
    }
    Ok(())
}
