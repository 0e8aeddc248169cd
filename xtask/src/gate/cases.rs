//! The cases, their figures and bounds.

use anyhow::Result;
use serde_json::{Value, json};

use super::nics::Nics;

/// A figure of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Metric {
    /// Median time in microseconds.
    P50,
    /// 99th percentile in microseconds. Few samples decide it, so its bound is lower.
    P99,
    /// Bytes a second.
    Rate,
    /// Processor seconds of both ends for 10^9 bytes.
    Cpu,
    /// Bytes of memory.
    Memory,
    Descriptors,
}

impl Metric {
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
            Self::Descriptors => "",
        }
    }

    pub(super) fn label(self) -> String {
        format!("{} {}", self.name(), self.unit())
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

    /// What a driver answers (bytes, bytes a second, ...), in the unit.
    pub(super) fn in_unit(self, value: f64) -> f64 {
        match self {
            Self::Rate => value / 1e9,
            Self::Memory => value / 1024.0,
            _ => value,
        }
    }

    /// A value in the unit.
    pub(super) fn print(self, value: f64) -> String {
        match self {
            Self::P50 | Self::P99 => format!("{value:.2}"),
            Self::Rate | Self::Cpu => format!("{value:.3}"),
            Self::Memory | Self::Descriptors => format!("{value:.1}"),
        }
    }
}

/// One case: what the drivers are asked.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: String,
    request: Value,
    place: Place,
}

/// Where a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Loopback,
    /// Two namespaces with four cables, in this state.
    Nics(NicState),
}

