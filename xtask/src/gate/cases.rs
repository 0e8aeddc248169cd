//! The cases, their figures and bounds.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use tcpx_bench::process::Metric::{self, Cpu, Descriptors, Memory, P50, P99, Rate};

/// Its name, its unit, whether more is better, and the least ratio of this tree to BASE, as good is
/// better: few samples decide a 99th percentile.
pub(super) const fn judged(metric: Metric) -> (&'static str, &'static str, bool, f64) {
    match metric {
        P50 => ("p50", "us", false, 0.95),
        P99 => ("p99", "us", false, 0.8),
        Rate => ("rate", "GB/s", true, 0.95),
        Cpu => ("cpu", "s/GB", false, 0.95),
        Memory => ("memory", "KiB", false, 0.95),
        Descriptors => ("descriptors", "descriptors", false, 0.95),
    }
}

/// The cases (`cases.json`).
const CASES: &str = include_str!("cases.json");

/// One case: what the drivers are asked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    pub(super) name: String,
    /// What is judged. A thread that polls says nothing about cores.
    pub(super) figures: Vec<Metric>,
    /// Milliseconds to measure for, about.
    ms: u64,
    /// As the driver knows it (`crates/tcpx-bench/src/measure/driver.rs`).
    what: Map<String, Value>,
    #[serde(default)]
    link: Map<String, Value>,
    /// Lanes that the plugin is to have; else what it has on this host by itself, which on a small
    /// one is none.
    lanes: Option<u8>,
    /// It may as well move memory of GPUs.
    #[serde(default)]
    gpus: bool,
}

impl Case {
    /// Whether one of the patterns names it; `*` stands for anything.
    pub(super) fn is_chosen(&self, patterns: &[String]) -> bool {
        patterns.is_empty() || patterns.iter().any(|pattern| matches(pattern, &self.name))
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

    /// Whether it is about memory that is sent by reference to its pages, which peers of one host
    /// are else given a copy of.
    pub(super) fn lends(&self) -> bool {
        ["staged", "gpus"]
            .iter()
            .any(|name| self.link.contains_key(*name))
    }

    /// What its drivers' environment has beside that of other cases.
    pub(super) fn variables(&self) -> Vec<(&'static str, String)> {
        let lend = self.lends().then(|| ("TCPX_LEND", "always".to_owned()));
        let lanes = self
            .lanes
            .map(|lanes| ("TCPX_NET_LANES", lanes.to_string()));
        lend.into_iter().chain(lanes).collect()
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

    #[test]
    fn the_plugin_moves_each_kind_of_message() {
        let cases = all(None).unwrap();
        for lanes in [Some(0), Some(2)] {
            let moved = cases.iter().filter(|case| case.lanes == lanes);
            let runs: Vec<_> = moved.map(|case| case.what["plugin"].clone()).collect();
            let has = |depth: u64, comms: u64| {
                let mut runs = runs.iter();
                runs.any(|run| run[0]["depth"] == depth && run[1] == comms)
            };
            assert!(has(1, 1) && has(8, 1) && has(8, 8), "{lanes:?}: {runs:?}");
        }
        for case in &cases {
            let set = case.variables();
            let asks = |name: &str| set.iter().any(|(one, _)| *one == name);
            assert_eq!(asks("TCPX_NET_LANES"), case.lanes.is_some());
            assert_eq!(asks("TCPX_LEND"), case.lends());
        }
    }
}
