//! `cargo xtask faults`: every test of faults between real processes, those at random moments as often as asked.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{cargo, root, run as run_command};

/// What can be counted, how often this task does it, and what it is.
const COUNTS: [(&str, u64, &str); 9] = [
    (
        "kills",
        200,
        "SIGKILL of a peer at a random moment of its transfers",
    ),
    (
        "resets",
        100,
        "resets of all connections at a random moment of their transfers",
    ),
    (
        "seconds",
        1800,
        "seconds of random transfers, in which nothing grows",
    ),
    (
        "rest",
        20,
        "seconds for which a process is stopped, which its transfers survive",
    ),
    (
        "flips",
        10_000,
        "flipped bits through relays, plain and as many sealed",
    ),
    ("relays", 8, "relays at once that flip bits"),
    (
        "flips_for",
        3600,
        "seconds of flipped bits at most, plain and as many sealed",
    ),
    (
        "clients",
        100,
        "clients that connect while strangers come from a thousand addresses",
    ),
    (
        "connects",
        2000,
        "connects and closes, after which nothing is left",
    ),
];

/// The tests, the fault of each, and where they are: a package, its test program and a filter.
const TESTS: [(&str, &str, [&str; 3]); 12] = [
    (
        "faults",
        "kills, resets and crowds at random moments",
        [ACROSS, "faults", ""],
    ),
    (
        "flips",
        "flipped bits, plain and sealed",
        [ACROSS, "engine", "flips::"],
    ),
    (
        "processes",
        "flipped bits while the program moves files, a hundredth as many",
        ["tcpx-cli", "processes", "flips::"],
    ),
    (
        "accidents",
        "SIGKILL and SIGSTOP at named points, over every network",
        [ACROSS, "engine", "accidents::"],
    ),
    (
        "rests",
        "SIGSTOP for a while, which a transfer survives",
        [ACROSS, "engine", "rests::"],
    ),
    (
        "shortages",
        "no descriptors, memory or threads, no /proc or /tmp, a clock that goes back",
        [ACROSS, "engine", "shortages::"],
    ),
    (
        "strangers",
        "wrong keys, no keys, other versions, nonsense, silence on the port",
        [ACROSS, "engine", "strangers::"],
    ),
    (
        "lanes",
        "lanes and control connections that are reset, closed, stalled, swallowed",
        [ACROSS, "engine", "lanes::"],
    ),
    (
        "nics",
        "cards that are slow, cut, or in one network",
        [ACROSS, "engine", "nics::"],
    ),
    (
        "nccl_lanes",
        "lanes under NCCL that end amid a message, a killed peer, wrong secrets",
        [ACROSS, "nccl", "lanes::"],
    ),
    (
        "nccl_forks",
        "forks, and a killed parent whose child lives",
        [ACROSS, "nccl", "forks::"],
    ),
    (
        "resources",
        "descriptors and threads that connections leave behind",
        [ACROSS, "resources", ""],
    ),
];

/// The package of the tests across crates.
const ACROSS: &str = "tcpx-tests";

/// Runs them; `--NAME COUNT` sets a count, and words name tests. `--built FOLDER` runs programs that were built before and
/// lie there by their names, beside those that they start, where there is no Cargo.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mut counts = COUNTS.map(|(name, count, _)| (name, count));
    let mut chosen = Vec::new();
    let mut built = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let Some(name) = argument.strip_prefix("--") else {
            let known = TESTS.iter().find(|(test, ..)| test == argument);
            chosen.push(known.with_context(|| format!("no test {argument}\n{}", usage()))?);
            continue;
        };
        if name == "built" {
            built = Some(Path::new(rest.next().with_context(usage)?));
            continue;
        }
        let held = counts.iter_mut().find(|(known, _)| *known == name);
        let Some(((_, count), given)) = held.zip(rest.next()) else {
            bail!("no count {argument}\n{}", usage());
        };
        *count = given
            .parse()
            .with_context(|| format!("{argument} {given}: not a number"))?;
    }
    if chosen.is_empty() {
        chosen = TESTS.iter().collect();
    }
    let counts = counts
        .map(|(name, count)| format!("{name}={count}"))
        .join(",");
    println!("FAULTS={counts}");
    for (_, _, [package, program, filter]) in chosen {
        let mut command = match built {
            Some(folder) => Command::new(folder.join(program)),
            None => {
                let mut command = cargo();
                command.current_dir(root()?).args([
                    "test",
                    "--locked",
                    "--package",
                    package,
                    "--test",
                    program,
                    "--",
                ]);
                command
            }
        };
        run_command(command.env("FAULTS", &counts).args(["--nocapture", filter]))?;
    }
    Ok(())
}

fn usage() -> String {
    let mut text = String::from("--built FOLDER: programs that were built before\ncounts:");
    for (name, count, what) in COUNTS {
        text.push_str(&format!("\n  --{name} N (default {count}): {what}"));
    }
    text.push_str("\ntests:");
    for (name, what, _) in TESTS {
        text.push_str(&format!("\n  {name}: {what}"));
    }
    text
}
