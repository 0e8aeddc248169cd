//! Two network namespaces with several links between them, for tests that run as root.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::child;
use crate::process::Running;

/// Two hosts, `a` and `b`, with links `nic0`, `nic1`, ... between them. Link `n` has the network
/// `10.78.n.0/24`, in which `a` is 1 and `b` is 2. Both namespaces go when this is dropped.
#[derive(Debug)]
pub struct Hosts {
    a: String,
    b: String,
    /// Where the hosts' links meet, if they are not cables between the two.
    switch: Option<String>,
}

/// Why the links cannot be made here; `None` when they can.
fn missing() -> Option<String> {
    // SAFETY: the call has no conditions.
    if unsafe { libc::geteuid() } != 0 {
        return Some("needs root for network namespaces".to_owned());
    }
    for tool in ["ip", "tc"] {
        let found = Command::new(tool)
            .arg("-V")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !found.is_ok_and(|status| status.success()) {
            return Some(format!("needs the program {tool}"));
        }
    }
    // Root in a container may not be allowed to; a probe says so.
    static PROBES: AtomicU32 = AtomicU32::new(0);
    let number = PROBES.fetch_add(1, Ordering::Relaxed);
    let name = format!("tcpx-probe-{}-{number}", std::process::id());
    let made = run("ip", &["netns", "add", &name]);
    let gone = run("ip", &["netns", "del", &name]);
    made.and(gone).err().map(|error| format!("{error:#}"))
}

/// Whether a test cannot run here; it says why.
pub fn skips(test: &str) -> bool {
    let why = missing();
    if let Some(why) = &why {
        // Not eprintln: the harness hides that.
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
    }
    why.is_some()
}

impl Hosts {
    /// One link for each rate, in Mb/s, which holds for both directions.
    ///
    /// # Errors
    /// What `ip` or `tc` said.
    pub fn new(name: &str, rates: &[u32]) -> anyhow::Result<Self> {
        let id = std::process::id();
        let hosts = Self {
            a: format!("tcpx-{name}-{id}-a"),
            b: format!("tcpx-{name}-{id}-b"),
            switch: None,
        };
        for namespace in [&hosts.a, &hosts.b] {
            run("ip", &["netns", "add", namespace])?;
            run("ip", &["-n", namespace, "link", "set", "lo", "up"])?;
        }
        for (index, rate) in rates.iter().enumerate() {
            let link = format!("nic{index}");
            run(
                "ip",
                &[
                    "link", "add", &link, "netns", &hosts.a, "type", "veth", "peer", "name", &link,
                    "netns", &hosts.b,
                ],
            )?;
            for (namespace, host) in [(&hosts.a, 1), (&hosts.b, 2)] {
                let address = format!("10.78.{index}.{host}/24");
                run(
                    "ip",
                    &["-n", namespace, "addr", "add", &address, "dev", &link],
                )?;
                run("ip", &["-n", namespace, "link", "set", &link, "up"])?;
                let rate = format!("{rate}mbit");
                run(
                    "tc",
                    &[
                        "-n", namespace, "qdisc", "add", "dev", &link, "root", "tbf", "rate",
                        &rate, "burst", "128k", "latency", "20ms",
                    ],
                )?;
            }
        }
        Ok(hosts)
    }

