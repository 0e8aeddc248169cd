//! `tcpx plugin`: what a plugin file exports, whether it starts, and its devices.
//!
//! The file is read before anything of it runs; then a process of its own loads and starts it,
//! because a plugin may hang, crash, or end its process.

pub(crate) mod events;
pub(crate) mod part;
mod watch;

use std::path::PathBuf;

use clap::Args;
use nccl_net::AbiVersion;
use serde::Serialize;
use serde_json::{Value, json};

use self::events::{Event, InUse};
use self::watch::Watched;
use crate::error::Error;
use crate::host::{Host, RealHost};
use crate::output::json::Told;
use crate::output::say::{aside, one_line, say};
use crate::output::{indented, table};
use crate::plugin_file::contents::{Contents, PluginKind};
use crate::sizes::Limit;
use crate::vendor_environment::{Setting, for_google};

#[derive(Args, Clone, Debug)]
pub(crate) struct PluginArgs {
    /// The plugin's file.
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Version of the plugin's table, v5 to v12 [default: its newest].
    #[arg(long, value_name = "vN", value_parser = crate::args::link::abi)]
    pub(crate) abi: Option<AbiVersion>,
    /// End the plugin's process if one step takes longer.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(crate) timeout: Limit,
}

/// What the process that loads the plugin is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct PluginPartArgs {
    pub(crate) path: PathBuf,
    #[arg(long, value_parser = crate::args::link::abi)]
    pub(crate) abi: Option<AbiVersion>,
}

/// Everything that was found; `docs/plugin-check.md` describes it.
#[derive(Debug, Serialize)]
struct Report<'a> {
    path: String,
    kind: String,
    build_id: Option<&'a str>,
    tables: Vec<Table<'a>>,
    variables: &'a [Setting],
    in_use: Option<InUse>,
    devices: Vec<Value>,
    log: Vec<String>,
}

/// A table in the file.
#[derive(Debug, Serialize)]
struct Table<'a> {
    version: u32,
    name: Option<&'a str>,
}

/// Reads the file, starts the plugin, and shows both.
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
            log: Vec::new(),
        }
    }

    /// Has another process start the plugin and takes note of what it tells.
    fn drive(&mut self, args: &PluginArgs) -> Result<(), Error> {
        let mut watched = Watched::start(args, self.variables)?;
        loop {
            match watched.next() {
                Ok(Event::Doing { .. } | Event::Failed { .. }) => {}
                Ok(Event::Loaded(in_use)) => self.in_use = Some(in_use),
                Ok(Event::Devices(devices)) => self.devices = devices,
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
            let text = |name: &str| device[name].as_str().unwrap_or("-");
            let memory = device["memory"].as_array().into_iter().flatten();
            let memory: Vec<&str> = memory.filter_map(Value::as_str).collect();
            let pci = text("pci_path");
            list.add_row([
                index.to_string(),
                one_line(text("name")),
                format!(
                    "{}",
                    device["speed_mbps"].as_f64().unwrap_or_default() / 1000.0
                ),
                memory.join(", "),
                text("offload").to_owned(),
                device["max_comms"].to_string(),
                one_line(pci.rsplit('/').next().unwrap_or(pci)),
            ]);
        }
        say!("{}", indented(&list, "  ").trim_end());
    }
}
