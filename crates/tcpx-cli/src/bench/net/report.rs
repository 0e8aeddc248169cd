//! The results as a table, as a benchmark file, and as comma-separated values.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::case::{Case, Contender};
use super::measure::{Results, Sample, Series};
use super::orders::{Drive, Mode, Op};
use crate::bench::file::{File, Row, digits, spread};
use crate::error::Error;
use crate::output::table::{indented, table};
use crate::perf::summary::Latency;
use crate::sizes::{Size, time};

/// What all figures have in common.
#[derive(Debug)]
pub(super) struct About {
    /// `GPU 0 -> GPU 1`.
    pub(super) ends: String,
    /// The data path, in words.
    pub(super) path: String,
    /// What the machine has, in words.
    pub(super) devices: String,
}

type Percentile = fn(&Latency) -> Option<f64>;

impl Series {
    fn values(&self, value: impl Fn(&Sample) -> f64) -> Vec<f64> {
        self.samples.iter().map(value).collect()
    }

    fn median(&self, value: impl Fn(&Sample) -> f64) -> f64 {
        spread(&self.values(value)).0
    }

    fn cpu(&self, end: usize) -> f64 {
        self.median(|sample| sample.cpu[end])
    }

    /// A percentile of each round in microseconds, where every round has enough samples for it.
    fn microseconds(&self, value: Percentile) -> Option<Vec<f64>> {
        let of = |sample: &Sample| sample.latency.as_ref().and_then(value);
        let values: Option<Vec<f64>> = self.samples.iter().map(of).collect();
        values.filter(|values| !values.is_empty())
    }

    fn pinned(&self) -> u64 {
        let most = self
            .samples
            .iter()
            .map(|sample| sample.pinned[0].max(sample.pinned[1]));
        most.max().unwrap_or(0)
    }

    /// TCP bytes for each payload byte, where they can be seen.
    fn tcp(&self) -> Option<f64> {
        let seen: Vec<f64> = self
            .samples
            .iter()
            .filter_map(|sample| sample.tcp)
            .collect();
        (!seen.is_empty()).then(|| spread(&seen).0)
    }

    fn title(&self) -> String {
        let size = Size(self.case.bytes);
        match self.case.mode {
            Mode::Latency => format!("{size}, half a round trip"),
            Mode::One | Mode::Back => format!("{size}, {} in flight", self.case.depth),
            Mode::Both => format!("{size}, {} in flight each way, sum", self.case.depth),
        }
    }
}

impl Results {
    /// The median over the rounds of how our figure stands to `other`'s in the same round: of rates, or of times where
    /// round trips are measured.
    fn ratio(&self, ours: &Series, other: Contender) -> Option<f64> {
        let theirs = self
            .series
            .iter()
            .find(|series| series.case == ours.case && series.contender == other)?;
        let pairs = ours.samples.iter().zip(&theirs.samples);
        let ratios: Vec<f64> = pairs
            .filter_map(|(a, b)| {
                let (a, b) = match ours.case.mode {
                    Mode::Latency => (a.latency?.p50, b.latency?.p50),
                    _ => (a.rate, b.rate),
                };
                (b > 0.0).then(|| a / b)
            })
            .collect();
        (!ratios.is_empty()).then(|| spread(&ratios).0)
    }

    /// `0.98 of raw's rate, 1.20 of iperf3's rate`.
    fn ratios(&self, series: &Series) -> Vec<String> {
        if series.contender.op().is_none() {
            return Vec::new();
        }
        let what = if series.case.mode == Mode::Latency {
            "p50"
        } else {
            "rate"
        };
        [
            Contender::Ours(Op::Send),
            Contender::Raw(Drive::Blocking),
            Contender::Raw(Drive::Spinning),
            Contender::Iperf3,
        ]
        .into_iter()
        .filter(|other| *other != series.contender)
        .filter(|other| *other != Contender::Iperf3 || !self.iperf3_differs)
        .filter_map(|other| {
            let ratio = self.ratio(series, other)?;
            let name = match other {
                Contender::Ours(Op::Send) => "send",
                other => other.name(),
            };
            Some(format!("{ratio:.2} of the {what} of {name}"))
        })
        .collect()
    }

