use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};

use tcpx_tests::support::until;

use crate::support::{Running, ask, run, tcpx};

const SHORT: [&str; 4] = ["--size", "1MiB", "--rounds", "3"];

/// A key that every rank has.
fn key() -> String {
    tcpx::generate_key().expect("a key").to_text()
}

/// A port that nobody listens at now. The system gives none of these to who asks for any: another
/// test could get it before the program does.
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

/// A host of a list, by its place in it.
fn host(list: &tempfile::NamedTempFile, place: usize, key: &str) -> Command {
    let mut command = tcpx(&["perf", "--host", "--hosts"]);
    command
        .arg(list.path())
        .args(SHORT)
        .env("TCPX_KEY", key)
        .env("RANK", place.to_string());
    command
}

/// A list of hosts with these lines.
fn list(lines: &str) -> tempfile::NamedTempFile {
    let mut list = tempfile::NamedTempFile::new().expect("a file");
    write!(list, "{lines}").expect("written");
    list
}

/// As many hosts, all on this one, each with a port, and another one behind it for its memory.
fn hosts(count: usize) -> tempfile::NamedTempFile {
    let line = |_| {
        let (port, _memory) = (free_port(), free_port());
        format!("127.0.0.1:{port} # one\n")
    };
    list(&(0..count).map(line).collect::<String>())
}

#[test]
fn the_hosts_of_a_list_are_measured_pair_by_pair() {
    let (list, key) = (hosts(3), key());
    let others = [1, 2].map(|place| Running::start(host(&list, place, &key)));
    let mut first = host(&list, 0, &key);
    first.arg("--json");
    let ended = run(first);
    let report: serde_json::Value =
        serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 3 * 2, "{report:#}");
    for row in rows {
        assert!(row["median"].as_f64() > Some(0.0), "{row}");
    }
    let name = "2: 127.0.0.1 host -> 1: 127.0.0.1 host";
    assert!(rows.iter().any(|row| row["name"] == name), "{report:#}");
    for other in others {
        other.end().assert_code(0).assert_says("perf: PASSED");
    }
}

/// A rank of several processes, as a launcher starts it: its variables for rank, size and rank 0's
/// host.
fn rank(variables: [&str; 3], rank: &str, size: &str, port: &str, key: &str) -> Command {
    let mut command = tcpx(&["perf", "--host", "--port", port]);
    command.args(SHORT).env("TCPX_KEY", key);
    command.envs(variables.into_iter().zip([rank, size, "127.0.0.1"]));
    command
}

const TORCHRUN: [&str; 3] = ["RANK", "WORLD_SIZE", "MASTER_ADDR"];
const MPIRUN: [&str; 3] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "MASTER_ADDR",
];
const SRUN: [&str; 3] = [
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
];
const INDEXED: [&str; 3] = ["JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR"];

#[test]
fn what_a_launcher_started_is_measured_pair_by_pair() {
    let (port, key) = (free_port(), key());
    let others = [(MPIRUN, "1"), (SRUN, "2"), (INDEXED, "3")]
        .map(|(launcher, other)| Running::start(rank(launcher, other, "4", &port, &key)));
    let ended = run(rank(TORCHRUN, "0", "4", &port, &key));
    ended.assert_code(0).assert_says("perf: PASSED");
    for from in 0..4 {
        for to in (0..4).filter(|to| *to != from) {
            ended.assert_says(&format!("{from}: 127.0.0.1 host -> {to}: 127.0.0.1 host"));
        }
    }
    for other in others {
        other.end().assert_code(0).assert_says("perf: PASSED");
    }
}

#[test]
fn an_absent_rank_is_named_and_others_measured() {
    let (port, key) = (free_port(), key());
    let other = Running::start(rank(TORCHRUN, "2", "3", &port, &key));
    let mut first = rank(TORCHRUN, "0", "3", &port, &key);
    // Enough for the other one on two busy cores.
    first.args(["--wait", "20s"]);
    run(first)
        .assert_code(1)
        .assert_says("0: 127.0.0.1 host -> 2: 127.0.0.1 host")
        .assert_complains("rank 1 did not come");
    other.end().assert_code(0);
}

#[test]
fn a_rank_obeys_nobody_without_its_key() {
    let port = free_port();
    let mut other = rank(TORCHRUN, "1", "2", &port, &key());
    other.args(["--wait", "2s"]);
    let mut first = rank(TORCHRUN, "0", "2", &port, &key());
    first.args(["--wait", "12s"]);
    let first = Running::start(first);
    // It listens, so that the other one is not refused because nobody does.
    until("somebody who listens", || {
        TcpStream::connect(format!("127.0.0.1:{port}")).ok()
    });
    run(other).assert_code(1).assert_complains("key");
    first
        .end()
        .assert_code(1)
        .assert_complains("no other host answered within 12.00 s");
}

#[test]
fn hosts_that_cannot_be_measured_are_refused() {
    let refused = |lines: &str, why: &str| {
        let hosts = list(lines);
        let mut command = tcpx(&["perf", "--insecure", "--hosts"]);
        command.arg(hosts.path()).args(SHORT);
        run(command).assert_code(2).assert_complains(why);
    };
    refused("127.0.0.1:1\n", "127.0.0.1:1 alone");
    refused("127.0.0.1:1\n127.0.0.1:2\n", "2 of its lines are addresses");
    let missing = ask(&["perf", "--insecure", "--hosts", "/nonexistent"]);
    missing.assert_code(1).assert_complains("/nonexistent");
    let list = hosts(2);
    let mut without = host(&list, 0, "");
    without.env_remove("TCPX_KEY");
    run(without).assert_code(2).assert_complains("need one key");
    let mut alone = tcpx(&["perf"]);
    alone.env_remove("RANK");
    run(alone)
        .assert_code(2)
        .assert_complains("give --hosts FILE");
}
