//! The drivers, and turns between them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::build::Build;
use super::cases::Case;
use super::nics::Nics;

/// Figures of a case by their names.
pub(super) type Figures = BTreeMap<String, f64>;

/// Both contenders' figures in one round.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) base: Figures,
    pub(super) own: Figures,
}

/// A running driver.
pub(super) struct Driver {
    child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Driver {
    pub(super) fn start(build: &Build, nics: Option<&Nics>) -> Result<Self> {
        let mut command = match nics {
            Some(nics) => nics.command(&build.driver),
            None => {
                let mut command = Command::new(&build.driver);
                command.arg("run");
                command
            }
        };
        command
            .env("TCPX_GATE_PLUGIN", &build.plugin)
            .env("NCCL_SOCKET_IFNAME", "=lo")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if nics.is_some() {
            command.env_remove("NCCL_SOCKET_IFNAME");
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", build.driver.display()))?;
        let to = child.stdin.take().context("no pipe to the driver")?;
        let from = child.stdout.take().context("no pipe from the driver")?;
        Ok(Self {
            child,
            to,
            from: BufReader::new(from).lines(),
        })
    }

    fn measure(&mut self, case: &Case) -> Result<Figures> {
        let mut line = case.request().to_string();
        line.push('\n');
        self.to
            .write_all(line.as_bytes())
            .context("the driver has gone")?;
        let answer = self.from.next().context("the driver has gone")??;
        let answer: Value = serde_json::from_str(&answer)?;
        if let Some(error) = answer["error"].as_str() {
            bail!("{error}");
        }
        serde_json::from_value(answer["figures"].clone()).context("the driver gave no figures")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A case twice on each: first, second, second, first; the mean of both is the round's.
pub(super) fn turns(
    case: &Case,
    base: &mut Driver,
    own: &mut Driver,
    own_first: bool,
) -> Result<Round> {
    let mut figures = [Vec::new(), Vec::new()];
    let order = if own_first {
        [1, 0, 0, 1]
    } else {
        [0, 1, 1, 0]
    };
    for which in order {
        let driver = if which == 0 { &mut *base } else { &mut *own };
        let who = if which == 0 { "BASE" } else { "this tree" };
        figures[which].push(driver.measure(case).context(who)?);
    }
    let [base, own] = figures.map(|both| mean(&both));
    Ok(Round { base, own })
}

fn mean(all: &[Figures]) -> Figures {
    let mut sums = Figures::new();
    for (name, value) in all.iter().flatten() {
        *sums.entry(name.clone()).or_default() += value / all.len() as f64;
    }
    sums
}
