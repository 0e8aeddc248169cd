//! The rates as bars, in SVG.

use std::fmt::Write as _;

use super::cases::Outcome;
use super::file::spread;
use super::report::rate;

const LEFT: f64 = 300.0;
const WIDTH: f64 = 560.0;
const LINE: f64 = 18.0;
const GAP: f64 = 26.0;
const MARGIN: f64 = 20.0;

/// One group of bars for each case, each relative to the fastest way of its case.
pub(crate) fn svg(outcomes: &[Outcome]) -> String {
    let mut bars = String::new();
    let mut y = MARGIN;
    let mut case = "";
    for outcome in outcomes {
        if outcome.case != case {
            case = outcome.case;
            y += GAP;
            // Writing to a string never fails.
            let _ = writeln!(
                bars,
                r#"<text x="{MARGIN}" y="{:.0}" font-weight="bold">{}</text>"#,
                y - 6.0,
                escaped(case)
            );
        }
        let speed = |one: &Outcome| rate(one.bytes, spread(&one.micros).0);
        let fastest = outcomes
            .iter()
            .filter(|other| other.case == case)
            .map(speed)
            .fold(f64::MIN_POSITIVE, f64::max);
        let length = (speed(outcome) / fastest * WIDTH).max(1.0);
        let color = if outcome.way.contains("unpacker") {
            "#1b6ca8"
        } else {
            "#b0b7bf"
        };
        let _ = writeln!(
            bars,
            r#"<text x="{:.0}" y="{:.0}" text-anchor="end">{}</text><rect x="{LEFT}" y="{:.0}" width="{length:.1}" height="{:.0}" fill="{color}"/><text x="{:.0}" y="{:.0}">{:.1} GB/s</text>"#,
            LEFT - 8.0,
            y + 12.0,
            escaped(outcome.way),
            y,
            LINE - 4.0,
            LEFT + length + 6.0,
            y + 12.0,
            speed(outcome)
        );
        y += LINE;
    }
    let (width, height) = (LEFT + WIDTH + 110.0, y + MARGIN);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{bars}</svg>\n"
    )
}

/// `text` as a part of SVG.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_has_a_bar_and_the_fastest_the_longest() {
        let outcome = |way, micros| Outcome {
            case: "a < b",
            way,
            bytes: 1_000_000,
            micros: vec![micros],
        };
        let text = svg(&[outcome("unpacker", 10.0), outcome("one copy", 20.0)]);
        assert!(text.contains("a &lt; b") && text.contains("100.0 GB/s"));
        assert!(text.contains(r#"width="560.0""#) && text.contains(r#"width="280.0""#));
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
    }
}
