//! What every command prints, and in which form.

use serde_json::Value;

use crate::support::{Ended, Server, ask, run, tcpx};

/// The one JSON document on standard output.
#[track_caller]
fn told(ended: &Ended) -> Value {
    let text = &ended.stdout;
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}\n{}", ended.stderr))
}

#[test]
fn commands_without_a_peer_print_one_object_with_a_schema() {
    let folder = tempfile::tempdir().expect("a folder");
    let key = folder.path().join("key");
    let key = key.to_str().expect("plain");
    for (arguments, schema, field) in [
        (&["devices", "--json"][..], "tcpx.devices", "interfaces"),
        (&["doctor", "--json"], "tcpx.doctor", "checks"),
        (
            &["doctor", "--explain", "all", "--json"],
            "tcpx.doctor",
            "checks",
        ),
        (&["env", "tcpx", "--json"], "tcpx.env", "variables"),
        (&["--json", "key", key], "tcpx.key", "fingerprint"),
        (
            &["devmem", "release", "--json"],
            "tcpx.devmem",
            "interfaces",
        ),
    ] {
        let ended = ask(arguments);
        let object = told(&ended);
        assert_eq!(object["schema"], schema, "{arguments:?}");
        assert_eq!(object["version"], 1, "{arguments:?}");
        assert_eq!(object["ok"], ended.code == Some(0), "{arguments:?}");
        assert!(!object[field].is_null(), "{arguments:?}: {object}");
    }
}

#[test]
fn errors_are_in_the_object_too() {
    for (arguments, schema, code) in [
        (
            &[
                "perf",
                "client",
                "127.0.0.1",
                "host",
                "--insecure",
                "--port",
                "1",
                "--json",
            ][..],
            "tcpx.perf",
            1,
        ),
        (
            &[
                "connection",
                "127.0.0.1",
                "--insecure",
                "--port",
                "1",
                "--json",
            ],
            "tcpx.connection",
            1,
        ),
        (
            &["bench", "show", "/nonexistent", "--json"],
            "tcpx.bench",
            1,
        ),
        (&["plugin", "/nonexistent", "--json"], "tcpx.plugin", 1),
        (
            &["env", "nccl", "--plugin", "/nonexistent", "--json"],
            "tcpx.env",
            1,
        ),
        (
            &["receive", "--out", "/nonexistent", "--json"],
            "tcpx.receive",
            2,
        ),
    ] {
        let ended = ask(arguments);
        ended.assert_code(code).assert_complains("error: ");
        let object = told(&ended);
        assert_eq!(
            (&object["schema"], &object["ok"]),
            (&schema.into(), &false.into())
        );
        let words = |name: &str| {
            object["error"][name]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        };
        assert!(words("what") && words("hint"), "{object}");
    }
}

#[test]
fn log_lines_have_a_time() {
    let server = Server::start(tcpx(&["connection", "server", "-v"]));
    let client = server.client(&["connection"], &[]);
    let (server, client) = server.finish(client);
    let line = |ended: &Ended| {
        let mut lines = ended.stderr.lines();
        let found = lines.find(|line| line.contains("connected"));
        found
            .map(str::to_owned)
            .unwrap_or_else(|| panic!("{}", ended.stderr))
    };
    client.assert_code(0);
    let text = line(server.assert_code(0));
    let time = text.split_whitespace().next().expect("a word");
    assert!(time.contains('T') && time.ends_with('Z'), "{text}");
    assert!(text.contains("INFO") && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn the_variable_does_not_switch_a_flag_off() {
    let mut serving = tcpx(&["connection", "server", "-v"]);
    serving.env("RUST_LOG", "error");
    let server = Server::start(serving);
    let client = server.client(&["connection"], &[]);
    let (server, _) = server.finish(client);
    server.assert_code(0).assert_complains("INFO");

    let mut wrong = tcpx(&["devices"]);
    wrong.env("RUST_LOG", "tcpx=loud");
    let ended = run(wrong);
    ended.assert_code(2).assert_complains("RUST_LOG=tcpx=loud");
}

#[test]
fn quiet_leaves_errors_and_the_line_for_the_other_side() {
    let mut command = tcpx(&["perf", "server", "host", "-q", "--bind", "127.0.0.1"]);
    command.args(["--port", "0", "--wait", "100ms"]);
    let ended = run(command);
    ended.assert_code(1);
    assert_eq!(ended.stdout, "");
    ended
        .assert_complains("perf client 127.0.0.1 host")
        .assert_complains("error: ");
}

/// While it moves, one line that is drawn anew; then what was moved, and that both ends have the
/// same.
#[test]
fn a_file_takes_two_lines_of_a_terminal() {
    use crate::files::{contents, sender, serve};

    let folder = tempfile::tempdir().expect("a folder");
    let (file, out) = (folder.path().join("weights.bin"), folder.path().join("out"));
    std::fs::create_dir(&out).expect("created");
    std::fs::write(&file, contents(8 << 20)).expect("written");
    let server = serve(&out, &[]);
    let client = sender(&server, &[&file], &["--path", "tcp"]);
    let (status, shown) = tcpx_tests::terminal::watch(client).expect("a terminal");
    assert!(status.success(), "{shown:?}");
    let [moved, same] = shown.left.as_slice() else {
        panic!("{shown:?}");
    };
    assert!(
        moved.contains("\"weights.bin\"") && moved.contains(" moved in "),
        "{moved}"
    );
    assert!(
        same.starts_with("BLAKE3 ") && same.ends_with("the same at both ends"),
        "{same}"
    );
    let bars: Vec<_> = shown.drawn.iter().filter(|line| !line.is_empty()).collect();
    assert!(!bars.is_empty(), "{shown:?}");
    for bar in bars {
        let has = |part| bar.contains(part);
        assert!(
            has("weights.bin") && has("of 8.39 MB") && has("B/s") && has(" left"),
            "{bar}"
        );
    }
}