    /// Two hosts with so many links each to one switch, all in the network `10.78.0.0/24`, in which
    /// `a` has 10, 11 ... and `b` 20, 21 ...; and `b` 2 on its first link.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn flat(name: &str, links: usize) -> anyhow::Result<Self> {
        let mut hosts = Self::new(name, &[])?;
        let switch = format!("tcpx-{name}-{}-s", std::process::id());
        run("ip", &["netns", "add", &switch])?;
        hosts.switch = Some(switch.clone());
        let bridge = ["link", "add", "switch", "type", "bridge"];
        run("ip", &[&["-n", &switch], &bridge[..]].concat())?;
        run("ip", &["-n", &switch, "link", "set", "switch", "up"])?;
        for (side, namespace, first) in [("a", &hosts.a, 10), ("b", &hosts.b, 20)] {
            for index in 0..links {
                let (link, port) = (format!("nic{index}"), format!("{side}{index}"));
                let pair = ["link", "add", &link, "netns", namespace, "type", "veth"];
                let peer = ["peer", "name", &port, "netns", &switch];
                run("ip", &[&pair[..], &peer[..]].concat())?;
                let on_switch = ["-n", &switch, "link", "set", &port];
                run(
                    "ip",
                    &[&on_switch[..], &["master", "switch", "up"]].concat(),
                )?;
                let mut addresses = vec![format!("10.78.0.{}/24", first + index)];
                if side == "b" && index == 0 {
                    addresses.insert(0, "10.78.0.2/24".to_owned());
                }
                for address in &addresses {
                    run(
                        "ip",
                        &["-n", namespace, "addr", "add", address, "dev", &link],
                    )?;
                }
                run("ip", &["-n", namespace, "link", "set", &link, "up"])?;
            }
        }
        Ok(hosts)
    }

    /// Whether a card of a host answers for addresses that its other cards have.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn answer_for_others(&self, answer: bool) -> anyhow::Result<()> {
        let (ignore, announce) = if answer { ("0", "0") } else { ("1", "2") };
        for namespace in [&self.a, &self.b] {
            for (setting, value) in [("arp_ignore", ignore), ("arp_announce", announce)] {
                let write = format!("echo {value} > /proc/sys/net/ipv4/conf/all/{setting}");
                run("ip", &["netns", "exec", namespace, "sh", "-c", &write])?;
            }
            run("ip", &["-n", namespace, "neigh", "flush", "all"])?;
        }
        Ok(())
    }

    /// Leaves the hosts no address on their first link but `::1` and `::2` of this network, as
    /// `fe80`.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn keep_ipv6(&self, network: &str) -> anyhow::Result<()> {
        for (namespace, host) in [(&self.a, 1), (&self.b, 2)] {
            let ip = |words: &[&str]| run("ip", &[&["-n", namespace], words].concat());
            ip(&["-4", "addr", "flush", "dev", "nic0"])?;
            let address = format!("{network}::{host}/64");
            ip(&["addr", "add", &address, "dev", "nic0", "nodad"])?;
        }
        Ok(())
    }

    /// Leaves the hosts the addresses `10.79.0.1` and `10.79.0.2`, which stand on `lo`, and routes
    /// to each other's by the first link.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn keep_routed(&self) -> anyhow::Result<()> {
        for (namespace, host, peer) in [(&self.a, 1, 2), (&self.b, 2, 1)] {
            let ip = |words: &[&str]| run("ip", &[&["-n", namespace], words].concat());
            ip(&["-4", "addr", "flush", "dev", "nic0"])?;
            let [own, other] = [host, peer].map(|host| format!("10.79.0.{host}/32"));
            ip(&["addr", "add", &own, "dev", "lo"])?;
            let (from, _) = own.split_once('/').context("an address")?;
            ip(&["route", "add", &other, "dev", "nic0", "src", from])?;
        }
        Ok(())
    }

    /// Takes a link down, on both hosts.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn cut(&self, link: usize) -> anyhow::Result<()> {
        self.set(link, "down")
    }

    /// Takes host `b` off the switch, of which `a` sees nothing but that nobody answers.
    ///
    /// # Errors
    /// What `ip` said, or there is no switch.
    pub fn unplug(&self, link: usize) -> anyhow::Result<()> {
        let switch = self.switch.as_deref().context("there is no switch")?;
        let port = format!("b{link}");
        run("ip", &["-n", switch, "link", "set", &port, "nomaster"])
    }

    /// Puts it back.
    ///
    /// # Errors
    /// What `ip` said, or there is no switch.
    pub fn plug(&self, link: usize) -> anyhow::Result<()> {
        let namespace = self.switch.as_deref().context("there is no switch")?;
        let port = format!("b{link}");
        let onto = ["link", "set", &port, "master", "switch"];
        run("ip", &[&["-n", namespace], &onto[..]].concat())
    }

    /// Gives the addresses of a link this label, on both hosts.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn label(&self, link: usize, label: &str) -> anyhow::Result<()> {
        let nic = format!("nic{link}");
        for (namespace, host) in [(&self.a, 1), (&self.b, 2)] {
            let address = format!("10.78.{link}.{host}/24");
            let on = ["dev", nic.as_str()];
            let ip = |verb, more: &[&str]| {
                let words = ["-n", namespace.as_str(), "addr", verb, &address];
                run("ip", &[&words[..], &on, more].concat())
            };
            ip("del", &[])?;
            ip("add", &["label", label])?;
        }
        Ok(())
    }

    /// Brings a link up again, on both hosts.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn restore_link(&self, link: usize) -> anyhow::Result<()> {
        self.set(link, "up")
    }

    fn set(&self, link: usize, state: &str) -> anyhow::Result<()> {
        for namespace in [&self.a, &self.b] {
            run(
                "ip",
                &["-n", namespace, "link", "set", &format!("nic{link}"), state],
            )?;
        }
        Ok(())
    }

    /// Starts a program on host `a` or `b`.
    ///
    /// # Errors
    /// It could not be started.
    pub fn start(&self, on_a: bool, program: &str, arguments: &[&str]) -> anyhow::Result<Told> {
        let mut command = self.command(on_a, program);
        command.args(arguments);
        Told::start(command)
    }

    /// Starts this test program again on host `a` or `b`, for the test `test` of the calling file
    /// in the part `role`.
    ///
    /// # Errors
    /// It could not be started.
    #[track_caller]
    pub fn start_part(
        &self,
        on_a: bool,
        (test, role): (&str, &str),
        environment: &[(&str, &str)],
    ) -> anyhow::Result<Told> {
        let mut command = self.command(on_a, std::env::current_exe()?);
        child::prepare(&mut command, &child::in_this_file(test), role, environment);
        Told::start(command)
    }

    /// A command that starts a program on host `a` or `b`.
    pub fn command(&self, on_a: bool, program: impl AsRef<OsStr>) -> Command {
        let namespace = if on_a { &self.a } else { &self.b };
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(program);
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for namespace in [&self.a, &self.b].into_iter().chain(&self.switch) {
            // Both ends of a link go with either.
            let _ = run("ip", &["netns", "del", namespace]);
        }
    }
}

