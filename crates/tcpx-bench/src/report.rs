//! One report: figures in the form of `benchmarks/*.json` (described for people in
//! `benchmarks/README.md`), and their table.

use std::process::Command;

use comfy_table::{CellAlignment, Table, presets};
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
    /// What else is to be said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub notes: String,
}

impl Subject {
    /// The figures of this process's command; `machine` says what took part.
    pub fn new(subject: &str, machine: String, rows: Vec<Row>, notes: Vec<String>) -> Self {
        Self {
            schema: SCHEMA,
            subject: subject.to_owned(),
            date: today(),
            machine,
            command: typed(),
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
        let Self { schema, rows, .. } = self;
        if *schema != SCHEMA {
            return Err(format!("schema {SCHEMA} expected, {schema} found"));
        }
        let texts = [&self.subject, &self.date, &self.machine, &self.command];
        if texts.iter().any(|text| text.trim().is_empty()) {
            return Err("subject, date, machine or command is empty".to_owned());
        }
        if rows.is_empty() {
            return Err("rows is empty: nothing was measured".to_owned());
        }
        rows.iter().try_for_each(Row::check)
    }

    /// One subject out of repeated runs: a row that several have is the spread over their medians.
    /// Everything else is said once, the first in front.
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

    /// The table for a person.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN).set_header(HEAD);
        table.add_rows(self.rows.iter().map(Row::cells));
        for column in table.column_iter_mut().take(7).skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
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
        // Some runs with the figure and some without would be a median of something else.
        let cpu: Option<Vec<f64>> = rows.iter().map(|row| row.cpu_seconds_per_gb).collect();
        let first = rows.remove(0);
        let mut merged = Self::of(first.name, &first.unit, &values).cpu(&cpu.unwrap_or_default());
        // What is said of one run, such as its ratio to a peer, need not hold for all.
        if rows.iter().all(|row| row.notes == first.notes) {
            merged.notes = first.notes;
        }
        merged
    }

    fn check(&self) -> Result<(), String> {
        let Self { name, min, max, .. } = self;
        let ordered = 0.0 <= *min && *min <= self.median && self.median <= *max && max.is_finite();
        let cpu = self.cpu_seconds_per_gb.unwrap_or_default();
        let is_named = !name.trim().is_empty() && !self.unit.trim().is_empty();
        if ordered && is_named && self.runs > 0 && cpu.is_finite() && cpu >= 0.0 {
            return Ok(());
        }
        Err(format!(
            "row {name:?}: a name, a unit, 1 run or more and 0 <= min <= median <= max expected, {self:?} found"
        ))
    }

    fn cells(&self) -> [String; 8] {
        let cpu = self.cpu_seconds_per_gb;
        [
            self.name.clone(),
            self.unit.clone(),
            figure(self.median),
            figure(self.min),
            figure(self.max),
            self.runs.to_string(),
            cpu.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.2}")),
            self.notes.clone(),
        ]
    }
}

/// The columns of a table.
const HEAD: [&str; 8] = [
    "what", "unit", "median", "min", "max", "runs", "CPU", "notes",
];

/// The lines of a Markdown table.
pub fn markdown(rows: &[Row]) -> String {
    let head = HEAD.join(" | ");
    let mut text = format!("| {head} |\n|---|---|---:|---:|---:|---:|---:|---|\n");
    for row in rows {
        // Text that cannot end its table cell.
        let cells = row
            .cells()
            .map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
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

/// The command as it was typed, the program by its name.
fn typed() -> String {
    let words: Vec<String> = std::env::args().collect();
    let command = words.join(" ").replace(['\n', '\r'], " ");
    let folder = words.first().and_then(|program| program.rfind('/'));
    command[folder.map_or(0, |at| at + 1)..].to_owned()
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
            ("/machine", json!(" "), "machine or command is empty"),
            ("/rows", json!([]), "nothing was measured"),
            ("/rows/0/min", json!(2.5), "min <= median <= max"),
            ("/rows/0/min", json!(-1.0), "0 <= min"),
            ("/rows/0/runs", json!(0), "1 run or more"),
            ("/rows/0/unit", json!(""), "a unit"),
            ("/rows/0/cpu_seconds_per_gb", json!(-0.1), "row"),
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
    fn a_table_is_a_line_for_each_row_whatever_a_cell_holds() {
        let rows = vec![
            Row::of("a|b", "GB/s", &[12.34, 0.5]),
            Row::of("c", "us", &[1234.5]),
        ];
        let text = markdown(&rows);
        assert!(
            text.contains("| a\\|b | GB/s | 6.42 | 0.500 | 12.3 | 2 | - |  |"),
            "{text}"
        );
        let table = Subject::new("s", "m".to_owned(), rows, Vec::new()).table();
        assert_eq!(table.lines().count(), 4, "{table}");
        assert!(table.contains("   1234 |"), "{table}");
    }
}
