//! The page: the rows that a user cares about, each beside its peers.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

use serde::Deserialize;
use tcpx_bench::plot::Group;
use tcpx_bench::report::{Row, Subject, figure};

const HEAD: &str = "\
# Benchmarks

<!-- Made by `cargo xtask bench-docs` from benchmarks/*.json. Edit those, not this. -->

**Every figure is of one host**: both ends run there over loopback TCP, so they share its cores and
its memory, and no figure says what a network card does.

Medians of repeated runs, the lowest and highest run in parentheses. GB/s is 10^9 bytes a second.

| what | unit | tcpx | peers in the same runs | host |
|---|---|---:|---|---|
";

const PLOT: &str = "
![tcpx beside its peers: bars from 0 to the median, lines from the lowest to the highest run](benchmarks.svg)

| host | what | date | command |
|---|---|---|---|
";

const TAIL: &str = "
On your hosts: `tcpx bench net` beside plain sockets and iperf3, `scripts/gpu-tcp-speed.sh OUT_DIR`
and `scripts/gpu-nccl.sh OUT_DIR` on a host with two GPUs. All tables:
[benchmarks/tables.md](../benchmarks/tables.md). What was tried and dropped:
[design/dropped.md](design/dropped.md).
";

/// The rows of the page.
const CHOICES: &str = include_str!("page.json");

/// One row of the page, by the names that its figures have in a file.
#[derive(Deserialize)]
pub(super) struct Choice {
    what: String,
    file: String,
    /// A word of the command that makes these figures; empty takes all commands of the file.
    command: String,
    ours: String,
    /// How the page calls each peer, and its row.
    peers: Vec<(String, String)>,
}

pub(super) fn choices() -> Result<Vec<Choice>> {
    serde_json::from_str(CHOICES).context("page.json")
}

/// Finds the figures of the page.
///
/// # Errors
/// When a file or a row is missing, or a peer has another unit.
pub(super) fn groups<'a>(
    choices: &'a [Choice],
    subjects: &'a [(String, Subject)],
) -> Result<Vec<Group<'a>>> {
    choices
        .iter()
        .map(|choice| group(choice, subjects))
        .collect()
}

fn group<'a>(choice: &'a Choice, subjects: &'a [(String, Subject)]) -> Result<Group<'a>> {
    let file = &choice.file;
    let (_, subject) = subjects
        .iter()
        .find(|(name, _)| name == file)
        .with_context(|| format!("the page needs {file}, which is missing"))?;
    let row = |name: &str| {
        let found = subject.rows.iter().find(|row| row.name == name);
        found.with_context(|| format!("the page needs the row {name:?}, which {file} lacks"))
    };
    let mut bars = vec![("tcpx", row(&choice.ours)?)];
    for (label, name) in &choice.peers {
        bars.push((label.as_str(), row(name)?));
    }
    let (_, ours) = bars[0];
    for (label, peer) in &bars {
        let (unit, of_ours) = (&peer.unit, &ours.unit);
        ensure!(unit == of_ours, "{label:?} is in {unit}, not in {of_ours}");
    }
    let commands = subject.command.split("; ");
    let commands = commands.filter(|command| command.contains(&choice.command));
    Ok(Group {
        what: &choice.what,
        subject,
        commands: commands.collect(),
        bars,
    })
}

/// The whole page. Hosts are numbered in the order in which rows name them.
pub(super) fn text(groups: &[Group<'_>]) -> String {
    let mut hosts: Vec<&Group<'_>> = Vec::new();
    let mut text = HEAD.to_owned();
    for group in groups {
        let is_host = |host: &&Group<'_>| std::ptr::eq(host.subject, group.subject);
        let host = hosts.iter().position(is_host).unwrap_or(hosts.len());
        if host == hosts.len() {
            hosts.push(group);
        }
        let (_, ours) = group.bars[0];
        let peers = group.bars[1..].iter();
        let peers =
            peers.map(|(label, row)| format!("{label}: {}{}", figure(row.median), spread(row)));
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | **{}**{} | {} | {} |",
            group.what,
            ours.unit,
            figure(ours.median),
            spread(ours),
            peers.collect::<Vec<_>>().join("<br>"),
            host + 1,
        );
    }
    text.push_str(PLOT);
    for (index, host) in hosts.iter().enumerate() {
        let commands = host.commands.iter().map(|command| format!("`{command}`"));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            index + 1,
            host.subject.machine,
            host.subject.date,
            commands.collect::<Vec<_>>().join("<br>"),
        );
    }
    text.push_str(TAIL);
    text
}

/// Fails unless the README shows the page's first figure and its first peer's.
pub(super) fn check_readme(groups: &[Group<'_>], readme: &str) -> Result<()> {
    for (label, row) in groups.iter().flat_map(|group| &group.bars).take(2) {
        let shown = format!("{} {}", figure(row.median), row.unit);
        ensure!(
            readme.contains(&shown),
            "README.md does not show the page's first figures: {shown} of {label} is missing"
        );
    }
    Ok(())
}

fn spread(row: &Row) -> String {
    format!(" ({} to {})", figure(row.min), figure(row.max))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(unit: &str) -> (String, Subject) {
        let row = |name: &str, unit: &str| serde_json::json!({"name": name, "unit": unit, "median": 2, "min": 1, "max": 3, "runs": 5});
        let file = serde_json::json!({
            "schema": 1, "subject": "s", "date": "2026-01-31", "machine": "two cores",
            "command": "one; two", "rows": [row("a", "GB/s"), row("b", unit)],
        });
        (
            "x.json".to_owned(),
            Subject::parse(&file.to_string()).unwrap(),
        )
    }

    fn choice(ours: &str) -> Choice {
        let text = serde_json::json!({
            "what": "bytes", "file": "x.json", "command": "", "ours": ours, "peers": [["peer", "b"]],
        });
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn a_row_shows_peers_host_and_every_command() {
        let subjects = [subject("GB/s")];
        let choice = choice("a");
        let page = text(&[group(&choice, &subjects).unwrap()]);
        assert!(
            page.contains(
                "| bytes | GB/s | **2.00** (1.00 to 3.00) | peer: 2.00 (1.00 to 3.00) | 1 |"
            ),
            "{page}"
        );
        assert!(
            page.contains("| 1 | two cores | 2026-01-31 | `one`<br>`two` |"),
            "{page}"
        );
    }

    #[test]
    fn the_readme_must_show_the_first_figure_and_its_peer() {
        let subjects = [subject("GB/s")];
        let choice = choice("a");
        let groups = [group(&choice, &subjects).unwrap()];
        check_readme(&groups, "tcpx 2.00 GB/s, the peer 2.00 GB/s").unwrap();
        let error = check_readme(&groups, "tcpx 3.00 GB/s").unwrap_err();
        assert!(error.to_string().contains("2.00 GB/s of tcpx"), "{error}");
    }

    #[test]
    fn a_missing_file_row_or_other_unit_is_named() {
        let fault = |choice: &Choice, subjects: &[(String, Subject)]| {
            format!("{:#}", group(choice, subjects).err().unwrap())
        };
        assert!(fault(&choice("a"), &[]).contains("x.json, which is missing"));
        assert!(fault(&choice("a"), &[subject("us")]).contains("is in us, not in GB/s"));
        assert!(fault(&choice("c"), &[subject("GB/s")]).contains("\"c\", which x.json lacks"));
    }
}
