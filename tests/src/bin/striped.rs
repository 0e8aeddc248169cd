//! One end of a connection in a network namespace: sends or receives transfers and says how fast.
//!
//! `striped server PORT BYTES COUNT [INTERFACES [patient]]`,
//! `striped client ADDRESS BYTES COUNT [INTERFACES [patient]]`. Both print a line of JSON for each
//! step. A patient side takes no peer for dead before ten minutes of silence.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::json;
use tcpx::{Auth, Connection, Endpoint, Key, Level, Options, TcpNetwork};
use tcpx_net::{TcpOptions, every_address};
use tcpx_tests::buffers::{Destination, Source};
use tcpx_tests::content::Content;

const LONG: Duration = Duration::from_secs(60);
const PATIENT: Duration = Duration::from_secs(600);
const LOOK: Duration = Duration::from_millis(5);

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, place, bytes, count, rest @ ..] = arguments.as_slice() else {
        bail!("server PORT BYTES COUNT, or client ADDRESS BYTES COUNT [INTERFACES [patient]]");
    };
    let (bytes, count): (u64, u64) = (bytes.parse()?, count.parse()?);
    // The two ends trust each other; nobody else is in their namespaces.
    let key = Key::generate(&mut |bytes| bytes.fill(0x5a));
    let network = TcpNetwork::new(TcpOptions {
        interfaces: rest.first().cloned(),
        ..TcpOptions::default()
    });
    let mut options = Options::new(Arc::new(network), Auth::Key(key));
    if rest.get(1).is_some_and(|word| word == "patient") {
        options.dead_after = PATIENT;
    }
    match role.as_str() {
        "server" => {
            let port: u16 = place.parse()?;
            let endpoint = Endpoint::listen((every_address(), port).into(), options)?;
            say(&json!({ "listening": endpoint.local_addr().to_string() }))?;
            let connection = endpoint.accept(LONG).inspect_err(refused)?;
            receive(&connection, bytes, count)?;
            finish(connection)
        }
        "client" => {
            let address: SocketAddr = place.parse()?;
            let connection = Endpoint::connect(address, &options).inspect_err(refused)?;
            send(&connection, bytes, count)?;
            finish(connection)
        }
        other => bail!("no role {other:?}"),
    }
}

/// Tells why there is no connection.
fn refused(error: &tcpx::Error) {
    // Whoever reads it may have gone.
    let _ = say(&json!({ "refused": error.to_string() }));
}

fn receive(connection: &Connection, bytes: u64, count: u64) -> anyhow::Result<()> {
    for number in 0..count {
        let destination = Destination::new(bytes, 17);
        let transfer = connection.receive(destination.slice(), number);
        transfer.level(Level::Verified).start()?.wait()?;
        if let Some(defect) = destination.defect(Content::new(4, number)) {
            bail!("transfer {number}: {defect}");
        }
        say(&json!({ "verified": number }))?;
    }
    Ok(())
}

fn send(connection: &Connection, bytes: u64, count: u64) -> anyhow::Result<()> {
    say(&json!({ "path": connection.path() }))?;
    for number in 0..count {
        let source = Source::new(Content::new(4, number), bytes, 0);
        let started = Instant::now();
        let transfer = connection.send(source.slice(), number).start()?;
        let mut quarter = false;
        let outcome = loop {
            if let Some(outcome) = transfer.wait_timeout(LOOK) {
                break outcome;
            }
            if !quarter && transfer.progress().bytes_done > bytes / 4 {
                quarter = true;
                say(&json!({ "quarter": number }))?;
            }
        };
        outcome.context("the send")?;
        let seconds = started.elapsed().as_secs_f64();
        say(&json!({ "sent": number, "bytes_per_second": bytes as f64 / seconds }))?;
    }
    Ok(())
}

fn finish(connection: Connection) -> anyhow::Result<()> {
    let stats = connection.statistics();
    connection.close(LONG)?;
    say(&json!({
        "lanes_lost": stats.lanes_lost,
        "lanes_restored": stats.lanes_restored,
        "chunks_resent": stats.chunks_resent,
    }))
}

fn say(line: &serde_json::Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}
