//! The tcpx program: demo, send, receive, transfer, connection, perf, bench, devices, devmem,
//! doctor, status, plugin, env.
//!
//! A library for the program and the fuzz targets alone.

mod addresses;
mod advice;
mod args;
mod bench;
mod connection;
mod demo;
mod devices;
#[cfg(feature = "devmem")]
mod devmem;
mod doctor;
mod env;
mod environment;
mod error;
mod files;
#[doc(hidden)]
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod generate;
mod host;
mod interrupt;
mod key;
mod link;
mod log;
mod measuring;
mod memory_choice;
mod messages;
mod output;
mod perf;
mod plugin_check;
mod plugin_file;
mod second_process;
mod sizes;
mod status;
mod transfer;
mod vendor_environment;

use std::process::ExitCode;

use tcpx_bench::pattern;
use tcpx_net::plugin;

use crate::args::{Cli, Command};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::Error;
use crate::output::json::{self, Told};
use crate::output::say::{self, say};

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    leave_no_core();
    let code = start();
    if plugin::is_linker_stuck() {
        // An orderly end would wait for the plugin's constructor.
        plugin::leave_process(u8::from(code != ExitCode::SUCCESS));
    }
    code
}

/// A core dump would hold keys, and payload of others: a crash leaves none.
fn leave_no_core() {
    let maximum = getrlimit(Resource::Core).maximum;
    let none = Rlimit {
        current: Some(0),
        maximum,
    };
    // To lower a limit is always allowed.
    let _ = setrlimit(Resource::Core, none);
}

fn start() -> ExitCode {
    let cli = Cli::read();
    say::follow(&cli.output);
    let result = log::start(&cli.output)
        .and_then(|()| environment::prepare(&cli))
        .and_then(|()| run(&cli));
    let result = json::conclude(&cli.schema(), result);
    let result = result.and_then(|()| say::check_output());
    match (result, cli.verdict_name()) {
        (Ok(()), None) => ExitCode::SUCCESS,
        (Ok(()), Some(name)) => {
            say!("{name}: PASSED");
            ExitCode::SUCCESS
        }
        (Err(error), name) => {
            say::failure(&error);
            if matches!(cli.command, Command::Env(_)) && !say::is_json() {
                say!("{}", env::FAILURE);
            }
            if let Some(name) = name
                && !matches!(error, Error::Usage { .. })
            {
                say!("{name}: FAILED");
            }
            error.exit_code()
        }
    }
}

/// Runs the command; returns what its JSON holds.
fn run(cli: &Cli) -> Result<Told, Error> {
    match &cli.command {
        Command::Demo(args) => demo::run(args),
        Command::Send(args) => files::send(args),
        Command::Receive(args) => files::receive(args),
        Command::Transfer(args) => transfer::run(args),
        Command::Connection(args) => connection::run(args),
        Command::Perf(args) => perf::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Devices => Ok(devices::run()),
        #[cfg(feature = "devmem")]
        Command::Devmem(args) => devmem::run(args),
        Command::Env(args) => env::run(args),
        Command::Key(args) => key::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Status(args) => status::run(args),
        Command::Plugin(args) => plugin_check::run(args),
        Command::Generate { folder } => generate::run(folder).map(|()| Told::Nothing),
        Command::PluginPart(args) => {
            plugin_check::part::run(args);
            Ok(Told::Nothing)
        }
    }
}
