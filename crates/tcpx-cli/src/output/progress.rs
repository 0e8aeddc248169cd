//! How far a transfer is: a bar on a terminal, a line now and then elsewhere.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tcpx::{Report, Transfer};

use super::say::{aside, is_lively, is_quiet};
use crate::error::Error;
use crate::interrupt;
use crate::sizes::{Amount, time};

/// How often a waiting command looks at the transfer. Nothing depends on it but the bar.
const REFRESH: Duration = Duration::from_millis(50);

/// A transfer that stalls this long is only waited for.
const STANDING: Duration = Duration::from_secs(10);

/// Without a terminal: a line at most this often.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows the progress of one amount of bytes.
#[derive(Debug)]
pub(crate) struct Progress {
    label: String,
    total: Option<u64>,
    bar: Option<ProgressBar>,
    started: Instant,
    before: u64,
    last_line: Instant,
}

impl Progress {
    /// A bar named `label` that is full at `total` bytes.
    pub(crate) fn new(label: &str, total: u64) -> Self {
        Self::from(label, Some(total), 0)
    }

    /// The same where `done` bytes were there before; without a `total` it only counts.
    pub(crate) fn from(label: &str, total: Option<u64>, done: u64) -> Self {
        let is_shown = is_lively() && !is_quiet();
        let bar = is_shown.then(|| {
            let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
            let template = match total {
                Some(_) => {
                    "  {prefix} {wide_bar} {decimal_bytes} of {decimal_total_bytes}  \
                     {decimal_bytes_per_sec}  {eta} left"
                }
                None => "  {prefix} {decimal_bytes}  {decimal_bytes_per_sec}",
            };
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(label.to_owned());
            bar.set_position(done);
            bar.reset_eta();
            bar
        });
        Self {
            label: label.to_owned(),
            total,
            bar,
            started: Instant::now(),
            before: done,
            last_line: Instant::now(),
        }
    }

    /// `done` bytes are there.
    pub(crate) fn at(&mut self, done: u64) {
        match &self.bar {
            Some(bar) => bar.set_position(done),
            None if self.last_line.elapsed() >= LINE_EVERY && !is_quiet() => {
                self.last_line = Instant::now();
                let moved = done.saturating_sub(self.before);
                let rate = rate(moved, self.started.elapsed());
                aside!("  {}: {}", self.label, line(done, self.total, rate));
            }
            None => {}
        }
    }

    /// Waits for `transfer` and shows its progress, counted from `before` bytes.
    ///
    /// The transfer's own limits bound the wait.
    pub(crate) fn follow(&mut self, transfer: Transfer, before: u64) -> Result<Report, Error> {
        let (mut done, mut moved) = (0, Instant::now());
        loop {
            if let Some(end) = transfer.wait_timeout(REFRESH) {
                if let Ok(report) = &end {
                    self.at(before + report.bytes);
                }
                return Ok(end?);
            }
            interrupt::check()?;
            let now_done = transfer.progress().bytes_done;
            self.at(before + now_done);
            if now_done != done {
                (done, moved) = (now_done, Instant::now());
            } else if moved.elapsed() >= STANDING {
                // Nothing to show, and this wait also notices an engine that hangs in a plugin.
                return Ok(transfer.wait()?);
            }
        }
    }
}

/// Says on a terminal what takes its time, until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy(Option<ProgressBar>);

impl Busy {
    pub(crate) fn new(what: &str) -> Self {
        Self((is_lively() && !is_quiet()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
            if let Ok(style) = ProgressStyle::with_template("  {msg} ... {elapsed}") {
                bar.set_style(style);
            }
            bar.set_message(what.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        }))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A line of progress; `rate` in bytes a second.
fn line(done: u64, total: Option<u64>, rate: u64) -> String {
    let mut line = match total {
        Some(total) => format!("{} of {}", Amount(done), Amount(total)),
        None => Amount(done).to_string(),
    };
    if rate > 0 {
        line.push_str(&format!(", {}/s", Amount(rate)));
        if let Some(left) = total.map(|total| total.saturating_sub(done)) {
            #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
            let left = Duration::try_from_secs_f64(left as f64 / rate as f64);
            line.push_str(&format!(", {} left", time(left.unwrap_or(Duration::MAX))));
        }
    }
    line
}

/// Bytes a second.
pub(crate) fn rate(bytes: u64, span: Duration) -> u64 {
    let nanoseconds = span.as_nanos().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000_000 / nanoseconds).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_rate_and_time_left_where_they_are_known() {
        let text = line(1_000_000_000, Some(3_000_000_000), 1_000_000_000);
        assert_eq!(text, "1.00 GB of 3.00 GB, 1.00 GB/s, 2.00 s left");
        assert_eq!(line(1_000_000, None, 500_000), "1.00 MB, 500 kB/s");
        assert_eq!(line(0, Some(1_000_000), 0), "0 bytes of 1.00 MB");
    }
}
