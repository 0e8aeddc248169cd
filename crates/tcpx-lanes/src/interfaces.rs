//! The network interfaces of this host, for choosing one and for showing them.

mod addresses;
mod choice;
mod distance;
mod driver;
mod filter;
mod reachable;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::error::SocketError;

pub use addresses::{InterfaceAddress, addresses};
pub use choice::{Choice, Nic, Wish, choose, is_container_name, is_link_local};
pub use distance::{Distance, PciPlace};
pub use filter::InterfaceFilter;
pub use reachable::reachable;

/// Where Linux describes its devices.
pub const SYSFS: &str = "/sys";

/// What an interface is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InterfaceKind {
    /// `lo`.
    Loopback,
    /// A software bridge.
    Bridge,
    /// One end of a virtual cable, as containers have.
    Veth,
    /// Any other interface without hardware: VLANs, tunnels, bonds.
    Virtual,
    /// A network card, real or a virtual machine's.
    Physical,
}

impl Interface {
    /// Its addresses with the leading bits of their networks.
    pub fn networks(&self) -> impl Iterator<Item = (IpAddr, u8)> + '_ {
        let known = self.prefixes.iter().copied().map(Some);
        let prefixes = known.chain(std::iter::repeat(None));
        self.addresses
            .iter()
            .zip(prefixes)
            .map(|(address, prefix)| {
                let alone = if address.is_ipv4() { 32 } else { 128 };
                (*address, prefix.unwrap_or(alone))
            })
    }
}

impl fmt::Display for InterfaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "loopback",
            Self::Bridge => "bridge",
            Self::Veth => "veth",
            Self::Virtual => "virtual",
            Self::Physical => "physical",
        })
    }
}

/// One network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name, such as `eth0`.
    pub name: String,
    /// What it is.
    pub kind: InterfaceKind,
    /// Whether it can carry packets now, as far as the kernel knows.
    pub up: bool,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// For each of them the leading bits that all addresses of its network share; where it is
    /// missing, the address is a network of its own.
    pub prefixes: Vec<u8>,
    /// Link speed in bits per second; `None` when there is none to speak of.
    pub speed: Option<u64>,
    /// Largest packet in bytes.
    pub mtu: Option<u32>,
    /// PCI addresses from the root port down to the card: `0000:00:03.0`, `0000:04:00.0`.
    pub pci_path: Vec<String>,
    /// The memory node that the card is attached to.
    pub numa_node: Option<u32>,
    /// The card's driver.
    pub driver: Option<String>,
}

/// The interfaces of this host, by name.
///
/// # Errors
/// [`SocketError::Io`] when the addresses cannot be read, or `/sys/class/net` is there and cannot
/// be.
pub fn interfaces() -> Result<Vec<Interface>, SocketError> {
    let addresses = addresses().map_err(|cause| SocketError::Io {
        operation: "getifaddrs",
        address: "interface addresses".to_owned(),
        cause: cause.into(),
        hint: "",
    })?;
    let mut found = match interfaces_in(Path::new(SYSFS), &addresses) {
        // Without sysfs, as in some containers, the addresses say what there is.
        Err(SocketError::Io { cause, .. }) if cause.kind == std::io::ErrorKind::NotFound => {
            with_addresses(&addresses)
        }
        found => found?,
    };
    for one in &mut found {
        if one.kind == InterfaceKind::Virtual {
            one.driver = driver::driver_of(&one.name);
            // In sysfs a cable whose ends have the same number in two namespaces looks like
            // anything.
            if one.driver.as_deref() == Some("veth") {
                one.kind = InterfaceKind::Veth;
            }
        }
    }
    Ok(found)
}

/// The interfaces that have these addresses, by name; nothing else is known of them.
fn with_addresses(addresses: &[InterfaceAddress]) -> Vec<Interface> {
    let names: BTreeSet<&str> = addresses.iter().map(|one| one.interface.as_str()).collect();
    let nowhere = Path::new("");
    let describe = |name: &str| Interface {
        kind: match name {
            "lo" => InterfaceKind::Loopback,
            _ => InterfaceKind::Virtual,
        },
        up: true,
        ..describe(nowhere, name.to_owned(), addresses)
    };
    names.into_iter().map(describe).collect()
}

