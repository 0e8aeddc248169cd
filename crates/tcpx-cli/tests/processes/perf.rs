use rustix::process::Signal;
use serde_json::Value;
use tcpx::{Auth, Endpoint, Options};

use crate::support::{Ended, Server, run, scattering, tcpx};

/// The median of the row whose name ends so.
fn figure(report: &Value, name: &str) -> Option<f64> {
    let rows = report["rows"].as_array().expect("rows");
    let ends = |row: &&Value| row["name"].as_str().is_some_and(|own| own.ends_with(name));
    rows.iter().find(ends)?["median"].as_f64()
}

fn report(ended: &Ended) -> Value {
    serde_json::from_str(&ended.assert_code(0).stdout).expect("one JSON document")
}

#[test]
fn a_rate_is_printed_after_the_contents_were_verified() {
    let server = Server::start(tcpx(&["perf", "server", "host"]));
    let sizes = ["host", "--size", "1MiB", "--iterations", "100"];
    let client = server.client(&["perf", "client"], &sizes);
    let (server, client) = server.finish(client);
    server
        .assert_code(0)
        .assert_says("contents verified")
        .assert_says("perf: PASSED");
    client.assert_code(0).assert_says("perf: PASSED");
    for words in [
        "GB/s",
        "Contents were verified",
        "100 transfers",
        "time of a transfer, p50",
        "time of a transfer, p90",
        "time of a transfer, p99",
        "sender, time in wire",
        "receiver, time in unpack",
        "receiver, time in wait",
    ] {
        client.assert_says(words);
    }
}

#[test]
fn json_is_all_there_is_on_standard_output() {
    let server = Server::start(tcpx(&["perf", "server"]));
    let mut client = server.client(&["perf", "client"], &["--json"]);
    client
        .env("UCCL_TCPX_PERF_SIZE", "65536")
        .env("UCCL_TCPX_PERF_ITERS", "3");
    let (server, client) = server.finish(client);
    server.assert_code(0);
    let report = report(&client);
    assert_eq!(report["schema"], 1);
    assert_eq!(report["rows"][0]["notes"], "3 transfers");
    assert!(figure(&report, ", to the server") > Some(0.0), "{report}");
    let of_times = report["rows"][1].clone();
    assert_eq!(
        of_times["name"],
        "64 KiB, 1 in flight: time of a transfer, p50"
    );
    assert_eq!(of_times["runs"], 3);
    // Three times have no such percentiles.
    assert_eq!(["p90", "p99"].map(|name| figure(&report, name)), [None; 2]);
}

#[test]
fn debug_prints_a_line_for_each_chunk() {
    let server = Server::start(tcpx(&["perf", "server", "host"]));
    let sizes = ["host", "--size", "4MiB", "--iterations", "2"];
    let client = [&sizes[..], &["--chunk-bytes", "256KiB"]].concat();
    let mut client = server.client(&["perf", "client"], &client);
    client.env("UCCL_TCPX_DEBUG", "1");
    let (server, client) = server.finish(client);
    server.assert_code(0);
    client
        .assert_code(0)
        .assert_complains("chunk 3 channel 0 offset 786432 bytes 262144");
}

#[test]
fn a_plugin_that_scatters_shows_its_fragments() {
    let plugin = ["--plugin", scattering::path()];
    let server = tcpx(&[&["perf", "server", "host"][..], &plugin].concat());
    let server = Server::start(scattering::takes_host_memory(server));
    let sizes = ["host", "--size", "4MiB", "--iterations", "2", "--json"];
    let client = server.client(&["perf", "client"], &[&sizes[..], &plugin].concat());
    let client = scattering::takes_host_memory(client);
    let (server, client) = server.finish(client);
    server.assert_code(0);
    let report = report(&client);
    assert!(
        figure(&report, "fragments of a transfer") > Some(1000.0),
        "{report}"
    );
}

#[test]
fn a_server_that_stays_measures_every_direction_and_time() {
    let server = Server::start(tcpx(&[
        "perf",
        "server",
        "host",
        "--keep",
        "--timeout",
        "10m",
    ]));
    // One that is connected and asks for nothing delays no other.
    let key = server.key.as_deref().expect("a key");
    let options = Options::tcp(Auth::parse(key).expect("one"));
    let port: u16 = server.port.parse().expect("a port");
    let silent = Endpoint::connect(("127.0.0.1", port), &options).expect("connected");
    let quick = [
        "host", "-s", "64KiB", "-t", "300ms", "-i", "100ms", "-O", "1ms", "--json",
    ];
    for (flags, direction, has_times) in [
        (&[][..], "to the server", true),
        (&["-R"], "from the server", false),
        (&["--bidir", "-P", "4"], "both ways, sum", true),
    ] {
        let client = server.client(&["perf", "client"], &[&quick[..], flags].concat());
        let client = run(client);
        let report = report(&client);
        assert!(figure(&report, direction) > Some(0.0), "{report}");
        assert_eq!(figure(&report, "p50").is_some(), has_times, "{report}");
        // Intervals: printed aside, as the result is JSON, and in the report.
        client.assert_complains(" GB/s");
        let rows = report["rows"].as_array().expect("rows");
        let is_interval = |row: &&Value| {
            row["name"]
                .as_str()
                .is_some_and(|name| name.ends_with(" s"))
        };
        assert!(rows.iter().filter(is_interval).count() >= 1, "{report}");
    }
    // Somebody who wants something else does not end it.
    let other = server.client(&["connection"], &[]);
    run(other).assert_code(1);
    let again = server.client(&["perf", "client"], &["host", "-n", "3"]);
    run(again).assert_code(0).assert_says("3 transfers");
    drop(silent);
    server.running.signal(Signal::KILL);
}
