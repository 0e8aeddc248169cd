//! `cargo xtask dist`: what a user installs, in one folder and as packages.

mod checks;
mod image;
mod packages;
mod release;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::gate::git;
use crate::workspace::{cargo, metadata, root, run as run_command};

/// Cargo cannot write a hyphenated library name, and NCCL looks for one.
const PLUGIN_BUILT: &str = "libnccl_net_tcpx.so";
const PLUGIN: &str = "libnccl-net-tcpx.so";
/// Cargo and NIXL name it so.
const NIXL_PLUGIN: &str = "libplugin_TCPX.so";
const NIXL_SYMBOL: &str = "nixl_plugin_init";
/// The C library as Cargo names it, by its version, by its soname (whose number is `TCPX_ABI`: programs
/// load that), and as the linker looks for it.
const LIBRARY_BUILT: &str = "libtcpx_capi.so";
const LIBRARY: &str = concat!("libtcpx.so.", env!("CARGO_PKG_VERSION"));
const LIBRARY_SONAME: &str = "libtcpx.so.0";
const LIBRARY_LINK: &str = "libtcpx.so";
const LIBRARY_SYMBOL: &str = "tcpx_transfer_wait";
const HEADERS: [&str; 2] = ["tcpx.h", "tcpx_plugin.h"];
const PKG_CONFIG: &str = "tcpx.pc";
const EXAMPLES: [&str; 3] = ["transfer.c", "put_get.c", "plugin_transfer.c"];
/// The table that the historic client and NCCL both take.
const PLUGIN_SYMBOL: &str = "ncclNetPlugin_v7";
const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];
/// The folder's own README: the repository's leads to files that a user does not get.
const README: &str = include_str!("dist/README.md");
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What is built for users, see the root's `Cargo.toml`.
const PROFILE: &str = "shipped";

/// This host's processor, as names of packages have it.
const ARCH: &str = std::env::consts::ARCH;

/// What of a release is made and tried; all of it, in this order, where nobody names parts.
const PARTS: [&str; 5] = ["--packages", "--static", "--wheel", "--image", "--check"];

/// Makes what users install in `target/dist` and `target/packages`, and tries it. `--packages`: the folder, and tarball, deb
/// and RPM of it; `--static`: a program that needs nothing of its host; `--wheel`: the Python package; `--image`: whether
/// the `Containerfile` makes an image of the folder; `--check`: tries the packages that are there. `--out` makes the folder
/// alone, elsewhere.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let target = PathBuf::from(
        metadata(&root)?["target_directory"]
            .as_str()
            .context("cargo metadata names no target directory")?,
    );
    if let [flag, folder] = arguments
        && flag == "--out"
    {
        return lay_out(&root, &target, &std::path::absolute(folder)?);
    }
    if let Some(unknown) = arguments.iter().find(|one| !PARTS.contains(&&***one)) {
        bail!("dist takes --out DIR, or nothing or some of {PARTS:?}, not {unknown}");
    }
    let packages = target.join("packages");
    std::fs::create_dir_all(&packages)
        .with_context(|| format!("cannot make {}", packages.display()))?;
    for part in PARTS {
        if !arguments.is_empty() && !arguments.iter().any(|one| one == part) {
            continue;
        }
        match part {
            "--packages" => packed(&root, &target, &packages)?,
            "--static" if !is_static_possible() => println!(
                "skipped: static program: no toolchain; `rustup target add {}` installs it",
                static_target()
            ),
            "--static" => static_program(&root, &target, &packages)?,
            "--wheel" => wheel::make(&root, &target, &packages)?,
            "--image" => image::check(&root, &target.join("dist"), &target.join("image"))?,
            _ => checks::run_all(&packages, &target.join("packages-check"))?,
        }
    }
    release::sums(&packages, VERSION)
}

