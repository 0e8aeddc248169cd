//! What a measurement takes, and where its time goes.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx::Report;

use crate::report::Row;

/// What a measurement cost one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Processor time of the process, in microseconds.
    pub cpu_us: u64,
    /// Where the time of its messages went.
    pub spent: Spent,
}

/// Where the time of transfers went at one end, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spent {
    /// On the wire.
    pub wire: u64,
    /// In unpacking.
    pub unpack: u64,
    /// In waiting for the peer, for memory or for the GPU.
    pub wait: u64,
    /// Fragments that had to be unpacked.
    pub fragments: u64,
}

impl Spent {
    /// Adds the times of one transfer.
    pub(crate) fn add(&mut self, report: &Report) {
        let us = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        self.join(&Self {
            wire: us(report.wire),
            unpack: us(report.unpack),
            wait: us(report.wait),
            fragments: report.fragments,
        });
    }

    /// Adds those of other transfers.
    pub fn join(&mut self, other: &Self) {
        self.wire = self.wire.saturating_add(other.wire);
        self.unpack = self.unpack.saturating_add(other.unpack);
        self.wait = self.wait.saturating_add(other.wait);
        self.fragments = self.fragments.saturating_add(other.fragments);
    }

    /// The share of each in percent, `who` in front.
    pub fn rows(&self, who: &str) -> Vec<Row> {
        let whole = (self.wire + self.unpack + self.wait).max(1) as f64;
        let parts = [
            ("wire", self.wire),
            ("unpack", self.unpack),
            ("wait", self.wait),
        ];
        let row = |(name, part): (&str, u64)| {
            Row::of(
                format!("{who}, time in {name}"),
                "%",
                &[part as f64 * 100.0 / whole],
            )
        };
        parts.map(row).to_vec()
    }
}

/// Times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// The shortest.
    pub min: f64,
    /// The median.
    pub p50: f64,
    /// From ten times on.
    pub p90: Option<f64>,
    /// From a hundred times on: of fewer it would be the longest one.
    pub p99: Option<f64>,
    /// The longest.
    pub max: f64,
    /// How many there are.
    pub count: usize,
}

impl Latency {
    /// `None` when there are no times.
    pub fn of(times: &[Duration]) -> Option<Self> {
        let mut sorted = times.to_vec();
        sorted.sort_unstable();
        let us = |index: usize| Some(sorted.get(index)?.as_secs_f64() * 1e6);
        let count = sorted.len();
        let at = |percent: usize| {
            // Nearest rank: the smallest time that this many percent do not exceed.
            let is_known = count >= 100 / (100 - percent);
            us((count * percent).div_ceil(100).max(1) - 1).filter(|_| is_known)
        };
        Some(Self {
            min: us(0)?,
            p50: us((count - 1) / 2)?.midpoint(us(count / 2)?),
            p90: at(90),
            p99: at(99),
            max: us(count - 1)?,
            count,
        })
    }

    /// The spread of the times, and their percentiles.
    pub fn rows(&self, what: &str) -> Vec<Row> {
        let whole = Row {
            name: format!("{what}, p50"),
            unit: "us".to_owned(),
            runs: u32::try_from(self.count).unwrap_or(u32::MAX),
            min: self.min,
            median: self.p50,
            max: self.max,
            ..Row::default()
        };
        let of = |name: &str, value: Option<f64>| {
            value.map(|us| Row::of(format!("{what}, {name}"), "us", &[us]))
        };
        let parts = [Some(whole), of("p90", self.p90), of("p99", self.p99)];
        parts.into_iter().flatten().collect()
    }
}

/// Processor time of this process, all its threads together, in microseconds.
pub(crate) fn cpu_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1_000_000 + nanos / 1000
}

/// What this process has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Has {
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Open descriptors.
    pub(crate) descriptors: u64,
}

impl Has {
    pub(crate) fn now() -> std::io::Result<Self> {
        let memory = std::fs::read_to_string("/proc/self/statm")?;
        let pages = memory.split_whitespace().nth(1).unwrap_or_default();
        let pages: u64 = pages.parse().unwrap_or(0);
        Ok(Self {
            memory: pages * rustix::param::page_size() as u64,
            descriptors: std::fs::read_dir("/proc/self/fd")?.count() as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(values: impl IntoIterator<Item = u64>) -> Option<Latency> {
        let times: Vec<_> = values.into_iter().map(Duration::from_micros).collect();
        Latency::of(&times)
    }

    #[test]
    fn percentiles_are_known_from_enough_times_on() {
        let all = us((1..=100).rev()).expect("times");
        assert_eq!((all.min, all.p50, all.max), (1.0, 50.5, 100.0));
        assert_eq!((all.p90, all.p99), (Some(90.0), Some(99.0)));
        let ten = us([1, 1, 1, 1, 1, 1, 1, 1, 1, 1000]).expect("times");
        assert_eq!((ten.p90, ten.p99), (Some(1.0), None));
        let one = us([7]).expect("a time");
        assert_eq!((one.p50, one.p90, one.max), (7.0, None, 7.0));
        assert_eq!(us([4, 2]).expect("times").p50, 3.0);
        assert_eq!(us([]), None);
    }

    #[test]
    fn shares_add_up_and_nothing_is_divided_by_zero() {
        let spent = Spent {
            wire: 600,
            unpack: 300,
            wait: 100,
            fragments: 0,
        };
        let medians = |spent: &Spent| {
            let rows = spent.rows("sender");
            rows.iter().map(|row| row.median).collect::<Vec<_>>()
        };
        assert_eq!(medians(&spent), [60.0, 30.0, 10.0]);
        assert_eq!(medians(&Spent::default()), [0.0; 3]);
    }
}
