//! A second process of this program on this host, which listens on loopback.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use clap::ValueEnum;
use tcpx::Key;
use tcpx_bench::process::Child;

use crate::args::link::LinkArgs;
use crate::environment;
use crate::error::Error;
use crate::key::{self, KEY_VARIABLE};
use crate::memory_choice::MemoryChoice;
use crate::output::say::is_debug;
use crate::perf::Place;

/// Lines of its output that are kept.
const KEPT: usize = 100;

/// How long it may take to end once its client has parted.
const ENDING: Duration = Duration::from_secs(30);

/// The process.
#[derive(Debug)]
pub(crate) struct Second {
    child: Child,
    /// Where it listens, on loopback.
    port: u16,
    key: Key,
    output: Option<JoinHandle<VecDeque<String>>>,
}

impl Second {
    /// Starts `command` with the same choices as this process; with the key of `link`, else a fresh
    /// one.
    pub(crate) fn start<T: AsRef<OsStr>>(command: &[T], link: &LinkArgs) -> Result<Self, Error> {
        let key = match &link.own_key {
            Some(key) => key.clone(),
            None => key::fresh()?,
        };
        let mut program = Command::new(environment::own_program());
        program
            .args(command)
            .args(["--bind=127.0.0.1", "--port=0"])
            .args(same(link))
            .args(is_debug().then_some("--debug"))
            .env(KEY_VARIABLE, key.to_text())
            // This process has the address.
            .env_remove("TCPX_METRICS")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let started = program.spawn().map(Child);
        let mut child = started.map_err(Error::process("start the second process"))?;
        let (sender, ports) = mpsc::channel();
        // Reads to the end, so that the process never waits for its reader.
        let output = child.0.stdout.take().map(|output| {
            std::thread::spawn(move || {
                let mut kept = VecDeque::new();
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Some(port) = port(&line) {
                        let _ = sender.send(port);
                    }
                    if kept.len() == KEPT {
                        kept.pop_front();
                    }
                    kept.push_back(line);
                }
                kept
            })
        });
        let mut second = Self {
            child,
            port: 0,
            key,
            output,
        };
        // Opening a GPU takes seconds on some hosts.
        second.port = ports
            .recv_timeout(link.timeout.0 + Duration::from_secs(30))
            .map_err(|_| {
                Error::failed(
                    "the second process does not listen",
                    "look for its messages above",
                )
            })?;
        Ok(second)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.0.id()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// `link` with the key of this process's client.
    pub(crate) fn link(&self, link: &LinkArgs) -> LinkArgs {
        let mut link = link.clone();
        link.own_key = Some(self.key.clone());
        link.insecure = false;
        link
    }

    /// Waits for its end; what it printed after it was connected.
    pub(crate) fn finish(mut self) -> Result<Vec<String>, Error> {
        let ended = self.child.end(ENDING);
        let ended = ended.map_err(Error::process("wait for the second process"))?;
        if !ended.is_some_and(|status| status.success()) {
            return Err(Error::failed(
                match ended {
                    Some(status) => format!("the second process ended with {status}"),
                    None => "the second process does not end".to_owned(),
                },
                "look for its messages above; --debug shows its log lines",
            ));
        }
        let lines = self.output.take().and_then(|output| output.join().ok());
        let lines = lines.unwrap_or_default().into_iter();
        let told = lines.skip_while(|line| !line.starts_with("connected to "));
        Ok(told.collect())
    }
}

/// The memory of the second process: the next GPU, so that bytes go from one to another.
pub(crate) fn place_for_second(memory: &MemoryChoice, gpus: usize) -> Place {
    match &memory.gpu {
        None => Place::Host,
        Some(gpu) => {
            let count = u32::try_from(gpus).unwrap_or(1).max(1);
            Place::Gpu((gpu.ordinal() + 1) % count)
        }
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
    flag("network", network.network.map(word));
    let plugin = network.plugin.as_ref();
    flag("plugin", plugin.map(|path| path.display().to_string()));
    flag("abi", network.abi.map(|version| version.to_string()));
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
    flag("path", network.path.map(word));
    flags.extend(network.encrypt.then(|| "--encrypt".to_owned()));
    flags
}

/// A value as its flag takes it.
fn word(value: impl ValueEnum) -> String {
    let named = value.to_possible_value();
    named.map_or_else(String::new, |named| named.get_name().to_owned())
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
