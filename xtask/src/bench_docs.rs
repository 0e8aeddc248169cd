//! `cargo xtask bench-docs`: `docs/benchmarks.md`, its plot and `benchmarks/tables.md` out of
//! `benchmarks/*.json`.

mod page;

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use tcpx_bench::plot;
use tcpx_bench::report::{self, Subject};

use crate::workspace::{files, publish, read, root};

const FOLDER: &str = "benchmarks";
const PAGE: &str = "docs/benchmarks.md";
const PLOT: &str = "docs/benchmarks.svg";
const TABLES: &str = "benchmarks/tables.md";

const TABLES_HEAD: &str = "\
# Tables

<!-- Made by `cargo xtask bench-docs` from benchmarks/*.json. Edit those, not this. -->

Every figure, with the machine and the command that made it; [README.md](README.md) explains the
columns. GB is 10^9 bytes, counted once however often they were copied. *CPU* is processor seconds
for one GB, both ends together. A command is that of the checkout of its date.
";

/// Writes the page, its plot and the tables, or with `--check` fails if one is out of date.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let subjects = subjects(&root()?.join(FOLDER))?;
    let choices = page::choices()?;
    let groups = page::groups(&choices, &subjects)?;
    page::check_readme(&groups, &read(&root()?.join("README.md"))?)?;
    publish(TABLES, &tables(&subjects), "bench-docs", arguments)?;
    publish(PLOT, &plot::svg(&groups), "bench-docs", arguments)?;
    publish(PAGE, &page::text(&groups), "bench-docs", arguments)
}

/// The files of a folder with their names, in the order of the names.
fn subjects(folder: &Path) -> Result<Vec<(String, Subject)>> {
    files(folder, "json", false)?
        .iter()
        .map(|path| {
            let subject = Subject::parse(&read(path)?)
                .map_err(anyhow::Error::msg)
                .with_context(|| format!("cannot use {}", path.display()))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Ok((name.into_owned(), subject))
        })
        .collect()
}

/// One section for each file.
fn tables(subjects: &[(String, Subject)]) -> String {
    let mut text = TABLES_HEAD.to_owned();
    for (_, subject) in subjects {
        let machine = subject.machine.trim_end_matches('.');
        let Subject { date, command, .. } = subject;
        let rows = report::markdown(&subject.rows);
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\n## {}\n\n{machine}, {date}\n\n```sh\n{command}\n```\n\n{rows}",
            subject.subject,
        );
        let path = subject.path.as_ref();
        let path = path.map(|path| format!("Path: {}.", path.trim_end_matches('.')));
        for (at, note) in path.iter().chain(&subject.notes).enumerate() {
            let before = if at == 0 { "\n" } else { "" };
            let _ = writeln!(text, "{before}- {note}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(folder: &Path) -> Result<String> {
        Ok(tables(&subjects(folder)?))
    }

    fn file(subject: &str, median: f64) -> String {
        serde_json::json!({
            "schema": 1, "subject": subject, "date": "2026-01-31", "machine": "two cores",
            "command": "tcpx perf client 127.0.0.1 host",
            "rows": [{"name": "a|b", "unit": "GB/s", "median": median, "min": 0.5, "max": 1234.5,
                      "runs": 5, "cpu_seconds_per_gb": 0.256}],
            "notes": ["both ends on one host"],
        })
        .to_string()
    }

    #[test]
    fn subjects_appear_in_file_order_with_their_command_and_rows() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("20-second.json"), file("Second", 2.0)).unwrap();
        std::fs::write(folder.path().join("10-first.json"), file("First", 12.34)).unwrap();
        std::fs::write(folder.path().join("README.md"), "not a benchmark").unwrap();
        let text = document(folder.path()).unwrap();
        assert!(text.find("## First").unwrap() < text.find("## Second").unwrap());
        assert!(text.contains("```sh\ntcpx perf client 127.0.0.1 host\n```"));
        assert!(
            text.contains("| a\\|b | GB/s | 12.3 | 0.500 | 1234 | 5 | 0.26 |  |"),
            "{text}"
        );
        assert!(text.ends_with("\n- both ends on one host\n"), "{text}");
    }

    #[test]
    fn a_bad_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("bad.json"), "{}").unwrap();
        let error = format!("{:#}", document(folder.path()).unwrap_err());
        assert!(error.contains("bad.json"), "{error}");
    }
}
