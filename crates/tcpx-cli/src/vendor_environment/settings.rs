//! Each variable of Google's plugin that this program sets: its value here, and why.

use std::path::Path;

use super::interfaces::{choose, filter_for};
use super::{Origin, Wanted};
use crate::host::{Host, default_route};
use tcpx_net::interfaces::InterfaceKind;

pub(super) const DATA_INTERFACES: &str = "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME";
pub(super) const CONTROL_INTERFACE: &str = "NCCL_GPUDIRECTTCPX_CTRL_DEV";
pub(super) const NCCL_INTERFACE: &str = "NCCL_SOCKET_IFNAME";
pub(super) const CHUNK: &str = "NCCL_DYNAMIC_CHUNK_SIZE";
pub(super) const SOCKET_FOLDER: &str = "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX";
pub(super) const GPU_CLIENT: &str = "NCCL_TCPX_RXMEM_IMPORT_USE_GPU_PCI_CLIENT";
pub(super) const STEERING_WAIT: &str = "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS";
pub(super) const STEERING: &str = "NCCL_GPUDIRECTTCPX_FLOW_STEERING_STRATEGY";
pub(super) const ENABLE: &str = "NCCL_GPUDIRECTTCPX_SOCKET_ENABLE";
pub(super) const DMA_BUF: &str = "NCCL_USE_DMA_BUF";
const RECEIVE_SYNC: &str = "NCCL_GPUDIRECTTCPX_RECV_SYNC";
pub(super) const ZERO_COPY: &str = "NCCL_MIN_ZCOPY_SIZE";

/// Where Google's recipes have the daemon put its sockets.
const USUAL_FOLDER: &str = "/run/tcpx";
/// Where the plugin looks unless told otherwise.
const PLUGIN_FOLDER: &str = "/tmp";
/// Sockets of the daemon: of the rules for flows, and one for each GPU.
pub(super) const RULE_SOCKET: &str = "rx_rule_manager";
pub(super) const GPU_SOCKET: &str = "get_gpu_fd_";

/// Whether the daemon's sockets lie in `folder`.
fn has_sockets(host: &dyn Host, folder: &str) -> bool {
    let names = host.names(Path::new(folder)).unwrap_or_default();
    names
        .iter()
        .any(|name| name == RULE_SOCKET || name.starts_with(GPU_SOCKET))
}

/// The folder that has the daemon's sockets, else the usual one; and why.
pub(super) fn detected_socket_folder(host: &dyn Host) -> (String, String) {
    let found = [USUAL_FOLDER, PLUGIN_FOLDER]
        .into_iter()
        .find(|folder| has_sockets(host, folder));
    match found {
        Some(folder) => (folder.into(), "the daemon's sockets lie there".into()),
        None => (
            USUAL_FOLDER.into(),
            format!(
                "the usual place; no socket of the daemon was found there or in {PLUGIN_FOLDER}"
            ),
        ),
    }
}

/// Every variable, and what it would be on `host` if nobody had set it.
pub(super) fn wanted(host: &dyn Host) -> Vec<Wanted> {
    let mut all = interfaces(host);
    all.extend(daemon(host));
    all.push(zero_copy(host));
    all.extend(fixed());
    all
}

fn interfaces(host: &dyn Host) -> Vec<Wanted> {
    let all = host.interfaces().unwrap_or_default();
    let choice = choose(&all, default_route(host).as_deref());
    let control_apart = choice
        .control
        .clone()
        .filter(|control| !choice.data.contains(control));
    vec![
        Wanted {
            name: DATA_INTERFACES,
            value: (!choice.data.is_empty()).then(|| filter_for(&choice.data, &all)),
            origin: Origin::Detected,
            effect: "interfaces that carry the payload; the plugin does not start if none matches",
            why: choice.data_why,
        },
        Wanted {
            name: CONTROL_INTERFACE,
            value: control_apart,
            origin: Origin::Detected,
            effect: "interface of the plugin's control connections; unset, they share the data's",
            why: choice.control_why.clone(),
        },
        Wanted {
            name: NCCL_INTERFACE,
            value: choice.control.map(|control| filter_for(&[control], &all)),
            origin: Origin::Detected,
            effect: "interface of NCCL's own connections, and of plugins without a variable of their own",
            why: choice.control_why,
        },
    ]
}

fn daemon(host: &dyn Host) -> Vec<Wanted> {
    let (folder, folder_why) = detected_socket_folder(host);
    let in_use = host
        .variable(SOCKET_FOLDER)
        .unwrap_or_else(|| folder.clone());
    let served = super::served_gpus(host, Path::new(&in_use)).len();
    let (client, client_why) = if served > 0 {
        let why = format!("{in_use} has {GPU_SOCKET}* for {served} GPUs");
        ("1", why)
    } else {
        let why = format!(
            "{in_use} has no {GPU_SOCKET}*, and asking for a socket that is missing ends the process"
        );
        ("0", why)
    };
    vec![
        Wanted {
            name: SOCKET_FOLDER,
            value: Some(folder),
            origin: Origin::Detected,
            effect: "folder of the buffer daemon's sockets; without the daemon connect and accept return 3",
            why: folder_why,
        },
        Wanted {
            name: GPU_CLIENT,
            value: Some(client.into()),
            origin: Origin::Detected,
            effect: "1: a GPU's receive memory comes from the daemon's socket; 0: from the older file /tmp/nvdma-*",
            why: client_why,
        },
    ]
}

/// The kernel copies what goes over loopback anyway, after it has pinned and reported it.
fn zero_copy(host: &dyn Host) -> Wanted {
    let all = host.interfaces().unwrap_or_default();
    let carries = super::data_interfaces(host, &all);
    let loopback = carries
        .iter()
        .all(|one| one.kind == InterfaceKind::Loopback);
    let (value, why) = if loopback {
        (
            "0",
            "over loopback the kernel copies all the same, and pinning pages only costs",
        )
    } else {
        (
            "4096",
            "on smaller messages pinning pages costs more than a copy",
        )
    };
    Wanted {
        name: ZERO_COPY,
        value: Some(value.into()),
        origin: Origin::Detected,
        effect: "bytes from which sends of host memory avoid a copy; 0: never",
        why: why.into(),
    }
}

fn fixed() -> Vec<Wanted> {
    // Name, value or none to leave it unset, what it does, why this value.
    let rows = [
        (
            CHUNK,
            Some("524288"),
            "bytes that a data connection takes at a time",
            "the plugin's default of 0 moves no payload at all",
        ),
        (
            STEERING_WAIT,
            Some("500000"),
            "microseconds that accept waits for flow rules to take effect",
            "the plugin's default is 5 seconds for every connection, and it takes 0 for that default; data that arrives too early ends the process",
        ),
        (
            RECEIVE_SYNC,
            Some("1"),
            "1: the receiver announces each posted receive and the sender waits for it",
            "as run on A3 hosts; the plugin's default of 0 lets data run ahead of its receive",
        ),
        (
            STEERING,
            None,
            "who steers flows to the GPU's queues; only 3, the daemon, works",
            "",
        ),
        (ENABLE, None, "0 has the plugin refuse to start", ""),
        (DMA_BUF, None, "0 has the plugin refuse GPU memory", ""),
    ];
    rows.into_iter()
        .map(|(name, value, effect, why)| Wanted {
            name,
            value: value.map(str::to_owned),
            origin: Origin::Fixed,
            effect,
            why: why.to_owned(),
        })
        .collect()
}
