//! What makes NCCL use a plugin file as its network.

use std::path::Path;

use tcpx_net::interfaces::InterfaceKind;

use crate::error::Error;
use crate::host::{Host, default_route};
use crate::plugin_file::contents::{Contents, PluginKind};
use crate::vendor_environment::{
    Origin, Setting, choose_interfaces, filter_for, for_google, trouble,
};

const PLUGIN: &str = "NCCL_NET_PLUGIN";
const NETWORK: &str = "NCCL_NET";
const KEEP: &str = "NCCL_NET_PLUGIN_REF_COUNT";
const INTERFACES: &str = "NCCL_SOCKET_IFNAME";
const PROTOCOL: &str = "NCCL_PROTO";

/// The variables for NCCL with the plugin at `path`.
pub(super) fn settings(host: &dyn Host, path: &Path) -> Result<Vec<Setting>, Error> {
    let contents = host.contents(path).map_err(Error::PluginContents)?;
    Ok(for_contents(host, path, &contents))
}

fn for_contents(host: &dyn Host, path: &Path, contents: &Contents) -> Vec<Setting> {
    let mut all = vec![ours(
        host,
        PLUGIN,
        path.display().to_string(),
        "file that NCCL loads as its network",
        format!("{}, tables {}", contents.kind, contents.versions()),
    )];
    if let Some(name) = common_name(contents) {
        all.push(ours(
            host,
            NETWORK,
            name.to_owned(),
            "network that NCCL must use: it fails, with a reason, instead of falling back to its own sockets in silence",
            "the name in the plugin's tables".into(),
        ));
    }
    all.push(yours_or(
        host,
        KEEP,
        "1".into(),
        Origin::Fixed,
        "1: NCCL keeps the plugin loaded when its last communicator ends",
        "NCCL 2.28 unloads the plugin with its last communicator, and has to load and start it again for the next".into(),
    ));
    if contents.kind == PluginKind::Google {
        all.push(yours_or(
            host,
            PROTOCOL,
            "Simple".into(),
            Origin::Fixed,
            "NCCL's way of moving data inside a collective",
            "only Simple unpacks what this plugin receives".into(),
        ));
        all.extend(for_google(host));
        return all;
    }
    let (value, why) = interfaces(host);
    if !value.is_empty() {
        all.push(yours_or(
            host,
            INTERFACES,
            value,
            Origin::Detected,
            "interfaces for NCCL's own connections and for the plugin, which offers each as a device",
            why,
        ));
    }
    all
}

/// The fastest cards of this host, or what takes their place.
fn interfaces(host: &dyn Host) -> (String, String) {
    let all = host.interfaces().unwrap_or_default();
    let cards: Vec<_> = all
        .iter()
        .filter(|one| one.kind == InterfaceKind::Physical && one.up)
        .filter(|one| one.addresses.iter().any(|address| address.is_ipv4()))
        .collect();
    let fastest = cards.iter().map(|one| one.speed).max();
    let names: Vec<String> = cards
        .iter()
        .filter(|one| Some(one.speed) == fastest)
        .map(|one| one.name.clone())
        .collect();
    if names.is_empty() {
        let choice = choose_interfaces(&all, default_route(host).as_deref());
        return (filter_for(&choice.data, &all), choice.data_why);
    }
    let why = if names.len() == cards.len() {
        "the network cards that are up and have an IPv4 address"
    } else {
        "the fastest of the network cards that are up and have an IPv4 address"
    };
    (filter_for(&names, &all), why.into())
}

/// The name that all tables share: NCCL may take any of them.
fn common_name(contents: &Contents) -> Option<&str> {
    let first = contents.tables.first()?.name.as_deref()?;
    let same = |name: &Option<String>| name.as_deref() == Some(first);
    contents
        .tables
        .iter()
        .all(|table| same(&table.name))
        .then_some(first)
}

/// A variable that this command is asked to set, whatever it is now.
fn ours(
    host: &dyn Host,
    name: &'static str,
    value: String,
    effect: &'static str,
    why: String,
) -> Setting {
    let before = host.variable(name).filter(|before| *before != value);
    let why = match before {
        Some(before) => format!("{why}; takes the place of your {before}"),
        None => why,
    };
    Setting {
        name,
        value,
        origin: Origin::Detected,
        effect,
        why,
        trouble: None,
    }
}

/// A variable that stays as the person has set it.
fn yours_or(
    host: &dyn Host,
    name: &'static str,
    value: String,
    origin: Origin,
    effect: &'static str,
    why: String,
) -> Setting {
    match host.variable(name) {
        Some(yours) => Setting {
            name,
            trouble: trouble(host, name, &yours),
            value: yours,
            origin: Origin::Yours,
            effect,
            why: "you have set it".into(),
        },
        None => Setting {
            name,
            value,
            origin,
            effect,
            why,
            trouble: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use nccl_net::AbiVersion;

    use super::*;
    use crate::host::fake::FakeHost;
    use crate::plugin_file::contents::ExportedTable;

    fn contents(kind: PluginKind, names: &[&str]) -> Contents {
        let tables = names.iter().zip(AbiVersion::ALL);
        Contents {
            kind,
            tables: tables
                .map(|(name, version)| ExportedTable {
                    version,
                    name: Some((*name).to_owned()),
                })
                .collect(),
            build_id: None,
        }
    }

    fn values(host: &FakeHost, contents: &Contents) -> Vec<(&'static str, String)> {
        let settings = for_contents(host, Path::new("/lib/x.so"), contents);
        settings
            .into_iter()
            .map(|one| (one.name, one.value))
            .collect()
    }

    #[test]
    fn nccl_is_pointed_at_the_file_by_path_and_by_name_and_keeps_it() {
        let mut host = FakeHost::default();
        host.interface("eth0", InterfaceKind::Physical, "10.0.0.1");
        host.interface("eth1", InterfaceKind::Physical, "10.0.1.1");
        host.interfaces[1].speed = Some(200_000_000_000);
        host.set(PLUGIN, "/other.so");
        let contents = contents(PluginKind::Ours, &["TCPX", "TCPX"]);
        assert_eq!(
            values(&host, &contents),
            [
                (PLUGIN, "/lib/x.so".to_owned()),
                (NETWORK, "TCPX".to_owned()),
                (KEEP, "1".to_owned()),
                (INTERFACES, "eth1".to_owned()),
            ]
        );
        host.set(INTERFACES, "eth0");
        assert!(values(&host, &contents).contains(&(INTERFACES, "eth0".to_owned())));
    }

    #[test]
    fn tables_of_several_names_are_not_chosen_by_name() {
        let names = values(
            &FakeHost::default(),
            &contents(PluginKind::Other, &["A", "B"]),
        );
        assert!(names.iter().all(|(name, _)| *name != NETWORK), "{names:?}");
    }

    #[test]
    fn google_s_plugin_brings_its_own_variables() {
        let names = values(
            &FakeHost::a3(),
            &contents(PluginKind::Google, &["GPUDirectTCPX_v7"]),
        );
        assert!(names.contains(&(PROTOCOL, "Simple".to_owned())));
        assert!(
            names
                .iter()
                .any(|(name, _)| *name == "NCCL_DYNAMIC_CHUNK_SIZE")
        );
    }
}
