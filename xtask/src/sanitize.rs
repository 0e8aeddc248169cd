//! `cargo xtask sanitize`: tests under Miri and under ThreadSanitizer, for which a nightly toolchain is needed.

use std::process::Command;

use anyhow::{Result, bail};

use crate::workspace::{root, run as run_command};

/// Tests of memory on the host, by the start of their names. Not among them: those that load the GPU's driver, call C code, stream
/// past the caches, protect pages or set signals, which Miri knows nothing of.
const MEMORY_TESTS: [&str; 11] = [
    "awake::",
    "bounce::",
    "fence::",
    "kind::",
    "lease::",
    "pinned::",
    "region::",
    "slice::",
    "worker::queue",
    "worker::tests::a_sink",
    "worker::tests::copies",
];

/// The crates whose threads share memory. Not among them: `tcpx-nccl`, whose tests look at a buffer while a lane fills it, and
/// `tcpx-net`, of whose tests some take longer so than a lane may stand still; its threads run under those of `tcpx`.
const THREAD_CRATES: [&str; 3] = ["tcpx-lanes", "tcpx-memory", "tcpx"];

/// What is no race. A connection is reset by connecting its socket to no address, while the loop of its other direction uses it;
/// for ThreadSanitizer each `connect` makes the descriptor anew.
const NO_RACES: &str = "race:connect_unspec\n";

/// Runs both, or the one that is named.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    match arguments {
        [] => {
            memory()?;
            threads()
        }
        [one] if one == "memory" => memory(),
        [one] if one == "threads" => threads(),
        _ => bail!("usage: cargo xtask sanitize [memory|threads]"),
    }
}

/// The Cargo of the nightly toolchain: `rustup toolchain install nightly -c miri -c rust-src` installs it.
fn nightly(target: &str) -> Result<Command> {
    let mut command = Command::new("rustup");
    for variable in [
        "CARGO",
        "RUSTC",
        "RUSTDOC",
        "RUSTUP_TOOLCHAIN",
        "CARGO_MANIFEST_DIR",
    ] {
        command.env_remove(variable);
    }
    command
        .current_dir(root()?)
        .env("CARGO_TARGET_DIR", root()?.join("target").join(target))
        .args(["run", "nightly", "cargo"]);
    Ok(command)
}

/// Undefined behaviour, by Miri: it interprets each instruction, so that two random cases of a property have to do.
fn memory() -> Result<()> {
    let mut command = nightly("miri")?;
    command
        // Isolated programs have no folder; the fake driver keeps addresses as numbers, and its threads to the end.
        .env(
            "MIRIFLAGS",
            "-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks",
        )
        .env("PROPTEST_CASES", "2")
        .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")
        .args([
            "miri",
            "test",
            "--locked",
            "--package",
            "tcpx-memory",
            "--lib",
            "--",
        ])
        .args(MEMORY_TESTS);
    run_command(&mut command)
}

/// Races, by ThreadSanitizer. It must see every lock, so the standard library is built with it, too, and every system call, so rustix
/// calls the C library: memory that one thread has unmapped and another has mapped again is not shared.
fn threads() -> Result<()> {
    let mut command = nightly("sanitize")?;
    let no_races = root()?.join("target/no-races");
    std::fs::write(&no_races, NO_RACES)?;
    command
        .env(
            "TSAN_OPTIONS",
            format!("suppressions={}", no_races.display()),
        )
        .env("RUSTFLAGS", "-Zsanitizer=thread --cfg=rustix_use_libc")
        .args(["test", "--locked", "--no-fail-fast", "-Zbuild-std"])
        .args(["--target", "x86_64-unknown-linux-gnu", "--lib", "--tests"]);
    for package in THREAD_CRATES {
        command.args(["--package", package]);
    }
    run_command(&mut command)
}
