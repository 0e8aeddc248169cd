//! What goes beside the packages of a release: the list of what was built in, and everybody's
//! checksum.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Dist, VERSION};
use crate::workspace::{cargo, read, run};

const SUMS: &str = "SHA256SUMS";

/// Beside the packages: every crate that is built in or takes part in the build, with licence and
/// checksum, in the form of CycloneDX 1.5.
pub(super) fn bill_of_materials(dist: &Dist) -> Result<PathBuf> {
    let mut tree = cargo();
    tree.current_dir(&dist.root)
        .args(["tree", "--locked", "--prefix", "none"]);
    tree.args(["--edges", "normal,build", "--target"]);
    tree.arg(dist.processor.triple("gnu"));
    tree.args(["--format", "{p}\t{l}", "--package", "tcpx-python"]);
    let crates = dist.crates().into_iter();
    tree.args(crates.flat_map(|name| ["--package", name]));
    let answer = tree.output().context("cannot start cargo tree")?;
    ensure!(
        answer.status.success(),
        "cargo tree: {}",
        String::from_utf8_lossy(&answer.stderr).trim()
    );
    let checksums = checksums(&read(&dist.root.join("Cargo.lock"))?);
    let components = components(&String::from_utf8_lossy(&answer.stdout), &checksums);
    ensure!(!components.is_empty(), "cargo tree names no crate");
    let purl = |name: &str| format!("pkg:cargo/{name}@{VERSION}");
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {
            "type": "application", "name": "tcpx", "version": VERSION, "bom-ref": purl("tcpx-cli"),
            "licenses": [{"expression": "Apache-2.0 OR MIT"}],
        }},
        "components": components,
    });
    let name = format!("{}.cdx.json", dist.tarball_name());
    let path = dist.packages.join(name);
    super::write(&path, &format!("{bill:#}\n"))?;
    Ok(path)
}

/// One entry for each crate of `cargo tree`'s lines `NAME vVERSION ...<tab>LICENCE`, but for the
/// workspace's own.
fn components(tree: &str, checksums: &BTreeMap<(String, String), String>) -> Vec<Value> {
    let crates: BTreeSet<(&str, &str, &str)> = tree
        .lines()
        .filter_map(|line| {
            let (package, licence) = line.split_once('\t')?;
            let mut words = package.split(' ');
            let name = words.next()?;
            let version = words.next()?.strip_prefix('v')?;
            // Marks what was listed before.
            Some((name, version, licence.trim_end_matches(" (*)")))
        })
        .collect();
    let component = |(name, version, licence): (&str, &str, &str)| {
        let hash = checksums.get(&(name.to_owned(), version.to_owned()))?;
        let purl = format!("pkg:cargo/{name}@{version}");
        Some(json!({
            "type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl,
            "licenses": [{"expression": licence.replace('/', " OR ")}],
            "hashes": [{"alg": "SHA-256", "content": hash}],
        }))
    };
    crates.into_iter().filter_map(component).collect()
}

/// The checksums of `Cargo.lock`, which has none of the workspace's own crates.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let field = |package: &str, name: &str| {
        let value = package
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""))?;
        value.strip_suffix('"').map(str::to_owned)
    };
    lock.split("[[package]]")
        .filter_map(|package| {
            let key = (field(package, "name")?, field(package, "version")?);
            Some((key, field(package, "checksum")?))
        })
        .collect()
}

/// `SHA256SUMS` in `out`, of the files of this version, as `sha256sum --check` reads it.
pub(super) fn sums(out: &Path, version: &str) -> Result<()> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(out).with_context(|| format!("cannot read {}", out.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_file() && name.contains(version) {
            names.insert(name);
        }
    }
    // Without a name it would read its input.
    if names.is_empty() {
        return Ok(());
    }
    let list = fs::File::create(out.join(SUMS)).with_context(|| format!("cannot write {SUMS}"))?;
    run(Command::new("sha256sum")
        .arg("--")
        .args(names)
        .current_dir(out)
        .stdout(list))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_is_listed_once_and_our_own_are_not() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.2.3\"\nsource = \"x\"\nchecksum = \"00ff\"\n\n\
                    [[package]]\nname = \"own\"\nversion = \"0.1.0\"\n";
        let tree =
            "own v0.1.0 (/folder)\tMIT\na v1.2.3\tMIT/Apache-2.0\na v1.2.3\tMIT/Apache-2.0 (*)\n\n";
        let found = components(tree, &checksums(lock));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0]["purl"], "pkg:cargo/a@1.2.3");
        assert_eq!(found[0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(found[0]["hashes"][0]["content"], "00ff");
    }

    #[test]
    fn sums_are_those_of_this_version_alone() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tcpx-1.2.3.tar.gz", "tcpx-1.1.0.tar.gz", SUMS] {
            fs::write(folder.path().join(name), "abc").unwrap();
        }
        sums(folder.path(), "1.2.3").unwrap();
        let text = fs::read_to_string(folder.path().join(SUMS)).unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(text, format!("{abc}  tcpx-1.2.3.tar.gz\n"));
    }
}
