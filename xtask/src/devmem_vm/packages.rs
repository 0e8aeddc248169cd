//! Getting the packages, and building the driver with what is in them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::pins::{Package, Pins, hex};

/// Whether a program can be found.
pub(super) fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The packages' files in one folder. The inner error says why they cannot be had.
pub(super) fn tree(pins: &Pins, work: &Path) -> Result<Result<PathBuf, String>> {
    let tree = work.join(format!("root-{}", pins.fingerprint));
    if tree.join("complete").exists() {
        return Ok(Ok(tree));
    }
    let store = work.join("packages");
    fs::create_dir_all(&store)?;
    for package in &pins.packages {
        if let Err(why) = obtain(package, &pins.from, &store)? {
            return Ok(Err(why));
        }
    }
    // An unpacking that was cut short is done again from the start.
    if tree.exists() {
        fs::remove_dir_all(&tree)?;
    }
    for folder in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(tree.join("usr").join(folder))?;
        std::os::unix::fs::symlink(format!("usr/{folder}"), tree.join(folder))?;
    }
    for folder in ["proc", "dev", "tmp", "dmsim"] {
        fs::create_dir_all(tree.join(folder))?;
    }
    for package in &pins.packages {
        let file = store.join(package.name());
        let status = Command::new("dpkg-deb")
            .arg("-x")
            .arg(&file)
            .arg(&tree)
            .status()?;
        ensure!(
            status.success(),
            "dpkg-deb -x {} ended with {status}",
            file.display()
        );
    }
    // Installing the package would choose this name.
    std::os::unix::fs::symlink("mawk", tree.join("usr/bin/awk"))?;
    fs::write(tree.join("complete"), "")?;
    Ok(Ok(tree))
}

/// Downloads a package unless it lies there already; its contents decide.
fn obtain(package: &Package, from: &[String], store: &Path) -> Result<Result<(), String>> {
    let file = store.join(package.name());
    if is_it(package, &file) {
        return Ok(Ok(()));
    }
    let part = store.join("part");
    for address in package.addresses(from) {
        let got = download(&address, &part)?;
        if got && is_it(package, &part) {
            fs::rename(&part, &file)?;
            return Ok(Ok(()));
        }
    }
    Ok(Err(format!(
        "the package {} cannot be downloaded as it is pinned",
        package.name()
    )))
}

fn download(address: &str, to: &Path) -> Result<bool> {
    let mut command = Command::new("curl");
    command
        .args(["-fsSL", "--retry", "2", "--connect-timeout", "20"])
        .args(["--max-time", "300", "-o"])
        .arg(to)
        .arg(address);
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot start {command:?}"))?;
    Ok(status.success())
}

/// Whether a file is the package, to the last byte.
fn is_it(package: &Package, file: &Path) -> bool {
    fs::read(file).is_ok_and(|found| {
        found.len() as u64 == package.bytes && hex(&Sha256::digest(found)) == package.sha256
    })
}

/// The driver, built inside the packages' files. The inner error says why nothing can be built here
/// at all; a driver that does not compile is a failure.
pub(super) fn module(
    pins: &Pins,
    tree: &Path,
    sources: &Path,
    work: &Path,
) -> Result<Result<PathBuf, String>> {
    let mut hash = Sha256::new();
    for file in ["dmsim.c", "Kbuild"] {
        let path = sources.join(file);
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        hash.update(&text);
        fs::write(tree.join("dmsim").join(file), text)?;
    }
    hash.update(&pins.fingerprint);
    let built = work.join(format!("dmsim-{}.ko", &hex(&hash.finalize())[..16]));
    if built.exists() {
        return Ok(Ok(built));
    }
    if !enter(tree, "exec true").output()?.status.success() {
        return Ok(Err(
            "the driver is built in a root folder of its own (unshare, chroot), which is not permitted here"
                .to_owned(),
        ));
    }
    // Type information needs a tool that the driver's tests do not.
    let make = format!(
        "exec make -s -C /usr/src/linux-headers-{} M=/dmsim CONFIG_DEBUG_INFO_BTF_MODULES= modules",
        pins.kernel
    );
    let output = enter(tree, &make).output()?;
    if !output.status.success() {
        bail!(
            "the driver does not build: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let part = built.with_extension("part");
    fs::copy(tree.join("dmsim/dmsim.ko"), &part)?;
    fs::rename(&part, &built)?;
    Ok(Ok(built))
}

/// A shell command with the packages' files as its root.
fn enter(tree: &Path, command: &str) -> Command {
    // objtool reads /proc, compilers write to /dev/null.
    let inside = "mount --rbind /proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && \
                  exec chroot \"$0\" /bin/sh -c \"$1\"";
    let mut shell = Command::new("unshare");
    if !rootlike() {
        shell.arg("--map-root-user");
    }
    shell
        .args(["--mount", "sh", "-c", inside])
        .arg(tree)
        .arg(command)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    shell
}

fn rootlike() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}
