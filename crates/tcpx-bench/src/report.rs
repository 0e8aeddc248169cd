//! One report: figures in the form of `benchmarks/*.json` (described for people in `benchmarks/README.md`), and their
//! table.

use std::fmt::Write as _;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::statistics::median;

/// The only version of the form.
pub const SCHEMA: u32 = 1;

/// One subject: what was measured together, on one machine, on one day, by one command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Heading of the section.
    pub subject: String,
    /// `YYYY-MM-DD`, UTC.
    pub date: String,
    /// Cores, GPUs, driver, kernel.
    pub machine: String,
    /// Repeats the measurement from a checkout.
    pub command: String,
    /// The way that the bytes took; absent where rows took several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The figures.
    pub rows: Vec<Row>,
    /// How it was measured, and what was not.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// One figure: the spread over repeated runs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What was moved, and by whom.
    pub name: String,
    /// `GB/s` (10^9 bytes a second), `us`, `s`, `%`, ...
    pub unit: String,
    /// The middle of the runs.
    pub median: f64,
    /// The lowest run.
    pub min: f64,
    /// The highest run.
    pub max: f64,
    /// How many there were.
    pub runs: u32,
    /// Processor seconds for 10^9 bytes, both sides together; absent where it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_seconds_per_gb: Option<f64>,
    /// The same of the end that measured, and of the other one; in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_seconds_per_gb_each: Option<[f64; 2]>,
    /// TCP bytes for each payload byte; in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_bytes_per_payload_byte: Option<f64>,
    /// What else is to be said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub notes: String,
}

/// Flags of a command that say where files are.
const FILES: [&str; 3] = ["--plot", "--out", "--key-file"];

impl Subject {
    /// The figures of this process's command; `machine` says what took part.
    pub fn new(subject: &str, machine: String, rows: Vec<Row>, notes: Vec<String>) -> Self {
        Self {
            schema: SCHEMA,
            subject: subject.to_owned(),
            date: today(),
            machine,
            command: typed(std::env::args()),
            path: None,
            rows,
            notes,
        }
    }

    /// Reads and checks one file's text.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let subject: Self = serde_json::from_str(text)
            .map_err(|error| format!("not a benchmark file of schema {SCHEMA}: {error}"))?;
        subject.check()?;
        Ok(subject)
    }

    /// As a file.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Refuses what a table could not state honestly.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        ensure(self.schema == SCHEMA, || {
            format!("schema {SCHEMA} expected, {} found", self.schema)
        })?;
        for (field, text) in [
            ("subject", &self.subject),
            ("machine", &self.machine),
            ("command", &self.command),
        ] {
            ensure(!text.trim().is_empty(), || format!("{field} is empty"))?;
        }
        ensure(is_date(&self.date), || {
            format!("date: YYYY-MM-DD expected, {:?} found", self.date)
        })?;
        ensure(!self.rows.is_empty(), || {
            "rows is empty: nothing was measured".to_owned()
        })?;
        for row in &self.rows {
            let wrong = |why| format!("row {:?}: {why}", row.name);
            row.check().map_err(wrong)?;
        }
        Ok(())
    }

    /// One subject out of repeated runs: a row that several have is the spread over their medians. Everything else is
    /// said once, the first in front.
    pub fn merge(subjects: Vec<Self>) -> Option<Self> {
        let mut all = subjects.into_iter();
        let mut merged = all.next()?;
        let mut values: Vec<Vec<Row>> = merged.rows.drain(..).map(|row| vec![row]).collect();
        for other in all {
            for row in other.rows {
                let same = |known: &&mut Vec<Row>| {
                    (&known[0].name, &known[0].unit) == (&row.name, &row.unit)
                };
                match values.iter_mut().find(same) {
                    Some(known) => known.push(row),
                    None => values.push(vec![row]),
                }
            }
            for note in other.notes {
                if !merged.notes.contains(&note) {
                    merged.notes.push(note);
                }
            }
            if !merged.command.split("; ").any(|one| one == other.command) {
                merged.command = format!("{}; {}", merged.command, other.command);
            }
        }
        merged.rows = values.into_iter().map(Row::merge).collect();
        Some(merged)
    }

    /// The table for a person: the lines of a Markdown table, its columns in line.
    pub fn table(&self) -> String {
        aligned(&table(&self.rows))
    }
}

impl Row {
    /// A row of `values`, one for each run.
    pub fn of(name: impl Into<String>, unit: &str, values: &[f64]) -> Self {
        let ends = |fold: fn(f64, f64) -> f64| values.iter().copied().reduce(fold);
        Self {
            name: name.into(),
            unit: unit.to_owned(),
            median: digits(median(values)),
            min: digits(ends(f64::min).unwrap_or(f64::NAN)),
            max: digits(ends(f64::max).unwrap_or(f64::NAN)),
            runs: u32::try_from(values.len()).unwrap_or(u32::MAX),
            ..Self::default()
        }
    }

