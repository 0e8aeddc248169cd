//! Whether what lies in `target/packages` installs and runs where nothing else of ours is.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{Dist, has, symbols};
use crate::workspace::run;

pub(super) const DEMO: [&str; 3] = ["demo", "--size", "1MiB"];

/// Whether a package was tried, in a folder to work in; an error if it does not run.
type Check = fn(&Dist, &Path, &Path) -> Result<bool>;

/// Tries each package that is there. What needs root or a program that is not here is told.
pub(super) fn run_all(dist: &Dist) -> Result<()> {
    let work = dist.target.join("packages-check");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot empty {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let checks: [(String, Check); 4] = [
        (format!("{}.tar.gz", dist.tarball_name()), tarball),
        (dist.static_name(), static_program),
        (dist.debian_name(), debian),
        (dist.rpm_name(), rpm),
    ];
    for (name, check) in checks {
        let package = dist.packages.join(&name);
        if !package.is_file() {
            println!("{name} is not there, so not tried");
        } else if check(dist, &package, &work).with_context(|| format!("{name} does not run"))? {
            println!("{name} runs");
        }
    }
    fs::remove_dir_all(&work).with_context(|| format!("cannot empty {}", work.display()))
}

fn tarball(dist: &Dist, package: &Path, work: &Path) -> Result<bool> {
    run(Command::new("tar")
        .arg("-C")
        .arg(work)
        .arg("-xf")
        .arg(package))?;
    let folder = work.join(dist.tarball_name());
    symbols::check(&folder)?;
    dist.processor.try_program(&folder.join("tcpx"))?;
    let program = work.join("tarball-put_get");
    if dist.processor.is_host() && c_program(&folder, &folder, None, &program)? {
        run(Command::new(program).env("LD_LIBRARY_PATH", &folder))?;
    }
    Ok(true)
}

/// In a root that holds the file alone, and what every container has of the kernel's.
fn static_program(dist: &Dist, package: &Path, work: &Path) -> Result<bool> {
    if !dist.processor.is_host() {
        return dist.processor.try_program(package);
    }
    let root = work.join("static");
    for folder in ["proc", "dev", "sys", "tmp"] {
        fs::create_dir_all(root.join(folder)).with_context(|| format!("cannot make {folder}"))?;
    }
    super::copy(package, &root.join("tcpx"))?;
    in_root(&root, &["/tcpx", DEMO[0], DEMO[1], DEMO[2]])
}

/// In the smallest system of this host's own distribution.
fn debian(dist: &Dist, package: &Path, work: &Path) -> Result<bool> {
    let tree = work.join("deb");
    run(Command::new("dpkg-deb")
        .arg("--extract")
        .args([package, &tree]))?;
    symbols::check(&tree)?;
    if !dist.processor.is_host() {
        return dist.processor.try_program(&tree.join("usr/bin/tcpx"));
    }
    let source = Command::new("apt-get")
        .args([
            "indextargets",
            "--format",
            "$(REPO_URI) $(CODENAME)",
            "Created-By: Packages",
        ])
        .output();
    let text = source.map(|answer| String::from_utf8_lossy(&answer.stdout).into_owned());
    let text = text.unwrap_or_default();
    let first = text.lines().next().and_then(|line| line.split_once(' '));
    let (Some((mirror, suite)), true) = (first, has("debootstrap")) else {
        return skip("deb", "no debootstrap, or no apt, is here");
    };
    if !is_root() {
        return skip("deb", "a fresh root needs root");
    }
    let root = work.join("debian");
    run(Command::new("debootstrap")
        .args(["--variant=minbase", suite])
        .arg(&root)
        .arg(mirror)
        .stdout(Stdio::null()))?;
    super::copy(package, &root.join("tcpx.deb"))?;
    run(Command::new("chroot")
        .arg(&root)
        .args(["dpkg", "--install", "/tcpx.deb"])
        .stdout(Stdio::null()))?;
    in_root(&root, &["/usr/bin/tcpx", DEMO[0], DEMO[1], DEMO[2]])?;
    let libraries = root.join(format!("usr/lib/{}-linux-gnu", dist.processor.name));
    let examples = root.join("usr/share/doc/tcpx/examples");
    let program = root.join("put_get");
    if c_program(
        &examples,
        &libraries.join("pkgconfig"),
        Some(&root),
        &program,
    )? {
        in_root(&root, &["/put_get"])?;
    }
    Ok(true)
}

/// Beside no other package; the C library is this host's.
fn rpm(dist: &Dist, package: &Path, work: &Path) -> Result<bool> {
    if !has("rpm") {
        return skip("RPM", "no rpm is here");
    }
    if !is_root() {
        return skip("RPM", "a fresh root needs root");
    }
    let root = work.join("rpm");
    fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
    let root = fs::canonicalize(&root)?;
    let mut install = Command::new("rpm");
    if !dist.processor.is_host() {
        install.arg("--ignorearch");
    }
    run(install
        .arg("--root")
        .arg(&root)
        .args(["--nodeps", "--install"])
        .arg(package))?;
    symbols::check(&root)?;
    dist.processor.try_program(&root.join("usr/bin/tcpx"))
}

/// Compiles the example `put_get.c` against the installed header and library, as pkg-config names
/// them; `false` on a host without a compiler or pkg-config.
fn c_program(
    examples: &Path,
    description: &Path,
    sysroot: Option<&Path>,
    program: &Path,
) -> Result<bool> {
    if !["cc", "pkg-config"].into_iter().all(has) {
        return skip("C program", "no cc, or no pkg-config, is here");
    }
    let mut ask = Command::new("pkg-config");
    ask.args(["--cflags", "--libs", "tcpx"]);
    ask.env("PKG_CONFIG_LIBDIR", description);
    if let Some(root) = sysroot {
        // What is the system's own place in there is not that of the compiler.
        ask.env("PKG_CONFIG_SYSROOT_DIR", root);
        ask.env("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1");
        ask.env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1");
    }
    let flags = ask.output().context("cannot start pkg-config")?;
    run(Command::new("cc")
        .args(["-std=c99", "-Wall", "-Werror"])
        .arg(examples.join("put_get.c"))
        .args(String::from_utf8_lossy(&flags.stdout).split_whitespace())
        .arg("-o")
        .arg(program))?;
    Ok(true)
}

/// Runs a program of another root, by its path and arguments there.
fn in_root(root: &Path, program: &[&str]) -> Result<bool> {
    if !is_root() {
        return skip(program[0], "another root needs root");
    }
    // The mounts end with the process.
    run(Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "sh", "-euc"])
        .arg(
            "mount -t proc proc \"$0/proc\"; mount --rbind /dev \"$0/dev\"; \
             mount --rbind /sys \"$0/sys\"; exec chroot \"$0\" \"$@\"",
        )
        .arg(root)
        .args(program)
        .stdout(Stdio::null()))?;
    Ok(true)
}

fn skip(what: &str, why: &str) -> Result<bool> {
    println!("skipped: {what}: {why}");
    Ok(false)
}

fn is_root() -> bool {
    let answer = Command::new("id").arg("-u").output();
    answer.is_ok_and(|answer| answer.stdout == b"0\n")
}
