//! `cargo xtask devmem-vm`: a machine with a real kernel that receives into device memory, without
//! such a network card. QEMU emulates it; a test-only driver (tests/devmem-vm/dmsim.c) stands for
//! the card.
//!
//! The kernel and the tools that build the driver are Debian packages pinned by their contents;
//! whatever keeps them from being had, or the machine from being started at all, is a line
//! `skipped: ...` and success. A script that fails is a failure.

mod console;
mod machine;
mod packages;
mod pins;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{cargo, files, root, run as run_command};

/// Longest run of one script; emulation on a busy machine is slow.
const LIMIT: Duration = Duration::from_secs(600);
/// Least bytes that all scripts together check through device memory.
const LEAST_CHECKED: u64 = 500_000_000;
/// What `rustc` calls the only host that this machine is made for.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Programs of ours that scripts may use.
const PROGRAMS: [&str; 3] = ["tcpx", "devmem_setup", "devmem_peer"];

/// Why there is no machine here.
#[derive(Debug)]
struct NotHere(String);

/// Runs the scripts named, or all.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let sources = root.join("tests/devmem-vm");
    let scripts = scripts(&sources, arguments)?;
    let work = root.join("target/devmem-vm");
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let machine = match prepare(&sources, &work)? {
        Ok(machine) => machine,
        Err(NotHere(why)) => {
            println!("skipped: devmem-vm: {why}");
            return Ok(());
        }
    };
    let programs = build(&root, &work)?;
    let mut failed = Vec::new();
    let mut sum = console::Checked::default();
    for script in &scripts {
        let name = script.file_stem().unwrap_or_default().to_string_lossy();
        println!("== {name}");
        let started = Instant::now();
        let outcome = machine.run(script, &programs, LIMIT)?;
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Ok(checked) => {
                sum += checked;
                println!("   {name}: passed in {seconds:.0} s");
            }
            Err(failure) => {
                println!("   {name}: FAILED after {seconds:.0} s: {}", failure.why);
                failed.push((name.into_owned(), failure));
            }
        }
    }
    let word = if failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "test result: {word}. {} passed; {} failed",
        scripts.len() - failed.len(),
        failed.len()
    );
    println!(
        "every byte of {:.0} MB was checked, {:.0} MB of them came through device memory",
        sum.bytes as f64 / 1e6,
        sum.in_device as f64 / 1e6
    );
    // Once more where a reader who has the end of a long output alone finds it.
    for (name, failure) in &failed {
        print!("{name} FAILED: {}\n{}", failure.why, failure.end);
    }
    let names: Vec<_> = failed.iter().map(|(name, _)| name.as_str()).collect();
    ensure!(failed.is_empty(), "failed: {}", names.join(", "));
    ensure!(
        !arguments.is_empty() || sum.in_device >= LEAST_CHECKED,
        "{} bytes came through device memory, {LEAST_CHECKED} were expected",
        sum.in_device
    );
    Ok(())
}

fn scripts(sources: &Path, names: &[String]) -> Result<Vec<PathBuf>> {
    let all = files(&sources.join("scripts"), "sh", false)?;
    if names.is_empty() {
        return Ok(all);
    }
    let find = |name: &String| {
        let is_it = |path: &&PathBuf| path.file_stem().is_some_and(|stem| stem == name.as_str());
        all.iter().find(is_it).cloned().with_context(|| {
            let known: Vec<_> = all
                .iter()
                .filter_map(|path| path.file_stem())
                .map(|stem| stem.to_string_lossy().into_owned())
                .collect();
            format!("no script {name}; there are {}", known.join(", "))
        })
    };
    names.iter().map(find).collect()
}

/// Everything but our own programs.
fn prepare(sources: &Path, work: &Path) -> Result<Result<machine::Machine, NotHere>> {
    let no = |why: &str| Ok(Err(NotHere(why.to_owned())));
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return no("the machine is made for x86-64 Linux hosts");
    }
    for (program, package) in [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("dpkg-deb", "dpkg"),
        ("curl", "curl"),
    ] {
        if !packages::is_there(program) {
            return no(&format!(
                "{program} is missing; install the package {package}"
            ));
        }
    }
    let pins = pins::Pins::read(&sources.join("packages.txt"))?;
    let tree = match packages::tree(&pins, work)? {
        Ok(tree) => tree,
        Err(why) => return Ok(Err(NotHere(why))),
    };
    let module = match packages::module(&pins, &tree, sources, work)? {
        Ok(module) => module,
        Err(why) => return Ok(Err(NotHere(why))),
    };
    Ok(Ok(machine::Machine {
        kernel: tree.join(format!("usr/lib/modules/{}/vmlinuz", pins.kernel)),
        tree,
        module,
        init: sources.join("init.sh"),
        work: work.to_owned(),
    }))
}

/// Our programs, statically linked: the machine has another C library than this host.
fn build(root: &Path, work: &Path) -> Result<Vec<PathBuf>> {
    let target = work.join("build");
    let mut command = cargo();
    command
        .current_dir(root)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .args(["build", "--release", "--locked", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target)
        .args(["--package", "tcpx-cli", "--package", "tcpx-tests", "--bins"]);
    run_command(&mut command)?;
    let folder = target.join(TARGET).join("release");
    let mut found = Vec::new();
    for program in PROGRAMS {
        let path = folder.join(program);
        if !path.is_file() {
            bail!("{} was not built", path.display());
        }
        found.push(path);
    }
    Ok(found)
}
