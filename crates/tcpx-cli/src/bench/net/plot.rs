//! Rates over sizes as lines, in SVG.

use std::fmt::Write as _;

use super::case::Contender;
use super::measure::{Results, Series};
use super::orders::Mode;
use crate::bench::file::spread;
use crate::sizes::Size;

const LEFT: f64 = 60.0;
const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 320.0;
const MARGIN: f64 = 30.0;
const LEGEND: f64 = 18.0;

const COLORS: [&str; 8] = [
    "#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#8d99ae", "#2e4057", "#00798c",
];

/// A line for each contender, mode and depth that streams.
pub(super) fn svg(results: &Results) -> String {
    let streaming = || {
        results
            .series
            .iter()
            .filter(|series| series.case.mode != Mode::Latency)
    };
    let rate = |series: &Series| {
        let rates: Vec<f64> = series.samples.iter().map(|sample| sample.rate).collect();
        spread(&rates).0
    };
    let mut lines: Vec<(String, Vec<&Series>)> = Vec::new();
    for series in streaming() {
        let name = label(series);
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, points)) => points.push(series),
            None => lines.push((name, vec![series])),
        }
    }
    let sizes = || streaming().map(|series| series.case.bytes.max(1));
    let (least, most) = (sizes().min().unwrap_or(1), sizes().max().unwrap_or(2));
    let top = streaming().map(rate).fold(f64::MIN_POSITIVE, f64::max);
    #[expect(clippy::cast_precision_loss, reason = "a place on a picture")]
    let log = |bytes: u64| (bytes as f64).log2();
    let span = (log(most) - log(least)).max(1.0);
    let x = |bytes: u64| LEFT + (log(bytes.max(1)) - log(least)) / span * WIDTH;
    let y = |rate: f64| MARGIN + HEIGHT - rate / top * HEIGHT;

    let mut body = String::new();
    // Writing to a string never fails.
    for step in 0..=4 {
        let value = top * f64::from(step) / 4.0;
        let _ = writeln!(
            body,
            r##"<line x1="{LEFT}" x2="{:.0}" y1="{:.1}" y2="{:.1}" stroke="#dddddd"/><text x="{:.0}" y="{:.1}" text-anchor="end">{value:.1}</text>"##,
            LEFT + WIDTH,
            y(value),
            y(value),
            LEFT - 6.0,
            y(value) + 4.0
        );
    }
    let mut shown: Vec<u64> = sizes().collect();
    shown.sort_unstable();
    shown.dedup();
    for bytes in shown {
        let _ = writeln!(
            body,
            r#"<text x="{:.1}" y="{:.0}" text-anchor="middle">{}</text>"#,
            x(bytes),
            MARGIN + HEIGHT + 18.0,
            Size(bytes)
        );
    }
    for (index, (name, points)) in lines.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let mut path = String::new();
        for series in points {
            let _ = write!(path, "{:.1},{:.1} ", x(series.case.bytes), y(rate(series)));
        }
        let below = MARGIN + HEIGHT + 36.0 + LEGEND * f64::from(u32::try_from(index).unwrap_or(0));
        let _ = writeln!(
            body,
            r#"<polyline points="{}" fill="none" stroke="{color}" stroke-width="2"/><rect x="{LEFT}" y="{below:.0}" width="14" height="4" fill="{color}"/><text x="{:.0}" y="{:.0}">{name}</text>"#,
            path.trim_end(),
            LEFT + 20.0,
            below + 6.0
        );
    }
    let height =
        MARGIN + HEIGHT + 50.0 + LEGEND * f64::from(u32::try_from(lines.len()).unwrap_or(0));
    let width = LEFT + WIDTH + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"18\">GB/s over the size of a message</text>\n{body}</svg>\n"
    )
}

fn label(series: &Series) -> String {
    let depth = series.case.depth;
    let mode = match series.case.mode {
        Mode::Both => "both directions",
        Mode::One | Mode::Latency => "one direction",
    };
    match series.contender {
        Contender::Iperf3 => format!("{}, {mode}", series.contender.name()),
        _ => format!("{}, {mode}, {depth} in flight", series.contender.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::Case;
    use super::super::measure::Sample;
    use super::*;

    #[test]
    fn a_line_for_each_contender_that_streams() {
        let series = |mode, contender, bytes, rate| {
            let sample = Sample {
                rate,
                ..Sample::default()
            };
            Series::new(
                Case {
                    name: "one".into(),
                    mode,
                    bytes,
                    depth: 1,
                },
                contender,
                vec![sample],
            )
        };
        let results = Results {
            series: vec![
                series(Mode::Latency, Contender::Tcpx, 1024, 1.0),
                series(Mode::One, Contender::Tcpx, 1024, 1.0),
                series(Mode::One, Contender::Tcpx, 4096, 2.0),
                series(Mode::One, Contender::Iperf3, 4096, 1.5),
            ],
            streams: 1,
            notes: Vec::new(),
            iperf3_differs: false,
        };
        let text = svg(&results);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert!(text.contains("tcpx, one direction, 1 in flight") && text.contains("1 KiB"));
        assert!(text.contains("60.0,190.0 680.0,30.0"), "{text}");
    }
}
