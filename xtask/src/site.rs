//! `cargo xtask site`: links between the documents lead somewhere, and the documents as pages for a
//! browser, by mdbook.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{files, read, root, run as run_command};

/// The order of the pages; its links are relative to its folder, as in every document.
const SUMMARY: &str = "docs/SUMMARY.md";
/// What mdbook reads beside the pages.
const SETTINGS: [&str; 2] = ["book.toml", "site.css"];
/// Folders whose documents all stand in the order of the pages.
const FOLDERS: [&str; 4] = ["docs", "benchmarks", "deploy", "fuzz"];

/// What other tools have made of the sources, each below `target`: the folder, its first page, and
/// what it describes. `cargo doc` makes the first one,
/// `pdoc -d restructuredtext -o target/pdoc tcpx` the other.
const INTERFACES: [(&str, &str, &str); 2] = [
    ("doc", "tcpx/index.html", "Rust"),
    ("pdoc", "tcpx.html", "Python"),
];
const HEADERS: [&str; 2] = ["tcpx.h", "tcpx_plugin.h"];

/// Copies the pages and whatever they lead to, at the same places, and has mdbook make
/// `target/site` of them. Every link between its pages leads somewhere.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    ensure!(
        arguments.is_empty(),
        "site takes no arguments, not {arguments:?}"
    );
    let root = root()?;
    let (stage, out) = (root.join("target/site-pages"), root.join("target/site"));
    for folder in [&stage, &out] {
        if folder.exists() {
            fs::remove_dir_all(folder)
                .with_context(|| format!("cannot empty {}", folder.display()))?;
        }
    }
    let summary = read(&root.join(SUMMARY))?;
    let pages: Vec<PathBuf> = targets(&summary).map(|to| beside(SUMMARY, to)).collect();
    let listed: BTreeSet<&PathBuf> = pages.iter().collect();
    let mut waiting: VecDeque<PathBuf> = pages.iter().cloned().collect();
    let mut copied = BTreeSet::new();
    while let Some(name) = waiting.pop_front() {
        if !copied.insert(name.clone()) {
            continue;
        }
        let (from, to) = (root.join(&name), stage.join("src").join(&name));
        ensure!(from.is_file(), "{} is no file: link to one", name.display());
        fs::create_dir_all(to.parent().context("a file in no folder")?)?;
        fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        if name.extension().is_some_and(|ending| ending == "md") {
            ensure!(
                listed.contains(&name),
                "{SUMMARY} does not list {}",
                name.display()
            );
            let text = read(&from)?;
            waiting.extend(targets(&text).map(|to| beside(&name, to)));
        }
    }
    for document in FOLDERS {
        for path in files(&root.join(document), "md", document == "docs")? {
            let name = path.strip_prefix(&root)?.to_owned();
            let is_page = name == Path::new(SUMMARY) || copied.contains(&name);
            ensure!(is_page, "no page leads to {}", name.display());
        }
    }
    check_anchors(&root, &copied)?;
    println!("{} pages and what they lead to are there", pages.len());
    let from_root = |line: &str| match targets(line).next() {
        Some(to) => line.replace(to, &beside(SUMMARY, to).display().to_string()),
        None => line.to_owned(),
    };
    let mut summary: Vec<String> = summary.lines().map(from_root).collect();
    let made = INTERFACES.map(|(folder, page, language)| {
        let is_there = root.join("target").join(folder).join(page).is_file();
        is_there.then(|| format!("- [{language}]({folder}/{page})"))
    });
    let mut links: Vec<String> = made.into_iter().flatten().collect();
    let mut entries = vec!["- [Interfaces](interfaces.md)".to_owned()];
    for name in HEADERS {
        // A browser saves a header in place of showing it.
        let text = read(&root.join("crates/tcpx-capi/include").join(name))?;
        let page = format!("# {name}\n\n```c\n{text}```\n");
        fs::write(stage.join(format!("src/{name}.md")), page)?;
        links.push(format!("- [C: {name}]({name}.md)"));
        entries.push(format!("  - [{name}]({name}.md)"));
    }
    fs::write(
        stage.join("src/interfaces.md"),
        format!(
            "# Interfaces\n\nEach call, out of the sources; the guides say how calls belong together.\n\n{}\n",
            links.join("\n")
        ),
    )?;
    let place = summary.iter().position(|line| line == "# Reference");
    let place = place.with_context(|| format!("{SUMMARY} has no part \"Reference\""))?;
    summary.splice(place + 2..place + 2, entries);
    fs::write(stage.join("src/SUMMARY.md"), summary.join("\n"))?;
    for name in SETTINGS {
        fs::copy(root.join("docs").join(name), stage.join(name))
            .with_context(|| format!("cannot copy {name}"))?;
    }
    let mdbook = std::env::var_os("MDBOOK").unwrap_or_else(|| "mdbook".into());
    // The variable names the program where it is not in the search path.
    if Command::new(&mdbook).arg("--version").output().is_err() {
        println!("skipped: site: no mdbook is here; `cargo install --locked mdbook` installs it");
        return Ok(());
    }
    run_command(
        Command::new(mdbook)
            .arg("build")
            .arg(&stage)
            .arg("--dest-dir")
            .arg(&out),
    )?;
    for (folder, page, _) in INTERFACES {
        let made = root.join("target").join(folder);
        if made.join(page).is_file() {
            run_command(Command::new("cp").arg("-r").arg(made).arg(&out))?;
        }
    }
    let (mut links, mut broken) = (0, Vec::new());
    for page in files(&out, "html", true)? {
        // Their tools check their links.
        if INTERFACES
            .iter()
            .any(|(folder, ..)| page.starts_with(out.join(folder)))
        {
            continue;
        }
        // The page for what is not there has links from the site's root, and the one to print has
        // all of the others'.
        if page.ends_with("404.html") || page.ends_with("print.html") {
            continue;
        }
        let text = read(&page)?;
        for target in text
            .split("href=\"")
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
        {
            let file = target.split(['#', '?']).next().unwrap_or_default();
            let is_local = !file.is_empty() && !target.contains(':');
            links += usize::from(is_local);
            if is_local && !page.parent().unwrap_or(&out).join(file).exists() {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    if !broken.is_empty() {
        bail!(
            "{} links lead nowhere:\n{}",
            broken.len(),
            broken.join("\n")
        );
    }
    println!("{}: {} pages, {links} links", out.display(), pages.len());
    Ok(())
}

/// Every link to a heading of a document leads to one.
fn check_anchors(root: &Path, documents: &BTreeSet<PathBuf>) -> Result<()> {
    let is_page = |name: &Path| name.extension().is_some_and(|ending| ending == "md");
    let mut broken = Vec::new();
    for name in documents.iter().filter(|name| is_page(name)) {
        let text = read(&root.join(name))?;
        for (to, anchor) in links(&text).filter_map(|link| link.split_once('#')) {
            let to = match to {
                "" => name.clone(),
                to => beside(name, to),
            };
            if is_page(&to) && !anchors(&read(&root.join(&to))?).contains(anchor) {
                broken.push(format!("{}: {}#{anchor}", name.display(), to.display()));
            }
        }
    }
    let all = broken.join("\n");
    ensure!(broken.is_empty(), "no heading is called so:\n{all}");
    Ok(())
}

/// What links call the headings of a document.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    // Every other part stands in a block of code.
    for line in text.split("```").step_by(2).flat_map(str::lines) {
        let heading = line.trim_start_matches('#').strip_prefix(' ');
        let Some(heading) = heading.filter(|_| line.starts_with('#')) else {
            continue;
        };
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let name: String = heading.trim().to_lowercase().chars().filter(kept).collect();
        let name = name.replace(' ', "-");
        let numbered = (1..).map(|number| format!("{name}-{number}"));
        let mut names = std::iter::once(name.clone()).chain(numbered);
        found.extend(names.find(|name| !found.contains(name)));
    }
    found
}

/// What stands in the parentheses of `[text](target)`; not for other hosts.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let links = text.split("](").skip(1);
    let links = links.filter_map(|rest| Some(rest.split_once(')')?.0));
    links.filter(|link| !link.contains("://"))
}

