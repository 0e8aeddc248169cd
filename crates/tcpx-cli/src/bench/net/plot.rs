//! Rates over sizes as lines, in SVG.

use std::fmt::Write as _;

use super::case::Contender;
use super::measure::{Results, Series};
use super::orders::Mode;
use super::report::About;
use crate::bench::file::{machine, spread, today};
use crate::sizes::Size;

const LEFT: f64 = 60.0;
const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 320.0;
const MARGIN: f64 = 50.0;
const LEGEND: f64 = 18.0;

/// Colours that people who see fewer of them tell apart (Okabe and Ito).
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// A line for each contender, mode and depth that streams, with a bar from the lowest to the highest rate.
pub(super) fn svg(results: &Results, about: &About) -> String {
    let streaming = || {
        results
            .series
            .iter()
            .filter(|series| series.case.mode != Mode::Latency)
    };
    let rates = |series: &Series| {
        let rates: Vec<f64> = series.samples.iter().map(|sample| sample.rate).collect();
        spread(&rates)
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
    let highest = streaming().map(|series| rates(series).2);
    let step = step(highest.fold(f64::MIN_POSITIVE, f64::max));
    let highest = streaming().map(|series| rates(series).2);
    let steps = (highest.fold(f64::MIN_POSITIVE, f64::max) / step)
        .ceil()
        .max(1.0);
    let top = steps * step;
    #[expect(clippy::cast_precision_loss, reason = "a place on a picture")]
    let log = |bytes: u64| (bytes as f64).log2();
    let span = (log(most) - log(least)).max(1.0);
    let x = |bytes: u64| LEFT + (log(bytes.max(1)) - log(least)) / span * WIDTH;
    let y = |rate: f64| MARGIN + HEIGHT - rate / top * HEIGHT;

    let mut body = String::new();
    // Writing to a string never fails.
    let mut value = 0.0;
    while value <= top + step / 2.0 {
        let _ = writeln!(
            body,
            r##"<line x1="{LEFT}" x2="{:.0}" y1="{:.1}" y2="{:.1}" stroke="#dddddd"/><text x="{:.0}" y="{:.1}" text-anchor="end">{}</text>"##,
            LEFT + WIDTH,
            y(value),
            y(value),
            LEFT - 6.0,
            y(value) + 4.0,
            round(value)
        );
        value += step;
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
        // With the next round of colours the lines are dashed, so that no two look the same.
        let dashes = match index / COLORS.len() {
            0 => String::new(),
            round => format!(r#" stroke-dasharray="{} 3""#, 8 / round.min(8)),
        };
        let mut path = String::new();
        for series in points {
            let (median, low, high) = rates(series);
            let at = x(series.case.bytes);
            let _ = write!(path, "{at:.1},{:.1} ", y(median));
            let _ = writeln!(
                body,
                r#"<line x1="{at:.1}" x2="{at:.1}" y1="{:.1}" y2="{:.1}" stroke="{color}"/>{}"#,
                y(low),
                y(high),
                marker(index, at, y(median), color)
            );
        }
        let below = MARGIN + HEIGHT + 40.0 + LEGEND * f64::from(u32::try_from(index).unwrap_or(0));
        let _ = writeln!(
            body,
            r#"<polyline points="{}" fill="none" stroke="{color}" stroke-width="2"{dashes}/><line x1="{LEFT}" x2="{:.0}" y1="{below:.0}" y2="{below:.0}" stroke="{color}" stroke-width="2"{dashes}/>{}<text x="{:.0}" y="{:.0}">{}</text>"#,
            path.trim_end(),
            LEFT + 28.0,
            marker(index, LEFT + 14.0, below, color),
            LEFT + 36.0,
            below + 4.0,
            escaped(name)
        );
    }
    let height =
        MARGIN + HEIGHT + 54.0 + LEGEND * f64::from(u32::try_from(lines.len()).unwrap_or(0));
    let width = LEFT + WIDTH + 40.0;
    let title = format!("{}: GB/s over the size of a message", about.ends);
    let host = format!(
        "{}, {}; medians, with the lowest and highest round",
        machine(&about.devices),
        today()
    );
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"18\" font-size=\"14\">{}</text>\n<text x=\"{LEFT}\" y=\"34\" fill=\"#555555\">{}</text>\n{body}</svg>\n",
        escaped(&title),
        escaped(&host)
    )
}

/// `text` as a part of SVG.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// A distance of lines that people count in (1, 2 or 5 of a power of ten), for about five of them.
fn step(highest: f64) -> f64 {
    let rough = highest / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let enough = factors.into_iter().find(|factor| factor * power >= rough);
    enough.unwrap_or(10.0) * power
}

/// A value of the scale without the digits that adding steps leaves.
fn round(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// A shape of its own for each line.
fn marker(index: usize, x: f64, y: f64, color: &str) -> String {
    match index % 4 {
        0 => format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{color}"/>"#),
        1 => format!(
            r#"<rect x="{:.1}" y="{:.1}" width="8" height="8" fill="{color}"/>"#,
            x - 4.0,
            y - 4.0
        ),
        2 => format!(
            r#"<polygon points="{x:.1},{:.1} {:.1},{:.1} {:.1},{:.1}" fill="{color}"/>"#,
            y - 5.0,
            x - 5.0,
            y + 4.0,
            x + 5.0,
            y + 4.0
        ),
        _ => format!(
            r#"<polygon points="{x:.1},{:.1} {:.1},{y:.1} {x:.1},{:.1} {:.1},{y:.1}" fill="{color}"/>"#,
            y - 5.0,
            x + 5.0,
            y + 5.0,
            x - 5.0
        ),
    }
}

fn label(series: &Series) -> String {
    let depth = series.case.depth;
    let mode = match series.case.mode {
        Mode::Both => "both directions",
        Mode::One | Mode::Back | Mode::Latency => "one direction",
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
    use super::super::orders::Op;
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
                series(Mode::Latency, Contender::Ours(Op::Send), 1024, 1.0),
                series(Mode::One, Contender::Ours(Op::Send), 1024, 1.0),
                series(Mode::One, Contender::Ours(Op::Send), 4096, 2.0),
                series(Mode::One, Contender::Iperf3, 4096, 1.5),
            ],
            streams: 1,
            notes: Vec::new(),
            iperf3_differs: false,
        };
        let about = About {
            ends: "host -> host".into(),
            path: String::new(),
            devices: "no GPU".into(),
        };
        let text = svg(&results, &about);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert!(text.contains("tcpx, one direction, 1 in flight") && text.contains("1 KiB"));
        assert!(text.contains("60.0,210.0 680.0,50.0"), "{text}");
        assert!(text.contains("host -&gt; host") && text.contains("no GPU, "));
        // A scale that people count in.
        for value in [">0<", ">0.5<", ">1<", ">1.5<", ">2<"] {
            assert!(text.contains(value), "{value}: {text}");
        }
    }

    #[test]
    fn the_scale_steps_by_one_two_or_five() {
        for (highest, expected) in [(2.0, 0.5), (8.4, 2.0), (5.0, 1.0), (47.0, 10.0), (0.3, 0.1)] {
            assert!((step(highest) - expected).abs() < 1e-9, "{highest}");
        }
    }
}
