//! What this program asks of the host it runs on, behind a trait: tests bring a host of their own.

mod real;
#[cfg(test)]
pub(crate) mod tests;

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rustix::process::Rlimit;
use serde::Serialize;
use tcpx_net::interfaces::Interface;

use crate::plugin_file::contents::{Contents, ContentsError};

pub(crate) use tcpx_memory::driver::DriverStatus as Driver;

pub(crate) use real::RealHost;

/// What lies at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    File,
    Folder,
    Socket,
    Other,
}

/// The mount that a file lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) point: PathBuf,
    /// Whether it lets files be mapped as code.
    pub(crate) allows_programs: bool,
}

/// The host. Every answer comes within a bounded time.
pub(crate) trait Host {
    /// A variable of this process; an empty one counts as unset.
    fn variable(&self, name: &str) -> Option<String>;
    /// A small text file, such as those below `/proc` and `/sys`.
    fn text(&self, path: &Path) -> io::Result<String>;
    /// The names in a folder, sorted.
    fn names(&self, folder: &Path) -> io::Result<Vec<String>>;
    /// What lies at `path`, links followed.
    fn kind(&self, path: &Path) -> io::Result<FileKind>;
    /// `path` without links.
    fn real_path(&self, path: &Path) -> io::Result<PathBuf>;
    /// The mount of a path without links.
    fn mount(&self, path: &Path) -> io::Result<Mount>;
    /// The network interfaces, by name.
    fn interfaces(&self) -> Result<Vec<Interface>, String>;
    /// The limit on files that this process has open.
    fn open_files(&self) -> Rlimit;
    /// What a plugin file holds; nothing of it runs.
    fn contents(&self, plugin: &Path) -> Result<Contents, ContentsError>;
    /// Asks the CUDA driver for its GPUs. May start threads.
    fn driver(&self) -> Driver;
    /// Whether somebody accepts connections on a Unix socket; nothing is sent.
    fn listens(&self, socket: &Path) -> io::Result<()>;
}

/// Whether other hosts can reach the address by itself: one for the network segment alone says too
/// little.
pub(crate) fn is_for_others(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    }
}

/// A number in a small text file.
pub(crate) fn number(host: &dyn Host, path: &str) -> Option<u64> {
    host.text(Path::new(path)).ok()?.trim().parse().ok()
}

/// PCI addresses of the NVIDIA GPUs that the kernel knows, whether a driver serves them or not.
pub(crate) fn gpu_addresses(host: &dyn Host) -> Vec<String> {
    const DEVICES: &str = "/sys/bus/pci/devices";
    let read = |address: &str, file: &str| {
        let path = Path::new(DEVICES).join(address).join(file);
        host.text(&path).unwrap_or_default().trim().to_owned()
    };
    let is_gpu = |address: &String| {
        // Display controllers: VGA (0x0300..) and 3D (0x0302..).
        read(address, "vendor") == "0x10de" && read(address, "class").starts_with("0x03")
    };
    let all = host.names(Path::new(DEVICES)).unwrap_or_default();
    all.into_iter().filter(is_gpu).collect()
}

/// The interface that packets to everywhere leave by: the IPv4 default route of least metric.
pub(crate) fn default_route(host: &dyn Host) -> Option<String> {
    let table = host.text(Path::new("/proc/net/route")).ok()?;
    let routes = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [name, destination, _, _, _, _, metric, mask, ..] = fields[..] else {
            return None;
        };
        let is_default = destination == "00000000" && mask == "00000000";
        is_default.then(|| Some((metric.parse::<u32>().ok()?, name.to_owned())))?
    });
    routes
        .min_by_key(|(metric, _)| *metric)
        .map(|(_, name)| name)
}

/// What `tcpx devices`, the doctor and benchmark files say of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostFacts {
    /// Cores that this process may use.
    pub(crate) cores: usize,
    /// The processor's name.
    pub(crate) processor: Option<String>,
    /// The release of the Linux kernel.
    pub(crate) kernel: Option<String>,
    /// The CUDA version of the driver.
    pub(crate) driver: Option<String>,
    /// The congestion control of sockets that ask for none.
    pub(crate) congestion: Option<String>,
    /// Those that users without CAP_NET_ADMIN may choose, between spaces.
    pub(crate) congestion_allowed: Option<String>,
}

impl HostFacts {
    pub(crate) fn of(host: &dyn Host) -> Self {
        let text = |path: &str| {
            let text = host.text(Path::new(path)).unwrap_or_default();
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            (!text.is_empty()).then_some(text)
        };
        let processors = host.text(Path::new("/proc/cpuinfo")).unwrap_or_default();
        let name = |line: &str| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == "model name").then(|| value.trim().to_owned())
        };
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            processor: processors.lines().find_map(name),
            kernel: text("/proc/sys/kernel/osrelease"),
            driver: match host.driver() {
                Driver::Present { version, .. } => Some(version.to_string()),
                Driver::Missing { .. } => None,
            },
            congestion: text("/proc/sys/net/ipv4/tcp_congestion_control"),
            congestion_allowed: text("/proc/sys/net/ipv4/tcp_allowed_congestion_control"),
        }
    }

    /// `2 cores, no driver, Linux 6.12.3`.
    pub(crate) fn line(&self) -> String {
        let driver = self.driver.as_ref();
        let driver = driver.map(|version| format!("driver for CUDA {version}"));
        format!(
            "{} cores, {}, Linux {}",
            self.cores,
            driver.as_deref().unwrap_or("no driver"),
            self.kernel.as_deref().unwrap_or("(unknown)")
        )
    }
}
