use std::process::Command;

use crate::support::{Server, ask, passes, program, run, tcpx};

/// A right key that no server of these tests has made.
const OTHER_KEY: &str = "MFXG65DIMVZCA23FPEQGQZLSMVIWISBB";

#[test]
fn help_names_each_variable_beside_its_flag() {
    let help = [
        ask(&["demo", "--help-all"]),
        ask(&["transfer", "--help-all"]),
        ask(&["perf", "client", "--help-all"]),
        ask(&["--help-all"]),
    ];
    let text: String = help
        .iter()
        .map(|ended| ended.assert_code(0).stdout.as_str())
        .collect();
    // Lines are folded where a word ends.
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for name in [
        "UCCL_TCPX_UNPACK_IMPL",
        "UCCL_TCPX_DEBUG",
        "UCCL_TCPX_PERF_SIZE",
        "UCCL_TCPX_PERF_ITERS",
        "UCCL_TCPX_CHUNK_BYTES",
        "NCCL_P2P_NET_CHUNKSIZE",
        "UCCL_TCPX_PAYLOAD_BYTES",
        "UCCL_TCPX_PLUGIN_PATH",
        "UCCL_TCPX_NUM_CHANNELS",
    ] {
        assert!(text.contains(&format!("[env: {name}]")), "{name}\n{text}");
    }
    assert!(text.contains("TCPX_KEY"), "{text}");
}

#[test]
fn help_is_short_and_shows_experts_the_rest() {
    for command in [&["transfer"][..], &["perf", "client"], &["bench", "net"]] {
        let usual = ask(&[command, &["--help"]].concat());
        let all = ask(&[command, &["--help-all"]].concat());
        let lines = |ended: &crate::support::Ended| ended.assert_code(0).stdout.lines().count();
        assert!(
            lines(&usual) < 80 && lines(&usual) < lines(&all),
            "{}",
            usual.stdout
        );
        assert!(!usual.stdout.contains("--loops"), "{}", usual.stdout);
        all.assert_says("--loops").assert_says("--nccl-interfaces");
        usual.assert_says("--help-all").assert_says("--timeout");
    }
    ask(&["receive", "-h"])
        .assert_says("Examples:")
        .assert_says("-o, --out");
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let mut command = tcpx(&["connection", "127.0.0.1"]);
    command
        .env("UCCL_TCPX_CHUNK_BYTES", "")
        .env("UCCL_TCPX_DEBUG", "");
    run(command).assert_code(1).assert_complains("needs a key");
}

#[test]
fn devices_answers_with_and_without_a_driver() {
    let ended = ask(&["devices"]);
    ended
        .assert_code(0)
        .assert_says("GPUs:")
        .assert_says("network interfaces:")
        .assert_says("lo");
    ended.assert_says("plugin file:");
    if !ended.stdout.contains("NVIDIA") {
        ended.assert_says("missing:");
    }
}

#[test]
fn the_handshake_alone_passes_on_both_sides() {
    let server = Server::start(tcpx(&["connection", "server", "--host"]));
    assert!(
        server.invitation.starts_with("tcpx connection 127.0.0.1 "),
        "{}",
        server.invitation
    );
    let client = server.client(&["connection"], &["--host"]);
    let (server, client) = server.finish(client);
    for side in [server, client] {
        side.assert_code(0)
            .assert_says("connection: PASSED")
            .assert_says("tcp")
            .assert_says("data channel");
    }
}

#[test]
fn nobody_at_the_port_is_one_line_and_a_hint() {
    // Bound and never listened on: a connection to it is refused.
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let port = socket.local_addr().expect("bound").port().to_string();
    let mut command = tcpx(&["connection", "127.0.0.1", "--host", "--port", &port]);
    command.env("TCPX_KEY", OTHER_KEY);
    let ended = run(command);
    ended
        .assert_code(1)
        .assert_says("connection: FAILED")
        .assert_complains("127.0.0.1");
    assert_eq!(
        ended
            .stderr
            .lines()
            .filter(|line| line.starts_with("error: "))
            .count(),
        1,
        "{}",
        ended.stderr
    );
    assert_eq!(
        ended
            .stderr
            .lines()
            .filter(|line| line.starts_with("hint: "))
            .count(),
        1,
        "{}",
        ended.stderr
    );
}

#[test]
fn a_wrong_key_is_named_and_spends_nothing() {
    let server = Server::start(tcpx(&["connection", "server", "--host"]));
    let mut stranger = server.client(&["connection"], &["--host"]);
    stranger.env("TCPX_KEY", OTHER_KEY);
    run(stranger)
        .assert_code(1)
        .assert_complains("key")
        .assert_says("FAILED");
    let client = server.client(&["connection"], &["--host"]);
    passes(server.finish(client));
}

#[test]
fn without_a_key_both_sides_say_so() {
    let server = Server::start(tcpx(&["connection", "server", "--host", "--insecure"]));
    assert_eq!(server.key, None, "{}", server.invitation);
    assert!(
        server.invitation.contains("--insecure"),
        "{}",
        server.invitation
    );
    let client = server.client(&["connection"], &["--host", "--insecure"]);
    let (server, client) = server.finish(client);
    for side in [server, client] {
        side.assert_code(0).assert_complains("there is no key");
    }
}

#[test]
fn a_key_file_serves_both_sides_and_is_not_printed() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("key");
    let key = OTHER_KEY;
    std::fs::write(&path, key).expect("written");
    let path = path.to_str().expect("text");
    let server = Server::start(tcpx(&[
        "connection",
        "server",
        "--host",
        "--key-file",
        path,
    ]));
    assert!(!server.invitation.contains(key), "{}", server.invitation);
    let client = server.client(&["connection"], &["--host", "--key-file", path]);
    passes(server.finish(client));
}

#[test]
fn lost_output_is_an_error_of_every_command() {
    for arguments in [
        &["devices"][..],
        &["devices", "--json"],
        &["doctor", "--json"],
        &["env", "tcpx", "--json"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full");
        let mut command = tcpx(arguments);
        command
            .stdout(full.expect("opened"))
            .stderr(std::process::Stdio::piped());
        let ended = command.output().expect("runs");
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}");
        let complaint = String::from_utf8_lossy(&ended.stderr).into_owned();
        for words in ["standard output", "hint: make room where the output goes"] {
            assert!(complaint.contains(words), "{arguments:?}: {complaint}");
        }
    }
}

#[test]
fn the_version_says_what_the_program_was_built_from() {
    let ended = ask(&["--version"]);
    ended
        .assert_code(0)
        .assert_says(concat!("tcpx ", env!("CARGO_PKG_VERSION")));
    for line in ["commit   ", "target   ", "plugin   tcpx-nccl "] {
        ended.assert_says(line);
    }
    let short = ask(&["-V"]);
    assert_eq!(short.assert_code(0).stdout.lines().count(), 1);
}

/// Whatever limit the shell gave it.
#[test]
fn a_crash_leaves_no_keys_in_a_core_dump() {
    let mut shell = Command::new("sh");
    let script = "ulimit -S -c \"$(ulimit -H -c)\"; exec \"$0\" \"$@\"";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_tcpx")]);
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("text");
    let server = Server::start(program(shell, &["receive", "--host", "--out", out]));
    let limits = format!("/proc/{}/limits", server.running.pid());
    let limits = std::fs::read_to_string(limits).expect("its limits");
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"));
    let soft = core.and_then(|line| line.split_whitespace().nth(4));
    assert_eq!(soft, Some("0"), "{core:?}");
}
