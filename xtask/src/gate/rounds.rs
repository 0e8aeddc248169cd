//! Turns of two drivers.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use tcpx_bench::process::{Figures, Process};

use super::build::{Build, Builds};
use super::cases::Case;

/// Longest time that a driver may take for a case. Its own waits end after 60 s, with a reason.
const LONGEST: Duration = Duration::from_secs(180);

/// Both contenders' figures in one round, BASE first: the means of two turns.
pub(super) type Round = [Figures; 2];

/// A start of both drivers, and each case in turns. A driver is of no more use after a failed case.
pub(super) fn run(
    builds: &Builds,
    cases: &[&Case],
    own_first: bool,
) -> Result<Vec<(String, Result<Round>)>> {
    let mut outcomes = Vec::new();
    let mut cases = cases.to_vec();
    cases.sort_by_key(|case| case.variables());
    for alike in cases.chunk_by(|a, b| a.variables() == b.variables()) {
        let mut base = start(&builds.base, alike[0])?;
        let mut own = start(&builds.own, alike[0])?;
        for case in alike {
            let outcome = turns(case, &mut base, &mut own, own_first);
            let has_failed = outcome.is_err();
            outcomes.push((case.name.clone(), outcome));
            if has_failed {
                return Ok(outcomes);
            }
        }
    }
    // Between rounds the machine may do what it has put off.
    std::thread::sleep(Duration::from_millis(200));
    Ok(outcomes)
}

fn start(build: &Build, case: &Case) -> Result<Process> {
    let mut command = Command::new(&build.driver);
    command.arg("run").arg(&build.plugin);
    command.env("NCCL_SOCKET_IFNAME", "=lo");
    // The gate's cases are about TCP.
    command.env("TCPX_LOCAL", "off");
    command.envs(case.variables());
    let started = Process::start(&mut command);
    started.with_context(|| format!("cannot start {}", build.driver.display()))
}

/// A case twice on each: first, second, second, first.
fn turns(case: &Case, base: &mut Process, own: &mut Process, own_first: bool) -> Result<Round> {
    let request = case.request();
    let mut of_base = || base.measure(&request, LONGEST).context("BASE");
    let mut of_own = || own.measure(&request, LONGEST).context("this tree");
    let ([base, base_again], [own, own_again]) = if own_first {
        let first = of_own()?;
        ([of_base()?, of_base()?], [first, of_own()?])
    } else {
        let first = of_base()?;
        let own = [of_own()?, of_own()?];
        ([first, of_base()?], own)
    };
    Ok([mean(&base, &base_again), mean(&own, &own_again)])
}

/// Of what both turns have.
fn mean(first: &Figures, second: &Figures) -> Figures {
    let both = first.iter().filter_map(|(metric, a)| {
        let mean = f64::midpoint(*a, *second.get(metric)?);
        Some((*metric, mean))
    });
    both.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::cases;
    use tcpx_bench::process::Metric;

    #[test]
    fn a_round_keeps_the_means_of_both_turns() {
        let driver = |first: u8| {
            let script = format!(
                "at={first}; while read line; do echo \"{{\\\"figures\\\":{{\\\"p50\\\":$at}}}}\"; at=$((at+1)); done"
            );
            Process::start(Command::new("sh").args(["-c", &script])).unwrap()
        };
        let case = &cases::all(None).unwrap()[0];
        for own_first in [false, true] {
            let round = turns(case, &mut driver(1), &mut driver(10), own_first).unwrap();
            assert_eq!(round.map(|figures| figures[&Metric::P50]), [1.5, 10.5]);
        }
    }
}
