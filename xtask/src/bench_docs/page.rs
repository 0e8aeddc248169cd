//! The page: the rows that a user cares about, each beside its peers.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

use super::figure;
use crate::benchmark::{Row, Subject};

const HEAD: &str = "\
# Benchmarks

<!-- Made by `cargo xtask bench-docs` from benchmarks/*.json. Edit those, not this. -->

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
Both ends run on one host over loopback TCP, so they share its cores and its memory, and no figure
says what a network card does.

On your hosts: `tcpx bench net` beside plain sockets and iperf3, `scripts/gpu-tcp-speed.sh OUT_DIR`
and `scripts/gpu-nccl.sh OUT_DIR` on a host with two GPUs. All tables:
[benchmarks/tables.md](../benchmarks/tables.md). What was tried and dropped: [design/](design/README.md).
";

/// One row of the page, by the names that its figures have in a file.
struct Choice {
    what: &'static str,
    file: &'static str,
    /// A word of the command that makes these figures; empty takes all commands of the file.
    command: &'static str,
    ours: &'static str,
    /// How the page calls each peer, and its row.
    peers: &'static [(&'static str, &'static str)],
}

const SPEED: &str = "16-gpu-tcp-speed-two.json";
const NCCL: &str = "40-nccl.json";
const NCCL_ENCRYPTED: &str = "41-nccl-encrypted.json";
const HOST: &str = "35-host-two-cores.json";
const ENCRYPTED: &str = "36-host-encrypted.json";
const GPU_ENCRYPTED: &str = "37-gpu-encrypted.json";
const TUNED: &str = "NCCL's sockets, best tuning";
const DEFAULT: &str = "NCCL's sockets, defaults";

const CHOICES: [Choice; 9] = [
    Choice {
        what: "GPU to GPU, 256 MiB, 2 in flight",
        file: SPEED,
        command: "",
        ours: "256 MiB, 2 in flight",
        peers: &[
            (
                TUNED,
                "NCCL over its own sockets, as tuned best for large messages: 256 MiB, streaming",
            ),
            (
                DEFAULT,
                "NCCL over its own sockets, as it comes: 256 MiB, streaming",
            ),
            (
                "plain sockets, host memory",
                "plain sockets, 12 lanes, over 256 MiB of host memory",
            ),
        ],
    },
    Choice {
        what: "GPU to GPU, 4 MiB, 8 in flight",
        file: SPEED,
        command: "",
        ours: "4 MiB, 8 in flight",
        peers: &[(
            "plain sockets, host memory, cached",
            "plain sockets, 12 lanes, each over 1 MiB of host memory",
        )],
    },
    Choice {
        what: "GPU to GPU, 256 MiB, 2 in flight, encrypted",
        file: GPU_ENCRYPTED,
        command: "",
        ours: "256 MiB, 2 in flight, encrypted",
        peers: &[("tcpx in the clear", "256 MiB, 2 in flight, in the clear")],
    },
    Choice {
        what: "GPU to GPU, 4 KiB, half a round trip",
        file: SPEED,
        command: "",
        ours: "4 KiB, half round trip, p50",
        peers: &[
            (
                DEFAULT,
                "NCCL over its own sockets, as it comes: 4 KiB, half round trip, p50",
            ),
            (
                "plain sockets that spin, host memory",
                "4 KiB, half round trip, p50: plain sockets that spin, host memory",
            ),
        ],
    },
    Choice {
        what: "NCCL send/receive over tcpx, 256 MiB",
        file: NCCL,
        command: "",
        ours: "send/recv, 256 MiB, tcpx, untuned",
        peers: &[
            (TUNED, "send/recv, 256 MiB, NCCL's sockets, 16 channels"),
            (DEFAULT, "send/recv, 256 MiB, NCCL's sockets, default"),
        ],
    },
    Choice {
        what: "NCCL send/receive over tcpx, 256 MiB, encrypted",
        file: NCCL_ENCRYPTED,
        command: "",
        ours: "send/recv, 256 MiB, tcpx, encrypted",
        peers: &[
            ("tcpx in the clear", "send/recv, 256 MiB, tcpx, untuned"),
            (DEFAULT, "send/recv, 256 MiB, NCCL's sockets, default"),
        ],
    },
    Choice {
        what: "NCCL all-reduce over tcpx, 256 MiB",
        file: NCCL,
        command: "",
        ours: "all-reduce, 256 MiB, tcpx, untuned",
        peers: &[
            (TUNED, "all-reduce, 256 MiB, NCCL's sockets, 16 channels"),
            (DEFAULT, "all-reduce, 256 MiB, NCCL's sockets, default"),
        ],
    },
    Choice {
        what: "Host memory on two cores, 1 MiB, 8 in flight, bbr",
        file: HOST,
        command: "bbr",
        ours: "1 MiB, 8 in flight: host -> host, congestion control bbr at all ends",
        peers: &[
            (
                "plain sockets",
                "1 MiB, 8 in flight: raw, congestion control bbr at all ends",
            ),
            (
                "iperf3",
                "1 MiB, 8 in flight: iperf3, congestion control bbr at all ends",
            ),
        ],
    },
    Choice {
        what: "Host memory on two cores, 16 MiB, 8 in flight, encrypted",
        file: ENCRYPTED,
        command: "",
        ours: "16 MiB, 8 in flight: host -> host, encrypted",
        peers: &[(
            "tcpx in the clear",
            "16 MiB, 8 in flight: host -> host, in the clear",
        )],
    },
];

/// A row of the page with its figures; tcpx comes first.
pub(super) struct Group<'a> {
    pub(super) what: &'a str,
    pub(super) subject: &'a Subject,
    /// The commands that make its figures.
    pub(super) commands: Vec<&'a str>,
    pub(super) bars: Vec<(&'a str, &'a Row)>,
}

/// Finds the figures of the page.
///
/// # Errors
/// When a file or a row is missing, or a peer has another unit.
pub(super) fn groups(subjects: &[(String, Subject)]) -> Result<Vec<Group<'_>>> {
    CHOICES
        .iter()
        .map(|choice| group(choice, subjects))
        .collect()
}

fn group<'a>(choice: &Choice, subjects: &'a [(String, Subject)]) -> Result<Group<'a>> {
    let file = choice.file;
    let (_, subject) = subjects
        .iter()
        .find(|(name, _)| name == file)
        .with_context(|| format!("the page needs {file}, which is missing"))?;
    let row = |name: &str| {
        let found = subject.rows.iter().find(|row| row.name == name);
        found.with_context(|| format!("the page needs the row {name:?}, which {file} lacks"))
    };
    let ours = row(choice.ours)?;
    let mut bars = vec![("tcpx", ours)];
    for (label, name) in choice.peers {
        let peer = row(name)?;
        ensure!(
            peer.unit == ours.unit,
            "{name:?} is in {}, not in {}",
            peer.unit,
            ours.unit
        );
        bars.push((label, peer));
    }
    let commands: Vec<&str> = subject
        .command
        .split("; ")
        .filter(|command| command.contains(choice.command))
        .collect();
    ensure!(
        !commands.is_empty(),
        "no command of {file} contains {:?}",
        choice.command
    );
    Ok(Group {
        what: choice.what,
        subject,
        commands,
        bars,
    })
}

/// The whole page. Hosts are numbered in the order in which rows name them.
pub(super) fn text(groups: &[Group<'_>]) -> String {
    let mut hosts: Vec<&Group<'_>> = Vec::new();
    let mut text = HEAD.to_owned();
    for group in groups {
        let known = hosts
            .iter()
            .position(|host| std::ptr::eq(host.subject, group.subject));
        let host = known.unwrap_or_else(|| {
            hosts.push(group);
            hosts.len() - 1
        });
        let peers: Vec<String> = group
            .bars
            .iter()
            .skip(1)
            .map(|(label, row)| format!("{label}: {}", spread(row)))
            .collect();
        let ours = group.bars[0].1;
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | **{}** ({} to {}) | {} | {} |",
            group.what,
            ours.unit,
            figure(ours.median),
            figure(ours.min),
            figure(ours.max),
            peers.join("<br>"),
            host + 1,
        );
    }
    text.push_str(PLOT);
    for (index, host) in hosts.iter().enumerate() {
        let commands: Vec<String> = host
            .commands
            .iter()
            .map(|command| format!("`{command}`"))
            .collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            index + 1,
            host.subject.machine,
            host.subject.date,
            commands.join("<br>"),
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
    format!(
        "{} ({} to {})",
        figure(row.median),
        figure(row.min),
        figure(row.max)
    )
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

    const CHOICE: Choice = Choice {
        what: "bytes",
        file: "x.json",
        command: "",
        ours: "a",
        peers: &[("peer", "b")],
    };

    #[test]
    fn a_row_shows_peers_host_and_every_command() {
        let subjects = [subject("GB/s")];
        let page = text(&[group(&CHOICE, &subjects).unwrap()]);
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
        let groups = [group(&CHOICE, &subjects).unwrap()];
        check_readme(&groups, "tcpx 2.00 GB/s, the peer 2.00 GB/s").unwrap();
        let error = check_readme(&groups, "tcpx 3.00 GB/s").unwrap_err();
        assert!(error.to_string().contains("2.00 GB/s of tcpx"), "{error}");
    }

    #[test]
    fn a_missing_file_row_or_other_unit_is_named() {
        let fault = |choice: &Choice, subjects: &[(String, Subject)]| {
            format!("{:#}", group(choice, subjects).err().unwrap())
        };
        assert!(fault(&CHOICE, &[]).contains("x.json, which is missing"));
        assert!(fault(&CHOICE, &[subject("us")]).contains("is in us, not in GB/s"));
        let other = Choice {
            ours: "c",
            ..CHOICE
        };
        assert!(fault(&other, &[subject("GB/s")]).contains("\"c\", which x.json lacks"));
    }
}
