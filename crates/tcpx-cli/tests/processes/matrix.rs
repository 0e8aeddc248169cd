use std::io::Write;

use crate::support::{Running, Server, tcpx};

const SHORT: [&str; 4] = ["--size", "1MiB", "--rounds", "3"];

#[test]
fn one_host_without_gpus_measures_its_memory_against_itself() {
    let mut command = tcpx(&["perf", "--json"]);
    command.args(SHORT);
    let ended = Running::start(command).end();
    let file: serde_json::Value =
        serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document");
    let rows = file["rows"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    // A host with GPUs has other pairs.
    if names.len() == 4 {
        assert_eq!(
            names,
            [
                "host -> host, alone",
                "host -> host, all at once",
                "sum of all at once",
                "all cores copying memory"
            ]
        );
    }
    assert!(rows.len() >= 4, "{file:#}");
    for row in rows {
        assert!(
            row["median"].as_f64().is_some_and(|rate| rate > 0.0),
            "{row}"
        );
    }
}

#[test]
fn a_list_of_hosts_is_measured_pair_by_pair() {
    let one = Server::start(tcpx(&["perf", "agent", "host"]));
    let key = one.key.clone().expect("a fresh key");
    let mut second = tcpx(&["perf", "agent", "host"]);
    second.env("TCPX_KEY", &key);
    let two = Server::start(second);
    let mut list = tempfile::NamedTempFile::new().expect("a file");
    writeln!(list, "127.0.0.1:{} # one\n127.0.0.1:{}", one.port, two.port).expect("written");
    let mut command = tcpx(&["perf", "--hosts"]);
    command.arg(list.path()).args(SHORT).env("TCPX_KEY", &key);
    let ended = Running::start(command).end();
    ended
        .assert_code(0)
        .assert_says("contents verified")
        .assert_says("alone")
        .assert_says("all at once")
        .assert_says("perf: PASSED");
    for port in [&one.port, &two.port] {
        ended.assert_says(&format!("127.0.0.1:{port} host"));
    }
}

/// A list of hosts with these lines.
fn list(lines: &str) -> tempfile::NamedTempFile {
    let mut list = tempfile::NamedTempFile::new().expect("a file");
    write!(list, "{lines}").expect("written");
    list
}

#[test]
fn a_host_without_an_agent_is_named_and_the_others_are_measured() {
    let one = Server::start(tcpx(&["perf", "agent", "host"]));
    let key = one.key.clone().expect("a fresh key");
    let mut second = tcpx(&["perf", "agent", "host", "--bind", "::1"]);
    second.env("TCPX_KEY", &key);
    let two = Server::start(second);
    let hosts = list(&format!(
        "127.0.0.1:{}\n# the next one is down\n127.0.0.1:1\n\n[::1]:{}\n",
        one.port, two.port
    ));
    for json in [false, true] {
        let mut command = tcpx(&["perf", "--hosts"]);
        command.arg(hosts.path()).args(SHORT).env("TCPX_KEY", &key);
        if json {
            command.arg("--json");
        }
        let ended = Running::start(command).end();
        ended
            .assert_code(1)
            .assert_complains("127.0.0.1:1: ")
            .assert_complains("tcpx perf agent");
        if json {
            let file: serde_json::Value =
                serde_json::from_str(&ended.stdout).expect("one JSON document");
            let file = &file["measured"];
            let rows = file["rows"].as_array().expect("rows");
            assert_eq!(rows.len(), 5, "two pairs, two ways, and a sum: {file:#}");
            let notes = file["notes"].to_string();
            assert!(notes.contains("Not measured: 127.0.0.1:1"), "{notes}");
        } else {
            ended
                .assert_says(&format!("[::1]:{} host", two.port))
                .assert_says("sum of all at once")
                .assert_says("perf: FAILED");
        }
    }
}

#[test]
fn a_list_that_cannot_be_measured_is_refused() {
    let refused = |lines: &str, code, why: &str| {
        let hosts = list(lines);
        let mut command = tcpx(&["perf", "--insecure", "--hosts"]);
        command.arg(hosts.path()).args(SHORT);
        Running::start(command)
            .end()
            .assert_code(code)
            .assert_complains(why);
    };
    refused("127.0.0.1:1\n", 2, "127.0.0.1:1 alone");
    refused("127.0.0.1:1\n127.0.0.1:2\n", 1, "tcpx perf agent");
    refused("fe80::1%lo\n127.0.0.1:1\n", 1, "127.0.0.1:1");
    let agent = Server::start(tcpx(&["perf", "agent", "host", "--insecure"]));
    let port = &agent.port;
    let twice = format!("127.0.0.1:{port}\nlocalhost:{port}\n");
    refused(&twice, 2, "are the same host");
    let missing = Running::start(tcpx(&["perf", "--insecure", "--hosts", "/nonexistent"])).end();
    missing.assert_code(1).assert_complains("/nonexistent");
}

#[test]
fn an_agent_obeys_nobody_without_its_key() {
    let agent = Server::start(tcpx(&["perf", "agent", "host"]));
    let mut list = tempfile::NamedTempFile::new().expect("a file");
    writeln!(list, "127.0.0.1:{}\n127.0.0.1:1", agent.port).expect("written");
    let mut command = tcpx(&["perf", "--hosts"]);
    command
        .arg(list.path())
        .env("TCPX_KEY", "MFXG65DIMVZCA23FPEQGQZLSMVIWISBB");
    Running::start(command)
        .end()
        .assert_code(1)
        .assert_complains("key");
}
