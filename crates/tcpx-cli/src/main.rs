//! The tcpx program: demo, transfer, connection, perf, bench, devices, devmem.

mod addresses;
mod args;
mod bench;
mod connection;
mod demo;
mod devices;
mod devmem;
mod environment;
mod error;
mod key;
mod link;
mod log;
mod memory_choice;
mod messages;
mod output;
mod pattern;
mod perf;
mod plugin_file;
mod second_process;
mod sizes;
mod transfer;

use std::process::ExitCode;

use crate::args::{Cli, Command};
use crate::error::Error;
use crate::output::say::{self, say};

fn main() -> ExitCode {
    let cli = Cli::read();
    let result = environment::prepare(&cli).and_then(|()| {
        log::start(cli.debug());
        run(&cli)
    });
    match (result, cli.verdict_name()) {
        (Ok(()), None) => ExitCode::SUCCESS,
        (Ok(()), Some(name)) => {
            say!("{name}: PASSED");
            ExitCode::SUCCESS
        }
        (Err(error), name) => {
            say::failure(&error);
            if let Some(name) = name
                && !matches!(error, Error::Usage { .. })
            {
                say!("{name}: FAILED");
            }
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
        Command::Bench(args) => bench::run(args),
        Command::Devmem(args) => devmem::run(args),
        Command::Devices => {
            devices::run();
            Ok(())
        }
    }
}
