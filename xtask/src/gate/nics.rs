//! Two network namespaces with four cables between them, as two hosts with four cards.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::build::Build;
use super::cases::NicState;

/// Makes the namespaces `$1` and `$2`; the server listens at its end of the first cable, 10.77.0.2.
const MAKE: &str = r#"set -e
for host in "$1" "$2"; do ip netns add "$host"; ip -n "$host" link set lo up; done
for at in 0 1 2 3; do
  ip link add "card$at" netns "$1" type veth peer name "card$at" netns "$2"
  ip -n "$1" addr add "10.77.$at.1/24" dev "card$at"
  ip -n "$2" addr add "10.77.$at.2/24" dev "card$at"
  for host in "$1" "$2"; do
    ip -n "$host" link set "card$at" up
    tc -n "$host" qdisc add dev "card$at" root tbf rate 800mbit burst 256kb latency 50ms
  done
done"#;

/// Brings the last cable into a state: its rate `$3`, and `$4`, up or down.
const SET: &str = r#"set -e
for host in "$1" "$2"; do
  tc -n "$host" qdisc change dev card3 root tbf rate "$3" burst 256kb latency 50ms
  ip -n "$host" link set card3 "$4"
done"#;

/// Both namespaces; they go with it, and the cables with them.
#[derive(Debug)]
pub(super) struct Nics([String; 2]);

impl Nics {
    /// An error says why there are none.
    pub(super) fn make() -> Result<Self> {
        let id = std::process::id();
        // On an early return what was made so far goes with it.
        let nics = Self([format!("gate{id}a"), format!("gate{id}b")]);
        nics.shell(MAKE, &[])
            .context("root, `ip` and `tc` are needed")?;
        Ok(nics)
    }

    /// A driver whose ends are in both namespaces.
    pub(super) fn command(&self, build: &Build) -> Command {
        let [client, server] = &self.0;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", client]).arg(&build.driver);
        command.arg("run").arg(&build.plugin);
        command.args(["ip", "netns", "exec", server]);
        command.env_remove("NCCL_SOCKET_IFNAME");
        command
    }

    pub(super) fn set(&self, state: NicState) -> Result<()> {
        self.shell(
            SET,
            match state {
                NicState::Equal => &["800mbit", "up"],
                NicState::OneSlow => &["80mbit", "up"],
                NicState::OneCut => &["800mbit", "down"],
            },
        )
    }

    fn shell(&self, script: &str, more: &[&str]) -> Result<()> {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).args(&self.0).args(more);
        let output = command.output().context("cannot run sh")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}", said.trim());
        Ok(())
    }
}

impl Drop for Nics {
    fn drop(&mut self) {
        let _ = self.shell("ip netns del \"$1\"; ip netns del \"$2\"", &[]);
    }
}
