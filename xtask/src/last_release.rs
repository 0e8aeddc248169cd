//! `cargo xtask last-release`: the last release and this tree move bytes between them.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::gate::worktree;
use crate::workspace::{cargo, read, root, run as run_command};

/// Names the commit of the last release, behind its comment.
const NAMED: &str = "tests/last-release";
/// As Cargo names them.
const FILES: [&str; 3] = ["tcpx", "libnccl_net_tcpx.so", "libplugin_TCPX.so"];
/// The variable that names the folder of these files to the tests.
const VARIABLE: &str = "TCPX_LAST_RELEASE";

/// Builds the commit that the file names, or the argument, once in a worktree of its own, and runs
/// the tests of versions of the program and of the plugin for NCCL with it; NIXL's find it in
/// `target/last-release/files`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let named = match arguments {
        [] => commit(&read(&root.join(NAMED))?)?,
        [commit] => Some(commit.clone()),
        other => bail!("last-release takes nothing or a commit, not {other:?}"),
    };
    let Some(named) = named else {
        println!(
            "{NAMED} names none yet: the tests of versions have this tree speak with itself, told to speak other protocols"
        );
        return Ok(());
    };
    let folder = root.join("target/last-release");
    let (tree, commit) = worktree(&root, &named, &folder)?;
    // Of its own, whatever the environment says.
    let target = tree.join("target");
    let mut build = cargo();
    build
        .current_dir(&tree)
        .args(["build", "--locked", "--target-dir"])
        .arg(&target)
        .args(["--package", "tcpx-cli", "--package", "tcpx-nccl"])
        .args(["--package", "tcpx-nixl"]);
    run_command(build.env("TCPX_COMMIT", &commit))?;
    let files = folder.join("files");
    std::fs::create_dir_all(&files).with_context(|| format!("cannot make {}", files.display()))?;
    for name in FILES {
        std::fs::copy(target.join("debug").join(name), files.join(name))
            .with_context(|| format!("{commit} has no {name}"))?;
    }
    run_tests(&root, &files)
}

/// As `cargo test --workspace` builds them, so that neither builds for the other again.
fn run_tests(root: &Path, files: &Path) -> Result<()> {
    run_command(
        cargo()
            .current_dir(root)
            .args(["test", "--locked", "--workspace"])
            .args(["--test", "processes", "--test", "nccl"])
            .args(["--", "versions::"])
            .env(VARIABLE, files),
    )
}

/// The only line that is no comment: a whole commit, or `none`.
fn commit(text: &str) -> Result<Option<String>> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let (Some(line), None) = (lines.next(), lines.next()) else {
        bail!("{NAMED} has more or less than one line beside its comment");
    };
    if line == "none" {
        return Ok(None);
    }
    let is_whole = line.len() == 40 && line.bytes().all(|byte| byte.is_ascii_hexdigit());
    ensure!(
        is_whole,
        "{NAMED}: {line:?} is no whole commit, and not `none`"
    );
    Ok(Some(line.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_named_by_its_whole_commit() {
        let whole = "0123456789abcdef0123456789abcdef01234567";
        let text = |line: &str| format!("# Why.\n{line}\n");
        assert_eq!(commit(&text("none")).unwrap(), None);
        assert_eq!(commit(&text(whole)).unwrap().as_deref(), Some(whole));
        for wrong in ["", "v0.2.0", "0123456", "none\nnone"] {
            assert!(commit(&text(wrong)).is_err(), "{wrong}");
        }
    }
}
