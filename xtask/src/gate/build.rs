//! Building the commit BASE and this tree.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::{cargo, run};

/// As users get it, but without the long link.
const PROFILE: &str = "release";

/// The file name of the program that runs cases.
const DRIVER: &str = "tcpx-bench";

/// One contender.
#[derive(Debug)]
pub(super) struct Build {
    /// What it was built from, or where it lies, for the record.
    pub(super) commit: String,
    pub(super) driver: PathBuf,
    pub(super) plugin: PathBuf,
}

impl Build {
    fn in_folder(folder: &Path, commit: String) -> Self {
        Self {
            commit,
            driver: folder.join(DRIVER),
            plugin: folder.join("libnccl_net_tcpx.so"),
        }
    }
}

/// Both.
#[derive(Debug)]
pub(super) struct Builds {
    pub(super) base: Build,
    pub(super) own: Build,
}

/// Builds BASE, a commit, and this tree, but what is a folder with files that were built before.
pub(super) fn both(root: &Path, base: &str, own: Option<&Path>) -> Result<Builds> {
    let base = if Path::new(base).join(DRIVER).exists() {
        found(Path::new(base))?
    } else {
        of_commit(root, base)?
    };
    let own = match own {
        Some(folder) => found(folder)?,
        None => of_this_tree(root)?,
    };
    Ok(Builds { base, own })
}

/// Both files of a folder.
fn found(folder: &Path) -> Result<Build> {
    // Loaders search other places for a name without a folder.
    let folder = folder
        .canonicalize()
        .with_context(|| format!("cannot find {}", folder.display()))?;
    let build = Build::in_folder(&folder, folder.display().to_string());
    for file in [&build.driver, &build.plugin] {
        ensure!(file.exists(), "{} is missing", file.display());
    }
    Ok(build)
}

/// A worktree of a commit in `folder`, which may be there from before, and the commit in full.
pub(crate) fn worktree(root: &Path, named: &str, folder: &Path) -> Result<(PathBuf, String)> {
    let commit = git(
        root,
        &["rev-parse", "--verify", &format!("{named}^{{commit}}")],
    )?;
    let tree = folder.join(&commit[..12]);
    if !tree.exists() {
        let path = tree
            .to_str()
            .context("the path of this checkout is not text")?;
        git(root, &["worktree", "prune"])?;
        git(root, &["worktree", "add", "--detach", path, &commit])?;
    }
    Ok((tree, commit))
}

fn of_commit(root: &Path, base: &str) -> Result<Build> {
    let (tree, commit) = worktree(root, base, &root.join("target/gate"))?;
    // Both contenders are driven alike: the driver of this tree, which is a member of any workspace
    // that has `crates/*`, and uses public interfaces alone.
    let crates = tree.join("crates");
    let driver = crates.join("tcpx-bench");
    if driver.exists() {
        std::fs::remove_dir_all(&driver)?;
    }
    let own = root.join("crates/tcpx-bench");
    run(Command::new("cp").arg("-r").arg(own).arg(crates))?;
    build(&tree, commit)
}

fn of_this_tree(root: &Path) -> Result<Build> {
    let mut commit = git(root, &["rev-parse", "HEAD"])?;
    if !git(root, &["status", "--porcelain", "--untracked-files=no"])?.is_empty() {
        commit.push_str(" with changes");
    }
    build(root, commit)
}

fn build(tree: &Path, commit: String) -> Result<Build> {
    let packages = ["--package", "tcpx-bench", "--package", "tcpx-nccl"];
    let target = tree.join("target");
    run(cargo()
        .current_dir(tree)
        .args(["build", "--profile", PROFILE])
        .args(packages)
        .env("CARGO_TARGET_DIR", &target)
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .env("CARGO_PROFILE_RELEASE_LTO", "false"))?;
    Ok(Build::in_folder(&target.join(PROFILE), commit))
}

/// What git prints.
pub(crate) fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .current_dir(root)
        .args(arguments)
        .output()
        .context("cannot run git")?;
    ensure!(
        output.status.success(),
        "git {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
