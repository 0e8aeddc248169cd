//! Whether the `Containerfile` makes an image in which the program runs, confined as `deploy/`
//! confines it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Dist, checks, copy};
use crate::workspace::{read, run};

const BASE: &str = "localhost/tcpx-base";
const IMAGE: &str = "localhost/tcpx";
/// What `deploy/compose.yaml` gives a container. Without a number Podman asks for more processes
/// than some hosts allow.
const CONFINED: [&str; 10] = [
    "--read-only",
    "--user=65532:65532",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--memory=1g",
    "--ulimit=nofile=256:256",
    "--ulimit=nproc=4096:4096",
    "--tmpfs=/run/tcpx:mode=1777,size=16m",
    "--env=XDG_RUNTIME_DIR=/run/tcpx",
    "--network=none",
];

/// Builds an image out of the folder that was laid out, upon the C library of this host, as other
/// images are not to be had everywhere; the program runs in it while it is built, and confined
/// then. What this host cannot do is told.
pub(super) fn check(dist: &Dist) -> Result<()> {
    let (folder, work) = (dist.folder(), dist.target.join("image"));
    if !dist.processor.is_host() {
        println!("skipped: container image: the folder is for another processor than this host's");
        return Ok(());
    }
    let Some(builder) = ["podman", "docker", "buildah"].into_iter().find(works) else {
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
    build(&dist.root.join("Containerfile"), IMAGE, &folder)?;
    println!("container image {IMAGE}, by {builder}");
    run_confined(builder, &work)
}

/// The demo, and a server with its client and its status, in containers of the image.
fn run_confined(runner: &str, work: &Path) -> Result<()> {
    let container = |more: &[&str]| {
        let mut command = Command::new(runner);
        command.arg("run").args(CONFINED).args(more).arg(IMAGE);
        command
    };
    let mut probe = container(&["--rm"]);
    let started = probe.arg("--version").output();
    if !started.is_ok_and(|answer| answer.status.success()) {
        println!("skipped: confined container: {runner} starts none here");
        return Ok(());
    }
    run(container(&["--rm"])
        .args(checks::DEMO)
        .stdout(Stdio::null()))?;
    let id = work.join("container");
    let file = format!("--cidfile={}", id.display());
    let mut server = container(&["--detach", &file]);
    server.args(["perf", "server", "host", "--keep", "--insecure"]);
    run(server.stdout(Stdio::null()))?;
    let id = read(&id)?;
    let inside = [
        "perf client 127.0.0.1 host --insecure --time 500ms",
        "status",
    ];
    let ran = inside.iter().try_for_each(|arguments| {
        let mut exec = Command::new(runner);
        exec.args(["exec", &id, "tcpx"]).args(arguments.split(' '));
        run(exec.stdout(Stdio::null()))
    });
    run(Command::new(runner)
        .args(["rm", "--force", &id])
        .stdout(Stdio::null()))?;
    ran?;
    println!("its program runs confined");
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
