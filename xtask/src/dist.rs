//! `cargo xtask dist`: what a user installs, in one folder and as packages.

mod checks;
mod image;
mod packages;
mod release;
mod symbols;
mod wheel;

use std::ffi::OsString;
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
/// The C library as Cargo names it, by its version, by its soname (whose number is `TCPX_ABI`:
/// programs load that), and as the linker looks for it.
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

/// The oldest C library that packages and the wheel are for.
const GLIBC: &str = "2.28";

/// What builds for it: zig's linker and C compiler, at versions that the wheel's build has too.
const TOOLS: &str = "crates/tcpx-python/build/requirements.txt";

/// What of a release is made and tried; all of it, in this order, where nobody names parts.
const PARTS: [&str; 5] = ["--packages", "--static", "--wheel", "--image", "--check"];

/// Makes what users install in `target/dist` and `target/packages`, and tries it. `--packages`: the
/// folder, and tarball, deb and RPM of it; `--static`: a program that needs nothing of its host;
/// `--wheel`: the Python package; `--image`: whether the `Containerfile` makes an image of the
/// folder; `--check`: tries the packages that are there. `--out` makes the folder alone, elsewhere.
/// `--target` makes them for another processor than this host's.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let target = PathBuf::from(
        metadata(&root)?["target_directory"]
            .as_str()
            .context("cargo metadata names no target directory")?,
    );
    let (processor, arguments) = match arguments {
        [flag, triple, rest @ ..] if flag == "--target" => {
            let name = triple.strip_suffix("-unknown-linux-gnu");
            (name.context("dist makes packages for Linux alone")?, rest)
        }
        all => (std::env::consts::ARCH, all),
    };
    let packages = target.join("packages");
    let dist = Dist {
        processor: Processor::find(processor)?,
        root,
        target,
        packages,
    };
    if let [flag, folder] = arguments
        && flag == "--out"
    {
        return dist.lay_out(&std::path::absolute(folder)?);
    }
    if let Some(unknown) = arguments.iter().find(|one| !PARTS.contains(&&***one)) {
        bail!(
            "dist takes --target TRIPLE first, and --out DIR, or nothing or some of {PARTS:?}, \
             not {unknown}"
        );
    }
    std::fs::create_dir_all(&dist.packages)
        .with_context(|| format!("cannot make {}", dist.packages.display()))?;
    for part in PARTS {
        if !arguments.is_empty() && !arguments.iter().any(|one| one == part) {
            continue;
        }
        match part {
            "--packages" => dist.pack()?,
            "--static" => dist.static_program()?,
            "--wheel" => wheel::make(&dist)?,
            "--image" => image::check(&dist)?,
            _ => checks::run_all(&dist)?,
        }
    }
    release::sums(&dist.packages, VERSION)
}

/// A processor that packages are for, by its names.
#[derive(Clone, Copy)]
struct Processor {
    name: &'static str,
    debian: &'static str,
    /// The layouts of NIXL's interface are those of x86-64: elsewhere its backend is left out.
    has_nixl: bool,
}

impl Processor {
    fn find(name: &str) -> Result<Self> {
        let known = [("x86_64", "amd64", true), ("aarch64", "arm64", false)];
        let found = known.into_iter().find(|(known, ..)| *known == name);
        let (name, debian, has_nixl) = found.context("packages are for x86_64 and aarch64")?;
        Ok(Self {
            name,
            debian,
            has_nixl,
        })
    }

    fn is_host(self) -> bool {
        self.name == std::env::consts::ARCH
    }

    fn triple(self, library: &str) -> String {
        format!("{}-unknown-linux-{library}", self.name)
    }

    /// Runs a program for it, in an emulator if this host has another processor.
    fn command(self, program: &Path) -> Command {
        if self.is_host() {
            return Command::new(program);
        }
        let mut command = Command::new(format!("qemu-{}-static", self.name));
        command
            .arg("-L")
            .arg(format!("/usr/{}-linux-gnu", self.name));
        command.arg(program);
        command
    }

    /// Runs the demo; an emulator, which cannot start the demo's second process, asks for the
    /// version.
    fn try_program(self, program: &Path) -> Result<bool> {
        let mut command = self.command(program);
        if self.is_host() {
            command.args(checks::DEMO);
        } else {
            command.arg("--version");
        }
        run_command(command.stdout(Stdio::null())).map(|()| true)
    }
}

/// What is made, out of what, and where.
struct Dist {
    processor: Processor,
    root: PathBuf,
    /// Cargo's folder.
    target: PathBuf,
    packages: PathBuf,
}

impl Dist {
    fn folder(&self) -> PathBuf {
        self.target.join("dist")
    }

    fn tarball_name(&self) -> String {
        format!("tcpx-{VERSION}-linux-{}", self.processor.name)
    }

    fn static_name(&self) -> String {
        format!("{}-static", self.tarball_name())
    }