    pub(super) fn table(&self) -> String {
        let header = [
            "message", "who", "GB/s", "least", "most", "p50", "p99", "CPU s/GB", "there", "pinned",
            "beside",
        ];
        let mut out = table(&header, &[2, 3, 4, 5, 6, 7, 8, 9]);
        for series in &self.series {
            let (median, least, most) = spread(&series.values(|sample| sample.rate));
            let us = |value: Percentile| {
                series
                    .microseconds(value)
                    .map_or_else(String::new, |values| {
                        time(Duration::from_secs_f64(spread(&values).0 / 1e6))
                    })
            };
            let pinned = series.pinned();
            out.add_row([
                series.title(),
                series.contender.name().to_owned(),
                format!("{median:.3}"),
                format!("{least:.3}"),
                format!("{most:.3}"),
                us(|latency| Some(latency.p50)),
                us(|latency| latency.p99),
                format!("{:.3}", series.cpu(0)),
                format!("{:.3}", series.cpu(1)),
                if pinned == 0 {
                    String::new()
                } else {
                    Size(pinned).to_string()
                },
                self.ratios(series).join(", "),
            ]);
        }
        indented(&out, "").trim_end().to_owned()
    }

    pub(super) fn csv(&self) -> String {
        let mut text = "mode,bytes,in_flight,who,round,gb_per_second,p50_us,p90_us,p99_us,max_us,cpu_s_per_gb_here,cpu_s_per_gb_there,pinned_here,pinned_there,tcp_bytes_per_payload_byte\n".to_owned();
        for series in &self.series {
            for (round, sample) in series.samples.iter().enumerate() {
                let us = |value: Percentile| {
                    let us = sample.latency.as_ref().and_then(value);
                    us.map_or_else(String::new, |us| format!("{us:.3}"))
                };
                // Writing to a string never fails.
                let _ = writeln!(
                    text,
                    "{},{},{},\"{}\",{round},{:.4},{},{},{},{},{:.4},{:.4},{},{},{}",
                    series.case.mode,
                    series.case.bytes,
                    series.case.depth,
                    series.contender.name(),
                    sample.rate,
                    us(|latency| Some(latency.p50)),
                    us(|latency| latency.p90),
                    us(|latency| latency.p99),
                    us(|latency| Some(latency.max)),
                    sample.cpu[0],
                    sample.cpu[1],
                    sample.pinned[0],
                    sample.pinned[1],
                    sample
                        .tcp
                        .map_or_else(String::new, |ratio| format!("{ratio:.5}")),
                );
            }
        }
        text
    }

    pub(super) fn json(&self, about: &About) -> String {
        let rows = self.series.iter().flat_map(|series| {
            let who = match series.contender {
                ours @ Contender::Ours(_) => ours.name().replace("tcpx", &about.ends),
                other => other.name().to_owned(),
            };
            let name = format!("{}: {who}", series.title());
            let mut notes = self.ratios(series);
            if let Some(tcp) = series.tcp() {
                notes.push(format!("{tcp:.4} TCP bytes a payload byte"));
            }
            if series.pinned() > 0 {
                notes.push(format!(
                    "{} of pinned slots in use at most",
                    Size(series.pinned())
                ));
            }
            let notes = sentence(&notes);
            if series.case.mode == Mode::Latency {
                let of = |percent: &str, notes: String, value: Percentile| {
                    let values = series.microseconds(value)?;
                    Some(Row::of(format!("{name}, {percent}"), "us", &values, notes))
                };
                let rows = [
                    of("p50", notes, |latency| Some(latency.p50)),
                    of("p99", String::new(), |latency| latency.p99),
                ];
                rows.into_iter().flatten().collect()
            } else {
                let mut row = Row::of(name, "GB/s", &series.values(|sample| sample.rate), notes);
                row.cpu_seconds_per_gb = Some(digits(series.cpu(0) + series.cpu(1)));
                row.cpu_seconds_per_gb_each = Some([0, 1].map(|end| digits(series.cpu(end))));
                row.tcp_bytes_per_payload_byte = series.tcp().map(|tcp| (tcp * 1e4).round() / 1e4);
                vec![row]
            }
        });
        let mut notes = vec![
            "Each run is one measurement in its round; the contenders of a case take turns within a round. Contents of every size were compared in both directions before anything was timed.".to_owned(),
        ];
        if !self.notes.is_empty() {
            notes.push(format!(
                "Beside it: {}. `raw` are plain send and receive loops over host memory with as many streams, a thread for each end of each; a message is divided among them.",
                self.notes.join("; ")
            ));
        }
        let mut file = File::new("Network", &about.devices, rows.collect(), notes);
        file.path = Some(about.path.clone());
        file.text()
    }
}

