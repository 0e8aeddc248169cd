//! Medians, and how sure of a ratio paired rounds make us.

/// Resamples of a bootstrap.
const RESAMPLES: usize = 4000;
/// How far below the bound an interval that passes may begin.
const TOLERANCE: f64 = 0.03;

/// The median; the mean of the two middle ones of an even number. NaN of none.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match (sorted.len(), sorted.len() % 2) {
        (0, _) => f64::NAN,
        (_, 1) => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

/// The smallest sample that so many percent do not exceed; none of so few that it would be the
/// largest.
pub fn percentile(samples: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let is_known = sorted.len() >= 100 / (100 - percent);
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.max(1) - 1).copied().filter(|_| is_known)
}

/// A median with the interval that holds it at 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The middle.
    pub median: f64,
    /// Where the interval begins.
    pub low: f64,
    /// Where it ends.
    pub high: f64,
}

/// Bootstrap of the median. The same samples give the same interval.
pub fn bootstrap(samples: &[f64]) -> Interval {
    let median_of_all = median(samples);
    if samples.len() < 2 {
        return Interval {
            median: median_of_all,
            low: f64::NEG_INFINITY,
            high: f64::INFINITY,
        };
    }
    // A linear congruential generator (Knuth's MMIX constants): good enough to draw indices.
    let mut state = 0x5DEE_CE66_D1CE_4E5B_u64;
    let mut draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % samples.len() as u64) as usize
    };
    let mut resample = vec![0.0; samples.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            resample.fill_with(|| samples[draw()]);
            median(&resample)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    Interval {
        median: median_of_all,
        low: medians[RESAMPLES * 25 / 1000],
        high: medians[RESAMPLES * 975 / 1000],
    }
}

/// What is to be said of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Surely as good.
    Passed,
    /// Surely not.
    Failed,
    /// More rounds may tell.
    Undecided,
}

impl Verdict {
    /// Of an interval of ratios, above 1 if better.
    pub fn of(interval: Interval, bound: f64) -> Self {
        if interval.high < bound {
            Self::Failed
        } else if interval.low > bound - TOLERANCE {
            Self::Passed
        } else {
            Self::Undecided
        }
    }

    /// For a person.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Undecided => "undecided",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_ones() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn percentiles_are_known_from_enough_samples_on() {
        let all: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(
            [90, 99].map(|at| percentile(&all, at)),
            [Some(90.0), Some(99.0)]
        );
        assert_eq!(
            [90, 99].map(|at| percentile(&all[..10], at)),
            [Some(99.0), None]
        );
        assert_eq!(percentile(&[7.0], 90), None);
        assert_eq!(percentile(&[], 99), None);
    }

    #[test]
    fn an_interval_holds_the_median_and_narrows_with_samples() {
        let some: Vec<f64> = (0..6).map(|at| 0.9 + 0.04 * f64::from(at)).collect();
        let many: Vec<f64> = some.iter().cycle().take(60).copied().collect();
        let (wide, narrow) = (bootstrap(&some), bootstrap(&many));
        assert!(wide.low <= wide.median && wide.median <= wide.high);
        assert!(narrow.high - narrow.low < wide.high - wide.low);
        assert_eq!(bootstrap(&some), wide);
    }

    #[test]
    fn only_a_sure_loss_fails_and_only_a_sure_draw_passes() {
        let interval = |low, high| Interval {
            median: f64::midpoint(low, high),
            low,
            high,
        };
        assert_eq!(Verdict::of(interval(0.90, 0.94), 0.95), Verdict::Failed);
        assert_eq!(Verdict::of(interval(0.93, 1.10), 0.95), Verdict::Passed);
        assert_eq!(Verdict::of(interval(0.90, 1.10), 0.95), Verdict::Undecided);
        assert_eq!(Verdict::of(bootstrap(&[1.0]), 0.95), Verdict::Undecided);
    }
}