/// The folder, and the packages that hold it.
fn packed(root: &Path, target: &Path, packages: &Path) -> Result<()> {
    let out = target.join("dist");
    lay_out(root, target, &out)?;
    let name = format!("tcpx-{VERSION}-linux-x86_64");
    let mut made = vec![
        packages::tarball(&out, packages, &name)?,
        release::bill_of_materials(root, packages, VERSION)?,
    ];
    made.extend(packages::debian(&out, &target.join("deb"), packages)?);
    made.extend(packages::rpm(&out, &target.join("rpm"), packages)?);
    for path in made {
        println!("{} ({} KiB)", path.display(), path.metadata()?.len() / 1024);
    }
    Ok(())
}

/// Builds optimised, copies, strips, and prints where everything is.
fn lay_out(root: &Path, target: &Path, out: &Path) -> Result<()> {
    run_command(build_cargo(root).args([
        "build",
        "--profile",
        PROFILE,
        "--locked",
        "--package",
        "tcpx-cli",
        "--package",
        "tcpx-nccl",
        "--package",
        "tcpx-capi",
        "--package",
        "tcpx-nixl",
    ]))?;
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let built_in = target.join(PROFILE);
    for (built, name, symbol) in [
        ("tcpx", "tcpx", None),
        (PLUGIN_BUILT, PLUGIN, Some(PLUGIN_SYMBOL)),
        (LIBRARY_BUILT, LIBRARY, Some(LIBRARY_SYMBOL)),
        (NIXL_PLUGIN, NIXL_PLUGIN, Some(NIXL_SYMBOL)),
    ] {
        let path = out.join(name);
        copy(&built_in.join(built), &path)?;
        strip(&path);
        let bytes = std::fs::read(&path)?;
        if name == LIBRARY {
            ensure!(
                contains(&bytes, format!("{LIBRARY_SONAME}\0").as_bytes()),
                "{} has not the soname {LIBRARY_SONAME}: programs would not find it",
                path.display()
            );
        }
        if let Some(symbol) = symbol {
            ensure!(
                contains(&bytes, symbol.as_bytes()),
                "{} does not export {symbol}: nobody could use it",
                path.display()
            );
        }
        println!("{} ({} KiB)", path.display(), bytes.len() / 1024);
    }
    for name in LICENCES {
        copy(&root.join(name), &out.join(name))?;
    }
    write(&out.join("README.md"), &README.replace("VERSION", VERSION))?;
    run_command(Command::new(out.join("tcpx")).arg("generate").arg(out))?;
    let capi = root.join("crates/tcpx-capi");
    for name in HEADERS {
        copy(&capi.join("include").join(name), &out.join(name))?;
    }
    for name in EXAMPLES {
        copy(&capi.join("examples").join(name), &out.join(name))?;
    }
    link(LIBRARY, &out.join(LIBRARY_SONAME))?;
    link(LIBRARY_SONAME, &out.join(LIBRARY_LINK))?;
    write(
        &out.join(PKG_CONFIG),
        &pkg_config(VERSION, "${pcfiledir}", "${pcfiledir}"),
    )?;
    println!(
        "headers, {LIBRARY_LINK}, {PKG_CONFIG} and examples beside them, for C; man/ and completions/"
    );
    Ok(())
}

/// Cargo for what is shipped, whose handshakes name the commit; in a tree without one they name none.
fn build_cargo(root: &Path) -> Command {
    let mut cargo = cargo();
    cargo.current_dir(root);
    if let Ok(commit) = git(root, &["rev-parse", "HEAD"]) {
        cargo.env("TCPX_COMMIT", commit);
    }
    cargo
}

fn static_target() -> String {
    format!("{ARCH}-unknown-linux-musl")
}

/// Whether the standard library for it is installed.
fn is_static_possible() -> bool {
    let asked = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", &static_target()])
        .output();
    asked.is_ok_and(|answer| Path::new(String::from_utf8_lossy(&answer.stdout).trim()).is_dir())
}

