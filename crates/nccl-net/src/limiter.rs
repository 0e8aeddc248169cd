//! A rate limiter for log lines: real plugins emit one line per poll, a million in a minute.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Lets a burst through each second and counts the rest. Lock-free; callable from any thread.
///
/// Time is passed in, so that the limiter itself never asks for a clock.
#[derive(Debug)]
pub(crate) struct RateLimiter {
    per_second: u32,
    second: AtomicU64,
    used: AtomicU32,
    suppressed: AtomicU64,
}

impl RateLimiter {
    /// At most `per_second` lines in each second.
    pub(crate) const fn new(per_second: u32) -> Self {
        Self {
            per_second,
            second: AtomicU64::new(u64::MAX),
            used: AtomicU32::new(0),
            suppressed: AtomicU64::new(0),
        }
    }

    /// Decides about one line in second number `now_s` of any steady clock: `None` drops it, else
    /// so many were dropped since the last one that passed.
    pub(crate) fn check(&self, now_s: u64) -> Option<u64> {
        let seen = self.second.load(Ordering::Relaxed);
        // Only one thread wins the new second and resets the budget; losers see it as started.
        if seen != now_s
            && self
                .second
                .compare_exchange(seen, now_s, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        {
            self.used.store(0, Ordering::Release);
        }
        if self.used.load(Ordering::Acquire) < self.per_second
            && self.used.fetch_add(1, Ordering::AcqRel) < self.per_second
        {
            Some(self.suppressed.swap(0, Ordering::AcqRel))
        } else {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_a_burst_are_counted_and_reported() {
        let limiter = RateLimiter::new(3);
        for _ in 0..3 {
            assert_eq!(limiter.check(7), Some(0));
        }
        for _ in 0..1_000_000 {
            assert_eq!(limiter.check(7), None);
        }
        assert_eq!(limiter.check(8), Some(1_000_000));
        assert_eq!(limiter.check(8), Some(0));
    }

    #[test]
    fn threads_together_never_exceed_the_budget_within_one_second() {
        let limiter = RateLimiter::new(50);
        // The second is opened before the threads race, so only the budget is contended.
        let first = limiter.check(1);
        assert_eq!(first, Some(0));
        let passed: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..1000).filter(|_| limiter.check(1).is_some()).count()))
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(passed, 49);
    }
}
