//! One end of device-memory transfers between two processes, for the virtual machine: binds what it
//! is told to, plays scenarios over one connection after the other, and fails when a byte is wrong
//! or something is left open.
//!
//! Arguments are `name=value`: `listen=PORT` or `connect=ADDRESS:PORT`; `interface=`, `queue=`,
//! `pool=BYTES` (receive there), `send=yes` (send out of device memory too); `channels=`; `seed=`,
//! `sizes=N,N,...` or `shuffled=COUNTxLARGEST`, `one_way=yes` (only to the server), `rounds=`,
//! `connections=`, `rounds_shown=yes`; `expect=pool` (every byte landed in the pool or beside it,
//! no path changed), `plain` (none did), `moved` (the path changed), `any`; `unbind_after=CHUNKS`
//! received, or `unbind_after_sends=CHUNKS`: ends the process's bindings in the middle of its
//! transfers; `send=maybe` (where the card can). In the end it says how many bytes were checked;
//! every token that the kernel handed out must be free again, unless the path changed: then closing
//! frees the rest.

#[path = "devmem_peer/counting.rs"]
mod counting;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tcpx::{Auth, Endpoint, Event, Observer, Options};
use tcpx_devmem::{Adjust, Devmem, DevmemNetwork, DevmemOptions, ReceiveOptions, SocketCalls};
use tcpx_memory::DmaBuf;
use tcpx_tests::part;
use tcpx_tests::scenario::{Scenario, Side};

const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time in which a connection's thread lets go of its own.
const LETTING_GO: Duration = Duration::from_secs(60);
/// Device memory that chunks wait in until they are sent.
const SEND_BYTES: usize = 16 << 20;

struct Arguments(HashMap<String, String>);

impl Arguments {
    fn of_process() -> anyhow::Result<Self> {
        let pairs = std::env::args().skip(1).map(|argument| {
            let (name, value) = argument
                .split_once('=')
                .with_context(|| format!("{argument} is not name=value"))?;
            Ok((name.to_owned(), value.to_owned()))
        });
        pairs.collect::<anyhow::Result<_>>().map(Self)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn number<T: FromStr>(&self, name: &str, default: T) -> anyhow::Result<T> {
        let Some(text) = self.text(name) else {
            return Ok(default);
        };
        text.parse()
            .ok()
            .with_context(|| format!("{name}={text} is no number"))
    }

    fn is_set(&self, name: &str) -> bool {
        self.text(name) == Some("yes")
    }

    fn scenario(&self, seed: u64) -> anyhow::Result<Scenario> {
        let mut scenario = match (self.text("sizes"), self.text("shuffled")) {
            (Some(sizes), None) => {
                let sizes: Result<Vec<u64>, _> = sizes.split(',').map(str::parse).collect();
                Scenario::each(seed, &sizes.context("sizes")?)
            }
            (None, Some(shuffled)) => {
                let (count, largest) = shuffled.split_once('x').context("COUNTxLARGEST")?;
                Scenario::shuffled(seed, count.parse()?, largest.parse()?)
            }
            _ => bail!("either sizes= or shuffled="),
        };
        scenario.to_client = !self.is_set("one_way");
        Ok(scenario)
    }
}

fn main() -> anyhow::Result<ExitCode> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .init();
    println!("pid {}", std::process::id());
    let arguments = Arguments::of_process()?;
    let calls = Arc::new(counting::Counting::default());
    let network = Arc::new(network(&arguments, calls.clone())?);
    let mut options = Options::new(network, Auth::Insecure);
    options.channels = arguments.number("channels", 1)?;
    options.one_time = false;
    for (name, sends) in [("unbind_after", false), ("unbind_after_sends", true)] {
        let chunks = arguments.number(name, 0)?;
        if chunks > 0 {
            let left = AtomicU64::new(chunks);
            options.observer = Some(Arc::new(Unbinder { sends, left }));
        }
    }
    let side = match arguments.text("listen") {
        Some(_) => Side::Server,
        None => Side::Client,
    };
    let endpoint = match side {
        Side::Server => {
            let port = arguments.number("listen", 0)?;
            let endpoint = Endpoint::listen(([0, 0, 0, 0], port).into(), options.clone())?;
            println!("listening");
            Some(endpoint)
        }
        Side::Client => None,
    };
    let mut totals = Totals::default();
    let connections: u64 = arguments.number("connections", 1)?;
    // The first random number may open a source of them for good.
    getrandom::fill(&mut [0])?;
    let before = open_descriptors()?;
    for number in 0..connections {
        let connection = match &endpoint {
            Some(endpoint) => endpoint.accept(PATIENCE)?,
            None => {
                let address = arguments.text("connect").context("listen= or connect=")?;
                Endpoint::connect(address.parse::<SocketAddr>()?, &options)?
            }
        };
        let path = connection.path();
        for round in 0..arguments.number("rounds", 1u64)? {
            let seed = arguments.number("seed", 1u64)? + 1000 * number + round;
            let summary = part::play(&connection, &arguments.scenario(seed)?, side);
            if !summary.is_good() {
                bail!("connection {number}, round {round}: {summary:#?}");
            }
            totals.transfers += summary.succeeded;
            totals.received += summary.received;
            totals.fragments += summary.fragments;
            if arguments.is_set("rounds_shown") {
                println!("round {round} done");
            }
        }
        totals.in_pool += connection.statistics().bytes_in_pool;
        if connection.path() != path {
            totals.moved += 1;
            println!("moved: {}", connection.path());
        }
        connection.close(PATIENCE)?;
        // A server's next client may be there already.
        if side == Side::Client || number + 1 == connections {
            wait_for_descriptors(before)
                .with_context(|| format!("descriptors stay open after connection {number}"))?;
        }
    }
    println!("{totals:?}");
    // `cargo xtask devmem-vm` adds these up.
    println!(
        "checked {} bytes, {} of them in device memory",
        totals.received, totals.in_pool
    );
    let (handed_out, freed) = calls.tokens();
    println!("tokens: {handed_out} handed out, {freed} free again");
    if totals.moved == 0 && handed_out != freed {
        bail!("tokens were not given back");
    }
    totals.check(arguments.text("expect").unwrap_or("any"))?;
    Ok(ExitCode::SUCCESS)
}

