use crate::support::{Running, Server, tcpx};

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

#[test]
fn two_processes_measure_every_mode_beside_plain_loops() {
    let directory = tempfile::tempdir().expect("a directory");
    let (csv, plot) = (
        directory.path().join("net.csv"),
        directory.path().join("net.svg"),
    );
    let mut command = tcpx(&[
        "bench", "net", "--from", "host", "--to", "host", "--peer", "raw", "--json",
    ]);
    command
        .args(SHORT)
        .arg("--csv")
        .arg(&csv)
        .arg("--plot")
        .arg(&plot);
    let ended = Running::start(command).end();
    let file: serde_json::Value =
        serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document");
    assert_eq!(file["subject"], "Network");
    let rows = file["rows"].as_array().expect("rows");
    let is_p99 = |row: &&serde_json::Value| {
        row["name"]
            .as_str()
            .is_some_and(|name| name.ends_with("p99"))
    };
    let (p99, others): (Vec<_>, Vec<_>) = rows.iter().partition(is_p99);
    // For each of two sizes: three contenders' round trips, then two modes of two depths with two contenders.
    assert_eq!(others.len(), 2 * (3 + 2 * 2 * 2), "{file:#}");
    // A round trip has a 99th percentile where it was timed often enough.
    assert!(p99.len() <= 2 * 3, "{file:#}");
    for row in rows {
        assert!(
            row["median"].as_f64().is_some_and(|value| value > 0.0),
            "{row}"
        );
        assert_eq!(row["runs"], 2);
    }
    let named = |name: &str| rows.iter().find(|row| row["name"] == name).expect(name);
    let ours = named("292.97 KiB, 3 in flight: host -> host");
    let notes = ours["notes"].as_str().expect("notes");
    assert!(
        notes.contains("of the rate of raw") && notes.contains("TCP bytes a payload byte"),
        "{notes}"
    );
    // Headers are 48 bytes of a chunk, and nothing is sent twice on loopback.
    let tcp: f64 = notes
        .split("; ")
        .find_map(|part| part.strip_suffix(" TCP bytes a payload byte."))
        .and_then(|ratio| ratio.parse().ok())
        .expect("a ratio");
    assert!((1.0..1.01).contains(&tcp), "{tcp}");
    let lines = std::fs::read_to_string(&csv)
        .expect("written")
        .lines()
        .count();
    assert_eq!(lines, 1 + 2 * 2 * (3 + 2 * 2 * 2));
    assert!(
        std::fs::read_to_string(&plot)
            .expect("written")
            .starts_with("<svg")
    );
}

#[test]
fn puts_and_gets_stand_beside_sends() {
    let mut command = tcpx(&[
        "bench", "net", "--from", "host", "--to", "host", "--op", "put,get", "--json",
    ]);
    command.args(SHORT);
    let ended = Running::start(command).end();
    let file: serde_json::Value =
        serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document");
    let rows = file["rows"].as_array().expect("rows");
    let is_p99 = |row: &&serde_json::Value| {
        let name = row["name"].as_str();
        name.is_some_and(|name| name.ends_with("p99"))
    };
    // For each of two sizes: round trips, then two modes of two depths, each with three contenders.
    let others = rows.iter().filter(|row| !is_p99(row)).count();
    assert_eq!(others, 2 * (1 + 2 * 2) * 3, "{file:#}");
    for row in rows {
        let median = row["median"].as_f64();
        assert!(median.is_some_and(|value| value > 0.0), "{row}");
    }
    let put = "292.97 KiB, 3 in flight: host -> host, put";
    let put = rows.iter().find(|row| row["name"] == put).expect(put);
    let notes = put["notes"].as_str().expect("notes");
    assert!(notes.contains("of the rate of send"), "{notes}");
}

#[test]
fn batches_of_pieces_in_every_layout_stand_beside_one_put() {
    for layout in ["dense", "strided", "shuffled"] {
        let mut command = tcpx(&[
            "bench", "net", "--from", "host", "--to", "host", "--json", "--modes", "one",
        ]);
        command.args(["--op", "put,batch,batch-get", "--pieces", "301"]);
        command.args(["--piece-bytes", "1KiB", "--layout", layout]);
        command.args(["--in-flight", "1", "--rounds", "1", "--span", "1ms"]);
        let ended = Running::start(command).end();
        let file: serde_json::Value =
            serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document");
        let rows = file["rows"].as_array().expect("rows");
        for who in ["put", "batch", "batch of gets"] {
            let name = format!("301 KiB, 1 in flight: host -> host, {who}");
            assert!(rows.iter().any(|row| row["name"] == name), "{file:#}");
        }
    }
}

