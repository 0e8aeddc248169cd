//! `cargo xtask bench-docs`: `docs/benchmarks.md`, its plot and `benchmarks/tables.md` out of
//! `benchmarks/*.json`.

mod page;
mod plot;

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::benchmark::{Row, Subject};
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
for one GB, both ends together.
";

/// Writes the page, its plot and the tables, or with `--check` fails if one is out of date.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let subjects = subjects(&root()?.join(FOLDER))?;
    let groups = page::groups(&subjects)?;
    page::check_readme(&groups, &read(&root()?.join("README.md"))?)?;
    publish(TABLES, &tables(&subjects)?, "bench-docs", arguments)?;
    publish(PLOT, &plot::svg(&groups), "bench-docs", arguments)?;
    publish(PAGE, &page::text(&groups), "bench-docs", arguments)
}

/// The files of a folder with their names, in the order of the names.
fn subjects(folder: &Path) -> Result<Vec<(String, Subject)>> {
    files(folder, "json", false)?
        .iter()
        .map(|path| {
            let subject = Subject::parse(&read(path)?)
                .with_context(|| format!("cannot use {}", path.display()))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Ok((name.into_owned(), subject))
        })
        .collect()
}

/// One section for each file that has a table of its own.
fn tables(subjects: &[(String, Subject)]) -> Result<String> {
    let mut text = TABLES_HEAD.to_owned();
    if subjects.is_empty() {
        text.push_str("\nNothing has been measured yet.\n");
    }
    for (name, subject) in subjects {
        if let Some(target) = &subject.joins {
            let found = subjects
                .iter()
                .any(|(other, own)| other == target && own.joins.is_none());
            ensure!(
                found,
                "{name} joins {target}, which has no table of its own"
            );
            continue;
        }
        let joining: Vec<_> = subjects
            .iter()
            .map(|(_, other)| other)
            .filter(|other| other.joins.as_ref() == Some(name))
            .collect();
        section(&mut text, subject, &joining);
    }
    Ok(text)
}

fn section(text: &mut String, subject: &Subject, joining: &[&Subject]) {
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "\n## {}\n\n{}, {}\n\n```sh\n{}\n```\n\n| what | unit | median | min | max | runs | CPU | notes |\n|---|---|---:|---:|---:|---:|---:|---|\n",
        subject.subject,
        subject.machine.trim_end_matches('.'),
        subject.date,
        subject.command,
    );
    let rows = joining.iter().flat_map(|other| &other.rows);
    for row in subject.rows.iter().chain(rows) {
        text.push_str(&line(row));
    }
    if !subject.notes.is_empty() || subject.path.is_some() || !joining.is_empty() {
        text.push('\n');
    }
    if let Some(path) = &subject.path {
        let _ = writeln!(text, "- Path: {}.", path.trim_end_matches('.'));
    }
    for note in &subject.notes {
        let _ = writeln!(text, "- {note}");
    }
    for other in joining {
        let machine = other.machine.trim_end_matches('.');
        let (name, command) = (&other.subject, &other.command);
        let _ = writeln!(text, "- {name}: {machine}, {}, `{command}`.", other.date);
        for note in &other.notes {
            let _ = writeln!(text, "- {name}: {note}");
        }
    }
}

fn line(row: &Row) -> String {
    let cpu = row
        .cpu_seconds_per_gb
        .map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.2}"));
    format!(
        "| {} | {} | {} | {} | {} | {} | {cpu} | {} |\n",
        cell(&row.name),
        cell(&row.unit),
        figure(row.median),
        figure(row.min),
        figure(row.max),
        row.runs,
        cell(&row.notes),
    )
}

/// Three significant digits up to 1,000, whole numbers above: no digit that the spread would hide.
fn figure(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 1.0 => format!("{value:.3}"),
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// Text that cannot end its table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(folder: &Path) -> Result<String> {
        tables(&subjects(folder)?)
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
    fn joining_rows_name_the_file_they_come_from() {
        let folder = tempfile::tempdir().unwrap();
        let join = |target: &str| {
            file("Quoted", 7.0).replacen('{', &format!("{{\"joins\":\"{target}\","), 1)
        };
        std::fs::write(folder.path().join("10-first.json"), file("First", 2.0)).unwrap();
        let quoted = folder.path().join("20-quoted.json");
        std::fs::write(&quoted, join("10-first.json")).unwrap();
        let text = document(folder.path()).unwrap();
        assert!(!text.contains("## Quoted"), "{text}");
        assert!(
            text.ends_with(
                "- Quoted: two cores, 2026-01-31, `tcpx perf client 127.0.0.1 host`.\n- Quoted: both ends on one host\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("| 2.00 | ") && text.contains("| 7.00 | "),
            "{text}"
        );
        std::fs::write(&quoted, join("nothing.json")).unwrap();
        let error = format!("{:#}", document(folder.path()).unwrap_err());
        assert!(
            error.contains("20-quoted.json joins nothing.json"),
            "{error}"
        );
    }

    #[test]
    fn a_bad_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("bad.json"), "{}").unwrap();
        let error = format!("{:#}", document(folder.path()).unwrap_err());
        assert!(error.contains("bad.json"), "{error}");
    }

    #[test]
    fn without_measurements_the_document_says_so() {
        let folder = tempfile::tempdir().unwrap();
        assert!(
            document(folder.path())
                .unwrap()
                .contains("Nothing has been measured yet.")
        );
    }
}
