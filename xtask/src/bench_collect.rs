//! `cargo xtask bench-collect`: one file of `benchmarks/` out of the JSON of repeated runs.
//!
//! A program, not a script, so that a host with a GPU needs neither Cargo nor an interpreter: the
//! built `xtask` travels with the other binaries.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::benchmark::{Row, SCHEMA, Subject};
use crate::workspace::read;

const USAGE: &str = "\
bench-collect --out FILE --subject TEXT --date YYYY-MM-DD --machine TEXT --command TEXT
              [--note TEXT]... [--cpu POINTER] --row NAME UNIT POINTER FILE... [--row ...]...
POINTER is a JSON pointer into each FILE, such as /gb_per_s; one FILE is one run";

/// One `--row`: a name, a unit, where the figure stands in a run's JSON, and the runs.
#[derive(Debug)]
struct RowRequest {
    name: String,
    unit: String,
    pointer: String,
    runs: Vec<PathBuf>,
}

/// Collects the runs named on the command line and writes the file.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mut single: [(&str, Option<String>); 6] = [
        ("--out", None),
        ("--subject", None),
        ("--date", None),
        ("--machine", None),
        ("--command", None),
        ("--cpu", None),
    ];
    let mut notes = Vec::new();
    let mut requests = Vec::new();
    let mut rest = arguments;
    while let Some((flag, tail)) = rest.split_first() {
        let end = tail
            .iter()
            .position(|argument| argument.starts_with("--"))
            .unwrap_or(tail.len());
        let (values, next) = tail.split_at(end);
        rest = next;
        match (flag.as_str(), values) {
            ("--row", [name, unit, pointer, runs @ ..]) if !runs.is_empty() => {
                requests.push(RowRequest {
                    name: name.clone(),
                    unit: unit.clone(),
                    pointer: pointer.clone(),
                    runs: runs.iter().map(PathBuf::from).collect(),
                });
            }
            ("--note", [note]) => notes.push(note.clone()),
            (flag, [value]) => match single.iter_mut().find(|(name, _)| *name == flag) {
                Some((_, slot)) => *slot = Some(value.clone()),
                None => bail!("{flag} is not known\n{USAGE}"),
            },
            (flag, values) => bail!("{flag} does not take {values:?}\n{USAGE}"),
        }
    }
    let [out, subject, date, machine, command, cpu] = single;
    let needed = |(name, value): (&str, Option<String>)| {
        value.with_context(|| format!("{name} is missing\n{USAGE}"))
    };
    let out = needed(out)?;
    let subject = Subject {
        schema: SCHEMA,
        subject: needed(subject)?,
        date: needed(date)?,
        machine: needed(machine)?,
        command: needed(command)?,
        path: None,
        joins: None,
        rows: requests
            .iter()
            .map(|request| row(request, cpu.1.as_deref()))
            .collect::<Result<_>>()?,
        notes,
    };
    subject.check()?;
    let mut text = serde_json::to_string_pretty(&subject)?;
    text.push('\n');
    std::fs::write(&out, text).with_context(|| format!("cannot write {out}"))?;
    println!("wrote {out}");
    Ok(())
}

fn row(request: &RowRequest, cpu: Option<&str>) -> Result<Row> {
    let mut figures = Vec::new();
    let mut seconds = Vec::new();
    for path in &request.runs {
        let run: Value = serde_json::from_str(&read(path)?)
            .with_context(|| format!("{} is not one JSON value", path.display()))?;
        let figure = number(&run, &request.pointer, path)?;
        figures.push(figure);
        if let Some(pointer) = cpu
            && run.pointer(pointer).is_some_and(|value| !value.is_null())
        {
            seconds.push(number(&run, pointer, path)?);
        }
    }
    figures.sort_by(f64::total_cmp);
    seconds.sort_by(f64::total_cmp);
    // Some runs with the figure and some without would be a median of something else.
    let complete = seconds.len() == figures.len();
    Ok(Row {
        name: request.name.clone(),
        unit: request.unit.clone(),
        median: median(&figures),
        min: figures[0],
        max: figures[figures.len() - 1],
        runs: u32::try_from(figures.len())?,
        cpu_seconds_per_gb: complete.then(|| median(&seconds)),
        cpu_seconds_per_gb_each: None,
        tcp_bytes_per_payload_byte: None,
        notes: String::new(),
    })
}

