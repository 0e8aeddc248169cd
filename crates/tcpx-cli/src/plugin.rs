//! `tcpx plugin`: what a plugin file exports, and whether bytes pass through it.

mod self_test;

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use nccl_net::{AbiVersion, DeviceOffload, Plugin, Properties};
use serde::Serialize;
use tcpx_net::{PluginMemory, PluginNetwork, PluginOptions};

use crate::args::plugin::PluginArgs;
use crate::error::Error;
use crate::output::say::say;
use crate::output::table::{indented, table};
use crate::plugin_file::{Places, PluginFile};
use crate::sizes::Size;

use self::self_test::Case;

/// What was found, for `--json`.
#[derive(Debug, Serialize)]
struct Report {
    path: String,
    /// Tables that the file exports, newest first.
    tables: Vec<String>,
    /// The table in use.
    table: String,
    name: String,
    devices: Vec<Device>,
    /// Absent if it was left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    self_test: Option<Vec<Case>>,
}

#[derive(Debug, Serialize)]
struct Device {
    index: usize,
    name: String,
    pci_path: Option<String>,
    guid: String,
    host_memory: bool,
    cuda_memory: bool,
    dma_buf: bool,
    speed_mbps: i32,
    latency_us: f32,
    max_comms: i32,
    max_receives_in_a_group: i32,
    device_offload: String,
}

impl Device {
    fn new(index: usize, properties: Properties) -> Self {
        Self {
            index,
            host_memory: properties.pointer_support.host(),
            cuda_memory: properties.pointer_support.cuda(),
            dma_buf: properties.pointer_support.dma_buf(),
            device_offload: match properties.offload {
                DeviceOffload::None => "none".to_owned(),
                DeviceOffload::Unpack { version } => format!("unpack, version {version}"),
                DeviceOffload::Other { kind, version } => format!("kind {kind}, version {version}"),
            },
            name: properties.name,
            pci_path: properties.pci_path,
            guid: format!("{:#018x}", properties.guid),
            speed_mbps: properties.speed_mbps,
            latency_us: properties.latency_us,
            max_comms: properties.max_comms,
            max_receives_in_a_group: properties.max_recvs,
        }
    }

    fn memory(&self) -> String {
        let kinds = [
            (self.host_memory, "host"),
            (self.cuda_memory, "CUDA"),
            (self.dma_buf, "dma-buf"),
        ];
        let kinds: Vec<_> = kinds.iter().filter(|(has, _)| *has).map(|k| k.1).collect();
        kinds.join(", ")
    }
}

/// Loads the plugin, describes it, and moves bytes through it.
pub(crate) fn run(args: &PluginArgs) -> Result<(), Error> {
    let file = Places::of_process().find(args.path.as_deref())?;
    let tables = Plugin::tables(&file.path).map_err(|error| Error::Failed {
        what: error.to_string(),
        hint: "give the path of an NCCL network plugin",
    })?;
    if tables.is_empty() {
        return Err(Error::Failed {
            what: format!(
                "{} is a library but exports no table of a network plugin, v5 to v12",
                file.path.display()
            ),
            hint: "give the path of an NCCL network plugin",
        });
    }
    let tables: Vec<_> = tables.iter().map(ToString::to_string).collect();
    if !args.json {
        say!("plugin {} ({})", file.path.display(), file.why);
        say!("  exports the tables {}", tables.join(", "));
    }
    let network = Arc::new(start(args, &file)?);
    let plugin = network.plugin();
    let devices = describe(plugin)?;
    let mut report = Report {
        path: file.path.display().to_string(),
        tables,
        table: plugin.version().to_string(),
        name: plugin.name().to_owned(),
        devices,
        self_test: None,
    };
    if !args.json {
        show(&report);
    }
    let mut failed = Ok(());
    if !args.no_test {
        let (cases, outcome) = self_test::run(&network, args.timeout.0, !args.json);
        report.self_test = Some(cases);
        failed = outcome;
    }
    if args.json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Error::Process {
            doing: "write the report as JSON",
            source: error.into(),
        })?;
        say!("{text}");
    }
    failed
}

/// Starts the plugin, on a thread of its own: its start may hang.
fn start(args: &PluginArgs, file: &PluginFile) -> Result<PluginNetwork, Error> {
    let abi = args.abi.and_then(|number| {
        AbiVersion::ALL
            .into_iter()
            .find(|version| version.number() == u32::from(number))
    });
    let options = PluginOptions {
        path: file.path.clone(),
        abi,
        device: args.device,
        memory: PluginMemory::Host,
    };
    let limit = args.timeout.0;
    let (answer, answered) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("tcpx-start".to_owned())
        .spawn(move || {
            // Nobody listens any more after the limit.
            let _ = answer.send(PluginNetwork::load(options));
        })
        .map_err(|source| Error::Process {
            doing: "start a thread",
            source,
        })?;
    match answered.recv_timeout(limit) {
        Ok(network) => Ok(network.map_err(tcpx::Error::from)?),
        Err(_) => Err(Error::Failed {
            what: format!("the plugin's start has not returned within {limit:?}"),
            hint: "look at its log (RUST_LOG=tcpx_net=debug), or allow it more with --timeout",
        }),
    }
}

fn describe(plugin: &Plugin) -> Result<Vec<Device>, Error> {
    let failed = |error: nccl_net::HostError| Error::Failed {
        what: error.to_string(),
        hint: "look at the plugin's log (RUST_LOG=tcpx_net=debug)",
    };
    (0..plugin.devices().map_err(failed)?)
        .map(|index| {
            Ok(Device::new(
                index,
                plugin.properties(index).map_err(failed)?,
            ))
        })
        .collect()
}

fn show(report: &Report) {
    say!(
        "  started as {} through table {}; its devices:",
        report.name,
        report.table
    );
    let mut list = table(
        &[
            "device", "name", "memory", "speed", "latency", "comms", "offload", "PCI",
        ],
        &[0, 3, 4, 5],
    );
    for device in &report.devices {
        list.add_row([
            device.index.to_string(),
            device.name.clone(),
            device.memory(),
            format!("{} Mb/s", device.speed_mbps),
            format!("{} us", device.latency_us),
            device.max_comms.to_string(),
            device.device_offload.clone(),
            device.pci_path.clone().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    say!("{}", indented(&list, "  ").trim_end());
}

/// One line of the self-test.
fn show_case(case: &Case) {
    let size = Size(case.bytes);
    match &case.error {
        None => say!(
            "  {size}: {} requests, {:?}, every byte compared",
            case.requests,
            Duration::from_secs_f64(case.seconds)
        ),
        Some(error) => say!("  {size}: FAILED: {error}"),
    }
}