/// A program that tells its steps in lines of JSON.
#[derive(Debug)]
pub struct Told {
    child: Running,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Told {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        command.stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {command:?}"))?;
        let out = child.stdout.take().context("its output")?;
        Ok(Self {
            child: Running(child),
            lines: BufReader::new(out).lines(),
        })
    }

    /// The next line that has this field, and the field. The program bounds its own waits.
    ///
    /// # Errors
    /// It ended before.
    pub fn wait_for(&mut self, field: &str) -> anyhow::Result<(Value, Value)> {
        for line in self.lines.by_ref() {
            let line: Value = serde_json::from_str(&line?)?;
            if let Some(value) = line.get(field) {
                return Ok((value.clone(), line));
            }
        }
        bail!("it ended without {field:?}: {}", self.child.0.wait()?)
    }

    /// How it ended, whatever it printed. The program bounds its own waits.
    ///
    /// # Errors
    /// Its output is no text.
    pub fn end(mut self) -> anyhow::Result<ExitStatus> {
        // It never waits for its reader.
        for line in self.lines.by_ref() {
            line?;
        }
        Ok(self.child.0.wait()?)
    }
}

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let done = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("starting {program}"))?;
    if !done.status.success() {
        bail!(
            "{program} {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&done.stderr).trim()
        );
    }
    Ok(())
}
