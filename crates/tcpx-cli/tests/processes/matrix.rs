use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Running, tcpx};

const SHORT: [&str; 4] = ["--size", "1MiB", "--rounds", "3"];

/// A key that every rank has.
fn key() -> String {
    tcpx::generate_key().expect("a key").to_text()
}

/// A port that nobody listens at now. The system gives none of these to who asks for any: another test could get it
/// before the program does.
fn free_port() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 10_000).expect("a few thousand");
    let mut ports = (0..10_000).map(|_| {
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        20_000 + (start + next) % 10_000
    });
    let free = ports.find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok());
    free.expect("a free port").to_string()
}

/// A rank of several processes, as a launcher starts it.
fn rank(rank: &str, size: &str, port: &str, key: &str) -> Command {
    let mut command = tcpx(&["perf", "--host", "--port", port]);
    command
        .args(SHORT)
        .env("TCPX_KEY", key)
        .env("RANK", rank)
        .env("WORLD_SIZE", size)
        .env("MASTER_ADDR", "127.0.0.1");
    command
}

/// A list of hosts with these lines.
fn list(lines: &str) -> tempfile::NamedTempFile {
    let mut list = tempfile::NamedTempFile::new().expect("a file");
    write!(list, "{lines}").expect("written");
    list
}

#[test]
fn one_host_without_gpus_measures_its_memory_against_itself() {
    let mut command = tcpx(&["perf", "--host", "--json"]);
    command.args(SHORT);
    let ended = Running::start(command).end();
    let file: serde_json::Value =
        serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document");
    let rows = file["rows"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    assert_eq!(
        names,
        [
            "host -> host, alone",
            "host -> host, all at once",
            "sum of all at once"
        ]
    );
    for row in rows {
        assert!(
            row["median"].as_f64().is_some_and(|rate| rate > 0.0),
            "{row}"
        );
    }
}

#[test]
fn what_a_launcher_started_is_measured_pair_by_pair() {
    let (port, key) = (free_port(), key());
    let others = ["1", "2"].map(|other| Running::start(rank(other, "3", &port, &key)));
    let ended = Running::start(rank("0", "3", &port, &key)).end();
    ended
        .assert_code(0)
        .assert_says("contents verified")
        .assert_says("alone")
        .assert_says("all at once")
        .assert_says("perf: PASSED");
    for title in [
        "0: 127.0.0.1 host",
        "1: 127.0.0.1 host",
        "2: 127.0.0.1 host",
    ] {
        ended.assert_says(title);
    }
    for pair in ["0: 127.0.0.1 host -> 2", "2: 127.0.0.1 host -> 1"] {
        ended.assert_complains(pair);
    }
    for other in others {
        other.end().assert_code(0).assert_says("perf: PASSED");
    }
}

#[test]
fn a_list_of_hosts_says_where_rank_0_is() {
    let (port, key) = (free_port(), key());
    let hosts = list(&format!("127.0.0.1:{port} # one\nlocalhost\n"));
    let of_list = |rank: &str| {
        let mut command = tcpx(&["perf", "--host", "--hosts"]);
        command.arg(hosts.path()).args(SHORT);
        command.env("TCPX_KEY", &key).env("RANK", rank);
        command
    };
    let other = Running::start(of_list("1"));
    Running::start(of_list("0"))
        .end()
        .assert_code(0)
        .assert_says("1: 127.0.0.1 host");
    other.end().assert_code(0);
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_others_are_measured() {
    let (port, key) = (free_port(), key());
    let other = Running::start(rank("2", "3", &port, &key));
    let mut first = rank("0", "3", &port, &key);
    // Enough for the other one on two busy cores.
    first.args(["--wait", "20s"]);
    Running::start(first)
        .end()
        .assert_code(1)
        .assert_says("2: 127.0.0.1 host")
        .assert_complains("rank 1 did not come");
    other.end().assert_code(0);
}

#[test]
fn a_rank_obeys_nobody_without_its_key() {
    let port = free_port();
    let mut other = rank("1", "2", &port, &key());
    other.args(["--wait", "2s"]);
    let mut first = rank("0", "2", &port, &key());
    first.args(["--wait", "12s"]);
    let first = Running::start(first);
    // It listens, so that the other one is not refused because nobody does.
    let until = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
        assert!(Instant::now() < until, "nobody listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    Running::start(other)
        .end()
        .assert_code(1)
        .assert_complains("key");
    first
        .end()
        .assert_code(1)
        .assert_complains("no other rank of 2 came");
}

#[test]
fn ranks_that_cannot_be_measured_are_refused() {
    let refused = |lines: &str, why: &str| {
        let hosts = list(lines);
        let mut command = tcpx(&["perf", "--insecure", "--hosts"]);
        command.arg(hosts.path()).args(SHORT);
        Running::start(command)
            .end()
            .assert_code(2)
            .assert_complains(why);
    };
    refused("127.0.0.1:1\n", "127.0.0.1:1 alone");
    refused("127.0.0.1:1\n127.0.0.1:2\n", "2 of its lines are addresses");
    let missing = Running::start(tcpx(&["perf", "--insecure", "--hosts", "/nonexistent"])).end();
    missing.assert_code(1).assert_complains("/nonexistent");
    let mut without = rank("0", "2", &free_port(), "");
    without.env_remove("TCPX_KEY");
    Running::start(without)
        .end()
        .assert_code(2)
        .assert_complains("need one key");
}
