//! `tcpx plugin`: what a plugin file exports, and whether messages go through it whole.
//!
//! The file is read before anything of it runs; then a process of its own loads and drives it, because a plugin may
//! hang, crash, or end its process.

mod events;
pub(crate) mod part;
mod self_test;
mod watch;

use std::collections::BTreeMap;

use serde::Serialize;

use self::events::{Count, Device, Event, Moved};
use self::watch::Watched;
use crate::args::plugin::PluginArgs;
use crate::doctor::explains::check_for;
use crate::error::Error;
use crate::host::{Host, RealHost};
use crate::output::say::{aside, one_line, say};
use crate::output::table::{indented, table};
use crate::plugin_file::contents::{Contents, PluginKind};
use crate::sizes::{Size, time};
use crate::vendor_environment::{Setting, for_google};

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Report<'a> {
    path: String,
    kind: String,
    tables: Vec<Table<'a>>,
    build_id: Option<&'a str>,
    variables: &'a [Setting],
    /// Name and version of the table in use.
    name: Option<String>,
    version: Option<u32>,
    devices: Vec<Device>,
    self_test: Vec<Moved>,
    calls: BTreeMap<String, Count>,
    passed: bool,
    error: Option<String>,
    hint: Option<String>,
    /// The check of the doctor that explains the error.
    check: Option<&'static str>,
    log: Vec<String>,
}

/// A table in the file.
#[derive(Debug, Serialize)]
struct Table<'a> {
    version: u32,
    name: Option<&'a str>,
}

/// Reads the file, drives the plugin, and shows both.
pub(crate) fn run(args: &PluginArgs) -> Result<(), Error> {
    let host = RealHost::default();
    let contents = match host.contents(&args.path) {
        Ok(contents) => contents,
        Err(error) => {
            let error = Error::from(error);
            if args.json {
                let object = serde_json::json!({
                    "path": args.path.display().to_string(),
                    "passed": false,
                    "error": error.what(),
                    "hint": error.hint(),
                    "check": check_for(&error).map(|check| check.id),
                });
                say!("{object:#}");
            }
            return Err(error);
        }
    };
    let settings = match contents.kind {
        PluginKind::Google => for_google(&host),
        PluginKind::Ours | PluginKind::Other => Vec::new(),
    };
    let mut report = Report::of_file(args, &contents, &settings);
    if !args.json {
        report.show_file(&contents);
    }
    let end = report.drive(args);
    if args.json {
        say!("{:#}", serde_json::json!(report));
    } else {
        report.show_rest();
    }
    end
}

impl<'a> Report<'a> {
    fn of_file(args: &PluginArgs, contents: &'a Contents, variables: &'a [Setting]) -> Self {
        let tables = contents.tables.iter().map(|table| Table {
            version: table.version.number(),
            name: table.name.as_deref(),
        });
        Self {
            path: args.path.display().to_string(),
            kind: contents.kind.to_string(),
            tables: tables.collect(),
            build_id: contents.build_id.as_deref(),
            variables,
            name: None,
            version: None,
            devices: Vec::new(),
            self_test: Vec::new(),
            calls: BTreeMap::new(),
            passed: false,
            error: None,
            hint: None,
            check: None,
            log: Vec::new(),
        }
    }

    /// Has another process drive the plugin and takes note of what it tells.
    fn drive(&mut self, args: &PluginArgs) -> Result<(), Error> {
        let mut watched = Watched::start(args, self.variables)?;
        loop {
            match watched.next() {
                Event::Doing { .. } => {}
                Event::Loaded { name, version } => {
                    self.name = Some(name);
                    self.version = Some(version);
                }
                Event::Devices(devices) => self.devices = devices,
                Event::Moved(moved) => self.self_test.push(moved),
                Event::Calls(calls) => self.calls = calls,
                Event::Passed => {
                    self.passed = true;
                    return Ok(());
                }
                Event::Failed { what, hint } => {
                    self.log = watched.log();
                    let error = Error::PluginCheck { what, hint };
                    self.error = Some(error.what());
                    self.hint = Some(error.hint());
                    self.check = check_for(&error).map(|check| check.id);
                    return Err(error);
                }
            }
        }
    }

    fn show_file(&self, contents: &Contents) {
        say!("plugin {}", self.path);
        say!("  file     {}; tables {}", self.kind, contents.versions());
        if let Some(id) = self.build_id {
            say!("  build    {id}");
        }
        for setting in self.variables {
            let whose = crate::env::origin(setting.origin);
            let line = format!("{}={} ({whose})", setting.name, setting.value);
            say!("  variable {}", one_line(&line));
        }
    }

    fn show_rest(&self) {
        if let (Some(name), Some(version)) = (&self.name, self.version) {
            say!("  in use   v{version} \"{}\"", one_line(name));
        }
        if !self.devices.is_empty() {
            self.show_devices();
        }
        if let Some(largest) = self.self_test.iter().map(|moved| moved.bytes).max() {
            let total: usize = self.self_test.iter().map(|moved| moved.bytes).sum();
            let spent: u64 = self.self_test.iter().map(|moved| moved.microseconds).sum();
            say!(
                "  moved    {} messages of up to {}, {} in {}; every byte compared",
                self.self_test.len(),
                Size(largest as u64),
                Size(total as u64),
                time(std::time::Duration::from_micros(spent)),
            );
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|(name, count)| match count.failed {
                0 => format!("{name} {}", count.calls),
                failed => format!("{name} {} ({failed} failed)", count.calls),
            });
            say!("  calls    {}", calls.collect::<Vec<_>>().join(", "));
        }
        for line in &self.log {
            aside!("  log: {line}");
        }
    }

    fn show_devices(&self) {
        let header = [
            "device", "name", "Gb/s", "memory", "offload", "comms", "PCI",
        ];
        let mut list = table(&header, &[0, 2, 5]);
        for (index, device) in self.devices.iter().enumerate() {
            let pci = device.pci_path.as_deref().unwrap_or("-");
            list.add_row([
                index.to_string(),
                one_line(&device.name),
                format!("{}", f64::from(device.speed_mbps) / 1000.0),
                device.memory.join(", "),
                device.offload.clone(),
                device.max_comms.to_string(),
                one_line(pci.rsplit('/').next().unwrap_or(pci)),
            ]);
        }
        say!("{}", indented(&list, "  ").trim_end());
    }
}
