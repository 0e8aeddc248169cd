//! `cargo xtask dependencies`: every dependency has its reason in `docs/dependencies.md`.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::workspace::{metadata, read, root};

const DOCUMENT: &str = "docs/dependencies.md";

/// Checks the root manifest, the members' use of it and the document against each other.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        bail!("dependencies takes no arguments, not {arguments:?}");
    }
    let root = root()?;
    let declared = declared(&read(&root.join("Cargo.toml"))?);
    let mut faults = undocumented(&declared, &read(&root.join(DOCUMENT))?);
    let used = used(&root)?;
    for name in declared.difference(&used) {
        faults.push(format!(
            "{name}: in [workspace.dependencies] but used by no crate: take it out"
        ));
    }
    for name in used.difference(&declared) {
        faults.push(format!(
            "{name}: used by a crate but not in [workspace.dependencies]: move it there"
        ));
    }
    if !faults.is_empty() {
        bail!("{} dependency faults:\n{}", faults.len(), faults.join("\n"));
    }
    println!(
        "{} dependencies, each used and with its reason",
        declared.len()
    );
    Ok(())
}

/// Names in `[workspace.dependencies]` that come from a registry: those without `path =`.
fn declared(manifest: &str) -> BTreeSet<String> {
    manifest
        .lines()
        .skip_while(|line| line.trim() != "[workspace.dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.trim_start().starts_with('#') && !line.contains("path ="))
        .filter_map(|line| line.split_once('='))
        .map(|(name, _)| name.trim().to_owned())
        .collect()
}

/// Names that the document's tables list: the first cell of a row, in backquotes.
fn documented(document: &str) -> BTreeSet<String> {
    document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .filter(|(_, rest)| rest.trim_end_matches('|').chars().any(char::is_alphabetic))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// One line for each name that only one of the two has.
fn undocumented(declared: &BTreeSet<String>, document: &str) -> Vec<String> {
    let documented = documented(document);
    let missing = declared
        .difference(&documented)
        .map(|name| format!("{name}: no reason in {DOCUMENT}: add a row"));
    let gone = documented
        .difference(declared)
        .map(|name| format!("{name}: in {DOCUMENT} but no dependency: take the row out"));
    missing.chain(gone).collect()
}

/// Registry dependencies of the workspace's members, of every kind.
fn used(root: &Path) -> Result<BTreeSet<String>> {
    let metadata = metadata(root)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let mut names = BTreeSet::new();
    for package in packages {
        let dependencies = package["dependencies"]
            .as_array()
            .context("cargo metadata lists no dependencies")?;
        for dependency in dependencies {
            if dependency["path"].is_null() {
                let name = dependency["name"]
                    .as_str()
                    .context("cargo metadata names no dependency")?;
                names.insert(name.to_owned());
            }
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dependency_of_this_workspace_has_a_reason() {
        let root = root().unwrap();
        let declared = declared(&read(&root.join("Cargo.toml")).unwrap());
        assert!(declared.contains("anyhow"), "{declared:?}");
        let faults = undocumented(&declared, &read(&root.join(DOCUMENT)).unwrap());
        assert!(faults.is_empty(), "{faults:#?}");
    }

    #[test]
    fn a_dependency_without_a_row_and_a_row_without_a_dependency_are_faults() {
        let declared = declared(
            "[workspace.dependencies]\n# ours\ntcpx = { path = \"crates/tcpx\" }\n\
             libc = \"1\"\ncc = { version = \"1\" }\n\n[profile.release]\ndebug = 1\n",
        );
        assert_eq!(Vec::from_iter(&declared), ["cc", "libc"]);
        let faults = undocumented(
            &declared,
            "| name | reason |\n|---|---|\n| `libc` | types of system calls |\n| `gone` | no more |\n",
        );
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("cc: no reason"), "{faults:?}");
        assert!(faults[1].starts_with("gone: in docs"), "{faults:?}");
    }

    #[test]
    fn a_row_without_words_is_no_reason() {
        assert!(documented("| `libc` |  |\n").is_empty());
    }
}