/// The files among them.
fn targets(text: &str) -> impl Iterator<Item = &str> {
    links(text)
        .filter_map(|link| link.split('#').next())
        .filter(|file| !file.is_empty())
}

/// A link's file, from the root of the repository.
fn beside(document: impl AsRef<Path>, target: &str) -> PathBuf {
    let mut found = document
        .as_ref()
        .parent()
        .unwrap_or_else(|| Path::new(""))
        .to_path_buf();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => {
                found.pop();
            }
            Component::Normal(name) => found.push(name),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_are_called_as_links_call_them() {
        let text = "# `tcpx status`: Who, what?\n```sh\n# no heading\n```\n## A_b\n## A_b\n#no\n";
        let found = anchors(text);
        let wanted = ["tcpx-status-who-what", "a_b", "a_b-1"].map(str::to_owned);
        assert_eq!(found, BTreeSet::from(wanted));
        let text = "[a](b.md#c) [d](#e) [f](https://g#h)";
        assert_eq!(links(text).collect::<Vec<_>>(), ["b.md#c", "#e"]);
        assert_eq!(targets(text).collect::<Vec<_>>(), ["b.md"]);
    }

    #[test]
    fn links_are_followed_from_their_document() {
        assert_eq!(
            beside("docs/guides/c.md", "../nccl.md"),
            Path::new("docs/nccl.md")
        );
        assert_eq!(beside("docs/a.md", "../README.md"), Path::new("README.md"));
        assert_eq!(beside("README.md", "docs/a.md"), Path::new("docs/a.md"));
    }
}