fn network(arguments: &Arguments, calls: Arc<dyn SocketCalls>) -> anyhow::Result<DevmemNetwork> {
    let mut options = DevmemOptions::default();
    if let Some(interface) = arguments.text("interface") {
        let devmem = Devmem::system();
        let pool: usize = arguments.number("pool", 0)?;
        if pool > 0 {
            let queue = arguments.text("queue").map(str::parse).transpose()?;
            options.receive.push(devmem.bind_receive(&ReceiveOptions {
                interface: interface.to_owned(),
                queue,
                memory: DmaBuf::host(pool)?,
                adjust: Adjust::Settings,
            })?);
        }
        if let Some(send) = arguments.text("send") {
            let memory = DmaBuf::host(SEND_BYTES)?;
            match devmem.bind_send(interface, &memory) {
                Ok(path) => options.send = Some(path),
                Err(error) if send == "maybe" && error.leaves_staging() => {
                    println!("staged: {error}")
                }
                Err(error) => return Err(error.into()),
            }
        }
        options.interface = Some(interface.to_owned());
    }
    Ok(DevmemNetwork::with_calls(options, calls)?)
}

/// Ends the bindings after so many chunks have come, or have gone.
struct Unbinder {
    sends: bool,
    left: AtomicU64,
}

impl Observer for Unbinder {
    fn event(&self, event: &Event) {
        let counts = match event {
            Event::ChunkPlaced { .. } => !self.sends,
            Event::ChunkSent(_) => self.sends,
            _ => false,
        };
        if counts && self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            let ended = end_bindings().expect("this process's descriptors");
            println!("bindings ended: {ended}");
        }
    }
}

/// A binding lives as long as its netlink socket: puts `/dev/null` in the place of each.
fn end_bindings() -> anyhow::Result<usize> {
    let null = std::fs::File::open("/dev/null")?;
    let mut ended = 0;
    for entry in Path::new("/proc/self/fd").read_dir()? {
        let name = entry?.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // SAFETY: the descriptor was open a moment ago, and is only asked what it is.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        let domain = rustix::net::sockopt::socket_domain(descriptor);
        if domain == Ok(rustix::net::AddressFamily::NETLINK) {
            // SAFETY: both are open. The owner of the number goes on with a descriptor that answers
            // nothing, and closes that one in the end.
            if unsafe { libc::dup2(null.as_raw_fd(), number) } < 0 {
                return Err(std::io::Error::last_os_error().into());
            }
            ended += 1;
        }
    }
    Ok(ended)
}

fn open_descriptors() -> anyhow::Result<usize> {
    Ok(Path::new("/proc/self/fd").read_dir()?.count())
}

/// A connection's thread lets go of its own a moment after the goodbye.
fn wait_for_descriptors(most: usize) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let now = open_descriptors()?;
        if now <= most {
            return Ok(());
        }
        if started.elapsed() > LETTING_GO {
            let left = Path::new("/proc/self/fd").read_dir()?.filter_map(|one| {
                let target = one.ok()?.path().read_link().ok()?;
                Some(target.display().to_string())
            });
            let left: Vec<_> = left.collect();
            bail!("{now} are open, {most} were before the first connection: {left:?}");
        }
        std::thread::yield_now();
    }
}

#[derive(Debug, Default)]
struct Totals {
    transfers: u64,
    received: u64,
    in_pool: u64,
    fragments: u64,
    moved: u64,
}

impl Totals {
    fn check(&self, expect: &str) -> anyhow::Result<()> {
        let holds = match expect {
            "any" => true,
            // Packets that the card did not split are data beside the pool.
            "pool" => self.moved == 0 && self.in_pool > 0 && self.in_pool <= self.received,
            "all" => self.moved == 0 && self.in_pool == self.received,
            "plain" => self.in_pool == 0,
            "moved" => self.moved > 0,
            other => bail!("expect={other} is not known"),
        };
        if !holds {
            bail!("expected {expect}: {self:?}");
        }
        Ok(())
    }
}
