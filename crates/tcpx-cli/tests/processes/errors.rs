//! What the program says when something is wrong.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use rustix::process::Signal;

use crate::support::{Server, passes, run, tcpx};

#[test]
fn a_wrong_variable_is_blamed_and_not_its_flag() {
    let mut command = tcpx(&["connection", "127.0.0.1"]);
    command.env("UCCL_TCPX_CHUNK_BYTES", "4M");
    run(command).assert_code(2).assert_complains("4M");
    let mut command = tcpx(&["connection", "server", "--host"]);
    command.env("TCPX_LOOPS", "abc");
    let ended = run(command);
    ended
        .assert_code(2)
        .assert_complains("of the variable TCPX_LOOPS");
    assert!(!ended.stderr.contains("--loops"), "{}", ended.stderr);
    let mut command = tcpx(&["connection", "server", "--host", "--loops", "abc"]);
    command.env("TCPX_LOOPS", "2");
    run(command)
        .assert_code(2)
        .assert_complains("'--loops <N>'");
}

#[test]
fn a_chunk_size_meant_for_nccl_is_left_out() {
    for foreign in ["100", "abc"] {
        let mut command = tcpx(&["connection", "server", "--host"]);
        command.env("NCCL_P2P_NET_CHUNKSIZE", foreign);
        let server = Server::start(command);
        let client = server.client(&["connection"], &["--host"]);
        let (server, _) = passes(server.finish(client));
        server.assert_complains(&format!(
            "NCCL_P2P_NET_CHUNKSIZE={foreign} is no chunk size"
        ));
    }
}

#[test]
fn a_port_that_is_none_is_not_taken_for_a_name() {
    run(tcpx(&[
        "connection",
        "127.0.0.1:99999",
        "--insecure",
        "--host",
    ]))
    .assert_code(1)
    .assert_complains("`99999` is no port")
    .assert_complains("a port up to 65535");
}

#[test]
fn a_server_with_a_client_s_key_is_told_to_take_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("server.key");
    let made = run(tcpx(&["key", file.to_str().expect("a name")]));
    let (_, key) = made.stdout.split_once("TCPX_KEY=").expect("a key");
    let key = key.split_whitespace().next().expect("a key");
    let mut server = tcpx(&["connection", "server", "--host"]);
    server.env("TCPX_KEY", key);
    let ended = run(server);
    ended
        .assert_code(1)
        .assert_complains("TCPX_KEY holds a client's key")
        .assert_complains("hint: leave that key out");
    let mut client = tcpx(&["connection", "127.0.0.1", "--host"]);
    client.env("TCPX_KEY", format!("TCPX_KEY={key}"));
    run(client)
        .assert_code(1)
        .assert_complains("93 arrived\nhint: copy the key");
}

/// Of each file that is no key, one sentence says what is wrong and another what to do.
#[test]
fn a_key_file_that_is_none_has_one_advice() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str, mode: u32| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("changed");
        path
    };
    let words = "my very own words";
    let cases = [
        (file("words", words, 0o600), "17 arrived\nhint: "),
        (file("short", "ABCD", 0o600), "4 arrived\nhint: "),
        (
            file("open", words, 0o666),
            "whom they like\nhint: make it your own",
        ),
        (folder.path().join("nosuch"), "cannot be read: "),
        (folder.path().to_owned(), "cannot be read: "),
    ];
    for (path, complaint) in cases {
        let path = path.to_str().expect("a name");
        let ended = run(tcpx(&[
            "connection",
            "127.0.0.1",
            "--host",
            "--key-file",
            path,
        ]));
        ended.assert_code(1).assert_complains(complaint);
        let text = ended.stderr.trim();
        let (what, hint) = text.split_once("\nhint: ").expect("a hint");
        assert!(!what.contains("; ") && !hint.contains('\n'), "{text}");
    }
}

#[test]
fn patterns_that_leave_nothing_are_named() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("a name");
    run(tcpx(&["send", path, "127.0.0.1", "--include", "nothing"]))
        .assert_code(2)
        .assert_complains("hint: see --include and --exclude");
}

#[test]
fn interfaces_that_are_not_there_are_refused_at_once() {
    for side in ["server", "127.0.0.1"] {
        let mut command = tcpx(&["connection", side, "--host", "--interfaces", "nosuch"]);
        command.args(["--insecure", "--port", "0"]);
        run(command)
            .assert_code(2)
            .assert_complains("`nosuch` allows no interface of this host");
    }
}

#[test]
fn releasing_an_interface_that_is_not_there_fails() {
    run(tcpx(&["devmem", "release", "nosuch"]))
        .assert_code(2)
        .assert_complains("there is no interface nosuch");
}

#[test]
fn a_chunk_size_that_cannot_work_has_its_hint() {
    let mut command = tcpx(&["connection", "server", "--host", "--chunk-bytes", "1"]);
    command.arg("--insecure");
    run(command)
        .assert_code(1)
        .assert_complains("hint: give --chunk-bytes a multiple of 4KiB");
}

#[test]
fn a_server_s_last_words_count_the_clients_it_refused() {
    let mut server = Server::start(tcpx(&["transfer", "server", "--host", "--wait", "1h"]));
    for _ in 0..2 {
        let mut client = server.client(&["transfer"], &["--host"]);
        client.env("TCPX_KEY", "MFXG65DIMVZCA23FPEQGQZLSMVIWISBB");
        run(client)
            .assert_code(1)
            .assert_complains("is another one");
    }
    server
        .running
        .find_aside(|line| line.contains("connection refused"));
    server
        .running
        .find_aside(|line| line.contains("connection refused"));
    server.running.signal(Signal::TERM);
    let ended = server.running.end();
    ended.assert_code(143);
    ended.assert_complains("connections refused in all: 2");
}

#[test]
fn without_threads_there_is_an_error_and_no_panic() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: a limit on threads of another user needs root");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("a name");
    let stays = ["receive", "--host", "--insecure", "--keep", "--out", out];
    let server = Server::start(tcpx(&stays));
    let mut some_failed = false;
    for threads in 1..=6 {
        let insecure = ["--host", "--insecure", "--timeout", "10s"];
        let plain = server.client(&["send", "/etc/passwd"], &insecure);
        // The limit counts all processes of a user: this one has no others.
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "64321", "--clear-groups", "prlimit"]);
        command.arg(format!("--nproc={threads}"));
        command.arg(plain.get_program()).args(plain.get_args());
        command.stdin(std::process::Stdio::null());
        let ended = run(command);
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        some_failed |= ended.stderr.contains("Resource temporarily unavailable");
    }
    assert!(some_failed, "no limit was met");
}