/// The interfaces that a sysfs tree describes, by name, with these addresses. What the tree does
/// not say, or says in a way that makes no sense, is left out.
///
/// # Errors
/// [`SocketError::Io`] when `class/net` below `root` cannot be listed.
pub fn interfaces_in(
    root: &Path,
    addresses: &[InterfaceAddress],
) -> Result<Vec<Interface>, SocketError> {
    let directory = root.join("class/net");
    let fail = |cause: std::io::Error| SocketError::Io {
        operation: "listing network interfaces",
        address: directory.display().to_string(),
        cause: cause.into(),
        hint: "; sysfs must be mounted there",
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(&directory).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .map(str::to_owned);
        // Names that are not text cannot be asked for either; files (bonding_masters) are none.
        if let Some(name) = name.filter(|_| path.is_dir()) {
            found.push(describe(&path, name, addresses));
        }
    }
    found.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(found)
}

fn describe(path: &Path, name: String, addresses: &[InterfaceAddress]) -> Interface {
    // Negative speeds, and an error in place of a value, mean "unknown"; virtual cards may say
    // 2^32-1.
    let megabits: Option<u64> = number(&path.join("speed"));
    let own = addresses.iter().filter(|one| one.interface == name);
    Interface {
        kind: kind(path),
        // Interfaces without a carrier to watch, such as lo, say "unknown" and work.
        // The state follows the carrier with up to a second's delay.
        up: matches!(
            text(&path.join("operstate")).as_deref(),
            Some("up" | "unknown")
        ) || number(&path.join("carrier")) == Some(1u8),
        addresses: own.clone().map(|one| one.address).collect(),
        prefixes: own.map(|one| one.prefix).collect(),
        speed: megabits
            .filter(|speed| (1..u64::from(u32::MAX)).contains(speed))
            .and_then(|speed| speed.checked_mul(1_000_000)),
        mtu: number(&path.join("mtu")),
        pci_path: pci_path(&path.join("device")),
        numa_node: number(&path.join("device/numa_node")),
        driver: link_name(&path.join("device/driver")),
        name,
    }
}

fn kind(path: &Path) -> InterfaceKind {
    // ARPHRD_LOOPBACK of linux/if_arp.h.
    const LOOPBACK: u32 = 772;
    if number(&path.join("type")) == Some(LOOPBACK) {
        return InterfaceKind::Loopback;
    }
    if path.join("bridge").is_dir() {
        return InterfaceKind::Bridge;
    }
    if path.join("device").exists() {
        return InterfaceKind::Physical;
    }
    // Stacked interfaces name their type and have a lower interface too; a veth has only a peer.
    let typed = text(&path.join("uevent")).is_some_and(|uevent| uevent.contains("DEVTYPE="));
    let index: Option<u32> = number(&path.join("ifindex"));
    let link: Option<u32> = number(&path.join("iflink"));
    if !typed && index.is_some() && link.is_some() && index != link {
        return InterfaceKind::Veth;
    }
    InterfaceKind::Virtual
}

/// The PCI functions on the way to a device.
pub fn pci_path(device: &Path) -> Vec<String> {
    let Ok(target) = fs::canonicalize(device) else {
        return Vec::new();
    };
    let parts = target.iter().filter_map(|part| part.to_str());
    parts
        .filter(|part| is_pci_address(part))
        .map(str::to_owned)
        .collect()
}

