//! `cargo xtask simulate`: builds the simulator and runs it (`--seeds N`, `--from SEED`, `--replay SEED`).

use anyhow::Result;

use crate::workspace::{cargo, root, run as run_command};

/// Gives the simulator what follows the task's name.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let manifest = root.join("simulator/Cargo.toml");
    // Beside the workspace's own outputs, which are of other features.
    let target = root.join("target/simulator");
    run_command(
        cargo()
            .args(["run", "--quiet", "--locked", "--manifest-path"])
            .arg(manifest)
            .arg("--target-dir")
            .arg(target)
            .arg("--")
            .args(arguments),
    )
}
