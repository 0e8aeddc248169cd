//! What a matrix of pairs gave: the tables, the file, and what could not be measured.

use super::Measured;
use crate::args::perf::MatrixArgs;
use crate::bench::file::{File, Row, machine, today};
use crate::error::Error;
use crate::memory_choice::Devices;
use crate::output::table::{indented, table};
use crate::sizes::Size;

/// A host of the list that takes no part.
pub(super) struct Absent {
    pub(super) host: String,
    pub(super) error: Error,
}

/// What is printed.
pub(super) struct Results<'a> {
    pub(super) one_host: bool,
    pub(super) alone: Vec<Measured<'a>>,
    pub(super) at_once: Vec<Measured<'a>>,
    /// All pairs at once, 10^9 bytes a second.
    pub(super) sum: f64,
    /// What all cores of this host copy together.
    pub(super) limit: Option<f64>,
    pub(super) absent: Vec<Absent>,
}

impl Results<'_> {
    /// Everything was measured; otherwise what was not.
    pub(super) fn complete(&self) -> Result<(), Error> {
        let missing = self.missing();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::Failed {
            what: format!("not everything was measured: {}", missing.join("; ")),
            hint: "mend or leave out the hosts that are named, then run it again",
        })
    }

    /// Hosts and pairs without figures, with the reason.
    fn missing(&self) -> Vec<String> {
        let brief = |error: &Error| crate::output::say::one_line(&error.what());
        let hosts = self
            .absent
            .iter()
            .map(|one| format!("{}: {}", one.host, brief(&one.error)));
        let pairs = [("alone", &self.alone), ("all at once", &self.at_once)];
        let pairs = pairs.into_iter().flat_map(|(when, measured)| {
            measured.iter().filter_map(move |one| {
                let error = one.outcome.as_ref().err()?;
                let (from, to) = (one.pair.from, one.pair.to);
                Some(format!(
                    "{} -> {}, {when}: {}",
                    from.title(self.one_host),
                    to.title(self.one_host),
                    brief(error)
                ))
            })
        });
        hosts.chain(pairs).collect()
    }

    pub(super) fn text(&self, args: &MatrixArgs) -> String {
        let mut out = format!(
            "{} transfers of {} each, contents verified; GB/s, rows send to columns\n",
            args.rounds,
            Size(args.size.0)
        );
        out.push_str(&self.matrix("alone", &self.alone));
        out.push_str(&self.matrix("all at once", &self.at_once));
        out.push_str(&format!(
            "sum of all at once: {:.2} GB/s, from the first start to the last end; a cell counts its own time alone,\n\
             so cells add up to more where pairs do not run all the time",
            self.sum
        ));
        if let Some(limit) = self.limit {
            out.push_str(&format!(
                "\nthis host's cores copy {limit:.1} GB/s of memory"
            ));
        }
        out
    }

    fn matrix(&self, title: &str, measured: &[Measured<'_>]) -> String {
        let mut ends: Vec<String> = Vec::new();
        for one in measured {
            for end in [one.pair.from, one.pair.to] {
                let title = end.title(self.one_host);
                if !ends.contains(&title) {
                    ends.push(title);
                }
            }
        }
        let header: Vec<&str> = std::iter::once(title)
            .chain(ends.iter().map(String::as_str))
            .collect();
        let numbers: Vec<usize> = (1..header.len()).collect();
        let mut out = table(&header, &numbers);
        for from in &ends {
            let cells = ends.iter().map(|to| {
                let found = measured.iter().find(|one| {
                    one.pair.from.title(self.one_host) == *from
                        && one.pair.to.title(self.one_host) == *to
                });
                found.map_or_else(
                    || "-".to_owned(),
                    |one| match &one.outcome {
                        Ok(summary) => format!("{:.2}", summary.gb_per_second),
                        Err(_) => "failed".to_owned(),
                    },
                )
            });
            out.add_row(std::iter::once(from.clone()).chain(cells));
        }
        indented(&out, "  ")
    }

    pub(super) fn json(&self, args: &MatrixArgs) -> File {
        let row = |when: &str, one: &Measured<'_>| {
            let summary = one.outcome.as_ref().ok()?;
            let name = format!(
                "{} -> {}, {when}",
                one.pair.from.title(self.one_host),
                one.pair.to.title(self.one_host)
            );
            let mut row = Row::of(name, "GB/s", &[summary.gb_per_second], String::new());
            row.cpu_seconds_per_gb = (when == "alone").then_some(summary.cpu_seconds_per_gb);
            Some(row)
        };
        let alone = self.alone.iter().filter_map(|one| row("alone", one));
        let mut rows: Vec<Row> = alone.collect();
        rows.extend(
            self.at_once
                .iter()
                .filter_map(|one| row("all at once", one)),
        );
        rows.push(Row::of(
            "sum of all at once".into(),
            "GB/s",
            &[self.sum],
            String::new(),
        ));
        rows.extend(self.limit.map(|limit| {
            Row::of(
                "all cores copying memory".into(),
                "GB/s",
                &[limit],
                String::new(),
            )
        }));
        let devices = Devices::probe().count();
        let devices = if devices == 0 {
            "host memory".to_owned()
        } else {
            format!("{devices} GPUs")
        };
        let hosts = if self.one_host { "" } else { "--hosts FILE " };
        File {
            schema: 1,
            subject: "Every pair",
            date: today(),
            machine: machine(&devices),
            command: format!(
                "tcpx perf {hosts}--size {} --rounds {} --json",
                args.size.0, args.rounds
            ),
            path: None,
            rows,
            notes: std::iter::once(
                "Contents of every pair were compared before anything was timed. Each figure is one measurement of several transfers.".to_owned(),
            )
            .chain(self.missing().iter().map(|one| format!("Not measured: {one}.")))
            .collect(),
        }
    }
}
