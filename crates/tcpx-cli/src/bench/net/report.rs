//! The results as a table, as a benchmark file, and as comma-separated values.

use std::fmt::Write as _;

use super::case::Contender;
use super::measure::{Results, Sample, Series};
use super::orders::{Drive, Mode};
use crate::bench::file::{File, Row, digits, machine, spread, today};
use crate::output::table::{indented, table};
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
    /// The command that repeats it.
    pub(super) command: String,
}

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

    /// A percentile in microseconds, if messages were timed.
    fn microseconds(
        &self,
        value: impl Fn(&crate::perf::summary::Latency) -> Option<f64>,
    ) -> Option<f64> {
        let values: Option<Vec<f64>> = self
            .samples
            .iter()
            .map(|sample| sample.latency.as_ref().and_then(&value))
            .collect();
        values
            .filter(|values| !values.is_empty())
            .map(|values| spread(&values).0)
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
            Contender::Tcpx,
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
                Contender::Tcpx => "send",
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
            let us = |value: Option<f64>| {
                value.map_or_else(String::new, |us| {
                    time(std::time::Duration::from_secs_f64(us / 1e6))
                })
            };
            let pinned = series.pinned();
            out.add_row([
                series.title(),
                series.contender.name().to_owned(),
                format!("{median:.3}"),
                format!("{least:.3}"),
                format!("{most:.3}"),
                us(series.microseconds(|latency| Some(latency.p50))),
                us(series.microseconds(|latency| latency.p99)),
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
            let mode = match series.case.mode {
                Mode::Latency => "latency",
                Mode::One => "one",
                Mode::Back => "back",
                Mode::Both => "both",
            };
            for (round, sample) in series.samples.iter().enumerate() {
                let us = |value: fn(&crate::perf::summary::Latency) -> Option<f64>| {
                    sample
                        .latency
                        .as_ref()
                        .and_then(value)
                        .map_or_else(String::new, |us| format!("{us:.3}"))
                };
                // Writing to a string never fails.
                let _ = writeln!(
                    text,
                    "{mode},{},{},\"{}\",{round},{:.4},{},{},{},{},{:.4},{:.4},{},{},{}",
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
                Contender::Tcpx => about.ends.clone(),
                Contender::OneSided(_) => series.contender.name().replace("tcpx", &about.ends),
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
                let of =
                    |name: &str,
                     notes: String,
                     value: fn(&crate::perf::summary::Latency) -> Option<f64>| {
                        // Every round has enough samples, or none counts.
                        let values: Option<Vec<f64>> = series
                            .samples
                            .iter()
                            .map(|sample| sample.latency.as_ref().and_then(value))
                            .collect();
                        let values = values.filter(|values| !values.is_empty())?;
                        Some(Row::of(name.to_owned(), "us", &values, notes))
                    };
                let rows = [
                    of(&format!("{name}, p50"), notes, |latency| Some(latency.p50)),
                    of(&format!("{name}, p99"), String::new(), |latency| {
                        latency.p99
                    }),
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
        File {
            schema: 1,
            subject: "Network",
            date: today(),
            machine: machine(&about.devices),
            command: about.command.clone(),
            path: Some(about.path.clone()),
            rows: rows.collect(),
            notes,
        }
        .text()
    }
}

/// Parts as one sentence; nothing for no parts.
fn sentence(parts: &[String]) -> String {
    if parts.is_empty() {
        return String::new();
    }
    format!("{}.", parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::super::case::Case;
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
                series(Contender::Tcpx, &[1.0, 4.0, 9.0]),
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
            command: "tcpx bench net".into(),
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