/// `domain:bus:device.function`, in hexadecimal digits.
pub fn is_pci_address(text: &str) -> bool {
    let hexadecimal = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let mut parts = text.split(':');
    let (Some(domain), Some(bus), Some(rest), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some((device, function)) = rest.split_once('.') else {
        return false;
    };
    hexadecimal(domain, 4..=8)
        && hexadecimal(bus, 2..=2)
        && hexadecimal(device, 2..=2)
        && hexadecimal(function, 1..=1)
}

/// Whether the first bits of two addresses are the same.
pub fn same_network(our: IpAddr, their: IpAddr, prefix: u8) -> bool {
    let equal_bits = match (our, their) {
        (IpAddr::V4(our), IpAddr::V4(their)) => (our.to_bits() ^ their.to_bits()).leading_zeros(),
        (IpAddr::V6(our), IpAddr::V6(their)) => (our.to_bits() ^ their.to_bits()).leading_zeros(),
        _ => return false,
    };
    equal_bits >= prefix.into()
}

fn link_name(path: &Path) -> Option<String> {
    let target: PathBuf = fs::read_link(path).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A sysfs tree with one entry per kind.
    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let card = "devices/pci0000:00/0000:00:03.0/0000:04:00.0";
        write(&format!("{card}/numa_node"), "1\n");
        write(&format!("{card}/net/eth0/type"), "1\n");
        write(&format!("{card}/net/eth0/speed"), "200000\n");
        write(&format!("{card}/net/eth0/mtu"), "8244\n");
        write(&format!("{card}/net/eth0/operstate"), "up\n");
        write("bus/pci/drivers/gve/x", "");
        let class = root.path().join("class/net");
        fs::create_dir_all(&class).unwrap();
        let card = root.path().join(card);
        symlink(root.path().join("bus/pci/drivers/gve"), card.join("driver")).unwrap();
        symlink("../..", card.join("net/eth0/device")).unwrap();
        symlink(card.join("net/eth0"), class.join("eth0")).unwrap();
        write("class/net/lo/type", "772\n");
        write("class/net/lo/operstate", "unknown\n");
        write("class/net/lo/speed", "garbage\n");
        write("class/net/docker0/bridge/bridge_id", "8000\n");
        write("class/net/docker0/speed", "-1\n");
        write("class/net/docker0/operstate", "down\n");
        write("class/net/veth1/ifindex", "7\n");
        write("class/net/veth1/iflink", "8\n");
        write("class/net/vlan5/uevent", "DEVTYPE=vlan\nINTERFACE=vlan5\n");
        write("class/net/vlan5/ifindex", "9\n");
        write("class/net/vlan5/speed", "4294967295\n");
        write("class/net/vlan5/iflink", "2\n");
        write("class/net/bonding_masters", "\n");
        root
    }

    #[test]
    fn each_kind_is_told_apart_and_a_card_is_described_fully() {
        let root = tree();
        let addresses = [InterfaceAddress {
            interface: "eth0".to_owned(),
            address: IpAddr::from([10, 0, 0, 7]),
            prefix: 24,
        }];
        let found = interfaces_in(root.path(), &addresses).unwrap();
        let kinds: Vec<_> = found
            .iter()
            .map(|one| (one.name.as_str(), one.kind))
            .collect();
        assert_eq!(
            kinds,
            [
                ("docker0", InterfaceKind::Bridge),
                ("eth0", InterfaceKind::Physical),
                ("lo", InterfaceKind::Loopback),
                ("veth1", InterfaceKind::Veth),
                ("vlan5", InterfaceKind::Virtual),
            ]
        );
        assert_eq!(
            found[1],
            Interface {
                name: "eth0".to_owned(),
                kind: InterfaceKind::Physical,
                up: true,
                addresses: vec![IpAddr::from([10, 0, 0, 7])],
                prefixes: vec![24],
                speed: Some(200_000_000_000),
                mtu: Some(8244),
                pci_path: vec!["0000:00:03.0".to_owned(), "0000:04:00.0".to_owned()],
                numa_node: Some(1),
                driver: Some("gve".to_owned()),
            }
        );
        assert_eq!((found[0].speed, found[0].up), (None, false));
        assert_eq!((found[2].speed, found[2].up), (None, true));
        assert_eq!(found[4].speed, None, "no card is that fast");
    }

    #[test]
    fn without_a_tree_the_addresses_are_all_that_is_known() {
        let address = |interface: &str, last| InterfaceAddress {
            interface: interface.to_owned(),
            address: IpAddr::from([10, 0, 0, last]),
            prefix: 24,
        };
        let found = with_addresses(&[address("lo", 1), address("eth0", 2), address("eth0", 3)]);
        let known: Vec<_> = found
            .iter()
            .map(|one| (one.name.as_str(), one.kind, one.up, one.addresses.len()))
            .collect();
        let expected = [
            ("eth0", InterfaceKind::Virtual, true, 2),
            ("lo", InterfaceKind::Loopback, true, 1),
        ];
        assert_eq!(known, expected);
    }

    #[test]
    fn a_tree_without_interfaces_is_an_error_that_names_it() {
        let root = tempfile::tempdir().unwrap();
        let error = interfaces_in(root.path(), &[]).unwrap_err();
        assert!(error.to_string().contains("class/net"), "{error}");
    }

    #[test]
    fn this_host_has_a_loopback_with_its_address() {
        let found = interfaces().unwrap();
        let is_loopback = |one: &&Interface| one.kind == InterfaceKind::Loopback;
        let Some(loopback) = found.iter().find(is_loopback) else {
            eprintln!("skipped: this_host_has_a_loopback_with_its_address: no loopback here");
            return;
        };
        assert!(
            loopback.addresses.iter().any(IpAddr::is_loopback),
            "{loopback:?}"
        );
        assert!(loopback.mtu.is_some_and(|mtu| mtu >= 1500), "{loopback:?}");
    }

    #[test]
    fn only_pci_addresses_are_taken_for_such() {
        assert!(is_pci_address("0000:04:00.0") && is_pci_address("10000:e1:1f.7"));
        for text in [
            "pci0000:00",
            "virtio0",
            "0000:04:00",
            "0000:04:00.0:1",
            "zzzz:04:00.0",
            "",
        ] {
            assert!(!is_pci_address(text), "{text}");
        }
    }
}
