//! One plot: bars beside each other, in SVG.
//!
//! Every bar has its name beside it, so that nothing depends on telling colours apart; the two
//! colours are those of Okabe and Ito's palette for blue and orange.

use std::fmt::Write as _;

use crate::report::{Row, Subject, figure};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 260.0;
/// Room for the longest run of a group.
const SPAN: f64 = 480.0;
const BAR: f64 = 15.0;
const LINE: f64 = 21.0;
const OURS: &str = "#0072B2";
const PEERS: &str = "#E69F00";

/// Bars of one unit with one scale; the first one is ours.
#[derive(Debug)]
pub struct Group<'a> {
    /// Heading.
    pub what: &'a str,
    /// Where the figures come from.
    pub subject: &'a Subject,
    /// The commands that make them.
    pub commands: Vec<&'a str>,
    /// Name and figure of each bar.
    pub bars: Vec<(&'a str, &'a Row)>,
}

/// Each group has a scale of its own, from 0 to its highest run.
pub fn svg(groups: &[Group<'_>]) -> String {
    let mut body = String::new();
    let mut y = 34.0;
    for group in groups {
        let Some((_, ours)) = group.bars.first() else {
            continue;
        };
        let better = if ours.unit.ends_with("/s") {
            "longer is better"
        } else {
            "shorter is better"
        };
        // Writing to a String cannot fail.
        let _ = writeln!(
            body,
            r#"<text x="20" y="{y:.0}"><tspan font-weight="bold">{}</tspan> ({}, {better})</text>"#,
            escaped(group.what),
            escaped(&ours.unit),
        );
        y += 9.0;
        let highest = group
            .bars
            .iter()
            .map(|(_, row)| row.max)
            .fold(f64::MIN_POSITIVE, f64::max);
        let at = |value: f64| LEFT + value / highest * SPAN;
        for (index, (label, row)) in group.bars.iter().enumerate() {
            let (color, weight) = if index == 0 {
                (OURS, "bold")
            } else {
                (PEERS, "normal")
            };
            let (middle, low, high) = (y + BAR / 2.0, at(row.min), at(row.max));
            let _ = writeln!(
                body,
                r##"<text x="{:.0}" y="{:.0}" text-anchor="end" font-weight="{weight}">{}</text><rect x="{LEFT}" y="{y:.0}" width="{:.1}" height="{BAR}" fill="{color}"/><path d="M{low:.1} {middle:.1}H{high:.1}M{low:.1} {:.1}v8M{high:.1} {:.1}v8" stroke="#222" fill="none"/><text x="{:.0}" y="{:.0}" font-weight="{weight}">{}</text>"##,
                LEFT - 8.0,
                y + 12.0,
                escaped(label),
                at(row.median) - LEFT,
                middle - 4.0,
                middle - 4.0,
                high + 8.0,
                y + 12.0,
                figure(row.median),
            );
            y += LINE;
        }
        let _ = writeln!(
            body,
            r##"<text x="{LEFT}" y="{:.0}" font-size="10" fill="#555">{}, {}</text>"##,
            y + 6.0,
            escaped(&group.subject.machine),
            escaped(&group.subject.date),
        );
        y += 36.0;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y:.0}\" \
         viewBox=\"0 0 {WIDTH} {y:.0}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_share_their_group_s_scale_and_show_the_spread() {
        let rows = vec![
            Row::of("ours", "us", &[1.0, 2.0, 4.0]),
            Row::of("peer", "us", &[4.0, 4.0, 8.0]),
        ];
        let subject = Subject::new("s", "a & b".to_owned(), rows, Vec::new());
        let bars = subject.rows.iter().map(|row| (row.name.as_str(), row));
        let text = svg(&[Group {
            what: "a < b",
            subject: &subject,
            commands: Vec::new(),
            bars: bars.collect(),
        }]);
        assert!(text.contains("a &lt; b") && text.contains("a &amp; b, "));
        assert!(text.contains(r#"width="120.0""#) && text.contains(r#"width="240.0""#));
        assert!(
            text.contains("M320.0 ") && text.contains("H500.0M"),
            "{text}"
        );
        assert!(text.contains("shorter is better"));
    }
}