    fn debian_name(&self) -> String {
        format!("tcpx_{VERSION}_{}.deb", self.processor.debian)
    }

    fn rpm_name(&self) -> String {
        format!("tcpx-{VERSION}-1.{}.rpm", self.processor.name)
    }

    /// What is built for users.
    fn crates(&self) -> Vec<&'static str> {
        let mut crates = vec!["tcpx-cli", "tcpx-nccl", "tcpx-capi"];
        if self.processor.has_nixl {
            crates.push("tcpx-nixl");
        }
        crates
    }

    /// The folder, and the packages that hold it.
    fn pack(&self) -> Result<()> {
        let out = self.folder();
        self.lay_out(&out)?;
        let mut made = vec![
            packages::tarball(&out, &self.packages, &self.tarball_name())?,
            release::bill_of_materials(self)?,
        ];
        made.extend(packages::debian(self)?);
        made.extend(packages::rpm(self)?);
        for path in made {
            println!("{} ({} KiB)", path.display(), path.metadata()?.len() / 1024);
        }
        Ok(())
    }

    /// The search path for programs, with the tools before all others.
    fn tools(&self) -> Result<OsString> {
        let folder = self.target.join("dist-tools");
        run_command(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        let bin = std::fs::canonicalize(folder.join("bin"))?;
        let mut install = Command::new(bin.join("pip"));
        install.args(["install", "-q", "-r"]);
        run_command(install.arg(self.root.join(TOOLS)))?;
        let mut path = bin.into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        Ok(path)
    }

    /// Cargo for what is shipped, for a target as zig names it. Handshakes name the commit; of a
    /// tree without one they name none.
    fn build(&self, target: &str) -> Result<Command> {
        let mut cargo = cargo();
        cargo.current_dir(&self.root).env("PATH", self.tools()?);
        cargo.args(["zigbuild", "--locked", "--profile", PROFILE]);
        cargo.args(["--target", target]);
        if let Ok(commit) = git(&self.root, &["rev-parse", "HEAD"]) {
            cargo.env("TCPX_COMMIT", commit);
        }
        Ok(cargo)
    }

    /// Builds, copies, and prints where everything is.
    fn lay_out(&self, out: &Path) -> Result<()> {
        let goal = self.processor.triple("gnu");
        let mut build = self.build(&format!("{goal}.{GLIBC}"))?;
        let packages = self.crates().into_iter();
        run_command(build.args(packages.flat_map(|name| ["--package", name])))?;
        std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
        let built_in = self.target.join(goal).join(PROFILE);
        for (built, name, symbol) in [
            ("tcpx", "tcpx", None),
            (PLUGIN_BUILT, PLUGIN, Some(PLUGIN_SYMBOL)),
            (LIBRARY_BUILT, LIBRARY, Some(LIBRARY_SYMBOL)),
            (NIXL_PLUGIN, NIXL_PLUGIN, Some(NIXL_SYMBOL)),
        ] {
            let path = out.join(name);
            if name == NIXL_PLUGIN && !self.processor.has_nixl {
                println!("without {name}: NIXL's layouts are those of x86-64");
                // One for another processor.
                let _ = std::fs::remove_file(path);
                continue;
            }
            copy(&built_in.join(built), &path)?;
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
            copy(&self.root.join(name), &out.join(name))?;
        }
        write(&out.join("README.md"), &README.replace("VERSION", VERSION))?;
        let mut program = self.processor.command(&out.join("tcpx"));
        run_command(program.arg("generate").arg(out))?;
        let capi = self.root.join("crates/tcpx-capi");
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
            "headers, {LIBRARY_LINK}, {PKG_CONFIG} and examples beside them, for C; man/ and \
             completions/"
        );
        Ok(())
    }

    /// The program without a C library of its host's: it runs on every Linux, also in an empty
    /// container. It loads nothing, so it moves host memory alone and drives no plugin.
    fn static_program(&self) -> Result<()> {
        let goal = self.processor.triple("musl");
        if !has_toolchain(&goal) {
            println!(
                "skipped: static program: no toolchain; `rustup target add {goal}` installs it"
            );
            return Ok(());
        }
        let mut build = self.build(&goal)?;
        run_command(build.args(["--package", "tcpx-cli", "--no-default-features"]))?;
        let path = self.packages.join(self.static_name());
        copy(&self.target.join(&goal).join(PROFILE).join("tcpx"), &path)?;
        self.processor.try_program(&path)?;
        println!("{} ({} KiB)", path.display(), path.metadata()?.len() / 1024);
        Ok(())
    }
}

/// Whether the standard library for the target is installed.
fn has_toolchain(target: &str) -> bool {
    let asked = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .output();
    asked.is_ok_and(|answer| Path::new(String::from_utf8_lossy(&answer.stdout).trim()).is_dir())
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