#[test]
fn a_server_elsewhere_serves_one_benchmark() {
    let server = Server::start(tcpx(&["bench", "net", "--serve", "host"]));
    let client = server.client(
        &["bench", "net", "--server"],
        &[&SHORT[..], &["--from", "host", "--modes", "latency"]].concat(),
    );
    let (server, client) = server.finish(client);
    server.assert_code(0);
    client
        .assert_code(0)
        .assert_says("1 KiB, half a round trip")
        .assert_complains("contents verified");
}

#[test]
fn a_benchmark_that_cannot_be_is_refused() {
    let ended = Running::start(tcpx(&["bench", "net", "--sizes", "0", "--from", "host"])).end();
    ended.assert_code(2).assert_complains("0 bytes");
    let mut without = tcpx(&["bench", "net", "--peer", "iperf3", "--from", "host"]);
    without.env("PATH", "/nonexistent");
    Running::start(without)
        .end()
        .assert_code(1)
        .assert_complains("iperf3 cannot be started")
        .assert_complains("leave --peer iperf3 out");
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let mut command = tcpx(&["bench", "net", "--from", "host", "--to", "host"]);
    command.args(SHORT).args(["--csv", "/nonexistent/net.csv"]);
    let ended = Running::start(command).end();
    ended
        .assert_code(1)
        .assert_complains("/nonexistent/net.csv");
    assert_eq!(ended.stdout, "");
}

#[test]
fn the_other_end_does_only_what_a_benchmark_asks() {
    let server = Server::start(tcpx(&["bench", "net", "--serve", "host"]));
    let client = server.client(&["transfer"], &["--host"]);
    let (server, client) = server.finish(client);
    server
        .assert_code(1)
        .assert_complains("a request to measure");
    client.assert_code(1);
}

#[test]
fn both_ends_and_the_plain_loops_use_the_congestion_control_that_was_chosen() {
    let mut command = tcpx(&[
        "bench", "net", "--from", "host", "--to", "host", "--peer", "raw", "--modes", "one",
    ]);
    command.args(SHORT).args(["--congestion", "reno"]);
    let ended = Running::start(command).end();
    ended.assert_code(0).assert_says("streams, reno");
    // The other end would be named if it used another one.
    assert!(!ended.stdout.contains(" there,"), "{}", ended.stdout);
    assert!(!ended.stdout.contains("reno here"), "{}", ended.stdout);
}

#[test]
fn a_congestion_control_that_the_system_lacks_is_refused_with_those_it_has() {
    let mut command = tcpx(&["bench", "net", "--from", "host"]);
    command.env("TCPX_CONGESTION", "no_such");
    Running::start(command)
        .end()
        .assert_code(1)
        .assert_complains("congestion control `no_such` cannot be used")
        .assert_complains("/proc/sys/net/ipv4/tcp_available_congestion_control has `");
}

#[test]
fn cases_of_their_own_leave_a_file_for_each_measurement() {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = folder.path().join("runs");
    let measure = || {
        let mut command = tcpx(&[
            "bench",
            "net",
            "--from",
            "host",
            "--to",
            "host",
            "--span",
            "5ms",
            "--rounds",
            "2",
            "--peer",
            "raw",
            "--case",
            "ping=latency:8",
            "--case",
            "both:64KiB:3",
            "--at-once",
            "--runs",
        ]);
        command.arg(&runs);
        Running::start(command).end()
    };
    measure()
        .assert_code(0)
        .assert_says("8 bytes, half a round trip")
        .assert_says("64 KiB, 3 in flight each way, sum");
    // A second start counts on.
    measure().assert_code(0);
    let read = |name: &str| {
        let text = std::fs::read_to_string(runs.join(name)).expect(name);
        serde_json::from_str::<serde_json::Value>(&text).expect("one JSON value")
    };
    for who in ["tcpx", "raw", "raw-spinning"] {
        for number in 1..=4 {
            let run = read(&format!("ping.{who}.{number}.json"));
            assert_eq!((&run["who"], &run["verified"]), (&who.into(), &true.into()));
            assert!(run["latency_us"]["p50"].as_f64().expect("a time") > 0.0);
        }
    }
    let both = read("both-65536-3.tcpx.4.json");
    for figure in [
        "gb_per_second",
        "cpu_seconds_per_gb",
        "tcp_bytes_per_payload_byte",
    ] {
        assert!(both[figure].as_f64().expect(figure) > 0.0, "{both}");
    }
    assert!(!runs.join("ping.tcpx.5.json").exists());
}
