//! What makes NCCL use our plugin as its network.

use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use tcpx_net::interfaces::{Interface, InterfaceKind};

use crate::error::Error;
use crate::host::{Host, default_route, is_for_others};
use crate::plugin_file::contents::{Contents, PluginKind};
use crate::vendor_environment::{Origin, Setting, Wanted, choose_interfaces, filter_for};

const PLUGIN: &str = "NCCL_NET_PLUGIN";
const NETWORK: &str = "NCCL_NET";
const KEEP: &str = "NCCL_NET_PLUGIN_REF_COUNT";
const INTERFACES: &str = "NCCL_SOCKET_IFNAME";
/// Longest name in the list of plugins that NCCL takes, in bytes.
const MOST_PLUGIN_BYTES: usize = 254;

/// The variables for NCCL with the plugin at `path`.
pub(super) fn settings(host: &dyn Host, path: &Path) -> Result<Vec<Setting>, Error> {
    let contents = host.contents(path).map_err(Error::PluginContents)?;
    if contents.kind != PluginKind::Ours {
        return Err(Error::usage(
            format!("{} is {}", path.display(), contents.kind),
            "give --plugin a file of ours, or leave it out; `tcpx env tcpx` has the variables of Google's",
        ));
    }
    Ok(for_contents(host, path, &contents))
}

fn for_contents(host: &dyn Host, path: &Path, contents: &Contents) -> Vec<Setting> {
    let mut plugin = ours(
        host,
        PLUGIN,
        path.display().to_string(),
        "file that NCCL loads as its network (NCCL before 2.21 takes only the part after libnccl-net- of a file in LD_LIBRARY_PATH)",
        format!("{}, tables {}", contents.kind, contents.versions()),
    );
    plugin.trouble = unusable(path);
    let mut all = vec![plugin];
    // The tables of our own file share one name.
    if let Some(name) = contents
        .tables
        .first()
        .and_then(|table| table.name.as_deref())
    {
        all.push(ours(
            host,
            NETWORK,
            name.to_owned(),
            "network that NCCL must use: it fails, with a reason, instead of falling back to its own sockets in silence",
            "the name in the plugin's tables".into(),
        ));
    }
    all.extend(Wanted {
        name: KEEP,
        value: Some("1".into()),
        origin: Origin::Fixed,
        effect: "1: NCCL keeps the plugin loaded when its last communicator ends",
        why: "NCCL 2.28 unloads the plugin with its last communicator, and has to load and start it again for the next".into(),
    }.decide(host));
    let (value, why) = interfaces(host);
    if !value.is_empty() {
        all.extend(Wanted {
        name: INTERFACES,
        value: Some(value),
        origin: Origin::Detected,
        effect: "interfaces for NCCL's own connections and for the plugin, which offers each as a device",
        why,
    }.decide(host));
    }
    all
}

/// Why NCCL cannot take the file by this path.
fn unusable(path: &Path) -> Option<String> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.contains(&b',') {
        return Some(
            "NCCL ends a path at a comma: give --plugin a copy or link whose path has none".into(),
        );
    }
    (bytes.len() > MOST_PLUGIN_BYTES).then(|| {
        format!(
            "NCCL takes paths of at most {MOST_PLUGIN_BYTES} bytes, this one has {}: give --plugin a copy or link with a shorter path",
            bytes.len()
        )
    })
}

/// The fastest cards of this host, or what takes their place.
fn interfaces(host: &dyn Host) -> (String, String) {
    let all = host.interfaces().unwrap_or_default();
    let v4 = |address: &IpAddr| address.is_ipv4() && is_for_others(address);
    let v6 = |address: &IpAddr| address.is_ipv6() && is_for_others(address);
    let cards = |has: fn(&IpAddr) -> bool| usable(&all, &[InterfaceKind::Physical], has);
    let (cards, family) = match cards(v4) {
        none if none.is_empty() => (cards(v6), "IPv6"),
        some => (some, "IPv4"),
    };
    let fastest = cards.iter().map(|one| one.speed).max();
    let names: Vec<String> = cards
        .iter()
        .filter(|one| Some(one.speed) == fastest)
        .map(|one| one.name.clone())
        .collect();
    if !names.is_empty() {
        let what = if names.len() == cards.len() {
            "the network cards"
        } else {
            "the fastest of the network cards"
        };
        let why = format!("{what} that are up and have an {family} address");
        return (filter_for(&names, &all), why);
    }
    let without_card = [InterfaceKind::Veth, InterfaceKind::Virtual];
    let inside = usable(&all, &without_card, v6);
    if usable(&all, &without_card, v4).is_empty() && !inside.is_empty() {
        let names: Vec<String> = inside.iter().map(|one| one.name.clone()).collect();
        let why = "no network card is visible here, this is up and has an IPv6 address";
        return (filter_for(&names, &all), why.into());
    }
    let choice = choose_interfaces(&all, default_route(host).as_deref());
    (filter_for(&choice.data, &all), choice.data_why)
}

/// Those of these kinds that are up and have such an address.
fn usable<'a>(
    all: &'a [Interface],
    kinds: &[InterfaceKind],
    has: fn(&IpAddr) -> bool,
) -> Vec<&'a Interface> {
    all.iter()
        .filter(|one| one.up && kinds.contains(&one.kind) && one.addresses.iter().any(has))
        .collect()
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

#[cfg(test)]
mod tests {
    use nccl_net::AbiVersion;

    use super::*;
    use crate::host::tests::FakeHost;
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
    fn nccl_is_pointed_at_the_file_by_path_and_by_name() {
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

    fn chosen(host: &FakeHost) -> Option<String> {
        let all = values(host, &contents(PluginKind::Ours, &["TCPX"]));
        let found = all.into_iter().find(|(name, _)| *name == INTERFACES);
        found.map(|(_, value)| value)
    }

    #[test]
    fn a_host_of_ipv6_alone_uses_its_cards() {
        let mut host = FakeHost::default();
        host.interface("lo", InterfaceKind::Loopback, "127.0.0.1");
        assert_eq!(chosen(&host).as_deref(), Some("lo"));
        host.interface("eth9", InterfaceKind::Veth, "fd00::9");
        assert_eq!(chosen(&host).as_deref(), Some("eth9"));
        host.interface("ens1", InterfaceKind::Physical, "fd00::1");
        host.interface("ens2", InterfaceKind::Physical, "fe80::2");
        host.interface("usb0", InterfaceKind::Physical, "169.254.3.1");
        assert_eq!(chosen(&host).as_deref(), Some("ens1"));
        host.interface("eth0", InterfaceKind::Physical, "10.0.0.1");
        assert_eq!(chosen(&host).as_deref(), Some("eth0"));
    }

    #[test]
    fn a_path_that_nccl_would_cut_is_warned_of() {
        let trouble = |path: &str| {
            let contents = contents(PluginKind::Ours, &["TCPX"]);
            let settings = for_contents(&FakeHost::default(), Path::new(path), &contents);
            settings[0].trouble.clone()
        };
        assert_eq!(trouble("/opt/a b/x.so"), None);
        assert!(trouble("/opt/a,b/x.so").is_some_and(|words| words.contains("comma")));
        assert_eq!(trouble(&"x".repeat(254)), None);
        assert!(trouble(&"x".repeat(255)).is_some_and(|words| words.contains("has 255")));
    }
}
