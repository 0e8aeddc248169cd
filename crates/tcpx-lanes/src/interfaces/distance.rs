//! How far a network card is from a GPU.

use std::fmt;
use std::path::Path;

use super::{Interface, is_pci_address, number, pci_path};

/// Where a device sits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciPlace {
    /// PCI addresses from the root port down to the device; empty when it is no PCI device.
    pub path: Vec<String>,
    /// The memory node it is attached to.
    pub numa: Option<u32>,
}

/// The way between two devices, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Below the same PCI switch or root port.
    Switch,
    /// Below the same host bridge.
    HostBridge,
    /// On the same memory node.
    Node,
    /// Unknown: one of them is no PCI device, or nobody says which node it is on.
    Unknown,
    /// On different memory nodes.
    System,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Switch => "same switch",
            Self::HostBridge => "same host bridge",
            Self::Node => "same node",
            Self::Unknown => "unknown distance",
            Self::System => "another node",
        })
    }
}

impl PciPlace {
    /// The place of the PCI device with this address, such as `0000:1b:00.0`, in a sysfs tree;
    /// `None` when there is none.
    pub fn of(root: &Path, address: &str) -> Option<Self> {
        let address = address.to_ascii_lowercase();
        if !is_pci_address(&address) {
            return None;
        }
        let device = root.join("bus/pci/devices").join(&address);
        let path = pci_path(&device);
        (path.last() == Some(&address)).then(|| Self {
            path,
            // -1 says that there is no such thing.
            numa: number(&device.join("numa_node")),
        })
    }

    /// How far the card behind an interface is from here.
    pub fn distance(&self, interface: &Interface) -> Distance {
        let other = &interface.pci_path;
        let shared = self
            .path
            .iter()
            .zip(other)
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        if shared > 0 {
            return Distance::Switch;
        }
        let bridge = |path: &[String]| Some(path.first()?.rsplit_once(':')?.0.to_owned());
        if let (Some(ours), Some(theirs)) = (bridge(&self.path), bridge(other))
            && ours == theirs
        {
            return Distance::HostBridge;
        }
        match (self.numa, interface.numa_node) {
            (Some(ours), Some(theirs)) if ours == theirs => Distance::Node,
            (Some(_), Some(_)) => Distance::System,
            _ => Distance::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interfaces::interfaces_in;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Two sockets; on the first a switch with a GPU and a card, and a card beside it.
    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let device = |path: &str, numa: &str| {
            let path = root.path().join("devices").join(path);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("numa_node"), numa).unwrap();
            path
        };
        let gpu = device("pci0000:00/0000:00:01.0/0000:02:00.0/0000:03:00.0", "0\n");
        let cards = [
            (
                "near",
                "pci0000:00/0000:00:01.0/0000:02:01.0/0000:04:00.0",
                "0\n",
            ),
            ("beside", "pci0000:00/0000:00:05.0/0000:07:00.0", "0\n"),
            ("node", "pci0000:80/0000:80:01.0/0000:81:00.0", "0\n"),
            ("far", "pci0000:c0/0000:c0:01.0/0000:c1:00.0", "1\n"),
            ("strange", "pci0000:e0/0000:e0:01.0/0000:e1:00.0", "-1\n"),
        ];
        let bus = root.path().join("bus/pci/devices");
        fs::create_dir_all(&bus).unwrap();
        symlink(&gpu, bus.join("0000:03:00.0")).unwrap();
        let class = root.path().join("class/net");
        fs::create_dir_all(&class).unwrap();
        for (name, path, numa) in cards {
            let card = device(path, numa);
            fs::create_dir_all(card.join("net").join(name)).unwrap();
            symlink("../..", card.join("net").join(name).join("device")).unwrap();
            symlink(card.join("net").join(name), class.join(name)).unwrap();
        }
        fs::create_dir_all(class.join("virtual")).unwrap();
        root
    }

    #[test]
    fn nearer_is_less() {
        let root = tree();
        let gpu = PciPlace::of(root.path(), "0000:03:00.0").unwrap();
        assert_eq!(
            gpu.path,
            ["0000:00:01.0", "0000:02:00.0", "0000:03:00.0"].map(str::to_owned)
        );
        let mut found: Vec<_> = interfaces_in(root.path(), &[])
            .unwrap()
            .iter()
            .map(|one| (gpu.distance(one), one.name.clone()))
            .collect();
        found.sort();
        let order: Vec<_> = found
            .iter()
            .map(|(distance, name)| (name.as_str(), *distance))
            .collect();
        assert_eq!(
            order,
            [
                ("near", Distance::Switch),
                ("beside", Distance::HostBridge),
                ("node", Distance::Node),
                ("strange", Distance::Unknown),
                ("virtual", Distance::Unknown),
                ("far", Distance::System),
            ]
        );
    }

    #[test]
    fn what_is_no_pci_address_or_no_device_has_no_place() {
        let root = tree();
        for address in ["0000:99:00.0", "../../../etc", "", "0000:03:00"] {
            assert_eq!(PciPlace::of(root.path(), address), None, "{address:?}");
        }
    }
}
