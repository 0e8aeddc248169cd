//! What the unpackers are meant to reach on one H200, and whether they did in this run.

use serde_json::Value;

use super::cases::Outcome;
use super::ways::Way;
use super::{rate, row, spread};

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

    pub(super) fn row(&self) -> Value {
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
        row(
            &format!("target: {}", self.what),
            self.unit,
            &self.values,
            &notes,
        )
    }
}