/// What is done to the cables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        matches!(self.place, Place::Nics(_))
    }

    /// Brings the cables into this case's state.
    pub(super) fn prepare(&self, nics: Option<&Nics>) -> Result<()> {
        match (self.place, nics) {
            (Place::Nics(state), Some(nics)) => nics.set(state),
            _ => Ok(()),
        }
    }

    /// The line for a driver.
    pub(super) fn request(&self) -> &Value {
        &self.request
    }

    pub(super) fn metrics(&self) -> &'static [Metric] {
        match self.request["kind"].as_str() {
            Some("round_trip") => &[Metric::P50, Metric::P99],
            Some("set_up") => &[Metric::P50],
            Some("idle") => &[Metric::Memory, Metric::Descriptors],
            Some("plugin") if self.request["window"] == 0 => &[Metric::P50, Metric::P99],
            Some("plugin") => &[Metric::Rate],
            // Cables that are shaped below what a core moves say nothing about cores.
            Some("stream") if self.needs_nics() => &[Metric::Rate],
            _ => &[Metric::Rate, Metric::Cpu],
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

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn size_name(size: u64) -> String {
    match size {
        _ if size >= MIB => format!("{}MiB", size / MIB),
        _ if size >= KIB => format!("{}KiB", size / KIB),
        _ => format!("{size}B"),
    }
}

/// Milliseconds of a case; more where one message takes long.
const fn ms(size: u64) -> u64 {
    if size >= 64 * MIB { 400 } else { 150 }
}

/// Every case.
pub(super) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, request: Value| {
        cases.push(Case {
            name,
            request,
            place: Place::Loopback,
        });
    };
    for size in [8, 4 * KIB, 64 * KIB] {
        let request = json!({ "kind": "round_trip", "size": size, "ms": 300 });
        add(format!("round-trip-{}", size_name(size)), request);
    }
    // Each has one core less than it needs: turns of the scheduler decide, so it runs longer.
    add(
        "round-trip-4KiB-busy".into(),
        json!({ "kind": "round_trip", "size": 4 * KIB, "busy": 1, "ms": 500 }),
    );
    for (size, depth) in [
        (16 * KIB, 8),
        (64 * KIB, 1),
        (64 * KIB, 8),
        (128 * KIB, 1),
        (128 * KIB, 8),
        (256 * KIB, 1),
        (256 * KIB, 8),
        (MIB, 1),
        (MIB, 8),
        (16 * MIB, 8),
        (256 * MIB, 1),
    ] {
        let request = json!({ "kind": "stream", "size": size, "depth": depth, "ms": ms(size) });
        add(format!("stream-{}-x{depth}", size_name(size)), request);
    }
    for size in [4 * MIB, 256 * MIB] {
        let link = json!({ "staged": true });
        let request =
            json!({ "kind": "stream", "size": size, "depth": 1, "ms": ms(size), "link": link });
        add(format!("staged-{}", size_name(size)), request);
    }
    let stream = |more: Value| {
        let mut request = json!({ "kind": "stream", "size": 4 * KIB, "depth": 8, "ms": 150 });
        if let (Some(request), Some(more)) = (request.as_object_mut(), more.as_object()) {
            request.extend(more.clone());
        }
        request
    };
    add("small-into-large".into(), stream(json!({ "room": MIB })));
    add(
        "both-directions-1MiB".into(),
        stream(json!({ "size": MIB, "both": true })),
    );
    add("tags-64".into(), stream(json!({ "tags": 64, "depth": 64 })));
    add("threads-2".into(), stream(json!({ "threads": 2 })));
    add("set-up".into(), json!({ "kind": "set_up", "ms": 200 }));
    add(
        "idle-100".into(),
        json!({ "kind": "idle", "connections": 100, "ms": 0 }),
    );
    for (comms, size) in [
        (1, 8),
        (1, 4 * KIB),
        (1, 64 * KIB),
        (1, MIB),
        (8, 8),
        (8, 4 * KIB),
    ] {
        let request =
            json!({ "kind": "plugin", "size": size, "comms": comms, "window": 0, "ms": 150 });
        add(
            format!("plugin-round-trip-{}-c{comms}", size_name(size)),
            request,
        );
    }
    let plugin = |comms: u64, size: u64, window: u64| json!({ "kind": "plugin", "size": size, "comms": comms, "window": window, "ms": ms(size) });
    for size in [64 * KIB, 128 * KIB, 512 * KIB, 4 * MIB] {
        let name = format!("plugin-{}-c1-w1", size_name(size));
        add(name, plugin(1, size, 1));
    }
    for (comms, size) in [
        (1, 64 * KIB),
        (1, 128 * KIB),
        (1, 512 * KIB),
        (1, MIB),
        (1, 4 * MIB),
        (1, 16 * MIB),
        (8, 64 * KIB),
        (8, MIB),
        (8, 16 * MIB),
    ] {
        let name = format!("plugin-{}-c{comms}", size_name(size));
        add(name, plugin(comms, size, 8));
    }
    let delayed = json!({ "relay_us": 1000, "lanes": 4 });
    add(
        "delay-round-trip-64KiB".into(),
        json!({ "kind": "round_trip", "size": 64 * KIB, "ms": 200, "link": delayed }),
    );
    add(
        "delay-stream-1MiB-x8".into(),
        stream(json!({ "size": MIB, "ms": 300, "link": delayed })),
    );
    add(
        "delay-resets-1MiB-x8".into(),
        stream(json!({ "size": MIB, "ms": 500, "link": delayed, "reset_ms": 200 })),
    );
    for (name, state) in [
        ("equal", NicState::Equal),
        ("one-slow", NicState::OneSlow),
        ("one-cut", NicState::OneCut),
    ] {
        let link = json!({ "host": Nics::SERVER, "lanes": 4 });
        let request =
            json!({ "kind": "stream", "size": 4 * MIB, "depth": 8, "ms": 1500, "link": link });
        cases.push(Case {
            name: format!("nics-4-{name}"),
            request,
            place: Place::Nics(state),
        });
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_sizes_run_with_one_and_eight_comms() {
        let has = |size: u64, comms: u64| {
            all().iter().any(|case| {
                case.request["kind"] == "plugin"
                    && case.request["size"] == size
                    && case.request["comms"] == comms
            })
        };
        for size in [8, 4 * KIB, 64 * KIB, MIB, 16 * MIB] {
            assert!(has(size, 1) && has(size, 8), "{size} bytes");
        }
    }

    #[test]
    fn names_are_unlike_and_patterns_find_them() {
        let names: Vec<String> = all().into_iter().map(|case| case.name).collect();
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
        assert!(matches("stream-*-x8", "stream-64KiB-x8"));
        assert!(!matches("stream-*-x8", "stream-64KiB-x1"));
        assert!(matches("*", "anything") && !matches("set", "set-up"));
    }
}