    /// With processor seconds for 10^9 bytes, of each run.
    #[must_use]
    pub fn cpu(mut self, values: &[f64]) -> Self {
        self.cpu_seconds_per_gb = (!values.is_empty()).then(|| digits(median(values)));
        self
    }

    fn merge(mut rows: Vec<Self>) -> Self {
        if rows.len() == 1 {
            return rows.remove(0);
        }
        let values: Vec<f64> = rows.iter().map(|row| row.median).collect();
        let cpu: Vec<f64> = rows
            .iter()
            .filter_map(|row| row.cpu_seconds_per_gb)
            .collect();
        let first = rows.remove(0);
        // Some runs with the figure and some without would be a median of something else.
        let cpu = if cpu.len() == values.len() {
            &cpu[..]
        } else {
            &[]
        };
        let mut merged = Self::of(first.name, &first.unit, &values).cpu(cpu);
        // What is said of one run, such as its ratio to a peer, need not hold for all.
        if rows.iter().all(|row| row.notes == first.notes) {
            merged.notes = first.notes;
        }
        merged
    }

    fn check(&self) -> Result<(), String> {
        ensure(!self.name.trim().is_empty(), || "name is empty".to_owned())?;
        ensure(!self.unit.trim().is_empty(), || "unit is empty".to_owned())?;
        ensure(self.runs >= 1, || {
            "runs is 0: nothing was measured".to_owned()
        })?;
        let ordered = 0.0 <= self.min && self.min <= self.median && self.median <= self.max;
        ensure(ordered && self.max.is_finite(), || {
            format!(
                "0 <= min <= median <= max expected, {} / {} / {} found",
                self.min, self.median, self.max
            )
        })?;
        let cpu = self.cpu_seconds_per_gb.unwrap_or_default();
        ensure(cpu.is_finite() && cpu >= 0.0, || {
            format!("cpu_seconds_per_gb: a number of 0 or more expected, {cpu} found")
        })
    }
}

/// The lines of a Markdown table.
pub fn table(rows: &[Row]) -> String {
    let mut text = "| what | unit | median | min | max | runs | CPU | notes |\n|---|---|---:|---:|---:|---:|---:|---|\n"
        .to_owned();
    for row in rows {
        let cpu = row.cpu_seconds_per_gb;
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            cell(&row.name),
            cell(&row.unit),
            figure(row.median),
            figure(row.min),
            figure(row.max),
            row.runs,
            cpu.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.2}")),
            cell(&row.notes),
        );
    }
    text
}

/// The same lines with their columns in line.
fn aligned(table: &str) -> String {
    let cells = |line: &str| -> Vec<String> {
        let inner = line
            .strip_prefix('|')
            .and_then(|line| line.strip_suffix('|'));
        let inner = inner.unwrap_or(line).replace("\\|", "\u{1}");
        let cells = inner.split('|');
        cells
            .map(|cell| cell.trim().replace('\u{1}', "|"))
            .collect()
    };
    let lines: Vec<Vec<String>> = table.lines().map(cells).collect();
    let [head, rule, rows @ ..] = &lines[..] else {
        return table.to_owned();
    };
    let width = |at: usize| {
        let of = rows.iter().chain([head]).filter_map(|line| line.get(at));
        of.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for line in rows.iter().fold(vec![head], |mut all, line| {
        all.push(line);
        all
    }) {
        let mut out = String::new();
        for (at, cell) in line.iter().enumerate() {
            let (width, right) = (widths[at], rule[at].ends_with(':'));
            let _ = match right {
                true => write!(out, "{cell:>width$}  "),
                false => write!(out, "{cell:width$}  "),
            };
        }
        text.push_str(out.trim_end());
        text.push('\n');
    }
    text
}

/// Three significant digits up to 1,000, whole numbers above: no digit that the spread would hide.
pub fn figure(value: f64) -> String {
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

/// `4 KiB`; bytes where no power of 1,024 divides it.
pub fn size(bytes: u64) -> String {
    for (unit, power) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes >= 1 << power && bytes.is_multiple_of(1 << power) {
            return format!("{} {unit}", bytes >> power);
        }
    }
    format!("{bytes} B")
}

/// Four significant digits: no rate is so low that it reads as none.
fn digits(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    holds.then_some(()).ok_or_else(why)
}

/// The command as it was typed, without where files are.
fn typed(arguments: impl Iterator<Item = String>) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut arguments = arguments.map(|word| word.replace(['\n', '\r'], " "));
    while let Some(word) = arguments.next() {
        let flag = word.split('=').next().unwrap_or_default();
        if words.is_empty() {
            // The program by its name.
            words.push(word.rsplit('/').next().unwrap_or_default().to_owned());
        } else if !FILES.contains(&flag) {
            words.push(word);
        } else if flag == word {
            arguments.next();
        }
    }
    words.join(" ")
}

