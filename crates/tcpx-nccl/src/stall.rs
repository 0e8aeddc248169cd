//! Notices when a comm stalls.

use std::time::{Duration, Instant};

const FIRST_REPORT: Duration = Duration::from_secs(10);
const LAST_INTERVAL: Duration = Duration::from_secs(160);

/// Time since the last byte moved, reported after 10 s and then at doubling intervals.
#[derive(Debug)]
pub(crate) struct Stall {
    since: Option<Instant>,
    report_after: Duration,
}

impl Stall {
    pub(crate) const fn new() -> Self {
        Self {
            since: None,
            report_after: FIRST_REPORT,
        }
    }

    /// Bytes moved, or nothing is outstanding.
    pub(crate) const fn moved(&mut self) {
        self.since = None;
        self.report_after = FIRST_REPORT;
    }

    /// Time since the last byte moved, where something is outstanding.
    pub(crate) fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Something is outstanding and nothing moved; gives the duration when it is time to say so.
    pub(crate) fn waiting(&mut self, now: Instant) -> Option<Duration> {
        let stalled = now.saturating_duration_since(*self.since.get_or_insert(now));
        if stalled < self.report_after {
            return None;
        }
        self.report_after = stalled + self.report_after.min(LAST_INTERVAL);
        Some(stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_reported_after_10_s_and_then_less_and_less_often() {
        let start = Instant::now();
        let mut stall = Stall::new();
        let mut reports = Vec::new();
        for second in 0..=100 {
            if stall.waiting(start + Duration::from_secs(second)).is_some() {
                reports.push(second);
            }
        }
        assert_eq!(reports, [10, 20, 40, 80]);
        stall.moved();
        assert_eq!(stall.waiting(start + Duration::from_secs(101)), None);
        assert_eq!(stall.waiting(start + Duration::from_secs(110)), None);
        assert!(stall.waiting(start + Duration::from_secs(111)).is_some());
    }
}
