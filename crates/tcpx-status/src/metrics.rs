//! A report as OpenMetrics 1.0 text.

use std::fmt::Write;

use crate::counters::Histogram;
use crate::report::Report;

/// The content type of [`openmetrics`].
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The counters and gauges of a process. They have no label that grows with the number of peers.
pub fn openmetrics(report: &Report) -> String {
    let totals = &report.totals;
    let mut text = Text(String::with_capacity(4096));
    text.counter(
        "tcpx_payload_bytes",
        "Payload bytes that lanes and channels moved.",
        Some("bytes"),
        &[
            ("{direction=\"sent\"}", totals.bytes_sent),
            ("{direction=\"received\"}", totals.bytes_received),
        ],
    );
    text.counter(
        "tcpx_control_bytes",
        "Bytes of control connections, small messages among them.",
        Some("bytes"),
        &[
            ("{direction=\"sent\"}", totals.control_bytes_sent),
            ("{direction=\"received\"}", totals.control_bytes_received),
        ],
    );
    text.counter(
        "tcpx_discarded_bytes",
        "Bytes of cancelled or repeated chunks that were read and dropped.",
        Some("bytes"),
        &[("", totals.bytes_discarded)],
    );
    text.counter(
        "tcpx_operations",
        "Operations that ended, by how.",
        None,
        &[
            ("{result=\"completed\"}", totals.operations_completed),
            ("{result=\"failed\"}", totals.operations_failed),
        ],
    );
    text.histogram(
        "tcpx_operation_duration_seconds",
        "How long operations took that ended well.",
        &totals.durations,
    );
    for (name, help, value) in [
        (
            "tcpx_chunks_resent",
            "Chunks that were sent again because their lane failed.",
            totals.chunks_resent,
        ),
        ("tcpx_lanes_lost", "Lanes that failed.", totals.lanes_lost),
        (
            "tcpx_lanes_restored",
            "Lanes that came back.",
            totals.lanes_restored,
        ),
        (
            "tcpx_lanes_forged",
            "Lanes that failed because something had changed what the peer sealed.",
            totals.lanes_forged,
        ),
        (
            "tcpx_connections_opened",
            "Connections that were opened.",
            report.connections_opened,
        ),
        (
            "tcpx_connections_lost",
            "Connections that an error ended.",
            report.connections_lost,
        ),
        (
            "tcpx_peers_refused",
            "Connections that listeners refused.",
            report.peers_refused,
        ),
        (
            "tcpx_closes_held_up",
            "IPC handles of other processes that were closed while kernels ran, which held up copies.",
            report.mappings.held_up,
        ),
    ] {
        text.counter(name, help, None, &[("", value)]);
    }
    let sum = |of: fn(&crate::ConnectionReport) -> u64| report.connections.iter().map(of).sum();
    let retransmits = |connection: &crate::ConnectionReport| {
        connection.lanes.iter().map(|lane| lane.retransmits).sum()
    };
    for (name, help, value) in [
        (
            "tcpx_connections",
            "Open connections.",
            report.connections.len() as u64,
        ),
        (
            "tcpx_mappings",
            "GPU memory of other processes on the host that is mapped.",
            report.mappings.open,
        ),
        (
            "tcpx_lanes",
            "Open lanes.",
            sum(|connection| connection.lanes.len() as u64),
        ),
        (
            "tcpx_lane_retransmits",
            "Packets that TCP sent again on the open lanes.",
            sum(retransmits),
        ),
        (
            "tcpx_operations_running",
            "Operations that run.",
            sum(|connection| connection.operations_running),
        ),
        (
            "tcpx_operations_stalled",
            "Operations without progress for a second or longer.",
            sum(|connection| connection.operations_stalled),
        ),
    ] {
        text.gauge(name, help, value);
    }
    text.0.push_str("# EOF\n");
    text.0
}

struct Text(String);

impl Text {
    fn counter(&mut self, name: &str, help: &str, unit: Option<&str>, samples: &[(&str, u64)]) {
        self.head(name, "counter", help, unit);
        for (labels, value) in samples {
            let _ = writeln!(self.0, "{name}_total{labels} {value}");
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, "gauge", help, None);
        let _ = writeln!(self.0, "{name} {value}");
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help, Some("seconds"));
        let mut count = 0;
        for (bound, here) in Histogram::bounds().zip(histogram.buckets) {
            count += here;
            let _ = writeln!(self.0, "{name}_bucket{{le=\"{}\"}} {count}", seconds(bound));
        }
        count += histogram.above;
        let _ = writeln!(self.0, "{name}_bucket{{le=\"+Inf\"}} {count}");
        let _ = writeln!(self.0, "{name}_sum {}", seconds(histogram.sum_us));
        let _ = writeln!(self.0, "{name}_count {count}");
    }

    fn head(&mut self, name: &str, kind: &str, help: &str, unit: Option<&str>) {
        let _ = writeln!(self.0, "# TYPE {name} {kind}");
        if let Some(unit) = unit {
            let _ = writeln!(self.0, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.0, "# HELP {name} {help}");
    }
}

/// Microseconds as seconds, exactly.
fn seconds(micros: u64) -> String {
    format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;

    /// The names of a text that begin as ours do.
    fn names(text: &str) -> BTreeSet<&str> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        words.filter(|word| word.starts_with("tcpx_")).collect()
    }

    #[test]
    fn dashboard_and_alerts_name_metrics_that_are_served() {
        let dashboard = names(include_str!("../../../docs/grafana-dashboard.json"));
        let text = openmetrics(&Report::default());
        let served: String = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter(|line| !line.contains("_seconds_sum") && !line.contains("_seconds_count"))
            .map(|line| format!("{line}\n"))
            .collect();
        assert_eq!(dashboard, names(&served));
        let alerts = names(include_str!("../../../deploy/prometheus/rules.yml"));
        let others: Vec<_> = alerts.difference(&dashboard).collect();
        assert!(
            others.is_empty(),
            "alerts over metrics that nobody serves: {others:?}"
        );
    }

    #[test]
    fn the_text_is_what_openmetrics_asks_for() {
        let mut report = Report::default();
        report.totals.bytes_sent = 5;
        report.totals.durations.record(Duration::from_micros(20));
        report.totals.durations.record(Duration::from_secs(100));
        let text = openmetrics(&report);
        for line in [
            "# TYPE tcpx_payload_bytes counter",
            "# UNIT tcpx_payload_bytes bytes",
            "tcpx_payload_bytes_total{direction=\"sent\"} 5",
            "tcpx_operation_duration_seconds_bucket{le=\"0.000016\"} 0",
            "tcpx_operation_duration_seconds_bucket{le=\"0.000064\"} 1",
            "tcpx_operation_duration_seconds_bucket{le=\"+Inf\"} 2",
            "tcpx_operation_duration_seconds_sum 100.000020",
            "tcpx_operation_duration_seconds_count 2",
            "tcpx_operations_stalled 0",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        // Each family has one head, which comes before its samples.
        let heads: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("# TYPE"))
            .collect();
        let mut unique = heads.clone();
        unique.dedup();
        assert_eq!(heads, unique);
    }
}
