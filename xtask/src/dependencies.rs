//! `cargo xtask dependencies`: every dependency has its reason in `docs/dependencies.md`, and is
//! named in the sources of each crate that declares it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use serde_json::Value;

use crate::workspace::{files, metadata, read, root};

const DOCUMENT: &str = "docs/dependencies.md";

/// Checks the root manifest, the members' use of it and the document against each other.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        bail!("dependencies takes no arguments, not {arguments:?}");
    }
    let root = root()?;
    let declared = declared(&read(&root.join("Cargo.toml"))?);
    let mut faults = undocumented(&declared, &read(&root.join(DOCUMENT))?);
    let packages = packages(&root)?;
    let used: BTreeSet<_> = packages.iter().flat_map(Package::registry).collect();
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
    let libraries = packages
        .iter()
        .filter_map(|package| Some((package.name.as_str(), package.library.as_deref()?)));
    let libraries = libraries.collect();
    for package in &packages {
        faults.extend(package.unnamed(&libraries)?);
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

/// A member of the workspace.
struct Package {
    name: String,
    folder: PathBuf,
    /// The file of its shared library, which others may load.
    library: Option<String>,
    dependencies: Vec<Dependency>,
}

struct Dependency {
    name: String,
    ours: bool,
    /// Declared for the build script.
    builds: bool,
}

impl Package {
    fn from_metadata(package: &Value) -> Result<Self> {
        let manifest = Path::new(text(&package["manifest_path"])?);
        let mut targets = package["targets"].as_array().into_iter().flatten();
        let shared = targets.find(|target| target["crate_types"][0] == "cdylib");
        let dependencies = package["dependencies"]
            .as_array()
            .context("cargo metadata lists no dependencies")?;
        Ok(Self {
            name: text(&package["name"])?.to_owned(),
            library: shared.and_then(|target| Some(format!("lib{}.so", target["name"].as_str()?))),
            folder: manifest.parent().unwrap_or(manifest).to_path_buf(),
            dependencies: dependencies
                .iter()
                .map(|dependency| {
                    Ok(Dependency {
                        name: text(&dependency["name"])?.to_owned(),
                        ours: !dependency["path"].is_null(),
                        builds: dependency["kind"] == "build",
                    })
                })
                .collect::<Result<_>>()?,
        })
    }

    fn registry(&self) -> impl Iterator<Item = String> {
        self.dependencies
            .iter()
            .filter(|dependency| !dependency.ours)
            .map(|dependency| dependency.name.clone())
    }

    /// One line for each dependency that the package's sources never name, nor its shared library.
    fn unnamed(&self, libraries: &BTreeMap<&str, &str>) -> Result<Vec<String>> {
        let script = self.folder.join("build.rs");
        let (mut sources, mut build) = (String::new(), String::new());
        for path in files(&self.folder, "rs", true)? {
            let into = if path == script {
                &mut build
            } else {
                &mut sources
            };
            let source = read(&path)?;
            for elsewhere in path_attributes(&source) {
                into.push_str(&read(&path.with_file_name(elsewhere))?);
            }
            into.push_str(&source);
        }
        let idle = self.dependencies.iter().filter(|dependency| {
            let searched = if dependency.builds { &build } else { &sources };
            let library = libraries.get(dependency.name.as_str());
            let is_loaded = library.is_some_and(|file| searched.contains(&format!("\"{file}\"")));
            !is_loaded && !names(searched, &dependency.name)
        });
        Ok(idle
            .map(|dependency| {
                format!(
                    "{}: declared by {} but not named in its sources: take it out there",
                    dependency.name, self.name
                )
            })
            .collect())
    }
}

/// The workspace's members with their dependencies of every kind.
fn packages(root: &Path) -> Result<Vec<Package>> {
    let metadata = metadata(root)?;
    metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?
        .iter()
        .map(Package::from_metadata)
        .collect()
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().context("cargo metadata names nothing")
}

/// Files of other packages that a source has as its modules.
fn path_attributes(source: &str) -> impl Iterator<Item = &str> {
    source
        .lines()
        .filter_map(|line| line.trim().strip_prefix("#[path = \"")?.strip_suffix("\"]"))
}

/// Whether a line of the sources, comments apart, has a path into the crate.
fn names(sources: &str, dependency: &str) -> bool {
    let path = format!("{}::", dependency.replace('-', "_"));
    sources
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .any(|line| {
            line.match_indices(&path).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                !before.is_some_and(|before| before.is_alphanumeric() || before == '_')
            })
        })
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
    fn a_missing_row_and_a_superfluous_row_are_faults() {
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

    #[test]
    fn only_a_path_into_a_crate_names_it_and_files_elsewhere_count() {
        assert!(names("use tcpx_net::Network;", "tcpx-net"));
        assert!(!names("// see tcpx_net::Network", "tcpx-net"));
        assert!(!names("let net = my_tcpx_net::open();", "tcpx-net"));
        assert!(!names("fn tcpx_net() {}", "tcpx-net"));
        let source = "#[path = \"../user.rs\"]\nmod user;\n";
        assert_eq!(Vec::from_iter(path_attributes(source)), ["../user.rs"]);
    }
}
