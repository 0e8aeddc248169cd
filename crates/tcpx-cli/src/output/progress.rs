//! How far a transfer is: a bar on a terminal, a line now and then elsewhere.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tcpx::{Report, Transfer};

use super::say::aside;
use crate::error::Error;
use crate::sizes::Size;

/// How often a waiting command looks at the transfer. Nothing depends on it but the bar.
const REFRESH: Duration = Duration::from_millis(50);

/// A transfer that stands still this long is only waited for.
const STANDING: Duration = Duration::from_secs(10);

/// Without a terminal: a line at most this often.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows the progress of one amount of bytes.
#[derive(Debug)]
pub(crate) struct Progress {
    label: String,
    total: u64,
    bar: Option<ProgressBar>,
    last_line: Instant,
}

impl Progress {
    /// A bar named `label` that is full at `total` bytes.
    pub(crate) fn new(label: &str, total: u64) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
            let template = "  {prefix} {bar:30} {binary_bytes} of {binary_total_bytes}  {decimal_bytes_per_sec}  {eta} left";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(label.to_owned());
            bar
        });
        Self {
            label: label.to_owned(),
            total,
            bar,
            last_line: Instant::now(),
        }
    }

    /// `done` bytes are there.
    pub(crate) fn at(&mut self, done: u64) {
        match &self.bar {
            Some(bar) => bar.set_position(done),
            None if self.last_line.elapsed() >= LINE_EVERY => {
                self.last_line = Instant::now();
                aside!("  {}: {} of {}", self.label, Size(done), Size(self.total));
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
        Self(io::stderr().is_terminal().then(|| {
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
