//! `tcpx devices`: what this host has, and what is missing.

#[cfg(feature = "devmem")]
mod device_memory;

use serde_json::{Value, json};

use crate::advice::of_file;
use crate::host::{Driver, Host, HostFacts, RealHost, is_for_others};
use crate::output::json::Told;
use crate::output::say::say;
use crate::output::{indented, table};
use crate::plugin_file::Places;
use crate::sizes::Size;

/// Lists everything; a missing thing is an answer, not a failure.
pub(crate) fn run() -> Told {
    let host = RealHost::default();
    let facts = HostFacts::of(&host);
    say!("host: {}", facts.line());
    if let Some(processor) = &facts.processor {
        say!("  processor           {processor}");
    }
    if let (Some(usual), Some(allowed)) = (&facts.congestion, &facts.congestion_allowed) {
        say!("  congestion control  {usual} by default; users may choose {allowed}");
    }
    say!("");
    let gpus = gpus(&host);
    say!("");
    let interfaces = networks(&host);
    say!("");
    let plugin_files = plugin();
    Told::Fields(
        json!({ "host": facts, "gpus": gpus, "interfaces": interfaces, "plugin_files": plugin_files }),
    )
}

fn gpus(host: &dyn Host) -> Value {
    let (version, devices) = match host.driver() {
        Driver::Missing { why } => {
            say!("GPUs: none can be used");
            say!("  missing: {why}");
            say!("  host memory takes their place");
            return json!({ "missing": why.to_string(), "devices": [] });
        }
        Driver::Present { version, devices } => (version, devices),
    };
    say!("GPUs: {} (driver for CUDA {version})", devices.len());
    if devices.is_empty() {
        let missing = "the driver shows no GPU; look at CUDA_VISIBLE_DEVICES and `nvidia-smi`";
        say!("  missing: {missing}");
        return json!({ "missing": missing, "devices": [] });
    }
    let mut list = table(
        &["GPU", "name", "PCI", "memory", "NUMA", "compute", "dma-buf"],
        &[0, 3, 4],
    );
    for device in &devices {
        list.add_row([
            device.ordinal.to_string(),
            device.name.clone(),
            device.pci.clone(),
            Size(device.memory).to_string(),
            device
                .numa
                .map_or_else(|| "-".to_owned(), |node| node.to_string()),
            format!("{}.{}", device.capability.0, device.capability.1),
            if device.dma_buf { "yes" } else { "no" }.to_owned(),
        ]);
    }
    say!("{}", indented(&list, "  ").trim_end());
    let devices = devices.iter().map(|device| {
        json!({
            "gpu": device.ordinal, "name": device.name, "pci": device.pci, "bytes": device.memory,
            "numa_node": device.numa, "compute": [device.capability.0, device.capability.1],
            "dma_buf": device.dma_buf,
        })
    });
    json!({ "driver": version.to_string(), "devices": devices.collect::<Vec<_>>() })
}

fn networks(host: &dyn Host) -> Value {
    let found = match host.interfaces() {
        Ok(found) => found,
        Err(error) => {
            say!("network interfaces: unknown");
            say!("  missing: {error}");
            return json!({ "missing": error });
        }
    };
    say!("network interfaces: {}", found.len());
    let mut list = table(
        &["name", "kind", "state", "speed", "MTU", "NUMA", "addresses"],
        &[3, 4, 5],
    );
    for interface in &found {
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        list.add_row([
            interface.name.clone(),
            interface.kind.to_string(),
            if interface.up { "up" } else { "down" }.to_owned(),
            or_dash(interface.speed.map(speed)),
            or_dash(interface.mtu.map(|mtu| mtu.to_string())),
            or_dash(interface.numa_node.map(|node| node.to_string())),
            interface
                .addresses
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("\n"),
        ]);
    }
    say!("{}", indented(&list, "  ").trim_end());
    let mut addresses = found.iter().flat_map(|one| &one.addresses);
    if !addresses.any(is_for_others) {
        say!("  missing: an interface with an address that other hosts can reach");
    }
    #[cfg(feature = "devmem")]
    device_memory::show(found.iter().map(|interface| interface.name.as_str()));
    let interfaces = found.iter().map(|interface| {
        json!({
            "name": interface.name, "kind": interface.kind.to_string(), "up": interface.up,
            "bits_per_second": interface.speed, "mtu": interface.mtu,
            "numa_node": interface.numa_node, "addresses": interface.addresses,
        })
    });
    interfaces.collect()
}

fn plugin() -> Value {
    let places = Places::of_process();
    let vendor = places.vendor.is_file();
    say!("plugin file:");
    say!(
        "  vendor's: {} {}",
        places.vendor.display(),
        if vendor {
            "is there"
        } else {
            "is not there (only Google's A3 hosts have it)"
        }
    );
    let own = places.own();
    match &own {
        Ok(file) => say!("  our own:  {} is there", file.path.display()),
        Err(error) => say!("  our own:  missing: {error}; {}", of_file(error).hint),
    }
    json!({
        "vendor": vendor.then_some(&places.vendor),
        "own": own.ok().map(|file| file.path),
    })
}

/// Bits a second.
fn speed(bits: u64) -> String {
    let megabits = bits / 1_000_000;
    if megabits.is_multiple_of(1000) {
        format!("{} Gb/s", megabits / 1000)
    } else {
        format!("{megabits} Mb/s")
    }
}
