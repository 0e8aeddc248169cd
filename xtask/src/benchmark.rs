//! The file format of `benchmarks/*.json`, described for people in `benchmarks/README.md`.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// The only version of the format.
pub(crate) const SCHEMA: u32 = 1;

/// One subject: what was measured together, on one machine, on one day, by one command.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Subject {
    pub(crate) schema: u32,
    pub(crate) subject: String,
    /// `YYYY-MM-DD`, UTC.
    pub(crate) date: String,
    pub(crate) machine: String,
    /// Repeats the measurement from a checkout.
    pub(crate) command: String,
    /// The way that the bytes took; absent where rows took several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
    /// The file to whose table these rows belong; absent for a table of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) joins: Option<String>,
    pub(crate) rows: Vec<Row>,
    #[serde(default)]
    pub(crate) notes: Vec<String>,
}

/// One figure: the spread over repeated runs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// `GB/s` (10^9 bytes a second), `us`, `ms`, `s`, ...
    pub(crate) unit: String,
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) runs: u32,
    /// Processor seconds for 10^9 bytes, both sides together; absent where it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_seconds_per_gb: Option<f64>,
    /// The same of the end that measured, and of the other one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_seconds_per_gb_each: Option<[f64; 2]>,
    /// TCP bytes for each payload byte, those of headers and control frames among them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tcp_bytes_per_payload_byte: Option<f64>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) notes: String,
}

impl Subject {
    /// Reads and checks one file's text.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let subject: Self =
            serde_json::from_str(text).context("not a benchmark file of schema 1")?;
        subject.check()?;
        Ok(subject)
    }

    /// Refuses what a table could not state honestly.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(
            self.schema == SCHEMA,
            "schema {SCHEMA} expected, {} found",
            self.schema
        );
        for (field, text) in [
            ("subject", &self.subject),
            ("machine", &self.machine),
            ("command", &self.command),
        ] {
            ensure!(!text.trim().is_empty(), "{field} is empty");
        }
        ensure!(
            is_date(&self.date),
            "date: YYYY-MM-DD expected, {:?} found",
            self.date
        );
        ensure!(!self.rows.is_empty(), "rows is empty: nothing was measured");
        for row in &self.rows {
            row.check().with_context(|| format!("row {:?}", row.name))?;
        }
        Ok(())
    }
}

impl Row {
    fn check(&self) -> Result<()> {
        ensure!(!self.name.trim().is_empty(), "name is empty");
        ensure!(!self.unit.trim().is_empty(), "unit is empty");
        ensure!(self.runs >= 1, "runs is 0: nothing was measured");
        let ordered = 0.0 <= self.min && self.min <= self.median && self.median <= self.max;
        ensure!(
            ordered && self.max.is_finite(),
            "0 <= min <= median <= max expected, {} / {} / {} found",
            self.min,
            self.median,
            self.max
        );
        let [here, there] = self
            .cpu_seconds_per_gb_each
            .map_or([None; 2], |each| each.map(Some));
        for (name, figure) in [
            ("cpu_seconds_per_gb", self.cpu_seconds_per_gb),
            ("cpu_seconds_per_gb_each", here),
            ("cpu_seconds_per_gb_each", there),
            (
                "tcp_bytes_per_payload_byte",
                self.tcp_bytes_per_payload_byte,
            ),
        ] {
            let figure = figure.unwrap_or_default();
            ensure!(
                figure.is_finite() && figure >= 0.0,
                "{name}: a number of 0 or more expected, {figure} found"
            );
        }
        Ok(())
    }
}

/// Year, month 1-12 and day 1-31, as digits with two hyphens.
fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let [year, month, day] = parts.as_slice() else {
        return false;
    };
    let number = |part: &str, digits: usize| {
        (part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit()))
            .then(|| part.parse::<u32>().ok())
            .flatten()
    };
    number(year, 4).is_some()
        && number(month, 2).is_some_and(|month| (1..=12).contains(&month))
        && number(day, 2).is_some_and(|day| (1..=31).contains(&day))
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
    fn a_whole_file_is_read() {
        let subject = Subject::parse(&valid().to_string()).unwrap();
        assert_eq!(subject.rows[0].runs, 5);
        assert_eq!(subject.rows[0].cpu_seconds_per_gb, None);
    }

    #[test]
    fn each_dishonest_file_is_refused_by_name() {
        for (pointer, value, expected) in [
            ("/schema", json!(2), "schema 1 expected, 2 found"),
            ("/date", json!("31.1.2026"), "YYYY-MM-DD"),
            ("/date", json!("2026-13-01"), "YYYY-MM-DD"),
            ("/machine", json!(" "), "machine is empty"),
            ("/command", json!(""), "command is empty"),
            ("/rows", json!([]), "nothing was measured"),
            ("/rows/0/min", json!(2.5), "min <= median <= max"),
            ("/rows/0/max", json!(1.5), "min <= median <= max"),
            ("/rows/0/min", json!(-1.0), "0 <= min"),
            ("/rows/0/runs", json!(0), "runs is 0"),
            ("/rows/0/unit", json!(""), "unit is empty"),
            (
                "/rows/0/cpu_seconds_per_gb_each",
                json!([0.1, -0.1]),
                "cpu_seconds_per_gb_each: a number of 0 or more",
            ),
            (
                "/rows/0/tcp_bytes_per_payload_byte",
                json!(-1.0),
                "tcp_bytes_per_payload_byte: a number of 0 or more",
            ),
        ] {
            let mut file = valid();
            match file.pointer_mut(pointer) {
                Some(place) => *place = value,
                None => {
                    let name = pointer.rsplit('/').next().unwrap();
                    file["rows"][0][name] = value;
                }
            }
            let error = format!("{:#}", Subject::parse(&file.to_string()).unwrap_err());
            assert!(error.contains(expected), "{pointer}: {error}");
        }
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let mut file = valid();
        file["rows"][0]["p99"] = json!(1.0);
        let error = format!("{:#}", Subject::parse(&file.to_string()).unwrap_err());
        assert!(error.contains("p99"), "{error}");
    }
}
