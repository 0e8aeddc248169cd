//! `cargo xtask doctor`: `docs/doctor.md` is the program's own catalogue of checks, and sources
//! name no other check.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::{files, program, publish, read, root};

const DOCUMENT: &str = "docs/doctor.md";

const HEAD: &str = "\
# Checks of `tcpx doctor`

<!-- Made by `cargo xtask doctor` from what `tcpx doctor --explain all` prints. Edit the program, not this. -->

`tcpx doctor` looks at this host, the plugin file and, when the plugin is Google's, its buffer daemon. It changes nothing,
and ends with 0 only if nothing that blocks transfers was found; `--json` prints the same for a program. An error of
`tcpx` names the check that explains it; `tcpx doctor --explain ID` tells what stands here and measures it on this host.
Ids stay the same for ever.
";

/// Writes the document, or with `--check` fails if it differs.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let output = Command::new(program(&root)?)
        .args(["doctor", "--explain", "all", "--json"])
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .context("cannot start tcpx")?;
    ensure!(
        output.status.success(),
        "tcpx doctor ended with {}",
        output.status
    );
    let told: Value = serde_json::from_slice(&output.stdout)?;
    let checks = told["checks"].as_array().context("it tells of no checks")?;
    let known: BTreeSet<&str> = checks
        .iter()
        .filter_map(|check| check["id"].as_str())
        .collect();
    let mut strangers = Vec::new();
    for path in files(&root.join("crates"), "rs", true)? {
        for id in ids(&read(&path)?) {
            if !known.contains(id.as_str()) {
                strangers.push(format!("{}: {id}", path.display()));
            }
        }
    }
    if !strangers.is_empty() {
        bail!("checks that are in no catalogue:\n{}", strangers.join("\n"));
    }
    publish(DOCUMENT, &document(checks)?, "doctor", arguments)
}

fn document(checks: &[Value]) -> Result<String> {
    let mut text = HEAD.to_owned();
    let mut subject = "";
    for check in checks {
        let field = |name: &str| {
            check[name]
                .as_str()
                .with_context(|| format!("no {name} in {check}"))
        };
        if field("subject")? != subject {
            subject = field("subject")?;
            write!(text, "\n## {subject}\n")?;
        }
        write!(
            text,
            "\n### {}: {}\n\n{}\n\n- Then: {}.\n- Fix: {}.\n",
            field("id")?,
            field("title")?,
            field("about")?,
            field("consequence")?,
            field("fix")?
        )?;
    }
    Ok(text)
}

/// Every id of a check in a source, but for those of tests that look for a check that is not there.
fn ids(source: &str) -> BTreeSet<String> {
    const START: &str = "TCPX-D";
    let places = source.match_indices(START).map(|(at, _)| &source[at..]);
    places
        .filter_map(|rest| rest.get(..START.len() + 3))
        .filter(|id| {
            id.bytes()
                .skip(START.len())
                .all(|byte| byte.is_ascii_digit())
        })
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_three_digits_behind_their_start() {
        let found = ids("\"TCPX-D012\" [TCPX-D030] `TCPX-Dnnn` TCPX-D1");
        assert_eq!(Vec::from_iter(found), ["TCPX-D012", "TCPX-D030"]);
    }

    #[test]
    fn checks_stand_under_the_heading_of_their_subject() {
        let check = |id: &str, subject: &str| serde_json::json!({"id": id, "subject": subject, "title": "t", "about": "a.", "consequence": "c", "fix": "f"});
        let checks = [check("X1", "One"), check("X2", "One"), check("X3", "Two")];
        let text = document(&checks).unwrap();
        assert_eq!(text.matches("\n## ").count(), 2);
        assert_eq!(text.matches("\n### X").count(), 3);
        assert!(document(&[serde_json::json!({})]).is_err());
    }
}
