//! The drivers, and turns between them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::build::Build;
use super::cases::Case;
use super::nics::Nics;

/// Longest time that a driver may take for a case. Its own waits end after 60 s, with a reason.
const LONGEST: Duration = Duration::from_secs(180);

/// Figures of a case by their names.
pub(super) type Figures = BTreeMap<String, Option<f64>>;

/// Both contenders' figures in one round, of each turn.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) base: [Figures; 2],
    pub(super) own: [Figures; 2],
}

/// A running driver.
pub(super) struct Driver {
    child: Child,
    to: ChildStdin,
    from: Receiver<std::io::Result<String>>,
}

impl Driver {
    pub(super) fn start(build: &Build, nics: Option<&Nics>) -> Result<Self> {
        let mut command = match nics {
            Some(nics) => nics.command(build),
            None => {
                let mut command = Command::new(&build.driver);
                command.arg("run").arg(&build.plugin);
                command.env("NCCL_SOCKET_IFNAME", "=lo");
                command
            }
        };
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", build.driver.display()))?;
        let to = child.stdin.take().context("no pipe to the driver")?;
        let lines = BufReader::new(child.stdout.take().context("no pipe from the driver")?).lines();
        let (heard, from) = channel();
        // Ends with the driver, or with whoever listens.
        std::thread::spawn(move || {
            for line in lines {
                if heard.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, to, from })
    }

    fn measure(&mut self, case: &Case, limit: Duration) -> Result<Figures> {
        let mut line = case.request().to_string();
        line.push('\n');
        self.to
            .write_all(line.as_bytes())
            .context("the driver has gone")?;
        let answer = match self.from.recv_timeout(limit) {
            Ok(line) => line?,
            Err(RecvTimeoutError::Timeout) => bail!("no answer within {} s", limit.as_secs_f64()),
            Err(RecvTimeoutError::Disconnected) => bail!("the driver has gone"),
        };
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

/// A case twice on each: first, second, second, first.
pub(super) fn turns(
    case: &Case,
    base: &mut Driver,
    own: &mut Driver,
    own_first: bool,
) -> Result<Round> {
    let mut of_base = || base.measure(case, LONGEST).context("BASE");
    let mut of_own = || own.measure(case, LONGEST).context("this tree");
    let (base, own) = if own_first {
        let first = of_own()?;
        let base = [of_base()?, of_base()?];
        (base, [first, of_own()?])
    } else {
        let first = of_base()?;
        let own = [of_own()?, of_own()?];
        ([first, of_base()?], own)
    };
    Ok(Round { base, own })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::gate::cases;

    fn driver(script: &str) -> (tempfile::TempDir, Driver) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("driver");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let build = Build {
            commit: String::new(),
            driver: path.clone(),
            plugin: path,
        };
        let driver = Driver::start(&build, None).unwrap();
        (folder, driver)
    }

    #[test]
    fn a_driver_that_does_not_answer_is_an_error() {
        let case = &cases::all(None).unwrap()[0];
        let (_folder, mut silent) = driver("exec sleep 1000");
        let error = silent.measure(case, Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("no answer"), "{error:#}");
        let (_folder, mut gone) = driver("read line");
        let error = gone.measure(case, LONGEST).unwrap_err();
        assert!(error.to_string().contains("has gone"), "{error:#}");
    }

    #[test]
    fn a_round_keeps_both_turns_of_each() {
        let script = |first: u8| {
            format!(
                "at={first}; while read line; do echo \"{{\\\"figures\\\":{{\\\"p50\\\":$at}}}}\"; at=$((at+1)); done"
            )
        };
        let case = &cases::all(None).unwrap()[0];
        for own_first in [false, true] {
            let (_one, mut base) = driver(&script(1));
            let (_other, mut own) = driver(&script(10));
            let round = turns(case, &mut base, &mut own, own_first).unwrap();
            assert_eq!(
                round.base.map(|figures| figures["p50"]),
                [1.0, 2.0].map(Some)
            );
            assert_eq!(
                round.own.map(|figures| figures["p50"]),
                [10.0, 11.0].map(Some)
            );
        }
    }
}