fn number(run: &Value, pointer: &str, path: &Path) -> Result<f64> {
    let value = run
        .pointer(pointer)
        .with_context(|| format!("{} has nothing at {pointer}", path.display()))?;
    let number = value
        .as_f64()
        .with_context(|| format!("{} at {pointer}: a number expected", path.display()))?;
    ensure!(
        number.is_finite() && number >= 0.0,
        "{} at {pointer}: a figure expected, {number} found",
        path.display()
    );
    Ok(number)
}

/// Of a sorted, non-empty list.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted[middle]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(folder: &Path, rows: &[&str]) -> Result<Subject> {
        let out = folder.join("out.json");
        let mut arguments: Vec<String> = [
            "--subject",
            "S",
            "--date",
            "2026-01-31",
            "--machine",
            "M",
            "--command",
            "C",
            "--note",
            "one",
            "--note",
            "two",
            "--cpu",
            "/cpu",
        ]
        .map(str::to_owned)
        .to_vec();
        arguments.extend(["--out".to_owned(), out.display().to_string()]);
        arguments.extend(rows.iter().map(|&argument| argument.to_owned()));
        run(&arguments)?;
        Subject::parse(&read(&out)?)
    }

    fn runs(folder: &Path, texts: &[&str]) -> Vec<String> {
        texts
            .iter()
            .enumerate()
            .map(|(index, text)| {
                let path = folder.join(format!("run-{index}.json"));
                std::fs::write(&path, text).unwrap();
                path.display().to_string()
            })
            .collect()
    }

    #[test]
    fn repeated_runs_become_one_row_with_their_spread() {
        let folder = tempfile::tempdir().unwrap();
        let paths = runs(
            folder.path(),
            &[
                r#"{"rate": 3.0, "cpu": 0.3}"#,
                r#"{"rate": 1.0, "cpu": 0.1}"#,
                r#"{"rate": 2.0, "cpu": 0.2}"#,
                r#"{"rate": 9.0, "cpu": null}"#,
            ],
        );
        let mut rows = vec!["--row", "three", "GB/s", "/rate"];
        rows.extend(paths[..3].iter().map(String::as_str));
        rows.extend(["--row", "four", "GB/s", "/rate"]);
        rows.extend(paths.iter().map(String::as_str));
        let subject = call(folder.path(), &rows).unwrap();
        assert_eq!(subject.notes, ["one", "two"]);
        let three = &subject.rows[0];
        assert_eq!(
            (three.median, three.min, three.max, three.runs),
            (2.0, 1.0, 3.0, 3)
        );
        assert_eq!(three.cpu_seconds_per_gb, Some(0.2));
        let four = &subject.rows[1];
        assert_eq!((four.median, four.runs), (2.5, 4));
        assert_eq!(four.cpu_seconds_per_gb, None, "one run did not measure it");
    }

    #[test]
    fn a_run_without_its_figure_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        for text in [
            r#"{"other": 1}"#,
            r#"{"rate": "fast"}"#,
            r#"{"rate": -1}"#,
            "",
        ] {
            let paths = runs(folder.path(), &[text]);
            let error = call(folder.path(), &["--row", "r", "GB/s", "/rate", &paths[0]])
                .map(|_| ())
                .unwrap_err();
            assert!(format!("{error:#}").contains("run-0.json"), "{error:#}");
        }
    }

    #[test]
    fn a_row_without_runs_and_an_unknown_flag_are_usage_errors() {
        let folder = tempfile::tempdir().unwrap();
        for arguments in [&["--row", "r", "GB/s", "/rate"][..], &["--speed", "9"][..]] {
            let error = call(folder.path(), arguments).map(|_| ()).unwrap_err();
            assert!(
                format!("{error:#}").contains("bench-collect --out"),
                "{error:#}"
            );
        }
    }
}
