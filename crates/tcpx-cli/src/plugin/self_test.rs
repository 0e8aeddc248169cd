//! Both ends of a connection through the plugin, in this process.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use tcpx::{Auth, Connection, Deadlines, Endpoint, Key, Level, Options, Region};
use tcpx_net::PluginNetwork;

use super::show_case;
use crate::error::Error;
use crate::output::say::say;

/// From nothing to many windows' worth, around pages and requests.
const SIZES: [usize; 9] = [
    0,
    1,
    23,
    4095,
    4097,
    512 << 10,
    (512 << 10) + 1,
    4 << 20,
    64 << 20,
];
/// Bytes on either side of the destination that must stay as they were.
const GUARD: usize = 4096;
const POISON: u8 = 0xA5;

/// One size.
#[derive(Debug, Serialize)]
pub(super) struct Case {
    pub(super) bytes: u64,
    /// Requests that the plugin carried.
    pub(super) requests: u32,
    pub(super) seconds: f64,
    /// Why it failed; absent if every byte arrived and none beside them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// Moves every size; ends at the first that fails.
pub(super) fn run(
    network: &Arc<PluginNetwork>,
    stall: Duration,
    shown: bool,
) -> (Vec<Case>, Result<(), Error>) {
    let mut cases = Vec::new();
    let outcome = connect(network, stall).and_then(|(server, client)| {
        if shown {
            say!("self-test in host memory: {}", client.path());
        }
        for bytes in SIZES {
            let started = Instant::now();
            let moved = transfer(&server, &client, bytes);
            let case = Case {
                bytes: bytes as u64,
                requests: moved.as_ref().copied().unwrap_or(0),
                seconds: started.elapsed().as_secs_f64(),
                error: moved.as_ref().err().map(Error::what),
            };
            if shown {
                show_case(&case);
            }
            cases.push(case);
            moved?;
        }
        part(server, client, stall)
    });
    (cases, outcome)
}

fn connect(
    network: &Arc<PluginNetwork>,
    stall: Duration,
) -> Result<(Connection, Connection), Error> {
    let mut randomness = Ok(());
    let key = Key::generate(&mut |bytes| randomness = getrandom::fill(bytes));
    randomness.map_err(|error| Error::Process {
        doing: "get random bytes for a key",
        source: std::io::Error::other(error),
    })?;
    let mut options = Options::new(Arc::clone(network) as Arc<_>, Auth::Key(key));
    options.channels = 1;
    options.connect_timeout = stall;
    options.deadlines = Deadlines { stall, total: None };
    let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), options.clone())?;
    let address = endpoint.local_addr();
    thread::scope(|scope| {
        let client = scope.spawn(|| Endpoint::connect(address, &options));
        let server = endpoint.accept(stall.saturating_mul(2));
        let client = client.join().map_err(|_| Error::Failed {
            what: "the connecting thread panicked".to_owned(),
            hint: "report this with the lines above",
        })?;
        // The end that asked knows best what the plugin refused.
        let client = client?;
        Ok((server?, client))
    })
}

/// Fresh random bytes to a poisoned destination between guards; the number of requests.
fn transfer(server: &Connection, client: &Connection, bytes: usize) -> Result<u32, Error> {
    let memory = |source| Error::Memory {
        doing: "prepare the self-test's memory",
        source,
    };
    let mut content = vec![0; bytes];
    getrandom::fill(&mut content).map_err(|error| Error::Process {
        doing: "get random bytes to send",
        source: std::io::Error::other(error),
    })?;
    let source = Region::host(bytes).map_err(memory)?;
    let target = Region::host(bytes + 2 * GUARD).map_err(memory)?;
    source.write_from(0, &content).map_err(memory)?;
    let poison = vec![POISON; bytes + 2 * GUARD];
    target.write_from(0, &poison).map_err(memory)?;
    let place = target.slice(GUARD..GUARD + bytes).map_err(memory)?;
    let receive = server.receive(place, 42).level(Level::Placed).start()?;
    let send = client.send(source.all(), 42).level(Level::Placed).start()?;
    let report = send.wait()?;
    receive.wait()?;
    let same = target.with_bytes(.., |there| {
        let (before, rest) = there.split_at(GUARD);
        let (inside, behind) = rest.split_at(bytes);
        let untouched = |guard: &[u8]| guard.iter().all(|byte| *byte == POISON);
        (inside == content, untouched(before) && untouched(behind))
    });
    match same.map_err(memory)? {
        (true, true) => Ok(report.chunks),
        (false, _) => Err(wrong(format!("{bytes} bytes arrived changed"))),
        (true, false) => Err(wrong(format!("{bytes} bytes wrote past their buffer"))),
    }
}

fn wrong(what: String) -> Error {
    Error::Failed {
        what,
        hint: "do not use this plugin for host memory: it loses or changes data",
    }
}

fn part(server: Connection, client: Connection, limit: Duration) -> Result<(), Error> {
    thread::scope(|scope| {
        let other = scope.spawn(|| client.close(limit));
        server.close(limit)?;
        match other.join() {
            Ok(closed) => Ok(closed?),
            Err(_) => Err(Error::Failed {
                what: "the closing thread panicked".to_owned(),
                hint: "report this with the lines above",
            }),
        }
    })
}
