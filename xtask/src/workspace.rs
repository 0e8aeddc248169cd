//! Where the workspace is, and how tasks run programs in it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The workspace's root folder.
pub(crate) fn root() -> Result<PathBuf> {
    // Cargo sets the variable at run time too, so that a moved checkout is still found.
    let manifest = std::env::var("CARGO_MANIFEST_DIR")
        .unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    let manifest = PathBuf::from(manifest);
    match manifest.parent() {
        Some(root) => Ok(root.to_path_buf()),
        None => bail!("{} has no parent folder", manifest.display()),
    }
}

/// The Cargo that runs this task.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What Cargo said of this package when it started this task. Build scripts that ask for it
    // (ring's does) would run again, here and at the next build outside, and everything that
    // depends on them be built again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if text == "OUT_DIR" || of_package.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    command
}

/// Builds the program as `cargo test --workspace` does, so that neither builds for the other again.
pub(crate) fn program(root: &Path) -> Result<PathBuf> {
    let build = ["test", "--quiet", "--no-run", "--locked", "--workspace"];
    run(cargo()
        .current_dir(root)
        .args(build)
        .args(["--test", "processes"]))?;
    let target = metadata(root)?;
    let target = target["target_directory"]
        .as_str()
        .context("cargo metadata names no target directory")?;
    Ok(Path::new(target).join("debug/tcpx"))
}

/// Runs a command to its end; an exit status other than 0 is an error that shows the command.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

/// `cargo metadata` of the workspace's own packages.
pub(crate) fn metadata(root: &Path) -> Result<Value> {
    let mut command = cargo();
    command.current_dir(root).args([
        "metadata",
        "--no-deps",
        "--offline",
        "--format-version",
        "1",
    ]);
    let output = command
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!(
            "{command:?} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")
}

/// Text of a file, with its name in the error.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a generated document, or with `--check` fails if it is not what would be written.
pub(crate) fn publish(
    document: &str,
    wanted: &str,
    command: &str,
    arguments: &[String],
) -> Result<()> {
    let path = root()?.join(document);
    match arguments {
        [] => {
            std::fs::write(&path, wanted).with_context(|| format!("cannot write {document}"))?;
            println!("wrote {document}");
        }
        [flag] if flag == "--check" => {
            ensure!(
                read(&path)? == wanted,
                "{document} is out of date: run `cargo xtask {command}`"
            );
            println!("{document} is up to date");
        }
        other => bail!("{command} takes nothing or --check, not {other:?}"),
    }
    Ok(())
}

/// Files with the ending `extension` in a folder and, if `deep`, below it; sorted.
pub(crate) fn files(folder: &Path, extension: &str, deep: bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            if deep {
                found.extend(files(&path, extension, deep)?);
            }
        } else if path.extension().is_some_and(|ending| ending == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
