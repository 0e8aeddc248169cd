//! What the timed transfers add up to.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::output::table::{indented, table};
use crate::sizes::{Size, grouped, time};

/// Times of the single transfers and of all together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Bytes of one transfer.
    pub(crate) bytes: u64,
    /// Transfers, in each direction.
    pub(crate) iterations: u64,
    /// Which way they went, in words.
    pub(crate) direction: String,
    /// Of each direction under way at a time.
    pub(crate) in_flight: u16,
    /// From the first to the last, warming up left out.
    pub(crate) seconds: f64,
    /// 10^9 bytes a second over all transfers; with two directions their sum.
    pub(crate) gb_per_second: f64,
    /// Time of a transfer in microseconds, as its sender sees it; `None` where that is the server.
    pub(crate) latency_us: Option<Latency>,
    /// The parts that were asked for.
    pub(crate) intervals: Vec<Interval>,
    /// Share of the time, in percent, at the sender.
    pub(crate) sender_percent: Shares,
    /// Share of the time, in percent, at the receiver.
    pub(crate) receiver_percent: Shares,
    /// Fragments that had to be unpacked, per transfer.
    pub(crate) fragments_per_transfer: f64,
    /// Processor seconds for 10^9 bytes, both processes together.
    pub(crate) cpu_seconds_per_gb: f64,
    /// The data path, in words.
    pub(crate) path: String,
    /// Memory of this side and of the peer, in words.
    pub(crate) memory: [String; 2],
    /// Every byte of a transfer with fresh contents was compared.
    pub(crate) verified: bool,
}

/// A part of the time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Interval {
    /// Seconds since the first transfer.
    pub(crate) start: f64,
    pub(crate) end: f64,
    pub(crate) gb_per_second: f64,
}

/// Where the time of transfers went at one end, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spent {
    pub(crate) wire: u64,
    pub(crate) unpack: u64,
    pub(crate) wait: u64,
    pub(crate) fragments: u64,
}

/// Times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) min: f64,
    /// The median.
    pub(crate) p50: f64,
    /// From ten times on.
    pub(crate) p90: Option<f64>,
    /// From a hundred times on: of fewer it would be the longest one.
    pub(crate) p99: Option<f64>,
    pub(crate) max: f64,
}

/// Percent of the time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Shares {
    pub(crate) wire: f64,
    pub(crate) unpack: f64,
    pub(crate) wait: f64,
}

impl Latency {
    /// `None` when there are no times.
    pub(crate) fn of(times: &[Duration]) -> Option<Self> {
        if times.is_empty() {
            return None;
        }
        let mut sorted = times.to_vec();
        sorted.sort_unstable();
        let us = |index: usize| {
            sorted
                .get(index)
                .map(|time: &Duration| time.as_secs_f64() * 1e6)
        };
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
        })
    }
}

impl Shares {
    pub(crate) fn of(spent: &Spent) -> Self {
        let whole = (spent.wire + spent.unpack + spent.wait).max(1);
        #[expect(clippy::cast_precision_loss, reason = "percent with one digit")]
        let percent = |part: u64| part as f64 * 100.0 / whole as f64;
        Self {
            wire: percent(spent.wire),
            unpack: percent(spent.unpack),
            wait: percent(spent.wait),
        }
    }
}

impl Spent {
    /// Adds the times of one transfer.
    pub(crate) fn add(&mut self, report: &tcpx::Report) {
        let microseconds = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        self.wire = self.wire.saturating_add(microseconds(report.wire));
        self.unpack = self.unpack.saturating_add(microseconds(report.unpack));
        self.wait = self.wait.saturating_add(microseconds(report.wait));
        self.fragments = self.fragments.saturating_add(report.fragments);
    }

    /// Adds those of other transfers.
    pub(crate) fn join(&mut self, other: &Self) {
        self.wire = self.wire.saturating_add(other.wire);
        self.unpack = self.unpack.saturating_add(other.unpack);
        self.wait = self.wait.saturating_add(other.wait);
        self.fragments = self.fragments.saturating_add(other.fragments);
    }
}

/// Processor time of this process, all its threads together.
pub(crate) struct ProcessorTime(Duration);

