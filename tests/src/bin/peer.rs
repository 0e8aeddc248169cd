//! One end of a connection in a process of its own: reads its instructions from standard input,
//! does its part of a scenario, says how it went on standard output, and logs to standard error.

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tcpx::{Connection, Endpoint, Error};
use tcpx_tests::accident::{Point, Witness};
use tcpx_tests::instructions::{Answer, Instructions, Summary};
use tcpx_tests::part;
use tcpx_tests::scenario::Side;

/// Longest wait for a client; the test ends the program much earlier.
const ACCEPT: Duration = Duration::from_secs(300);
/// Longest goodbye.
const GOODBYE: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<ExitCode> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let instructions: Instructions = serde_json::from_str(&line).context("instructions")?;
    let summary = follow(&instructions)?;
    let code = if summary.is_good() { 0 } else { 1 };
    answer(&Answer::Summary(summary))?;
    Ok(ExitCode::from(code))
}

fn follow(instructions: &Instructions) -> anyhow::Result<Summary> {
    let scenario = &instructions.scenario;
    let side = match instructions.connect {
        Some(_) => Side::Client,
        None => Side::Server,
    };
    let incoming = scenario.flow_to(side);
    let bytes = incoming.messages.iter().map(|message| message.bytes).sum();
    let witness = Arc::new(Witness::new(instructions.accident, bytes));
    let mut options = instructions.options()?;
    options.observer = Some(witness.clone());
    // The endpoint goes on listening meanwhile: what others do to it must disturb nobody.
    let mut listening = None;
    let connected: Result<Connection, Error> = match instructions.connect {
        Some(address) => Endpoint::connect(address, &options),
        None => {
            let endpoint = Endpoint::listen(([127, 0, 0, 1], 0).into(), options)?;
            answer(&Answer::Listening(endpoint.local_addr()))?;
            listening.insert(endpoint).accept(ACCEPT)
        }
    };
    let connection = match connected {
        Ok(connection) => connection,
        Err(error) => {
            return Ok(Summary {
                set_up: Some(error.to_string()),
                ..Summary::default()
            });
        }
    };
    let mut summary = part::play(&connection, scenario, side);
    witness.reach(Point::BeforeClose);
    let statistics = connection.statistics();
    summary.lanes_lost = statistics.lanes_lost;
    summary.chunks_resent = statistics.chunks_resent;
    summary.close = connection
        .close(GOODBYE)
        .err()
        .map(|error| error.to_string());
    summary.arrivals = witness.arrivals();
    drop(listening);
    Ok(summary)
}

fn answer(answer: &Answer) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, answer)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}
