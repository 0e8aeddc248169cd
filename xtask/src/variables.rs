//! `cargo xtask variables`: `docs/variables.md` and the variables that the sources read agree.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::workspace::{files, read, root};

const DOCUMENT: &str = "docs/variables.md";
const SOURCES: &str = "crates";
/// What the names of our variables, and of those we share with others, begin with.
const PREFIXES: [&str; 3] = ["TCPX_", "UCCL_TCPX_", "NCCL_"];

/// Compares both directions.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        bail!("variables takes no arguments, not {arguments:?}");
    }
    let root = root()?;
    let mut read_by_sources = BTreeSet::new();
    for path in files(&root.join(SOURCES), "rs", true)? {
        read_by_sources.extend(quoted(&read(&path)?));
    }
    let documented = rows(&read(&root.join(DOCUMENT))?);
    let mut faults = Vec::new();
    for name in read_by_sources.difference(&documented) {
        faults.push(format!(
            "{name}: in the sources but not in {DOCUMENT}: add a row"
        ));
    }
    for name in documented.difference(&read_by_sources) {
        faults.push(format!(
            "{name}: in {DOCUMENT} but in no source: take the row out"
        ));
    }
    if !faults.is_empty() {
        bail!("{} variable faults:\n{}", faults.len(), faults.join("\n"));
    }
    println!("{} variables, each documented", documented.len());
    Ok(())
}

fn is_variable(text: &str) -> bool {
    PREFIXES.iter().any(|prefix| text.starts_with(prefix))
        && !text.ends_with('_')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}

/// String literals that are a variable's name and nothing else.
fn quoted(source: &str) -> BTreeSet<String> {
    source
        .lines()
        // `env!` is answered by the compiler, from what build scripts say.
        .filter(|line| !line.trim_start().starts_with("//") && !line.contains("env!("))
        .flat_map(|line| line.split('"').skip(1).step_by(2))
        .filter(|text| is_variable(text))
        .map(str::to_owned)
        .collect()
}

/// The first cells of table rows.
fn rows(document: &str) -> BTreeSet<String> {
    document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name.to_owned())
        .filter(|name| is_variable(name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_literals_are_variables() {
        let source = "let a = var(\"TCPX_KEY\"); // \"TCPX_NOT\"\n// \"TCPX_COMMENT\"\n\
                      env = \"UCCL_TCPX_DEBUG\", \"set TCPX_X to 1\" \"TCPX_\" \"OTHER\"";
        let found = quoted(source);
        assert!(
            found.contains("TCPX_KEY") && found.contains("UCCL_TCPX_DEBUG"),
            "{found:?}"
        );
        assert!(
            !found.contains("TCPX_COMMENT") && !found.contains("OTHER"),
            "{found:?}"
        );
        assert!(
            !found.contains("TCPX_") && !found.contains("set TCPX_X to 1"),
            "{found:?}"
        );
    }

    #[test]
    fn rows_name_their_variable_first() {
        let found = rows("| variable | effect |\n|---|---|\n| `TCPX_KEY` | see `TCPX_OTHER` |\n");
        assert_eq!(Vec::from_iter(found), ["TCPX_KEY"]);
    }
}
