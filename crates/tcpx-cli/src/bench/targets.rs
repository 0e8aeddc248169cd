//! What the unpackers are meant to reach on one H200, and whether they did in this run.

use super::cases::Outcome;
use super::file::{Row, spread};
use super::report::rate;
use super::ways::Way;

/// What is compared; each round by itself, so that a machine's slow hour weighs on both sides.
#[derive(Clone, Copy, Debug)]
enum Measure {
    /// 10^9 bytes a second.
    Rate,
    /// Microseconds: the fewer the better.
    Micros,
    /// The rate as a share of another way's, of the same case or of another one.
    Share(Option<&'static str>, Way),
}

#[derive(Clone, Copy, Debug)]
struct Target {
    case: &'static str,
    way: Way,
    measure: Measure,
    must: Option<f64>,
    aim: Option<f64>,
}

const OF_COPY: Measure = Measure::Share(None, Way::Copy);

const fn target(
    case: &'static str,
    way: Way,
    measure: Measure,
    must: Option<f64>,
    aim: Option<f64>,
) -> Target {
    Target {
        case,
        way,
        measure,
        must,
        aim,
    }
}

const TARGETS: [Target; 10] = [
    target(
        "4 MiB in 4 KiB, GPU",
        Way::Kernel,
        Measure::Rate,
        Some(350.0),
        None,
    ),
    target(
        "4 MiB in 4 KiB, GPU",
        Way::Kernel,
        Measure::Share(None, Way::Plain),
        None,
        Some(1.2),
    ),
    target(
        "64 MiB in 4 KiB, GPU",
        Way::Kernel,
        OF_COPY,
        Some(0.75),
        Some(0.9),
    ),
    target(
        "64 MiB in 1,448 B, GPU",
        Way::Kernel,
        Measure::Share(Some("64 MiB in 4 KiB, GPU"), Way::Kernel),
        Some(0.6),
        Some(0.85),
    ),
    target(
        "4 MiB in 4 KiB, pinned",
        Way::Kernel,
        OF_COPY,
        Some(0.85),
        Some(0.95),
    ),
    target(
        "64 MiB in 4 KiB, pinned",
        Way::Kernel,
        OF_COPY,
        Some(0.9),
        Some(0.95),
    ),
    target(
        "512 KiB in 4 KiB, GPU",
        Way::Kernel,
        Measure::Micros,
        Some(10.0),
        Some(7.0),
    ),
    target("4 MiB in one, GPU", Way::D2d, OF_COPY, Some(0.9), None),
    target("64 MiB in one, GPU", Way::D2d, OF_COPY, Some(0.9), None),
    target(
        "checksum of 64 MiB, GPU",
        Way::Checksum,
        OF_COPY,
        Some(0.5),
        Some(0.9),
    ),
];

/// A target and what was measured: median, least and most over the rounds.
#[derive(Clone, Debug)]
pub(super) struct Verdict {
    pub(super) what: String,
    pub(super) unit: &'static str,
    pub(super) must: Option<f64>,
    pub(super) aim: Option<f64>,
    values: Vec<f64>,
    fewer_is_better: bool,
    /// One copy of the same size in the same rounds, in GB/s.
    copy: Option<f64>,
}

/// All targets whose cases were measured.
pub(super) fn verdicts(outcomes: &[Outcome]) -> Vec<Verdict> {
    TARGETS
        .iter()
        .filter_map(|target| target.verdict(outcomes))
        .collect()
}

impl Target {
    fn verdict(&self, outcomes: &[Outcome]) -> Option<Verdict> {
        let of = |case: &str, way: Way| {
            let is_it = |one: &&Outcome| one.case == case && one.way == way.name();
            let found = outcomes.iter().find(is_it)?;
            let rates = found.micros.iter().map(|micros| rate(found.bytes, *micros));
            Some((found, rates.collect::<Vec<_>>()))
        };
        let (outcome, rates) = of(self.case, self.way)?;
        let (unit, values) = match self.measure {
            Measure::Rate => ("GB/s", rates),
            Measure::Micros => ("us", outcome.micros.clone()),
            Measure::Share(case, way) => {
                let (_, others) = of(case.unwrap_or(self.case), way)?;
                let shares = rates.iter().zip(others).map(|(one, other)| one / other);
                ("share", shares.collect())
            }
        };
        let against = match self.measure {
            Measure::Share(None, way) => format!(", of {}", way.name()),
            Measure::Share(Some(case), _) => format!(", of {case}"),
            Measure::Rate | Measure::Micros => String::new(),
        };
        Some(Verdict {
            what: format!("{}: {}{against}", self.case, self.way.name()),
            unit,
            must: self.must,
            aim: self.aim,
            values,
            fewer_is_better: matches!(self.measure, Measure::Micros),
            copy: of(self.case, Way::Copy).map(|(_, rates)| spread(&rates).0),
        })
    }
}

impl Verdict {
    /// Median, least and most.
    pub(super) fn spread(&self) -> (f64, f64, f64) {
        spread(&self.values)
    }

