//! The Python package for every Linux with glibc 2.28 or a newer one.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::run;

/// Makes it in `packages` by the one command of the guide, and tries it in an empty environment. Needs PyPI.
pub(super) fn make(root: &Path, target: &Path, packages: &Path) -> Result<()> {
    let (tools, made) = (target.join("wheel-tools"), target.join("wheel"));
    run(Command::new("python3").args(["-m", "venv"]).arg(&tools))?;
    let bin = fs::canonicalize(tools.join("bin"))?;
    run(Command::new(bin.join("pip"))
        .args(["install", "-q"])
        .arg(AUDITWHEEL))?;
    if made.exists() {
        fs::remove_dir_all(&made).with_context(|| format!("cannot empty {}", made.display()))?;
    }
    let mut build = Command::new(bin.join("pip"));
    build.args(["wheel", "-q", "--no-deps", "-w"]);
    build.arg(&made).arg(root).env("TCPX_GLIBC", GLIBC);
    run(build.env_remove("CARGO_MANIFEST_DIR"))?;
    let wheel = fs::read_dir(&made)?
        .next()
        .context("pip made no wheel")??
        .path();
    let tag = format!("manylinux_{}_x86_64", GLIBC.replace('.', "_"));
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    ensure!(name.contains(&tag), "{name} has not the tag {tag}");
    let shown = Command::new(bin.join("auditwheel"))
        .arg("show")
        .arg(&wheel)
        .output()?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(
        allows(&shown, GLIBC),
        "auditwheel does not find {tag}:\n{shown}"
    );
    let empty = target.join("wheel-empty");
    run(Command::new("python3")
        .args(["-m", "venv", "--clear"])
        .arg(&empty))?;
    run(Command::new(empty.join("bin/pip"))
        .args(["install", "-q", "--no-index"])
        .arg(&wheel))?;
    for (program, demo) in [
        ("python", &["-m", "tcpx.demo"][..]),
        ("tcpx", &super::checks::DEMO),
    ] {
        run(Command::new(empty.join("bin").join(program))
            .args(demo)
            .stdout(Stdio::null()))?;
    }
    let path = packages.join(&*name);
    super::copy(&wheel, &path)?;
    println!(
        "{} ({} KiB), {tag} by auditwheel, runs",
        path.display(),
        path.metadata()?.len() / 1024
    );
    Ok(())
}

const AUDITWHEEL: &str = "auditwheel==6.8.2";
/// The oldest C library that the wheel runs with.
const GLIBC: &str = "2.28";

/// Whether auditwheel names a tag that is this old, or older.
fn allows(shown: &str, glibc: &str) -> bool {
    let number = |text: &str| {
        let (major, minor) = text.split_once(['.', '_'])?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    let words = shown.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let named = words.filter_map(|word| {
        let tag = word.strip_prefix("manylinux_")?.strip_suffix("_x86_64")?;
        number(tag)
    });
    named
        .min()
        .is_some_and(|oldest| Some(oldest) <= number(glibc))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_tag_will_do_and_a_newer_one_will_not() {
        let shown =
            |tag: &str| format!("is consistent with the following\nplatform tag: \"{tag}\".");
        assert!(allows(&shown("manylinux_2_28_x86_64"), "2.28"));
        assert!(allows(&shown("manylinux_2_17_x86_64"), "2.28"));
        assert!(!allows(&shown("manylinux_2_34_x86_64"), "2.28"));
        assert!(!allows(&shown("linux_x86_64"), "2.28"));
    }
}
