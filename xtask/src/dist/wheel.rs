//! The Python package for every Linux with the C library that packages name.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Dist, GLIBC, checks};
use crate::workspace::run;

/// Says what hosts a wheel runs on, whatever its name says.
const AUDITWHEEL: &str = "auditwheel==6.8.2";

/// Makes it by the one command of the guide, with the tools that the packages are built by, so that
/// Cargo takes what they hold; and tries it in an empty environment. Needs PyPI.
pub(super) fn make(dist: &Dist) -> Result<()> {
    let made = dist.target.join("wheel");
    if made.exists() {
        fs::remove_dir_all(&made).with_context(|| format!("cannot empty {}", made.display()))?;
    }
    let tools = dist.tools()?;
    let mut build = Command::new("pip");
    build.env("PATH", &tools);
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
    let mut install = Command::new("pip");
    install.args(["install", "-q", AUDITWHEEL]);
    run(install.env("PATH", &tools))?;
    let mut audit = Command::new("auditwheel");
    audit.arg("show").arg(&wheel).env("PATH", &tools);
    let answer = audit.output().context("cannot start auditwheel")?;
    let said = String::from_utf8_lossy(&answer.stdout);
    // A wheel that would run on older hosts fails too: then the tag can name them.
    ensure!(
        said.contains(&format!("\"{tag}\"")),
        "auditwheel says of {name}: {said}"
    );
    if dist.processor.is_host() {
        let empty = dist.target.join("wheel-empty");
        run(Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&empty))?;
        run(Command::new(empty.join("bin/pip"))
            .args(["install", "-q", "--no-index"])
            .arg(&wheel))?;
        // At its end Python unwinds threads that nobody waits for.
        let exit = dist.root.join("crates/tcpx-python/tests/daemon_threads.py");
        for (program, demo) in [
            ("python", &["-m", "tcpx.demo"][..]),
            ("python", &[&*exit.to_string_lossy()]),
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