    /// In words. The median counts.
    pub(super) fn verdict(&self) -> &'static str {
        let median = self.spread().0;
        let reached = |target: Option<f64>| {
            target.map(|target| {
                if self.fewer_is_better {
                    median <= target
                } else {
                    median >= target
                }
            })
        };
        match (reached(self.must), reached(self.aim)) {
            (Some(false), _) => "SHORT",
            (_, Some(true)) => "aim reached",
            (Some(true), _) => "reached",
            (None, _) => "aim missed",
        }
    }

    pub(super) fn row(&self) -> Row {
        let named = |word: &str, target: Option<f64>| {
            target.map_or_else(String::new, |target| format!("{word} {target}, "))
        };
        let copy = self.copy.map_or_else(String::new, |copy| {
            format!(" One copy ran at {copy:.0} GB/s.")
        });
        let notes = format!(
            "{}{}{}.{copy}",
            named("must", self.must),
            named("aim", self.aim),
            self.verdict()
        );
        Row::of(
            format!("target: {}", self.what),
            self.unit,
            &self.values,
            notes,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(case: &'static str, way: Way, micros: &[f64]) -> Outcome {
        Outcome {
            case,
            way: way.name(),
            bytes: 4_000_000,
            micros: micros.to_vec(),
        }
    }

    #[test]
    fn shares_are_of_the_same_round_and_the_median_decides() {
        // The machine is three times as slow in the second round, and the share the same.
        let outcomes = [
            outcome("64 MiB in 4 KiB, GPU", Way::Kernel, &[10.0, 30.0, 10.0]),
            outcome("64 MiB in 4 KiB, GPU", Way::Copy, &[8.0, 24.0, 9.5]),
            outcome("4 MiB in 4 KiB, GPU", Way::Kernel, &[10.0, 12.0, 13.0]),
            outcome("512 KiB in 4 KiB, GPU", Way::Kernel, &[9.0, 9.5, 11.0]),
        ];
        let all = verdicts(&outcomes);
        let told: Vec<_> = all
            .iter()
            .map(|one| (one.what.as_str(), one.spread().0, one.verdict()))
            .collect();
        let (rate, share, micros) = (told[0], told[1], told[2]);
        assert_eq!(told.len(), 3, "{told:?}");
        assert_eq!(rate.0, "4 MiB in 4 KiB, GPU: unpacker, kernel");
        assert_eq!(rate.2, "SHORT");
        assert!((share.1 - 0.8).abs() < 1e-9 && share.2 == "reached");
        assert!((micros.1 - 9.5).abs() < 1e-9 && micros.2 == "reached");
        assert!(
            all[1]
                .row()
                .notes
                .contains("must 0.75, aim 0.9, reached. One copy ran at 421 GB/s."),
            "{}",
            all[1].row().notes
        );
    }

    #[test]
    fn every_target_is_of_a_case_that_is_measured() {
        for target in TARGETS {
            let cases = super::super::cases::names();
            assert!(cases.contains(&target.case), "{}", target.case);
            assert!(target.must.is_some() || target.aim.is_some());
        }
    }
}
