//! `cargo xtask simulate`: builds the simulator and runs it (`--seeds N`, `--from SEED`,
//! `--replay SEED`). With `--mutants [NAME...]` defects are put into a copy of the sources, and
//! each must be found.

mod mutants;

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::workspace::{cargo, root, run as run_command};

/// Gives the simulator what follows the task's name.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    match arguments.split_first() {
        Some((first, names)) if first == "--mutants" => mutants::run(&root, names),
        _ => run_command(simulator(&root, &root, "run").arg("--").args(arguments)),
    }
}

/// Cargo for the simulator of a tree, whose outputs go beside the workspace's own, which are of
/// other features.
fn simulator(root: &Path, tree: &Path, task: &str) -> Command {
    let mut command = cargo();
    command
        .args([task, "--quiet", "--manifest-path"])
        .arg(tree.join("simulator/Cargo.toml"))
        .arg("--target-dir")
        .arg(root.join("target/simulator"));
    command
}
