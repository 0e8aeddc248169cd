//! The tcpx program: demo, transfer, connection, perf, bench, devices, doctor, plugin, env.

mod addresses;
mod args;
mod bench;
mod buffer_daemon;
mod connection;
mod demo;
mod devices;
mod doctor;
mod env;
mod environment;
mod error;
mod host;
mod key;
mod link;
mod log;
mod memory_choice;
mod messages;
mod output;
mod pattern;
mod perf;
mod plugin_check;
mod plugin_file;
mod second_process;
mod sizes;
mod transfer;
mod vendor_environment;

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
        Command::Env(args) => env::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Plugin(args) => plugin_check::run(args),
        Command::PluginPart(args) => {
            plugin_check::part::run(args);
            Ok(())
        }
        Command::Devices => {
            devices::run();
            Ok(())
        }
    }
}
