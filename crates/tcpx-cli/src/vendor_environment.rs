//! The variables that Google's plugin needs, found out for this host instead of typed by a person.
//!
//! The plugin reads them when it is loaded and when it starts, and several of its effective
//! defaults stop it. A value that the person has set is never replaced; if it cannot work, that is
//! said.

mod interfaces;
mod settings;
#[cfg(test)]
mod tests;

use std::path::Path;

use tcpx_net::interfaces::Interface;

use self::interfaces::admitted;
use self::settings::{
    CHUNK, CONTROL_INTERFACE, DATA_INTERFACES, DMA_BUF, ENABLE, GPU_CLIENT, GPU_SOCKET,
    NCCL_INTERFACE, STEERING, STEERING_WAIT,
};
use crate::host::{Host, default_route};

pub(crate) use interfaces::{choose as choose_interfaces, filter_for};

/// Whose value a variable has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Origin {
    /// The person set it.
    Yours,
    /// Read from this host.
    Detected,
    /// The same on every host.
    Fixed,
}

/// A variable for a plugin, and why it has its value.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) origin: Origin,
    /// What the variable does.
    pub(crate) effect: &'static str,
    /// Why this value.
    pub(crate) why: String,
    /// Why a value that the person set cannot work.
    pub(crate) trouble: Option<String>,
}

/// A variable and the value that this program would give it.
pub(crate) struct Wanted {
    pub(crate) name: &'static str,
    /// `None`: leave it unset; a value of the person's is reported all the same.
    pub(crate) value: Option<String>,
    pub(crate) origin: Origin,
    pub(crate) effect: &'static str,
    pub(crate) why: String,
}

/// The variables for Google's plugin on `host`, in the order of their use.
pub(crate) fn for_google(host: &dyn Host) -> Vec<Setting> {
    let settings = settings::wanted(host).into_iter();
    settings.filter_map(|wanted| wanted.decide(host)).collect()
}

impl Wanted {
    /// The person's value if there is one, else ours.
    pub(crate) fn decide(self, host: &dyn Host) -> Option<Setting> {
        let Self {
            name,
            value,
            origin,
            effect,
            why,
        } = self;
        let yours = host.variable(name);
        Some(Setting {
            name,
            trouble: yours.as_ref().and_then(|yours| trouble(host, name, yours)),
            origin: yours.as_ref().map_or(origin, |_| Origin::Yours),
            effect,
            why: yours.as_ref().map_or(why, |_| "you have set it".into()),
            value: yours.or(value)?,
        })
    }
}

/// The interfaces of `all` that will carry payload: those that the person's filter admits, else
/// those of our choice.
pub(crate) fn data_interfaces<'a>(host: &dyn Host, all: &'a [Interface]) -> Vec<&'a Interface> {
    if let Some(filter) = host.variable(DATA_INTERFACES) {
        let admitted = admitted(&filter, all).into_iter();
        return admitted.filter(|one| one.up).collect();
    }
    let choice = interfaces::choose(all, default_route(host).as_deref());
    let is_chosen = |one: &&Interface| choice.data.contains(&one.name);
    all.iter().filter(is_chosen).collect()
}

/// The folder with the sockets of the buffer daemon, and how it was found.
pub(crate) fn socket_folder(host: &dyn Host) -> (String, String) {
    if let Some(yours) = host.variable(settings::SOCKET_FOLDER) {
        return (yours, "you have set it".into());
    }
    settings::detected_socket_folder(host)
}

/// PCI addresses of the GPUs whose `get_gpu_fd_*` sockets lie in `folder`.
pub(crate) fn served_gpus(host: &dyn Host, folder: &Path) -> Vec<String> {
    let names = host.names(folder).unwrap_or_default();
    let addresses = names
        .iter()
        .filter_map(|name| name.strip_prefix(GPU_SOCKET));
    addresses.map(str::to_owned).collect()
}

/// Why `value` of the variable `name` cannot work on `host`; `None` when nothing is known against
/// it.
fn trouble(host: &dyn Host, name: &str, value: &str) -> Option<String> {
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
