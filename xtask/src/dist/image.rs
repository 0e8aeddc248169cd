//! Whether the `Containerfile` makes an image in which the program runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Dist, copy};
use crate::workspace::run;

const BASE: &str = "localhost/tcpx-base";

/// Builds an image out of the folder that was laid out, upon the C library of this host, as other images are not to be
/// had everywhere; the program runs in it while it is built. A host where no image can be built is told.
pub(super) fn check(dist: &Dist) -> Result<()> {
    let (folder, work) = (dist.folder(), dist.target.join("image"));
    if !dist.processor.is_host() {
        println!("skipped: container image: the folder is for another processor than this host's");
        return Ok(());
    }
    let Some(builder) = ["buildah", "podman", "docker"].into_iter().find(works) else {
        println!("skipped: container image: no buildah, podman or running docker is here");
        return Ok(());
    };
    ensure!(
        folder.join("tcpx").is_file(),
        "{} holds no program: run `cargo xtask dist --packages` first",
        folder.display()
    );
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot empty {}", work.display()))?;
    }
    let tree = work.join("base");
    for library in libraries(&folder.join("tcpx"))? {
        let inside = library.strip_prefix("/").unwrap_or(&library);
        let to = tree.join(inside);
        let place = to.parent().context("a library in no folder")?;
        fs::create_dir_all(place).with_context(|| format!("cannot make {}", place.display()))?;
        copy(&library, &to)?;
    }
    fs::create_dir_all(tree.join("tmp")).context("cannot make the folder tmp of the image")?;
    let of_base = work.join("Containerfile");
    super::write(&of_base, "FROM scratch\nCOPY . /\n")?;
    let build = |file: &Path, name: &str, context: &Path| {
        let mut command = Command::new(builder);
        // Where namespaces are not to be had, buildah needs none; the others do not read this.
        command.env("BUILDAH_ISOLATION", "chroot");
        command.args(["build", "-q", "-t", name, "-f"]).arg(file);
        command.args(["--build-arg", &format!("BASE={BASE}")]);
        run(command.arg(context))
    };
    build(&of_base, BASE, &tree)?;
    build(&dist.root.join("Containerfile"), "tcpx", &folder)?;
    println!("container image tcpx, by {builder}");
    Ok(())
}

/// Whether a builder is installed, and its daemon, if it needs one, runs.
fn works(builder: &&str) -> bool {
    let asked = Command::new(builder)
        .arg("info")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    asked.is_ok_and(|status| status.success())
}

/// The libraries that a program loads at its start, the loader among them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let answer = Command::new("ldd")
        .arg(program)
        .output()
        .context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&answer.stdout);
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    let found: Vec<PathBuf> = words.map(PathBuf::from).collect();
    ensure!(
        !found.is_empty(),
        "ldd names no library of {}: {text}",
        program.display()
    );
    Ok(found)
}
