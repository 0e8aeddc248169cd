//! Two network namespaces with several links between them, for tests that run as root.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, bail};
use serde_json::Value;

/// Two hosts, `a` and `b`, with links `nic0`, `nic1`, ... between them. Link `n` has the network
/// `10.78.n.0/24`, in which `a` is 1 and `b` is 2. Both namespaces go when this is dropped.
#[derive(Debug)]
pub struct Hosts {
    a: String,
    b: String,
}

/// Why the links cannot be made here; `None` when they can.
pub fn missing() -> Option<String> {
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

    /// Takes a link down, on both hosts.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn cut(&self, link: usize) -> anyhow::Result<()> {
        self.set(link, "down")
    }

    /// Brings a link up again, on both hosts.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn mend(&self, link: usize) -> anyhow::Result<()> {
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
        let namespace = if on_a { &self.a } else { &self.b };
        let mut child = Command::new("ip")
            .args(["netns", "exec", namespace, program])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {program}"))?;
        let out = child.stdout.take().context("its output")?;
        Ok(Told {
            child,
            lines: BufReader::new(out).lines(),
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for namespace in [&self.a, &self.b] {
            // Both ends of a link go with either.
            let _ = run("ip", &["netns", "del", namespace]);
        }
    }
}

/// A program that tells its steps in lines of JSON.
#[derive(Debug)]
pub struct Told {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Told {
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
        bail!("it ended without {field:?}: {}", self.child.wait()?)
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
        Ok(self.child.wait()?)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
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