/// The program without a C library of its host's: it runs on every Linux, also in an empty container. It loads nothing, so
/// it moves host memory alone and drives no plugin.
fn static_program(root: &Path, target: &Path, packages: &Path) -> Result<()> {
    // Its C library is in the program.
    let goal = static_target();
    let mut build = build_cargo(root);
    build
        .args(["build", "--profile", PROFILE, "--locked"])
        .args(["--package", "tcpx-cli", "--no-default-features"])
        .args(["--target", &goal]);
    // What the crates have of C calls nothing but what every C library has, but for the calls that glibc's headers
    // put in place of those. A compiler that the user names is right already.
    let named = goal.replace('-', "_");
    if std::env::var_os(format!("CC_{named}")).is_none() {
        build
            .env(format!("CC_{named}"), "cc")
            .env(format!("CFLAGS_{named}"), "-U_FORTIFY_SOURCE");
    }
    run_command(&mut build)?;
    let path = packages.join(format!("tcpx-{VERSION}-linux-{ARCH}-static"));
    copy(&target.join(&goal).join(PROFILE).join("tcpx"), &path)?;
    strip(&path);
    let demo = ["demo", "--size", "1MiB"];
    run_command(Command::new(&path).args(demo).stdout(Stdio::null()))?;
    println!("{} ({} KiB)", path.display(), path.metadata()?.len() / 1024);
    Ok(())
}

/// What `pkg-config` answers; `${pcfiledir}` lets the folder be moved as a whole.
fn pkg_config(version: &str, include: &str, library: &str) -> String {
    format!(
        "Name: tcpx\n\
         Description: Move host and GPU memory between hosts over plain TCP\n\
         Version: {version}\n\
         Cflags: -I{include}\n\
         Libs: -L{library} -ltcpx\n"
    )
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A symbolic link in place of whatever has its name.
fn link(to: &str, name: &Path) -> Result<()> {
    let part = name.with_added_extension("part");
    // Left over if an earlier run was killed in between.
    let _ = std::fs::remove_file(&part);
    std::os::unix::fs::symlink(to, &part)
        .and_then(|()| std::fs::rename(&part, name))
        .with_context(|| format!("cannot link {} to {to}", name.display()))
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

fn has(program: &str) -> bool {
    let asked = Command::new(program).arg("--version").output();
    asked.is_ok_and(|answer| answer.status.success())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

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
    fn pkg_config_finds_the_folder_through_a_replaced_link() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join(LIBRARY_LINK);
        for to in ["old.so", LIBRARY_SONAME] {
            link(to, &name).unwrap();
            assert_eq!(std::fs::read_link(&name).unwrap(), Path::new(to));
        }
        let description = pkg_config("1.2.3", "${pcfiledir}", "${pcfiledir}");
        std::fs::write(folder.path().join(PKG_CONFIG), description).unwrap();
        let answer = Command::new("pkg-config")
            .env("PKG_CONFIG_PATH", folder.path())
            .args(["--cflags", "--libs", "tcpx"])
            .output();
        let Ok(answer) = answer else {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: pkg_config_finds_the_folder_through_a_replaced_link: \
                 no pkg-config"
            );
            return;
        };
        let flags = String::from_utf8(answer.stdout).unwrap();
        let folder = folder.path().display();
        assert_eq!(
            flags.split_whitespace().collect::<Vec<_>>().join(" "),
            format!("-I{folder} -L{folder} -ltcpx")
        );
        let version = Command::new("pkg-config")
            .env("PKG_CONFIG_PATH", folder.to_string())
            .args(["--modversion", "tcpx"])
            .output()
            .unwrap();
        assert_eq!(version.stdout, b"1.2.3\n");
    }

    #[test]
    fn a_symbol_is_found_by_its_bytes() {
        assert!(contains(b"\0ncclNetPlugin_v7\0", PLUGIN_SYMBOL.as_bytes()));
        assert!(!contains(b"\0ncclNetPlugin_v6\0", PLUGIN_SYMBOL.as_bytes()));
    }
}
