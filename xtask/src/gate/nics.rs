//! Two network namespaces with four cables between them, as two hosts with four cards.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::cases::NicState;

const CABLES: usize = 4;
const RATE: &str = "800mbit";
const SLOW: &str = "80mbit";

/// Both namespaces; they go with it.
#[derive(Debug)]
pub(super) struct Nics {
    client: String,
    server: String,
}

impl Nics {
    /// Where the server listens: its end of the first cable.
    pub(super) const SERVER: &'static str = "10.77.0.2";

    /// An error says why there are none.
    pub(super) fn make() -> Result<Self> {
        let id = std::process::id();
        let nics = Self {
            client: format!("gate{id}a"),
            server: format!("gate{id}b"),
        };
        // On an early return what was made so far goes with `nics`.
        for namespace in [&nics.client, &nics.server] {
            ip(&["netns", "add", namespace]).context("root and the program `ip` are needed")?;
            ip(&["-n", namespace, "link", "set", "lo", "up"])?;
        }
        for cable in 0..CABLES {
            let (near, far) = (format!("gc{cable}"), format!("gs{cable}"));
            ip(&[
                "link",
                "add",
                &near,
                "netns",
                &nics.client,
                "type",
                "veth",
                "peer",
                "name",
                &far,
                "netns",
                &nics.server,
            ])?;
            for (namespace, card, host) in [(&nics.client, &near, 1), (&nics.server, &far, 2)] {
                let address = format!("10.77.{cable}.{host}/24");
                ip(&["-n", namespace, "addr", "add", &address, "dev", card])?;
                ip(&["-n", namespace, "link", "set", card, "up"])?;
                tc(namespace, "add", card, RATE)?;
            }
        }
        Ok(nics)
    }

    /// A driver whose ends are in both namespaces.
    pub(super) fn command(&self, driver: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.client]).arg(driver);
        command.args(["run", "ip", "netns", "exec", &self.server]);
        command
    }

    pub(super) fn set(&self, state: NicState) -> Result<()> {
        let last = CABLES - 1;
        let rate = if state == NicState::OneSlow {
            SLOW
        } else {
            RATE
        };
        let link = if state == NicState::OneCut {
            "down"
        } else {
            "up"
        };
        for (namespace, card) in [
            (&self.client, format!("gc{last}")),
            (&self.server, format!("gs{last}")),
        ] {
            tc(namespace, "change", &card, rate)?;
            ip(&["-n", namespace, "link", "set", &card, link])?;
        }
        Ok(())
    }
}

impl Drop for Nics {
    fn drop(&mut self) {
        for namespace in [&self.client, &self.server] {
            // The cables go with their ends.
            let _ = ip(&["netns", "del", namespace]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    call("ip", arguments)
}

fn tc(namespace: &str, verb: &str, card: &str, rate: &str) -> Result<()> {
    let shape = ["rate", rate, "burst", "256kb", "latency", "50ms"];
    let mut arguments = vec![
        "netns", "exec", namespace, "tc", "qdisc", verb, "dev", card, "root", "tbf",
    ];
    arguments.extend(shape);
    call("ip", &arguments)
}

fn call(program: &str, arguments: &[&str]) -> Result<()> {
    let output = match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => bail!("{program}: {error}"),
    };
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
