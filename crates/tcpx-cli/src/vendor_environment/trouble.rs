//! Values that a person has set and that stop Google's plugin.

use std::path::Path;

use super::interfaces::admitted;
use super::settings::{
    CHUNK, CONTROL_INTERFACE, DATA_INTERFACES, DMA_BUF, ENABLE, GPU_CLIENT, GPU_SOCKET,
    NCCL_INTERFACE, STEERING, STEERING_WAIT,
};
use super::{served_gpus, socket_folder};
use crate::host::Host;

/// Why `value` of the variable `name` cannot work on `host`; `None` when nothing is known against it.
pub(crate) fn trouble(host: &dyn Host, name: &str, value: &str) -> Option<String> {
    let number = value.trim().parse::<i64>().ok();
    match name {
        DATA_INTERFACES | CONTROL_INTERFACE | NCCL_INTERFACE => {
            let all = host.interfaces().ok()?;
            if admitted(value, &all).iter().any(|one| one.up) {
                return None;
            }
            let names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
            Some(format!(
                "no interface that is up matches; this host has {}",
                names.join(", ")
            ))
        }
        CHUNK if number.is_none_or(|bytes| bytes <= 0) => {
            Some("it must be a number of bytes above 0: with 0 no payload ever moves".into())
        }
        GPU_CLIENT if number == Some(0) => {
            let (folder, _) = socket_folder(host);
            let has_sockets = !served_gpus(host, Path::new(&folder)).is_empty();
            let names = host.names(Path::new("/tmp")).unwrap_or_default();
            let has_files = names.iter().any(|name| name.starts_with("nvdma-"));
            (has_sockets && !has_files).then(|| {
                format!("there is no /tmp/nvdma-* to take a GPU's memory from, and {folder} has {GPU_SOCKET}*: give 1")
            })
        }
        GPU_CLIENT => {
            let (folder, _) = socket_folder(host);
            served_gpus(host, Path::new(&folder)).is_empty().then(|| {
                format!("{folder} has no {GPU_SOCKET}*: asking for a socket that is missing ends the process")
            })
        }
        STEERING_WAIT if number.is_none_or(|wait| wait <= 0) => Some(
            "the plugin ignores it and waits 5 seconds for every connection: give at least 1"
                .into(),
        ),
        STEERING if number != Some(3) => Some("the plugin refuses every value but 3".into()),
        ENABLE if number == Some(0) => Some("0 has the plugin refuse to start".into()),
        DMA_BUF if number == Some(0) => {
            Some("0 has the plugin refuse to register GPU memory".into())
        }
        _ => None,
    }
}
