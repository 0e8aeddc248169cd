//! A benchmark file as `benchmarks/README.md` describes it, and what every such file says of the host.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::host::{HostFacts, RealHost};

/// One subject: what was measured together.
#[derive(Debug, Serialize)]
pub(crate) struct File {
    pub(crate) schema: u32,
    pub(crate) subject: &'static str,
    pub(crate) date: String,
    pub(crate) machine: String,
    pub(crate) command: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) notes: Vec<String>,
}

/// One figure.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) runs: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_seconds_per_gb: Option<f64>,
    /// Here, and at the other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_seconds_per_gb_each: Option<[f64; 2]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tcp_bytes_per_payload_byte: Option<f64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) notes: String,
}

impl Row {
    /// A row of `values`, one for each round.
    pub(crate) fn of(name: String, unit: &'static str, values: &[f64], notes: String) -> Self {
        let (median, min, max) = spread(values);
        Self {
            name,
            unit,
            median: digits(median),
            min: digits(min),
            max: digits(max),
            runs: u32::try_from(values.len()).unwrap_or(u32::MAX),
            notes,
            ..Self::default()
        }
    }
}

/// Flags of the command that say where files are.
const FILES: [&str; 4] = ["--csv", "--plot", "--runs", "--key-file"];

impl File {
    /// The figures of this process's command; `devices` begin the line about the machine.
    pub(crate) fn new(
        subject: &'static str,
        devices: &str,
        rows: Vec<Row>,
        notes: Vec<String>,
    ) -> Self {
        Self {
            schema: 1,
            subject,
            date: today(),
            machine: machine(devices),
            command: typed(std::env::args().skip(1)),
            path: None,
            rows,
            notes,
        }
    }

    pub(crate) fn text(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// The command as it was typed, without where files are.
fn typed(mut arguments: impl Iterator<Item = String>) -> String {
    let mut words = vec!["tcpx".to_owned()];
    while let Some(word) = arguments.next() {
        let flag = word.split('=').next().unwrap_or_default();
        if !FILES.contains(&flag) {
            words.push(word);
        } else if flag == word {
            arguments.next();
        }
    }
    words.join(" ")
}

/// Median, least and most.
pub(crate) fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    let last = sorted.len().saturating_sub(1);
    let median = at(last / 2).midpoint(at(sorted.len() / 2));
    (median, at(0), at(last))
}

/// Four significant digits: no rate is so low that it reads as none.
pub(crate) fn digits(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// The host in a line, which begins with its `devices`.
pub(crate) fn machine(devices: &str) -> String {
    let facts = HostFacts::of(&RealHost::default());
    format!("{devices}, {}", facts.line())
}

/// The date in UTC.
pub(crate) fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    date(now.map_or(0, |now| now.as_secs() / 86_400))
}

/// The date that many days after 1970-01-01, by the calendar's cycle of 400 years, which begins in March.
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (cycle * 400 + year, month + 3),
        _ => (cycle * 400 + year + 1, month - 9),
    };
    format!("{year:04}-{month:02}-{of_month:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_in_the_middle() {
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]), (2.5, 1.0, 4.0));
        assert_eq!(spread(&[9.0, 5.0, 1.0]), (5.0, 1.0, 9.0));
        assert_eq!(spread(&[]), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_command_is_told_as_typed_without_its_files() {
        let words = "bench net --csv a.csv --sizes 1KiB --plot=b.svg --json";
        let command = typed(words.split(' ').map(str::to_owned));
        assert_eq!(command, "tcpx bench net --sizes 1KiB --json");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, text) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_453, "2025-12-31"),
            (20_454, "2026-01-01"),
        ] {
            assert_eq!(date(days), text);
        }
    }
}
