use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use tcpx_tests::support::until;

use crate::support::{Running, Server, run, tcpx};

/// A command whose socket lies in `folder`.
fn apart(mut command: Command, folder: &Path) -> Command {
    command.env("XDG_RUNTIME_DIR", folder);
    command
}

/// What the processes tell, once `wanted` takes something from it.
fn told<T>(folder: &Path, arguments: &[&str], wanted: impl Fn(&Value) -> Option<T>) -> T {
    until("what is wanted is told", || {
        let arguments = [&["status", "--json"], arguments].concat();
        let ended = run(apart(tcpx(&arguments), folder));
        wanted(&serde_json::from_str(&ended.stdout).expect("one JSON document"))
    })
}

/// The connections of process `pid`, if it has some.
fn connections(told: &Value, pid: u32) -> Option<Vec<Value>> {
    let mut processes = told["processes"].as_array()?.iter();
    let process = processes.find(|process| process["pid"] == pid)?;
    let connections = process["connections"].as_array()?;
    (!connections.is_empty()).then(|| connections.clone())
}

/// What a GET at this address answers.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: tcpx\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    answer
}

#[test]
fn a_running_transfer_tells_its_lanes_and_who_acts_next() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let serving = apart(tcpx(&["perf", "server", "host"]), folder);
    let server = Server::start(serving);
    let sizes = ["host", "--size", "4MiB", "--iterations", "1000000"];
    let client = server.client(&["perf", "client"], &sizes);
    let client = Running::start(apart(client, folder));

    let (pid, text) = (client.pid(), client.pid().to_string());
    let connection = told(folder, &[&text], |told| {
        let connection = connections(told, pid)?.remove(0);
        let sent = connection["counters"]["bytes_sent"].as_u64();
        (sent > Some(0) && connection["operations_running"] != 0).then_some(connection)
    });
    assert_eq!(connection["network"], "tcp");
    assert!(!connection["lanes"].as_array().expect("lanes").is_empty());
    let operation = &connection["operations"][0];
    let next = operation["next"].as_str().expect("somebody acts next");
    assert!(
        next.contains("must") || next.contains("nothing is left"),
        "{next}"
    );

    let socket = folder.join("tcpx").join(format!("{pid}.sock"));
    let mode = std::fs::metadata(&socket).expect("a socket").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);

    let shown = apart(tcpx(&["status", &text, "--interval", "100ms"]), folder);
    let shown = run(shown);
    shown
        .assert_code(0)
        .assert_says(&format!("process {pid}, tcpx"))
        .assert_says("now ")
        .assert_says("round trip");

    // Killed, they leave their sockets behind, which the next look removes.
    let gone = [pid, server.running.pid()];
    client.signal(Signal::KILL);
    server.running.signal(Signal::KILL);
    drop(client);
    drop(server);
    told(folder, &[], |told| {
        // Other programs of this host may have connections of their own.
        let processes = told["processes"].as_array()?;
        let is_gone = |one: &Value| gone.iter().all(|pid| one["pid"] != *pid);
        processes.iter().all(is_gone).then_some(())
    });
    assert!(!socket.exists());
}

#[test]
fn silent_processes_are_each_asked_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = folder.path().join("tcpx");
    let mut private = std::fs::DirBuilder::new();
    private.mode(0o700).create(&sockets).expect("a folder");
    let pids = ["4194305", "4194306"];
    let listeners = pids.map(|pid| {
        let listener = UnixListener::bind(sockets.join(format!("{pid}.sock"))).expect("a socket");
        listener.set_nonblocking(true).expect("a listener");
        listener
    });

    let shown = apart(tcpx(&["status", "--interval", "1ms"]), folder.path());
    let shown = run(shown);
    shown.assert_code(0);
    for (pid, listener) in pids.iter().zip(listeners) {
        shown.assert_says(&format!("process {pid} does not answer within 3s"));
        let mut asked = 0;
        while let Ok((mut stream, _)) = listener.accept() {
            let mut request = String::new();
            stream.read_to_string(&mut request).expect("it has closed");
            asked += usize::from(!request.is_empty());
        }
        assert_eq!(asked, 1);
    }
}

#[test]
fn a_folder_that_others_may_enter_is_named_and_not_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = folder.path().join("tcpx");
    std::fs::create_dir(&sockets).expect("a folder");
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&sockets, open).expect("open to others");
    let _listener = UnixListener::bind(sockets.join("4194307.sock")).expect("a socket");
    let shown = run(apart(tcpx(&["status"]), folder.path()));
    let named = format!("{} is another user's, or open to others", sockets.display());
    shown.assert_code(0).assert_says(&named);
    assert!(!shown.stdout.contains("4194307"), "{}", shown.stdout);
}

#[test]
fn a_process_that_is_not_there_is_an_error_in_json_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let status = apart(tcpx(&["status", "1", "--json"]), folder.path());
    let ended = run(status);
    ended.assert_code(1).assert_complains("process 1");
    let told: Value = serde_json::from_str(&ended.stdout).expect("one JSON document");
    assert_eq!(
        (&told["schema"], &told["ok"]),
        (&"tcpx.status".into(), &false.into())
    );
}

#[test]
fn a_variable_switches_the_socket_off() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut serving = apart(tcpx(&["perf", "server", "host"]), folder.path());
    serving.env("TCPX_STATUS", "0");
    let _server = Server::start(serving);
    assert!(!folder.path().join("tcpx").exists());
}

#[test]
fn metrics_count_refused_peers_and_show_no_peer() {
    let folder = tempfile::tempdir().expect("a folder");
    let serving = tcpx(&[
        "perf",
        "server",
        "host",
        "--metrics",
        "127.0.0.1:0",
        "--json",
    ]);
    let out = tempfile::tempfile().expect("a file");
    let mut command = apart(serving, folder.path());
    command.args(["--bind", "127.0.0.1", "--port", "0"]);
    let mut server = Running::start_aside(command, out);
    let address = server.find(|line| {
        let rest = line.strip_prefix("metrics at http://")?;
        rest.strip_suffix("/metrics").map(str::to_owned)
    });
    let port = server.find(|line| {
        let rest = line.strip_prefix("listening on 127.0.0.1:")?;
        rest.split(';').next().map(str::to_owned)
    });
    let mut stranger = tcpx(&["connection", "127.0.0.1", "--port", &port]);
    stranger.arg("--insecure");
    run(stranger).assert_code(1);

    let text = until("a refused peer", || {
        Some(get(&address, "/metrics"))
            .filter(|text| text.contains("\ntcpx_peers_refused_total 1\n"))
    });
    assert!(text.starts_with("HTTP/1.0 200 OK\r\n"), "{text}");
    assert!(text.contains("application/openmetrics-text"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    // Who reaches the port sees sums alone.
    assert!(!text.contains("127.0.0.1"), "{text}");
    assert!(get(&address, "/status").starts_with("HTTP/1.0 404"));
}
