//! Checks of what Google's plugin needs: the buffer daemon and its sockets.

use std::io;
use std::path::Path;

use super::check::{Context, Finding};
use crate::host::{Driver, FileKind, Host, gpu_addresses};
use crate::vendor_environment::{served_gpus, socket_folder};

const NOT_GOOGLE: &str = "only Google's plugin needs it, and that is not in question";
/// Sockets for the rules that steer flows to a GPU.
const RULE_SOCKETS: [&str; 2] = ["rx_rule_manager", "rx_rule_uninstall"];
/// How to start the daemon, as in Google's recipes.
const START: &str =
    "start the daemon: tcpgpudmarxd --gpu_nic_preset a3vm --gpu_shmem_type fd --uds_path";

/// The folder and the sockets for rules.
pub(super) fn rule_sockets(context: &Context<'_>) -> Finding {
    if !context.is_google() {
        return Finding::not_needed(NOT_GOOGLE);
    }
    let host = context.host;
    let (folder, why) = socket_folder(host);
    if !matches!(host.kind(Path::new(&folder)), Ok(FileKind::Folder)) {
        return Finding::blocks(format!("{folder} is not there ({why})")).with_fix(start(&folder));
    }
    for name in RULE_SOCKETS {
        let path = Path::new(&folder).join(name);
        match host.listens(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Finding::blocks(format!("{} accepts nobody", path.display()))
                    .with_fix("restart the buffer daemon: it accepts no connections any more");
            }
            Err(why) => {
                return Finding::blocks(format!("nobody listens at {}: {why}", path.display()))
                    .with_fix(start(&folder));
            }
        }
    }
    Finding::fine(format!("{folder}: {} listen", RULE_SOCKETS.join(" and ")))
}

/// A `get_gpu_fd_*` socket for each GPU.
pub(super) fn gpu_sockets(context: &Context<'_>) -> Finding {
    if !context.is_google() {
        return Finding::not_needed(NOT_GOOGLE);
    }
    let gpus = gpus(context.host);
    if gpus.is_empty() {
        return Finding::not_needed("there is no GPU");
    }
    let (folder, _) = socket_folder(context.host);
    let served = served_gpus(context.host, Path::new(&folder));
    let missing: Vec<&str> = gpus
        .iter()
        .filter(|gpu| !served.contains(gpu))
        .map(String::as_str)
        .collect();
    if missing.is_empty() {
        return Finding::fine(format!("{folder}/get_gpu_fd_* for all {} GPUs", gpus.len()));
    }
    let finding = Finding::blocks(format!(
        "{folder} has no get_gpu_fd_{} ({} of {} GPUs are served)",
        missing.join(", get_gpu_fd_"),
        gpus.len() - missing.len(),
        gpus.len()
    ));
    if served.is_empty() {
        finding.with_fix(start(&folder))
    } else {
        finding
    }
}

/// GPUs as the driver shows them, else as the kernel does.
fn gpus(host: &dyn Host) -> Vec<String> {
    match host.driver() {
        Driver::Present { devices, .. } if !devices.is_empty() => {
            let pci = devices.iter().map(|device| &device.pci);
            pci.map(|pci| pci.to_ascii_lowercase()).collect()
        }
        _ => gpu_addresses(host),
    }
}

fn start(folder: &str) -> String {
    format!("{START} {folder} (in a container: mount {folder} of the daemon's container)")
}