impl ProcessorTime {
    fn now() -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(
            u64::try_from(now.tv_sec).unwrap_or(0),
            u32::try_from(now.tv_nsec).unwrap_or(0),
        )
    }

    pub(crate) fn start() -> Self {
        Self(Self::now())
    }

    /// Since the start.
    pub(crate) fn microseconds(&self) -> u64 {
        u64::try_from(Self::now().saturating_sub(self.0).as_micros()).unwrap_or(u64::MAX)
    }
}

/// Processor seconds for 10^9 bytes, of microseconds at both ends together.
#[expect(clippy::cast_precision_loss, reason = "a figure with a few digits")]
pub(crate) fn cpu_per_gb(bytes: u64, cpu_us: u64) -> f64 {
    // Microseconds a byte are 1,000 seconds for 10^9 bytes.
    cpu_us as f64 * 1e3 / (bytes as f64).max(1.0)
}

/// The summary for a person.
pub(crate) fn text(summary: &Summary) -> String {
    let us = |value: f64| time(Duration::from_secs_f64(value / 1e6));
    let latency = summary.latency_us.as_ref();
    let cell =
        |of: fn(&Latency) -> Option<f64>| latency.and_then(of).map_or_else(|| "-".to_owned(), us);
    let mut times = table(
        &["GB/s", "CPU s/GB", "min", "p50", "p90", "p99", "max"],
        &[0, 1, 2, 3, 4, 5, 6],
    );
    times.add_row([
        format!("{:.3}", summary.gb_per_second),
        format!("{:.3}", summary.cpu_seconds_per_gb),
        cell(|latency| Some(latency.min)),
        cell(|latency| Some(latency.p50)),
        cell(|latency| latency.p90),
        cell(|latency| latency.p99),
        cell(|latency| Some(latency.max)),
    ]);
    let mut shares = table(&["time spent", "wire", "unpack", "wait"], &[1, 2, 3]);
    for (name, share) in [
        ("sender", &summary.sender_percent),
        ("receiver", &summary.receiver_percent),
    ] {
        shares.add_row([
            name.to_owned(),
            format!("{:.1} %", share.wire),
            format!("{:.1} %", share.unpack),
            format!("{:.1} %", share.wait),
        ]);
    }
    format!(
        "{} transfers of {} {}, {} in flight, {:.0} fragments each, contents verified\n{}{}",
        grouped(summary.iterations),
        Size(summary.bytes),
        summary.direction,
        summary.in_flight,
        summary.fragments_per_transfer,
        indented(&times, "  "),
        indented(&shares, "  "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(values: impl IntoIterator<Item = u64>) -> Vec<Duration> {
        values.into_iter().map(Duration::from_micros).collect()
    }

    #[test]
    fn a_hundred_times_have_every_percentile() {
        let latency = Latency::of(&us((1..=100).rev())).expect("times");
        assert_eq!(
            latency,
            Latency {
                min: 1.0,
                p50: 50.5,
                p90: Some(90.0),
                p99: Some(99.0),
                max: 100.0
            }
        );
    }

    #[test]
    fn one_time_is_a_median_and_no_percentile() {
        let latency = Latency::of(&us([7])).expect("a time");
        assert_eq!(
            latency,
            Latency {
                min: 7.0,
                p50: 7.0,
                p90: None,
                p99: None,
                max: 7.0
            }
        );
        assert_eq!(Latency::of(&[]), None);
    }

    #[test]
    fn ten_times_have_no_p99() {
        let latency = Latency::of(&us([1, 1, 1, 1, 1, 1, 1, 1, 1, 1000])).expect("times");
        assert_eq!((latency.p90, latency.p99), (Some(1.0), None));
    }

    #[test]
    fn the_median_of_two_lies_between_them() {
        assert_eq!(Latency::of(&us([4, 2])).expect("times").p50, 3.0);
    }

    #[test]
    fn shares_add_up_and_nothing_is_divided_by_zero() {
        let spent = Spent {
            wire: 600,
            unpack: 300,
            wait: 100,
            fragments: 0,
        };
        assert_eq!(
            Shares::of(&spent),
            Shares {
                wire: 60.0,
                unpack: 30.0,
                wait: 10.0
            }
        );
        assert_eq!(
            Shares::of(&Spent::default()),
            Shares {
                wire: 0.0,
                unpack: 0.0,
                wait: 0.0
            }
        );
    }

    #[test]
    fn processor_time_is_a_share_of_the_bytes() {
        let both = cpu_per_gb(1_000_000_000, 250_000);
        assert!((both - 0.25).abs() < 1e-9, "{both}");
    }
}