/// Parts as one sentence; nothing for no parts.
fn sentence(parts: &[String]) -> String {
    if parts.is_empty() {
        return String::new();
    }
    format!("{}.", parts.join("; "))
}

/// Most files of one case and contender in a folder.
const MOST_RUNS: u32 = 10_000;

/// Writes a measurement to `FOLDER/CASE.WHO.N.json` with the first N that is free, as `cargo xtask bench-collect`
/// reads it.
pub(super) fn write_run(
    folder: &Path,
    case: &Case,
    contender: Contender,
    sample: &Sample,
) -> Result<(), Error> {
    let who = contender.name().replace(", ", "-");
    let mut value = json!({
        "case": case.name,
        "who": who,
        "gb_per_second": sample.rate,
        "cpu_seconds_per_gb": sample.cpu[0] + sample.cpu[1],
        "cpu_seconds_per_gb_each": sample.cpu,
        "verified": true,
    });
    if let Some(latency) = &sample.latency {
        value["latency_us"] = json!({ "p50": latency.p50, "p99": latency.p99 });
    }
    if let Some(tcp) = sample.tcp {
        value["tcp_bytes_per_payload_byte"] = json!(tcp);
    }
    std::fs::create_dir_all(folder).map_err(Error::io("write", folder))?;
    for number in 1..=MOST_RUNS {
        let path = folder.join(format!("{}.{who}.{number}.json", case.name));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => {
                return opened
                    .and_then(|mut file| writeln!(file, "{value}"))
                    .map_err(Error::io("write", &path));
            }
        }
    }
    Err(Error::io("write", folder)(
        io::ErrorKind::AlreadyExists.into(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(contender: Contender, rates: &[f64]) -> Series {
        let samples = rates.iter().map(|&rate| Sample {
            rate,
            cpu: [0.1, 0.2],
            ..Sample::default()
        });
        let case = Case {
            name: "one".into(),
            mode: Mode::One,
            bytes: 1 << 20,
            depth: 8,
        };
        Series::new(case, contender, samples.collect())
    }

    #[test]
    fn ratios_are_those_of_the_same_round() {
        let results = Results {
            series: vec![
                series(Contender::Ours(Op::Send), &[1.0, 4.0, 9.0]),
                series(Contender::Raw(Drive::Blocking), &[2.0, 4.0, 3.0]),
            ],
            streams: 2,
            notes: Vec::new(),
            iperf3_differs: false,
        };
        assert_eq!(
            results.ratio(&results.series[0], Contender::Raw(Drive::Blocking)),
            Some(1.0)
        );
        assert_eq!(results.ratio(&results.series[0], Contender::Iperf3), None);
        let about = About {
            ends: "host -> host".into(),
            path: "tcp".into(),
            devices: "no GPU".into(),
        };
        let file: serde_json::Value = serde_json::from_str(&results.json(&about)).expect("JSON");
        assert_eq!(file["rows"][0]["median"], 4.0);
        assert_eq!(file["rows"][0]["cpu_seconds_per_gb"], 0.3);
        assert_eq!(
            file["rows"][0]["cpu_seconds_per_gb_each"],
            serde_json::json!([0.1, 0.2])
        );
        assert_eq!(file["path"], "tcp");
        assert_eq!(file["rows"][0]["notes"], "1.00 of the rate of raw.");
        assert_eq!(results.csv().lines().count(), 7);
    }
}
