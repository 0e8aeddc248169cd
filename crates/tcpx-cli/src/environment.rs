//! Variables that a plugin reads, set before this process has a second thread: by starting itself
//! anew.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::args::{Cli, Command as Tcpx};
use crate::error::Error;
use crate::host::{Host, RealHost};
use crate::key::KEY_VARIABLE;
use crate::link::is_plugin;
use crate::memory_choice::Devices;
use crate::output::say::{aside, one_line};
use crate::plugin_file::Places;
use crate::plugin_file::contents::PluginKind;
use crate::vendor_environment::{Origin, Setting, for_google};

/// Which memory our own plugin takes.
const DEVICE: &str = "TCPX_NET_DEVICE";
/// Lets host memory take the place of device memory where there is no GPU.
const STANDIN: &str = "TCPX_NET_STANDIN";
/// This program's key while it drives a plugin: our own would take what `TCPX_KEY` holds for that
/// of its ranks, and a client's key is not its server's. Nobody else needs it there, as handles are
/// passed on sealed.
pub(crate) const PROGRAM_KEY: &str = "TCPX_PROGRAM_KEY";
/// Interfaces that a plugin may use.
const INTERFACES: &str = "NCCL_SOCKET_IFNAME";

/// Names of the variables that this program has set for itself, for the program started anew.
const SET_BY_US: &str = "TCPX_ENVIRONMENT_SET";

/// A variable, its value, and whether it replaces one that the person has set.
type Wanted = (&'static str, &'static str, bool);

/// Starts this program anew if the command needs variables that are not set; returns if it needs
/// none.
pub(crate) fn prepare(cli: &Cli) -> Result<(), Error> {
    let vendor = vendor_settings(cli);
    let mut missing: BTreeMap<&str, &str> = vendor
        .iter()
        .filter(|setting| setting.origin != Origin::Yours)
        .filter(|setting| std::env::var_os(setting.name).is_none_or(|value| value.is_empty()))
        .map(|setting| (setting.name, setting.value.as_str()))
        .collect();
    for (name, value, replaces) in wanted(cli) {
        let is_missing = match std::env::var_os(name) {
            None => true,
            Some(set) => replaces && set != value,
        };
        if is_missing {
            missing.insert(name, value);
        }
    }
    let key = std::env::var_os(KEY_VARIABLE).filter(|_| drives_plugin(cli));
    if missing.is_empty() && key.is_none() {
        report(&vendor);
        return Ok(());
    }
    let mut names = set_by_us();
    names.extend(missing.keys().map(|name| (*name).to_owned()));
    Err(start_anew(&names, &missing, key))
}

/// Whether the command loads a plugin to move bytes over it.
fn drives_plugin(cli: &Cli) -> bool {
    matches!(cli.command, Tcpx::Demo(_)) || cli.link().is_some_and(|link| is_plugin(&link.network))
}

/// Starts this program anew with more variables, and its `key` where a plugin does not look;
/// returns only with an error.
fn start_anew(
    set_by_us: &[String],
    variables: &BTreeMap<&str, &str>,
    key: Option<OsString>,
) -> Error {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| OsString::from("tcpx"));
    let mut program = Command::new(own_program());
    program.arg0(name).args(arguments);
    program.env(SET_BY_US, set_by_us.join(",")).envs(variables);
    if let Some(key) = key {
        program.env_remove(KEY_VARIABLE).env(PROGRAM_KEY, key);
    }
    let failed = program.exec();
    Error::process("start this program anew with the plugin's variables")(failed)
}

/// The variables that this program has set for itself.
pub(crate) fn set_by_us() -> Vec<String> {
    let names = std::env::var(SET_BY_US).unwrap_or_default();
    names
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The variables for Google's plugin, if that is what the command drives.
fn vendor_settings(cli: &Cli) -> Vec<Setting> {
    let Some(given) = cli.plugin() else {
        return Vec::new();
    };
    let host = RealHost::default();
    let vendor = Places::of_process().vendor;
    // A file that is missing or damaged is reported by the one who loads it.
    let file = match given {
        Some(file) => file,
        None => &vendor,
    };
    match host.contents(file) {
        Ok(contents) if contents.kind == PluginKind::Google => for_google(&host),
        _ => Vec::new(),
    }
}

/// Shows each variable of Google's plugin, once.
fn report(settings: &[Setting]) {
    if settings.is_empty() {
        return;
    }
    aside!("variables for Google's plugin:");
    for setting in settings {
        let whose = crate::env::origin(setting.origin);
        let line = format!(
            "{}={} ({whose}: {})",
            setting.name, setting.value, setting.why
        );
        aside!("  {}", one_line(&line));
        if let Some(trouble) = &setting.trouble {
            aside!(
                "  warning: {}",
                one_line(&format!("{}: {trouble}", setting.name))
            );
        }
    }
}

/// Whether the plugin takes host memory for device memory.
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
    let is_demo = matches!(cli.command, Tcpx::Demo(_));
    let Some(memory) = cli.memory().filter(|_| drives_plugin(cli)) else {
        return Vec::new();
    };
    let device = match Devices::probe().means_host(&memory) {
        true => "host",
        false => "cuda",
    };
    // The demo shows this, whatever our plugin is set to for NCCL.
    let mut wanted = vec![(DEVICE, device, is_demo)];
    if is_demo {
        // Both processes are on this host: nothing has to leave it.
        wanted.push((INTERFACES, "lo", false));
    }
    wanted
}
