use std::io::Write;

use serde_json::Value;

use crate::support::{Ended, ask, run, tcpx};

/// Enough for every part to run; figures are nobody's business here.
const SHORT: [&str; 8] = [
    "--rounds",
    "2",
    "--span",
    "5ms",
    "--sizes",
    "1KiB,300KB",
    "--in-flight",
    "1,3",
];

const HERE: [&str; 6] = ["bench", "net", "--from", "host", "--to", "host"];

fn bench(arguments: &[&[&str]]) -> Ended {
    ask(&arguments.concat())
}

/// The names of a report's rows but those of 99th percentiles, which need many times.
fn names(ended: &Ended) -> Vec<String> {
    let report: Value =
        serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document");
    let rows = report["rows"].as_array().expect("rows");
    for row in rows {
        assert!(row["median"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["runs"], 2);
    }
    let names = rows
        .iter()
        .map(|row| row["name"].as_str().expect("a name").to_owned());
    names.filter(|name| !name.ends_with("p99")).collect()
}

#[test]
fn two_processes_measure_every_mode_beside_plain_loops() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("net.json");
    let file = file.to_str().expect("a path");
    let ended = bench(&[&HERE, &SHORT, &["--peer", "raw", "--json"]]);
    let names = names(&ended);
    // For each of two sizes: round trips, then two modes of two depths, each with two contenders.
    assert_eq!(names.len(), 2 * (1 + 2 * 2) * 2, "{names:#?}");
    for name in [
        "300000 B, 3 in flight: tcpx",
        "1 KiB, half a round trip: raw, p50",
    ] {
        assert!(names.iter().any(|own| own == name), "{names:#?}");
    }
    assert!(ended.stdout.contains(" of raw"), "{}", ended.stdout);
    // Repeated runs become one report.
    std::fs::write(file, &ended.stdout).expect("written");
    let shown = bench(&[&["bench", "show", file, file, "--subject", "Twice", "--json"]]);
    let report: Value =
        serde_json::from_str(&shown.assert_code(0).stdout).expect("one JSON document");
    assert_eq!(
        (&report["subject"], &report["rows"][0]["runs"]),
        (&"Twice".into(), &2.into())
    );
    bench(&[&["bench", "show", file]])
        .assert_code(0)
        .assert_says("300000 B, 3 in flight: tcpx");
    std::fs::write(file, "figures").expect("written");
    bench(&[&["bench", "show", file]])
        .assert_code(1)
        .assert_complains("not a benchmark file");
}

#[test]
fn puts_and_gets_stand_beside_sends_whole_and_in_pieces() {
    let ops = [
        "--op",
        "put,get",
        "--piece-bytes",
        "1KiB",
        "--modes",
        "latency,one",
        "--json",
    ];
    let names = names(&bench(&[&HERE, &SHORT, &ops]));
    // Round trips have three contenders; what streams has pieces too, but for a message of one
    // piece.
    assert_eq!(names.len(), 2 * 3 + 2 * 3 + 2 * 5, "{names:#?}");
    let pieces = "300000 B, 3 in flight: tcpx, gets of 1 KiB";
    assert!(names.iter().any(|own| own == pieces), "{names:#?}");
}

#[test]
fn another_library_is_measured_or_left_out_with_why() {
    let answers = |name: &str, line: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("measures");
        let text = format!("while read case; do echo '{line}'; done");
        std::fs::write(&script, text).expect("written");
        let peer = format!("{name}=sh {}", script.display());
        (folder, peer)
    };
    let (_one, right) = answers("right", r#"{"figures":{"rate":2.5},"polls":true}"#);
    let (_other, wrong) = answers("wrong", r#"{"error":"no such library"}"#);
    let peers = ["--modes", "one", "--peer", &right, "--peer", &wrong];
    bench(&[&HERE, &SHORT, &peers])
        .assert_code(0)
        .assert_says("1 KiB, 3 in flight: right")
        .assert_says(" of right")
        .assert_says("wrong is left out: could not measure: no such library");
}

#[test]
fn iperf3_stands_beside_the_deepest_streaming() {
    if std::process::Command::new("iperf3")
        .arg("--version")
        .output()
        .is_err()
    {
        let name = "iperf3_stands_beside_the_deepest_streaming";
        let _ = writeln!(
            std::io::stderr(),
            "skipped: {name}: iperf3 is not installed"
        );
        return;
    }
    let names = names(&bench(&[
        &HERE,
        &SHORT,
        &["--peer", "iperf3", "--modes", "one", "--json"],
    ]));
    let of_it = names.iter().filter(|name| name.ends_with(": iperf3"));
    assert_eq!(of_it.count(), 2, "{names:#?}");
}

#[test]
fn an_impossible_benchmark_is_refused_first() {
    bench(&[&HERE, &["--sizes", "0"]])
        .assert_code(2)
        .assert_complains("0 bytes");
    bench(&[&HERE, &SHORT, &["--peer", "x=/nonexistent"]])
        .assert_code(1)
        .assert_complains("/nonexistent");
    let mut without = tcpx(&[&HERE[..], &["--peer", "iperf3"]].concat());
    without.env("PATH", "/nonexistent");
    run(without)
        .assert_code(1)
        .assert_complains("iperf3 cannot be started")
        .assert_complains("leave --peer iperf3 out");
    let mut control = tcpx(&HERE);
    control.env("TCPX_CONGESTION", "no_such");
    run(control)
        .assert_code(1)
        .assert_complains("congestion control `no_such` cannot be used")
        .assert_complains("/proc/sys/net/ipv4/tcp_available_congestion_control has `");
}

#[test]
fn everything_uses_the_chosen_congestion_control() {
    let chosen = ["--peer", "raw", "--modes", "one", "--congestion", "reno"];
    let ended = bench(&[&HERE, &SHORT, &chosen]);
    ended.assert_code(0).assert_says("streams, reno");
}
