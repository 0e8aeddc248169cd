//! A second process of this program on this host, which listens on loopback.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use tcpx::Key;

use crate::args::link::{LinkArgs, NetworkName};
use crate::environment;
use crate::error::Error;
use crate::key::KEY_VARIABLE;

/// The process; ended when dropped.
#[derive(Debug)]
pub(crate) struct Second {
    child: Child,
    /// Where it listens, on loopback.
    pub(crate) port: u16,
}

impl Second {
    /// Starts `command` with the same choices as this process, and a key that this process then has too.
    pub(crate) fn start(command: &[&str], link: &LinkArgs, key: &Key) -> Result<Self, Error> {
        let failed = |source| Error::Process {
            doing: "start the second process",
            source,
        };
        let mut child = Command::new(environment::own_program())
            .args(command)
            .args(["--bind", "127.0.0.1", "--port", "0"])
            .args(same(link))
            .env(KEY_VARIABLE, key.to_text())
            // This process has the address.
            .env_remove("TCPX_METRICS")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (sender, ports) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            // Reads to the end, so that the process never waits for its reader.
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Some(port) = port(&line) {
                        let _ = sender.send(port);
                    }
                }
            });
        }
        let mut second = Self { child, port: 0 };
        // Opening a GPU takes seconds on some hosts.
        second.port = ports
            .recv_timeout(link.timeout.0 + Duration::from_secs(30))
            .map_err(|_| Error::Failed {
                what: "the second process does not listen".into(),
                hint: "look for its messages above",
            })?;
        Ok(second)
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The port in `listening on 127.0.0.1:4567; ...`.
fn port(line: &str) -> Option<u16> {
    let rest = line.strip_prefix("listening on 127.0.0.1:")?;
    rest.split(';').next()?.parse().ok()
}

/// What both processes must have in common, as flags; variables are inherited.
fn same(link: &LinkArgs) -> Vec<String> {
    let network = &link.network;
    let mut flags = vec![format!("--timeout={}ms", link.timeout.0.as_millis())];
    let mut flag = |name: &str, value: Option<String>| {
        flags.extend(value.map(|value| format!("--{name}={value}")));
    };
    flag(
        "network",
        network.network.map(|name| match name {
            NetworkName::Tcp => "tcp".to_owned(),
            NetworkName::Plugin => "plugin".to_owned(),
            NetworkName::Devmem => "devmem".to_owned(),
        }),
    );
    let plugin = network.plugin.as_ref().filter(|_| network.plugin_by_flag);
    flag("plugin", plugin.map(|path| path.display().to_string()));
    flag("abi", network.abi.map(|version| format!("v{version}")));
    flag("plugin-device", Some(network.plugin_device.to_string()));
    flag("channels", network.channels.map(|count| count.to_string()));
    flag("loops", network.loops.map(|count| count.to_string()));
    flag(
        "chunk-bytes",
        network.chunk_bytes().map(|size| size.0.to_string()),
    );
    flag("congestion", network.congestion.clone());
    flag("unpack", network.unpack.map(|method| method.to_string()));
    let persistent = u8::from(network.persistent_kernel);
    flag("persistent-kernel", Some(persistent.to_string()));
    flag("interfaces", network.interfaces().map(str::to_owned));
    flags.extend(network.zero_copy.then(|| "--zero-copy".to_owned()));
    flags.extend(network.encrypt.then(|| "--encrypt".to_owned()));
    flags
}

#[cfg(test)]
mod tests {
    use super::port;

    #[test]
    fn the_port_is_read_from_the_line_that_servers_print() {
        assert_eq!(
            port("listening on 127.0.0.1:4567; at the other side run:"),
            Some(4567)
        );
        assert_eq!(port("listening on 127.0.0.1:; at"), None);
        assert_eq!(port("  TCPX_KEY=X tcpx bench net"), None);
    }
}
