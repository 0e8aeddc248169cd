//! Variables that a plugin reads, set before this process has a second thread: by starting itself anew.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::args::bench::BenchCommand;
use crate::args::link::MemoryArgs;
use crate::args::perf::{PerfSide, Place};
use crate::args::{Cli, Command as Tcpx};
use crate::error::Error;
use crate::link::is_plugin;
use crate::memory_choice::Devices;

/// Makes our own plugin one that leaves fragments to be unpacked, instead of one with flat receives.
const DEVICE: &str = "TCPX_NET_DEVICE";
/// Lets host memory take the place of device memory where there is no GPU.
const STANDIN: &str = "TCPX_NET_STANDIN";
/// Interfaces that a plugin may use.
const INTERFACES: &str = "NCCL_SOCKET_IFNAME";

/// A variable, its value, and whether it replaces one that the person has set.
type Wanted = (&'static str, &'static str, bool);

/// Starts this program anew if the command needs variables that are not set; returns if it needs none.
pub(crate) fn prepare(cli: &Cli) -> Result<(), Error> {
    let missing: Vec<_> = wanted(cli)
        .into_iter()
        .filter(|&(name, value, replaces)| match std::env::var_os(name) {
            None => true,
            Some(set) => replaces && set != value,
        })
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| OsString::from("tcpx"));
    let failed = Command::new(own_program())
        .arg0(name)
        .args(arguments)
        .envs(missing.into_iter().map(|(name, value, _)| (name, value)))
        .exec();
    Err(Error::Process {
        doing: "start this program anew with the plugin's variables",
        source: failed,
    })
}

/// Whether our own plugin takes host memory for device memory.
pub(crate) fn host_stands_in() -> bool {
    std::env::var_os(STANDIN).is_some_and(|value| value == "host")
}

/// This program's file; if it was replaced, the link that still leads to what is running.
pub(crate) fn own_program() -> PathBuf {
    match std::env::current_exe() {
        Ok(path) if path.is_file() => path,
        _ => PathBuf::from("/proc/self/exe"),
    }
}

fn wanted(cli: &Cli) -> Vec<Wanted> {
    let (memory, is_demo) = match &cli.command {
        Tcpx::Demo(args) => (&args.memory, true),
        Tcpx::Transfer(args) if is_plugin(&args.link.network) => (&args.memory, false),
        Tcpx::Connection(args) if is_plugin(&args.link.network) => (&args.memory, false),
        Tcpx::Bench(args) => {
            return match &args.what {
                BenchCommand::Net(args) if is_plugin(&args.link.network) => {
                    let place = args.serve.or(args.from);
                    variables(&place.map(Place::memory).unwrap_or_default(), false)
                }
                _ => Vec::new(),
            };
        }
        Tcpx::Perf(args) => {
            let (link, memory) = match &args.side {
                None => (&args.matrix.link, MemoryArgs::default()),
                Some(PerfSide::Server(args)) => (&args.link, args.place.memory()),
                Some(PerfSide::Client(args)) => (&args.link, args.place.memory()),
                Some(PerfSide::Agent(args)) => {
                    let first = args.places.first().copied();
                    (&args.link, first.map(Place::memory).unwrap_or_default())
                }
            };
            return if is_plugin(&link.network) {
                variables(&memory, false)
            } else {
                Vec::new()
            };
        }
        _ => return Vec::new(),
    };
    variables(memory, is_demo)
}

fn variables(memory: &MemoryArgs, is_demo: bool) -> Vec<Wanted> {
    let mut wanted = vec![(DEVICE, "unpack", is_demo)];
    if Devices::probe().means_host(memory) {
        wanted.push((STANDIN, "host", is_demo));
    }
    if is_demo {
        // Both processes are on this host: nothing has to leave it.
        wanted.push((INTERFACES, "lo", true));
    }
    wanted
}
