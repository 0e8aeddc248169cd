//! `tcpx plugin`: what a plugin file exports, and whether messages go through it whole.
//!
//! The file is read before anything of it runs; then a process of its own loads and drives it, because a plugin may
//! hang, crash, or end its process.

pub(crate) mod events;
pub(crate) mod part;
mod self_test;
mod watch;

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::json;

use self::events::{Count, Device, Event, InUse, Moved};
use self::watch::Watched;
use crate::args::plugin::PluginArgs;
use crate::error::Error;
use crate::host::{Host, RealHost};
use crate::output::json::Told;
use crate::output::say::{aside, one_line, say};
use crate::output::table::{indented, table};
use crate::plugin_file::contents::{Contents, PluginKind};
use crate::sizes::Size;
use crate::vendor_environment::{Setting, for_google};

/// Everything that was found; `docs/plugin-check.md` describes it.
#[derive(Debug, Serialize)]
struct Report<'a> {
    path: String,
    kind: String,
    build_id: Option<&'a str>,
    tables: Vec<Table<'a>>,
    variables: &'a [Setting],
    in_use: Option<InUse>,
    devices: Vec<Device>,
    self_test: Vec<Moved>,
    calls: BTreeMap<String, Count>,
    log: Vec<String>,
}

/// A table in the file.
#[derive(Debug, Serialize)]
struct Table<'a> {
    version: u32,
    name: Option<&'a str>,
}

/// Reads the file, drives the plugin, and shows both.
pub(crate) fn run(args: &PluginArgs) -> Result<Told, Error> {
    let host = RealHost::default();
    let contents = match host.contents(&args.path) {
        Ok(contents) => contents,
        Err(error) => {
            let path = args.path.display().to_string();
            return Ok(Told::Bad(json!({ "path": path }), error.into()));
        }
    };
    let settings = match contents.kind {
        PluginKind::Google => for_google(&host),
        PluginKind::Ours | PluginKind::Other => Vec::new(),
    };
    let mut report = Report::of_file(args, &contents, &settings);
    report.show_file(&contents);
    let end = report.drive(args);
    report.show_rest();
    Ok(match end {
        Ok(()) => Told::Fields(json!(report)),
        Err(error) => Told::Bad(json!(report), error),
    })
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
            build_id: contents.build_id.as_deref(),
            tables: tables.collect(),
            variables,
            in_use: None,
            devices: Vec::new(),
            self_test: Vec::new(),
            calls: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    /// Has another process drive the plugin and takes note of what it tells.
    fn drive(&mut self, args: &PluginArgs) -> Result<(), Error> {
        let mut watched = Watched::start(args, self.variables)?;
        loop {
            match watched.next() {
                Ok(Event::Doing { .. } | Event::Failed { .. }) => {}
                Ok(Event::Loaded(in_use)) => self.in_use = Some(in_use),
                Ok(Event::Devices(devices)) => self.devices = devices,
                Ok(Event::Moved(moved)) => self.self_test.push(moved),
                Ok(Event::Calls(calls)) => self.calls = calls,
                Ok(Event::Passed) => return Ok(()),
                Err(error) => {
                    self.log = watched.log();
                    return Err(Error::At {
                        place: watched.step().to_owned(),
                        source: Box::new(error),
                    });
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
        if let Some(in_use) = &self.in_use {
            let name = one_line(&in_use.name);
            say!(
                "  in use   v{} \"{name}\"{}",
                in_use.version,
                in_use.without()
            );
        }
        if !self.devices.is_empty() {
            self.show_devices();
        }
        if let Some(largest) = self.self_test.iter().map(|moved| moved.bytes).max() {
            let total: usize = self.self_test.iter().map(|moved| moved.bytes).sum();
            say!(
                "  moved    {} messages of up to {}, {} in all; every byte compared",
                self.self_test.len(),
                Size(largest as u64),
                Size(total as u64),
            );
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|(name, count)| match count.failed {
                0 => format!("{name} {}", count.calls),
                failed => format!("{name} {} ({failed} failed)", count.calls),
            });
            for (at, line) in lines_of(calls).iter().enumerate() {
                say!("  {:8} {line}", if at == 0 { "calls" } else { "" });
            }
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

/// A list in lines that fit 80 columns beside its heading.
fn lines_of(items: impl Iterator<Item = String>) -> Vec<String> {
    const COLUMNS: usize = 68;
    let mut lines = vec![String::new()];
    for item in items {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(&item),
            Some(line) if line.len() + item.len() + 2 <= COLUMNS => {
                line.push_str(", ");
                line.push_str(&item);
            }
            line => {
                if let Some(line) = line {
                    line.push(',');
                }
                lines.push(item);
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_breaks_between_its_items() {
        let items = (0..30).map(|number| format!("call{number} {}", number * 1000));
        let lines = lines_of(items.clone());
        assert!(lines.len() > 1 && lines.iter().all(|line| line.len() <= 69));
        assert_eq!(lines.join(" "), items.collect::<Vec<_>>().join(", "));
        assert_eq!(lines_of(std::iter::once("one".to_owned())), ["one"]);
    }
}
