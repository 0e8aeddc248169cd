//! `cargo xtask links`: links between the documents lead somewhere, and the index is complete.

use std::path::Path;

use anyhow::{Result, bail};

use crate::workspace::{files, read, root};

/// Folders that hold documents, and whether their subfolders do too.
const FOLDERS: [(&str, bool); 6] = [
    ("", false),
    ("docs", true),
    ("benchmarks", false),
    ("deploy", false),
    ("tests", false),
    ("fuzz", false),
];

/// Checks every relative link of every document, and that `docs/README.md` lists all of `docs/`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        bail!("links takes no arguments, not {arguments:?}");
    }
    let root = root()?;
    let mut documents = Vec::new();
    for (folder, deep) in FOLDERS {
        let folder = root.join(folder);
        if folder.is_dir() {
            documents.extend(files(&folder, "md", deep)?);
        }
    }
    let mut faults = Vec::new();
    for path in &documents {
        for target in broken(path, &read(path)?) {
            let name = path.strip_prefix(&root).unwrap_or(path).display();
            faults.push(format!("{name}: {target} leads nowhere"));
        }
    }
    let index = read(&root.join("docs/README.md"))?;
    let listed: Vec<&str> = targets(&index).collect();
    let docs = root.join("docs");
    for path in documents.iter().filter(|path| path.starts_with(&docs)) {
        let name = path
            .strip_prefix(&docs)
            .unwrap_or(path)
            .display()
            .to_string();
        if name != "README.md" && name != "SUMMARY.md" && !listed.contains(&name.as_str()) {
            faults.push(format!("docs/{name}: not listed in docs/README.md"));
        }
    }
    if !faults.is_empty() {
        bail!("{} document faults:\n{}", faults.len(), faults.join("\n"));
    }
    println!("{} documents, every link leads somewhere", documents.len());
    Ok(())
}

/// What stands in the parentheses of `[text](target)`, without an anchor; not for other hosts.
pub(crate) fn targets(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let (target, _) = rest.split_once(')')?;
        let target = target.split('#').next().unwrap_or(target);
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
}

/// The relative links of one document that lead to no file or folder.
fn broken(document: &Path, text: &str) -> Vec<String> {
    let folder = document.parent().unwrap_or(document);
    targets(text)
        .filter(|target| !folder.join(target).exists())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_to_missing_files_are_broken() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("here.md"), "").unwrap();
        let text = "[a](here.md) [b](here.md#part) [c](#part) [d](gone.md) \
                    [e](https://example.org/x) [f](../nowhere/)";
        assert_eq!(
            broken(&folder.path().join("README.md"), text),
            ["gone.md", "../nowhere/"]
        );
    }
}
