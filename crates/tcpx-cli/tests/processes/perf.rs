use crate::support::{Running, Server, tcpx};

#[test]
fn a_rate_is_printed_after_the_contents_were_verified() {
    let server = Server::start(tcpx(&["perf", "server", "host"]));
    let client = server.client(
        &["perf", "client"],
        &["host", "--size", "1MiB", "--iterations", "5"],
    );
    let (server, client) = server.finish(client);
    server
        .assert_code(0)
        .assert_says("contents verified")
        .assert_says("perf: PASSED");
    client
        .assert_code(0)
        .assert_says("perf: PASSED")
        .assert_says("GB/s")
        .assert_says("contents verified");
    for column in ["p50", "p90", "p99", "max", "wire", "unpack", "wait"] {
        client.assert_says(column);
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
    let summary: serde_json::Value =
        serde_json::from_str(&client.assert_code(0).stdout).expect("one JSON document");
    assert_eq!(summary["bytes"], 65536);
    assert_eq!(summary["iterations"], 3);
    assert_eq!(summary["verified"], true);
    assert!(
        summary["gb_per_second"]
            .as_f64()
            .is_some_and(|rate| rate > 0.0),
        "{summary}"
    );
    assert_eq!(summary["schema"], "tcpx.perf");
    assert_eq!(summary["ok"], true);
    // Three times have no such percentiles.
    assert!(summary["latency_us"]["p90"].is_null() && summary["latency_us"]["p99"].is_null());
    let times = ["min", "p50", "max"].map(|name| summary["latency_us"][name].as_f64());
    assert!(
        times.iter().all(Option::is_some) && times.is_sorted(),
        "{summary}"
    );
}

#[test]
fn debug_prints_a_line_for_each_chunk() {
    let server = Server::start(tcpx(&["perf", "server", "host"]));
    let sizes = [
        "host",
        "--size",
        "1MiB",
        "--iterations",
        "2",
        "--chunk-bytes",
        "256KiB",
    ];
    let mut client = server.client(&["perf", "client"], &sizes);
    client.env("UCCL_TCPX_DEBUG", "1");
    let (server, client) = server.finish(client);
    server.assert_code(0);
    client
        .assert_code(0)
        .assert_complains("chunk 3 channel 0 offset 786432 bytes 262144");
}

#[test]
fn the_plugin_shows_its_fragments() {
    let plugin = ["--network", "plugin", "--abi", "v7"];
    let server = Server::start(tcpx(&[&["perf", "server", "host"][..], &plugin].concat()));
    let sizes = ["host", "--size", "4MiB", "--iterations", "2", "--json"];
    let client = server.client(&["perf", "client"], &[&sizes[..], &plugin].concat());
    let (server, client) = server.finish(client);
    server.assert_code(0);
    let summary: serde_json::Value =
        serde_json::from_str(&client.assert_code(0).stdout).expect("one JSON document");
    assert!(
        summary["fragments_per_transfer"]
            .as_f64()
            .is_some_and(|count| count > 1000.0),
        "{summary}"
    );
}

#[test]
fn a_client_that_wants_something_else_is_told_so() {
    let server = Server::start(tcpx(&["perf", "server", "host"]));
    let client = server.client(&["transfer"], &["--host"]);
    let (server, client) = server.finish(client);
    server
        .assert_code(1)
        .assert_complains("expected a request to measure");
    client
        .assert_code(1)
        .assert_complains("tcpx transfer server");
}

#[test]
fn a_server_that_stays_measures_every_direction_and_time() {
    let mut server = Server::start(tcpx(&["perf", "server", "host", "--keep"]));
    let quick = [
        "host", "-s", "64KiB", "-t", "300ms", "-i", "100ms", "-O", "1ms", "--json",
    ];
    for (flags, direction, has_times) in [
        (&[][..], "to the server", true),
        (&["-R"], "from the server", false),
        (&["--bidir", "-P", "4"], "both ways, sum", true),
    ] {
        let client = server.client(&["perf", "client"], &[&quick[..], flags].concat());
        let client = Running::start(client).end();
        let told: serde_json::Value =
            serde_json::from_str(&client.assert_code(0).stdout).expect("one JSON document");
        assert_eq!(told["direction"], direction);
        assert_eq!(told["latency_us"].is_object(), has_times, "{told}");
        assert_eq!(told["verified"], true);
        let intervals = told["intervals"].as_array().expect("intervals");
        let last = intervals.last().expect("an interval");
        assert_eq!(last["end"], told["seconds"], "{told}");
        assert!(
            told["iterations"].as_u64() >= Some(intervals.len() as u64),
            "{told}"
        );
        // Each printed interval went aside, as the result is JSON.
        client.assert_complains(" GB/s");
    }
    // Somebody who wants something else does not end it.
    let other = server.client(&["connection"], &[]);
    Running::start(other).end().assert_code(1);
    let again = server.client(&["perf", "client"], &["host", "-n", "3"]);
    Running::start(again)
        .end()
        .assert_code(0)
        .assert_says("3 transfers");
    server.running.kill();
}
