//! The tcpx program: demo, transfer, connection, perf, devices.

mod addresses;
mod args;
mod connection;
mod demo;
mod devices;
mod environment;
mod error;
mod key;
mod link;
mod memory_choice;
mod messages;
mod output;
mod pattern;
mod perf;
mod plugin_file;
mod sizes;
mod transfer;

use std::io;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command};
use crate::error::Error;
use crate::output::say;

fn main() -> ExitCode {
    let cli = Cli::read();
    let result = environment::prepare(&cli).and_then(|()| {
        log(cli.debug());
        run(&cli)
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say::failure(&error);
            error.exit_code()
        }
    }
}

fn run(cli: &Cli) -> Result<(), Error> {
    match &cli.command {
        Command::Demo(args) => demo::run(args),
        Command::DemoPeer => demo::peer::run(),
        Command::Transfer(args) => transfer::run(args),
        Command::Connection(args) => connection::run(args),
        Command::Perf(args) => perf::run(args),
        Command::Devices => {
            devices::run();
            Ok(())
        }
    }
}

/// Log lines go to standard error; `RUST_LOG` chooses them.
fn log(debug: bool) {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(if debug { "debug" } else { "warn" }));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .without_time()
        .compact()
        .init();
}
