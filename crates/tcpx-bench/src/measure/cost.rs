//! What a measurement takes, and where its time goes.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx::Report;

use crate::Error;
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

impl Cost {
    /// Since this much processor time.
    pub(crate) fn since(cpu: u64) -> Self {
        Self {
            cpu_us: cpu_us().saturating_sub(cpu),
            ..Self::default()
        }
    }

    /// Adds that of other messages.
    pub(crate) fn join(&mut self, other: &Self) {
        self.cpu_us += other.cpu_us;
        self.spent.join(&other.spent);
    }
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

/// Processor time of this process, all its threads together, in microseconds.
pub(crate) fn cpu_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1_000_000 + nanos / 1000
}

/// Bytes of memory that this process has, and open descriptors.
pub(crate) fn has_now() -> Result<[u64; 2], Error> {
    let look = Error::system("look at this process");
    let memory = std::fs::read_to_string("/proc/self/statm").map_err(look)?;
    let pages = memory.split_whitespace().nth(1).unwrap_or_default();
    let pages: u64 = pages.parse().unwrap_or(0);
    let descriptors = std::fs::read_dir("/proc/self/fd").map_err(look)?.count();
    Ok([
        pages * rustix::param::page_size() as u64,
        descriptors as u64,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

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
