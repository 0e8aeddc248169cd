//! What the host is, as every command says it.

use std::path::Path;

use serde::Serialize;

use super::{Driver, Host};

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