/// What every file says of the host: `devices`, then cores and kernel.
pub fn machine(devices: &str) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{devices}, {cores} cores, Linux {}", kernel.trim())
}

/// The date in UTC, as the program `date` says it.
fn today() -> String {
    let said = Command::new("date").args(["-u", "+%F"]).output();
    let said = said
        .ok()
        .and_then(|said| String::from_utf8(said.stdout).ok());
    said.map_or_else(|| "1970-01-01".to_owned(), |date| date.trim().to_owned())
}

/// `2026-01-31`: digits and two hyphens, a month and a day that can be.
fn is_date(text: &str) -> bool {
    let digits = |byte: (usize, u8)| match byte {
        (4 | 7, byte) => byte == b'-',
        (_, byte) => byte.is_ascii_digit(),
    };
    text.len() == 10
        && text.bytes().enumerate().all(digits)
        && ("01"..="12").contains(&&text[5..7])
        && ("01"..="31").contains(&&text[8..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn valid() -> Value {
        json!({
            "schema": 1, "subject": "Loopback", "date": "2026-01-31", "machine": "two cores",
            "command": "tcpx perf client 127.0.0.1 host",
            "rows": [{"name": "64 MiB", "unit": "GB/s", "median": 2.0, "min": 1.0, "max": 3.0, "runs": 5}],
        })
    }

    #[test]
    fn each_dishonest_file_is_refused_by_name() {
        Subject::parse(&valid().to_string()).expect("a whole file");
        for (pointer, value, expected) in [
            ("/schema", json!(2), "schema 1 expected, 2 found"),
            ("/date", json!("31.1.2026"), "YYYY-MM-DD"),
            ("/date", json!("2026-13-01"), "YYYY-MM-DD"),
            ("/machine", json!(" "), "machine is empty"),
            ("/rows", json!([]), "nothing was measured"),
            ("/rows/0/min", json!(2.5), "min <= median <= max"),
            ("/rows/0/min", json!(-1.0), "0 <= min"),
            ("/rows/0/runs", json!(0), "runs is 0"),
            ("/rows/0/unit", json!(""), "unit is empty"),
            ("/rows/0/cpu_seconds_per_gb", json!(-0.1), "0 or more"),
            ("/rows/0/p99", json!(1.0), "p99"),
        ] {
            let mut file = valid();
            let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
            file.pointer_mut(parent).expect("a parent")[name] = value;
            let error = Subject::parse(&file.to_string()).expect_err(pointer);
            assert!(error.contains(expected), "{pointer}: {error}");
        }
    }

    #[test]
    fn repeated_runs_become_one_row_with_their_spread() {
        let run = |rate: f64, cpu: Option<f64>| {
            let mut file = valid();
            for field in ["median", "min", "max"] {
                file["rows"][0][field] = json!(rate);
            }
            file["rows"][0]["cpu_seconds_per_gb"] = json!(cpu);
            Subject::parse(&file.to_string()).expect("a run")
        };
        let all = |cpu| vec![run(3.0, Some(0.3)), run(1.0, cpu), run(2.0, Some(0.2))];
        let merged = Subject::merge(all(Some(0.1))).expect("runs");
        let row = &merged.rows[0];
        assert_eq!((row.median, row.min, row.max, row.runs), (2.0, 1.0, 3.0, 3));
        assert_eq!(row.cpu_seconds_per_gb, Some(0.2));
        assert_eq!(merged.command, "tcpx perf client 127.0.0.1 host");
        let merged = Subject::merge(all(None)).expect("runs");
        assert_eq!(merged.rows[0].cpu_seconds_per_gb, None);
        for (notes, expected) in [(["a"; 3], "a"), (["a", "b", "a"], "")] {
            let mut runs = all(None);
            for (run, note) in runs.iter_mut().zip(notes) {
                run.rows[0].notes = note.to_owned();
            }
            assert_eq!(Subject::merge(runs).expect("runs").rows[0].notes, expected);
        }
    }

    #[test]
    fn a_table_has_its_columns_in_line_whatever_a_cell_holds() {
        let rows = [
            Row::of("a|b", "GB/s", &[12.34, 0.5]),
            Row::of("c", "us", &[1234.5]),
        ];
        let text = table(&rows);
        assert!(
            text.contains("| a\\|b | GB/s | 6.42 | 0.500 | 12.3 | 2 | - |  |"),
            "{text}"
        );
        let text = aligned(&text);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[1].starts_with("a|b   GB/s    6.42  0.500  12.3     2    -"),
            "{text}"
        );
        assert!(lines[2].starts_with("c     us      1234"), "{text}");
    }

    #[test]
    fn a_command_is_told_as_typed_without_its_files() {
        let words = "/opt/tcpx bench net --sizes 1KiB --plot=b.svg --key-file k --json";
        let command = typed(words.split(' ').map(str::to_owned));
        assert_eq!(command, "tcpx bench net --sizes 1KiB --json");
    }
}
