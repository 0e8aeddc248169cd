//! `cargo xtask dist`: what a user installs, in one folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{cargo, metadata, root, run as run_command};

/// Cargo cannot write a hyphenated library name, and NCCL looks for one.
const PLUGIN_BUILT: &str = "libnccl_net_tcpx.so";
const PLUGIN: &str = "libnccl-net-tcpx.so";
/// The table that the historic client and NCCL both take.
const PLUGIN_SYMBOL: &str = "ncclNetPlugin_v7";
const TEXTS: [&str; 3] = ["README.md", "LICENSE-APACHE", "LICENSE-MIT"];

/// Builds optimised, copies, strips, and prints where everything is.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let target = PathBuf::from(
        metadata(&root)?["target_directory"]
            .as_str()
            .context("cargo metadata names no target directory")?,
    );
    let out = match arguments {
        [] => target.join("dist"),
        [flag, folder] if flag == "--out" => std::path::absolute(folder)?,
        other => bail!("dist takes nothing or --out DIR, not {other:?}"),
    };
    run_command(cargo().current_dir(&root).args([
        "build",
        "--release",
        "--locked",
        "--package",
        "tcpx-cli",
        "--package",
        "tcpx-nccl",
    ]))?;
    std::fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let release = target.join("release");
    for (built, name) in [("tcpx", "tcpx"), (PLUGIN_BUILT, PLUGIN)] {
        let path = out.join(name);
        copy(&release.join(built), &path)?;
        strip(&path);
        let bytes = std::fs::read(&path)?;
        if name == PLUGIN {
            ensure!(
                contains(&bytes, PLUGIN_SYMBOL.as_bytes()),
                "{} does not export {PLUGIN_SYMBOL}: NCCL could not load it",
                path.display()
            );
        }
        println!("{} ({} KiB)", path.display(), bytes.len() / 1024);
    }
    for name in TEXTS {
        copy(&root.join(name), &out.join(name))?;
    }
    Ok(())
}

/// Replaces the file by renaming, so that a process that has the old one mapped is not disturbed.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let part = to.with_added_extension("part");
    std::fs::copy(from, &part)
        .and_then(|_| std::fs::rename(&part, to))
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Takes symbols and line tables out; without binutils the files work but stay larger.
fn strip(path: &Path) {
    let outcome = run_command(Command::new("strip").arg("--strip-unneeded").arg(path));
    if let Err(error) = outcome {
        eprintln!("not stripped: {error:#}");
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_replaces_the_file_and_leaves_nothing_half_written() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to.so"));
        std::fs::write(&from, "new").unwrap();
        std::fs::write(&to, "old").unwrap();
        copy(&from, &to).unwrap();
        assert_eq!(std::fs::read_to_string(&to).unwrap(), "new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        let error = copy(&folder.path().join("none"), &to).unwrap_err();
        assert!(format!("{error:#}").contains("none"), "{error:#}");
        assert_eq!(std::fs::read_to_string(&to).unwrap(), "new");
    }

    #[test]
    fn a_symbol_is_found_by_its_bytes() {
        assert!(contains(b"\0ncclNetPlugin_v7\0", PLUGIN_SYMBOL.as_bytes()));
        assert!(!contains(b"\0ncclNetPlugin_v6\0", PLUGIN_SYMBOL.as_bytes()));
    }
}
