//! The Python package for every Linux with the C library that packages name.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Dist, GLIBC, checks, symbols};
use crate::workspace::run;

/// Makes it by the one command of the guide, with the tools that the packages are built by, so that
/// Cargo takes what they hold; and tries it in an empty environment. Needs PyPI.
pub(super) fn make(dist: &Dist) -> Result<()> {
    let made = dist.target.join("wheel");
    if made.exists() {
        fs::remove_dir_all(&made).with_context(|| format!("cannot empty {}", made.display()))?;
    }
    let mut build = Command::new("pip");
    build.env("PATH", dist.tools()?);
    build.args(["wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]);
    build.arg(&made).arg(&dist.root).env("TCPX_GLIBC", GLIBC);
    build.env("CARGO_BUILD_TARGET", dist.processor.triple("gnu"));
    run(build.env_remove("CARGO_MANIFEST_DIR"))?;
    let wheel = fs::read_dir(&made)?
        .next()
        .context("pip made no wheel")??
        .path();
    let tag = format!(
        "manylinux_{}_{}",
        GLIBC.replace('.', "_"),
        dist.processor.name
    );
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    ensure!(name.contains(&tag), "{name} has not the tag {tag}");
    let unpacked = made.join("unpacked");
    run(Command::new("python3")
        .args(["-m", "zipfile", "--extract"])
        .args([&wheel, &unpacked]))?;
    symbols::check(&unpacked)?;
    if dist.processor.is_host() {
        let empty = dist.target.join("wheel-empty");
        run(Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&empty))?;
        run(Command::new(empty.join("bin/pip"))
            .args(["install", "-q", "--no-index"])
            .arg(&wheel))?;
        for (program, demo) in [
            ("python", &["-m", "tcpx.demo"][..]),
            ("tcpx", &checks::DEMO),
        ] {
            run(Command::new(empty.join("bin").join(program))
                .args(demo)
                .stdout(Stdio::null()))?;
        }
    }
    let path = dist.packages.join(&*name);
    super::copy(&wheel, &path)?;
    println!("{} ({} KiB)", path.display(), path.metadata()?.len() / 1024);
    Ok(())
}
