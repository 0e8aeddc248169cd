//! The results as a table, as a benchmark file, and as comma-separated values.

use std::fmt::Write as _;

use tcpx_memory::Gpu;

use super::cases::Outcome;
use super::file::{File, Row, digits, machine, spread, today};
use super::targets::{Verdict, verdicts};
use super::ways::Way;
use crate::output::table::{indented, table};

/// A line: what, and its time over the rounds.
struct Line<'a> {
    outcome: &'a Outcome,
    median: f64,
    min: f64,
    max: f64,
    /// Against one copy of the same size in the same case: the median over the rounds, and that copy's
    /// own rate.
    of_copy: Option<(f64, f64)>,
}

pub(crate) struct Report<'a> {
    lines: Vec<Line<'a>>,
    targets: Vec<Verdict>,
    machine: String,
    rounds: u32,
}

impl<'a> Report<'a> {
    pub(crate) fn new(gpu: &Gpu, rounds: u32, outcomes: &'a [Outcome]) -> Self {
        let of_copy = |one: &Outcome| {
            let is_copy =
                |other: &&Outcome| other.case == one.case && other.way == Way::Copy.name();
            let copy = outcomes.iter().find(is_copy)?;
            let shares = copy.micros.iter().zip(&one.micros);
            let shares: Vec<_> = shares.map(|(copy, own)| copy / own).collect();
            let own = rate(copy.bytes, spread(&copy.micros).0);
            Some((spread(&shares).0, own))
        };
        let lines = outcomes.iter().map(|outcome| {
            let (median, min, max) = spread(&outcome.micros);
            Line {
                outcome,
                median,
                min,
                max,
                of_copy: of_copy(outcome),
            }
        });
        Self {
            lines: lines.collect(),
            targets: verdicts(outcomes),
            machine: machine(&gpu.info().name),
            rounds,
        }
    }

    pub(crate) fn table(&self) -> String {
        let header = ["case", "way", "us", "least", "most", "GB/s", "of copy"];
        let mut out = table(&header, &[2, 3, 4, 5, 6]);
        for line in &self.lines {
            out.add_row([
                line.outcome.case.to_owned(),
                line.outcome.way.to_owned(),
                format!("{:.2}", line.median),
                format!("{:.2}", line.min),
                format!("{:.2}", line.max),
                format!("{:.1}", rate(line.outcome.bytes, line.median)),
                line.of_copy
                    .map_or_else(String::new, |(share, _)| format!("{share:.2}")),
            ]);
        }
        format!(
            "{}\n\n{}",
            indented(&out, "").trim_end(),
            self.target_table()
        )
    }

    fn target_table(&self) -> String {
        let header = ["target", "must", "aim", "here", "least", "most", "unit", ""];
        let mut out = table(&header, &[1, 2, 3, 4, 5]);
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        for one in &self.targets {
            let (median, min, max) = one.spread();
            out.add_row([
                one.what.clone(),
                number(one.must),
                number(one.aim),
                format!("{median:.2}"),
                format!("{min:.2}"),
                format!("{max:.2}"),
                one.unit.to_owned(),
                one.verdict().to_owned(),
            ]);
        }
        indented(&out, "").trim_end().to_owned()
    }

    pub(crate) fn csv(&self) -> String {
        let mut text = "case,way,bytes,median_us,min_us,max_us,gb_per_second\n".to_owned();
        for line in &self.lines {
            let Outcome {
                case, way, bytes, ..
            } = line.outcome;
            let (median, min, max) = (line.median, line.min, line.max);
            // Writing to a string never fails.
            let _ = writeln!(
                text,
                "\"{case}\",\"{way}\",{bytes},{median:.3},{min:.3},{max:.3},{:.3}",
                rate(*bytes, median)
            );
        }
        text
    }

    pub(crate) fn json(&self) -> String {
        let rows = self.lines.iter().flat_map(|line| {
            let name = format!("{}: {}", line.outcome.case, line.outcome.way);
            let notes = line
                .of_copy
                .map(|(share, copy)| format!("{share:.2} of one copy's rate, {copy:.1} GB/s."))
                .unwrap_or_default();
            let bytes = line.outcome.bytes;
            [
                Row {
                    name: name.clone(),
                    unit: "us",
                    median: digits(line.median),
                    min: digits(line.min),
                    max: digits(line.max),
                    runs: self.rounds,
                    ..Row::default()
                },
                Row {
                    name,
                    unit: "GB/s",
                    median: digits(rate(bytes, line.median)),
                    min: digits(rate(bytes, line.max)),
                    max: digits(rate(bytes, line.min)),
                    runs: self.rounds,
                    notes,
                    ..Row::default()
                },
            ]
        });
        let file = File {
            schema: 1,
            subject: "Unpack",
            date: today(),
            machine: self.machine.clone(),
            command: format!("tcpx bench unpack --rounds {} --json", self.rounds),
            path: None,
            rows: self.targets.iter().map(Verdict::row).chain(rows).collect(),
            notes: vec![
                "From the call until the bytes are visible, bytes counted once. Each run is a round over all cases in one start of the program, itself the median of up to 200 calls; every way was verified on fresh random data and a poisoned destination before.".to_owned(),
                "In a round the ways of a case take four turns each. Shares are of the same round, so that a machine's slow hour weighs on both sides; figures in GB/s and us are this machine's, with its own copy beside them.".to_owned(),
                "Four sets of 64 MiB take turns, so that neither end is in the GPU's cache, except in the cases that say so. Lists are shuffled; 1,448-byte fragments begin 3 bytes behind an aligned address.".to_owned(),
                "The time of 1 byte is what the launch and the way back cost: no unpack can take less.".to_owned(),
                "`one copy` is the copy engine; from pinned memory a kernel's reads cross the bus in smaller requests, which bounds it at about nine tenths of the copy engine.".to_owned(),
                "`unpacker` launches from the thread that polls; `worker` hands the job to the copy worker's thread, as the engine does.".to_owned(),
                "`plain kernel` is one warp a fragment with 16-byte loads, its descriptors in the launch or in mapped memory as the unpacker's.".to_owned(),
            ],
        };
        file.text()
    }
}

/// 10^9 bytes a second.
#[expect(clippy::cast_precision_loss, reason = "three digits are printed")]
pub(super) fn rate(bytes: u64, micros: f64) -> f64 {
    bytes as f64 / micros / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_and_rates() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), (2.0, 1.0, 3.0));
        assert!((rate(4_000_000, 10.0) - 400.0).abs() < 1e-9);
    }
}
