//! A host made up by a test.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use tcpx_memory::CudaError;
use tcpx_memory::driver::{CudaVersion, DeviceInfo};
use tcpx_net::interfaces::{Interface, InterfaceKind};

use super::*;
use crate::plugin_file::contents::{Contents, ContentsError};

/// Says what it was told to say; without a word, a host that has nothing.
#[derive(Debug)]
pub(crate) struct FakeHost {
    pub(crate) variables: BTreeMap<String, String>,
    pub(crate) files: BTreeMap<PathBuf, String>,
    /// The deepest holds; without one the mounts cannot be read.
    pub(crate) mounts: Vec<Mount>,
    pub(crate) interfaces: Vec<Interface>,
    pub(crate) open_files: Rlimit,
    pub(crate) contents: BTreeMap<PathBuf, Contents>,
    pub(crate) driver: Driver,
    /// Sockets, and whether somebody listens there.
    pub(crate) sockets: BTreeMap<PathBuf, bool>,
}

impl Default for FakeHost {
    fn default() -> Self {
        let unlimited = Rlimit {
            current: None,
            maximum: None,
        };
        Self {
            variables: BTreeMap::new(),
            files: BTreeMap::new(),
            mounts: Vec::new(),
            interfaces: Vec::new(),
            open_files: unlimited,
            contents: BTreeMap::new(),
            driver: no_driver(),
            sockets: BTreeMap::new(),
        }
    }
}

impl FakeHost {
    pub(crate) fn file(&mut self, path: &str, text: &str) {
        self.files.insert(path.into(), text.into());
    }

    pub(crate) fn mounted(&mut self, point: &str, allows_programs: bool) {
        self.mounts.push(Mount {
            point: point.into(),
            allows_programs,
        });
    }

    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.variables.insert(name.into(), value.into());
    }

    /// Adds an interface that is up.
    pub(crate) fn interface(&mut self, name: &str, kind: InterfaceKind, address: &str) {
        let addresses: Vec<IpAddr> = address.parse().into_iter().collect();
        self.interfaces.push(Interface {
            name: name.into(),
            kind,
            up: true,
            addresses,
            prefixes: Vec::new(),
            speed: None,
            mtu: Some(1500),
            pci_path: Vec::new(),
            numa_node: None,
            driver: None,
        });
    }

    /// Like an A3 host: a card for control, four for data, two GPUs.
    pub(crate) fn a3() -> Self {
        let mut host = Self::default();
        for index in 0..5 {
            let address = format!("10.0.{index}.2");
            host.interface(&format!("eth{index}"), InterfaceKind::Physical, &address);
        }
        for interface in &mut host.interfaces {
            interface.driver = Some("gve".into());
        }
        host.interface("lo", InterfaceKind::Loopback, "127.0.0.1");
        host.file(
            "/proc/net/route",
            "head\neth0 00000000 0 0 0 0 100 00000000 0 0 0\n",
        );
        let gpus = ["0000:04:00.0", "0000:05:00.0"];
        for gpu in gpus {
            host.file(&format!("/sys/bus/pci/devices/{gpu}/vendor"), "0x10de\n");
            host.file(&format!("/sys/bus/pci/devices/{gpu}/class"), "0x030200\n");
        }
        let device = |(ordinal, pci): (u32, &str)| DeviceInfo {
            ordinal,
            name: "H100".into(),
            pci: pci.to_owned(),
            memory: 80 << 30,
            numa: None,
            capability: (9, 0),
            dma_buf: true,
        };
        host.driver = Driver::Present {
            version: CudaVersion {
                major: 12,
                minor: 8,
            },
            devices: (0..).zip(gpus).map(device).collect(),
        };
        host
    }

    fn known(&self) -> BTreeSet<&Path> {
        let files = self.files.keys().chain(self.contents.keys());
        files
            .chain(self.sockets.keys())
            .map(PathBuf::as_path)
            .collect()
    }
}

pub(crate) fn no_driver() -> Driver {
    let why = "none here".into();
    Driver::Missing {
        why: CudaError::NoDriver { why },
    }
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Host for FakeHost {
    fn variable(&self, name: &str) -> Option<String> {
        self.variables
            .get(name)
            .filter(|value| !value.is_empty())
            .cloned()
    }

    fn text(&self, path: &Path) -> io::Result<String> {
        self.files.get(path).cloned().ok_or_else(missing)
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<String>> {
        let below = self.known().into_iter().filter_map(|path| {
            let first = path.strip_prefix(folder).ok()?.components().next()?;
            Some(first.as_os_str().to_string_lossy().into_owned())
        });
        let names: BTreeSet<String> = below.collect();
        if names.is_empty() {
            return Err(missing());
        }
        Ok(names.into_iter().collect())
    }

    fn kind(&self, path: &Path) -> io::Result<FileKind> {
        if self.sockets.contains_key(path) {
            Ok(FileKind::Socket)
        } else if self.files.contains_key(path) || self.contents.contains_key(path) {
            Ok(FileKind::File)
        } else {
            self.names(path).map(|_| FileKind::Folder)
        }
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        self.kind(path).map(|_| path.to_owned())
    }

    fn mount(&self, path: &Path) -> io::Result<Mount> {
        let above = self
            .mounts
            .iter()
            .filter(|mount| path.starts_with(&mount.point));
        let deepest = above.max_by_key(|mount| mount.point.components().count());
        deepest.cloned().ok_or_else(missing)
    }

    fn interfaces(&self) -> Result<Vec<Interface>, String> {
        Ok(self.interfaces.clone())
    }

    fn open_files(&self) -> Rlimit {
        self.open_files
    }

    fn contents(&self, plugin: &Path) -> Result<Contents, ContentsError> {
        let contents = self.contents.get(plugin).cloned();
        contents.ok_or_else(|| ContentsError::NotAFile(plugin.to_owned()))
    }

    fn driver(&self) -> Driver {
        self.driver.clone()
    }

    fn listens(&self, socket: &Path) -> io::Result<()> {
        match self.sockets.get(socket) {
            Some(true) => Ok(()),
            Some(false) => Err(io::ErrorKind::ConnectionRefused.into()),
            None => Err(missing()),
        }
    }
}

#[test]
fn the_default_route_of_least_metric_wins() {
    let mut host = FakeHost::default();
    assert_eq!(default_route(&host), None);
    host.file(
        "/proc/net/route",
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
         eth1\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\t0\t0\t0\n\
         eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
         eth2\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
         garbage\n",
    );
    assert_eq!(default_route(&host).as_deref(), Some("eth0"));
}

#[test]
fn gpus_are_nvidias_display_controllers() {
    let mut host = FakeHost::default();
    for (address, vendor, class) in [
        ("0000:04:00.0", "0x10de", "0x030200"),
        ("0000:05:00.0", "0x10de", "0x068000"),
        ("0000:06:00.0", "0x1ae0", "0x020000"),
    ] {
        host.file(&format!("/sys/bus/pci/devices/{address}/vendor"), vendor);
        host.file(&format!("/sys/bus/pci/devices/{address}/class"), class);
    }
    assert_eq!(gpu_addresses(&host), ["0000:04:00.0"]);
}
