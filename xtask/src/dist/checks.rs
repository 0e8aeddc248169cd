//! Whether what lies in `target/packages` installs and runs where nothing else of ours is.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{ARCH, VERSION};
use crate::workspace::run;

const DEMO: [&str; 3] = ["demo", "--size", "1MiB"];

/// Whether a package was tried, in a folder to work in; an error if it does not run.
type Check = fn(&Path, &Path) -> Result<bool>;

/// Tries each package that is there, in folders below `work`. What needs root or a program that is not here is told.
pub(super) fn run_all(packages: &Path, work: &Path) -> Result<()> {
    if work.exists() {
        fs::remove_dir_all(work).with_context(|| format!("cannot empty {}", work.display()))?;
    }
    fs::create_dir_all(work).with_context(|| format!("cannot make {}", work.display()))?;
    let checks: [(String, Check); 4] = [
        (format!("tcpx-{VERSION}-linux-x86_64.tar.gz"), tarball),
        (
            format!("tcpx-{VERSION}-linux-{ARCH}-static"),
            static_program,
        ),
        (format!("tcpx_{VERSION}_amd64.deb"), debian),
        (format!("tcpx-{VERSION}-1.x86_64.rpm"), rpm),
    ];
    for (name, check) in checks {
        let package = packages.join(&name);
        if !package.is_file() {
            println!("{name} is not there, so not tried");
        } else if check(&package, work).with_context(|| format!("{name} does not run"))? {
            println!("{name} runs");
        }
    }
    fs::remove_dir_all(work).with_context(|| format!("cannot empty {}", work.display()))
}

fn tarball(package: &Path, work: &Path) -> Result<bool> {
    run(Command::new("tar")
        .arg("-C")
        .arg(work)
        .arg("-xf")
        .arg(package))?;
    let folder = work.join(format!("tcpx-{VERSION}-linux-x86_64"));
    demo(&mut Command::new(folder.join("tcpx")))
}

/// In a root that holds the file alone, and what every container has of the kernel's.
fn static_program(package: &Path, work: &Path) -> Result<bool> {
    let root = work.join("static");
    for folder in ["proc", "dev", "sys", "tmp"] {
        fs::create_dir_all(root.join(folder)).with_context(|| format!("cannot make {folder}"))?;
    }
    super::copy(package, &root.join("tcpx"))?;
    in_root(&root, "/tcpx")
}

/// In the smallest system of this host's own distribution.
fn debian(package: &Path, work: &Path) -> Result<bool> {
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
    in_root(&root, "/usr/bin/tcpx")
}

/// Beside no other package; the C library is this host's.
fn rpm(package: &Path, work: &Path) -> Result<bool> {
    if !has("rpm") {
        return skip("RPM", "no rpm is here");
    }
    if !is_root() {
        return skip("RPM", "a fresh root needs root");
    }
    let root = work.join("rpm");
    fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
    let root = fs::canonicalize(&root)?;
    run(Command::new("rpm")
        .arg("--root")
        .arg(&root)
        .args(["--nodeps", "--install"])
        .arg(package))?;
    demo(&mut Command::new(root.join("usr/bin/tcpx")))
}

fn in_root(root: &Path, program: &str) -> Result<bool> {
    if !is_root() {
        return skip(program, "another root needs root");
    }
    // The mounts end with the process.
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "sh", "-euc"]);
    command.arg(
        "mount -t proc proc \"$0/proc\"; mount --rbind /dev \"$0/dev\"; \
         mount --rbind /sys \"$0/sys\"; exec chroot \"$0\" \"$@\"",
    );
    demo(command.arg(root).arg(program))
}

fn demo(command: &mut Command) -> Result<bool> {
    run(command.args(DEMO).stdout(Stdio::null()))?;
    Ok(true)
}

fn skip(what: &str, why: &str) -> Result<bool> {
    println!("skipped: {what}: {why}");
    Ok(false)
}

fn has(program: &str) -> bool {
    let asked = Command::new(program).arg("--version").output();
    asked.is_ok_and(|answer| answer.status.success())
}

fn is_root() -> bool {
    let answer = Command::new("id").arg("-u").output();
    answer.is_ok_and(|answer| answer.stdout == b"0\n")
}

/// A wheel for every Linux with glibc 2.28 or a newer one, in `packages`; it runs in an empty environment. Needs PyPI.
pub(super) fn wheel(root: &Path, target: &Path, packages: &Path) -> Result<PathBuf> {
    let (tools, made) = (target.join("wheel-tools"), target.join("wheel"));
    run(Command::new("python3").args(["-m", "venv"]).arg(&tools))?;
    let bin = fs::canonicalize(tools.join("bin"))?;
    run(Command::new(bin.join("pip"))
        .args(["install", "-q"])
        .args(WHEEL_TOOLS))?;
    if made.exists() {
        fs::remove_dir_all(&made).with_context(|| format!("cannot empty {}", made.display()))?;
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::env::join_paths(
        [bin.clone()]
            .into_iter()
            .chain(std::env::split_paths(&paths)),
    )?;
    run(Command::new(bin.join("pip"))
        .args(["wheel", "-q", "--no-deps", "--no-build-isolation", "-w"])
        .arg(&made)
        .arg(root)
        .env("TCPX_GLIBC", GLIBC)
        .env("PATH", paths)
        .env_remove("CARGO_MANIFEST_DIR"))?;
    let wheel = fs::read_dir(&made)?
        .next()
        .context("pip made no wheel")??
        .path();
    let tag = format!("manylinux_{}_x86_64", GLIBC.replace('.', "_"));
    let name = wheel
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
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
    run(Command::new(empty.join("bin/python"))
        .args(["-m", "tcpx.demo"])
        .stdout(Stdio::null()))?;
    demo(&mut Command::new(empty.join("bin/tcpx")))?;
    let path = packages.join(name);
    super::copy(&wheel, &path)?;
    Ok(path)
}

const WHEEL_TOOLS: [&str; 4] = [
    "maturin==1.16.0",
    "ziglang==0.17.1",
    "cargo-zigbuild==0.24.1",
    "auditwheel==6.8.2",
];
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
