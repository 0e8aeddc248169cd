//! The cases, their figures and bounds.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::nics::Nics;

/// A figure of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Metric {
    /// Median time in microseconds.
    P50,
    /// 99th percentile in microseconds. Few samples decide it, so its bound is lower.
    P99,
    Rate,
    /// Processor seconds of both ends for 10^9 bytes.
    Cpu,
    Memory,
    Descriptors,
}

impl Metric {
    /// What the driver calls it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::P50 => "p50",
            Self::P99 => "p99",
            Self::Rate => "rate",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Descriptors => "descriptors",
        }
    }

    pub(super) const fn unit(self) -> &'static str {
        match self {
            Self::P50 | Self::P99 => "us",
            Self::Rate => "GB/s",
            Self::Cpu => "s/GB",
            Self::Memory => "KiB",
            Self::Descriptors => "descriptors",
        }
    }

    pub(super) const fn more_is_better(self) -> bool {
        matches!(self, Self::Rate)
    }

    /// Least ratio of this tree to BASE, as good is better.
    pub(super) const fn bound(self) -> f64 {
        match self {
            Self::P99 => 0.8,
            _ => 0.95,
        }
    }
}

/// The cases (`cases.json`).
const CASES: &str = include_str!("cases.json");

/// One case: what the drivers are asked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    pub(super) name: String,
    figures: Figures,
    /// Milliseconds to measure for, about.
    ms: u64,
    /// As the driver knows it (`crates/tcpx-bench/src/measure/driver.rs`).
    what: Map<String, Value>,
    #[serde(default)]
    link: Map<String, Value>,
    /// It may as well move memory of GPUs.
    #[serde(default)]
    gpus: bool,
    /// Runs between two namespaces with four cables, in this state.
    #[serde(default)]
    nics: Option<NicState>,
}

/// What is judged. Cables that are shaped below what a core moves say nothing about cores, nor does a thread that
/// polls.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Figures {
    Times,
    Time,
    Rates,
    Rate,
    Idle,
}

/// What is done to the cables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum NicState {
    Equal,
    /// One has a tenth of the others' rate.
    OneSlow,
    /// One is cut.
    OneCut,
}

impl Case {
    /// Whether one of the patterns names it; `*` stands for anything.
    pub(super) fn is_chosen(&self, patterns: &[String]) -> bool {
        patterns.is_empty() || patterns.iter().any(|pattern| matches(pattern, &self.name))
    }

    pub(super) const fn needs_nics(&self) -> bool {
        self.nics.is_some()
    }

    /// Brings the cables into this case's state.
    pub(super) fn prepare(&self, nics: Option<&Nics>) -> Result<()> {
        match (self.nics, nics) {
            (Some(state), Some(nics)) => nics.set(state),
            _ => Ok(()),
        }
    }

    /// The line for a driver.
    pub(super) fn request(&self) -> Value {
        let mut request = self.what.clone();
        request.extend([
            ("ms".into(), self.ms.into()),
            ("link".into(), self.link.clone().into()),
        ]);
        request.into()
    }

    pub(super) const fn metrics(&self) -> &'static [Metric] {
        match self.figures {
            Figures::Times => &[Metric::P50, Metric::P99],
            Figures::Time => &[Metric::P50],
            Figures::Rates => &[Metric::Rate, Metric::Cpu],
            Figures::Rate => &[Metric::Rate],
            Figures::Idle => &[Metric::Memory, Metric::Descriptors],
        }
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|tail| {
            (0..=tail.len()).any(|at| tail.is_char_boundary(at) && matches(rest, &tail[at..]))
        }),
    }
}

/// Every case; where two GPUs are named, those that can move their memory.
pub(super) fn all(gpus: Option<[u32; 2]>) -> Result<Vec<Case>> {
    let mut cases: Vec<Case> = serde_json::from_str(CASES).context("cases.json")?;
    if let Some(gpus) = gpus {
        cases.retain(|case| case.gpus);
        for case in &mut cases {
            case.link.insert("gpus".into(), json!(gpus));
        }
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unlike_and_patterns_find_them() {
        let names: Vec<String> = all(None)
            .unwrap()
            .into_iter()
            .map(|case| case.name)
            .collect();
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
        assert!(matches("stream-*-x8", "stream-64KiB-x8"));
        assert!(!matches("stream-*-x8", "stream-64KiB-x1"));
        assert!(matches("*", "anything") && !matches("set", "set-up"));
    }
}
