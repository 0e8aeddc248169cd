//! `tcpx doctor`.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use tcpx_tests::double;

use crate::support::{ask, run, tcpx};

fn double() -> &'static str {
    double::path().to_str().expect("text")
}

/// What the doctor finds with Google's plugin and the daemon's sockets in `folder`: verdict and
/// measurement of a check.
fn examine(folder: &Path, id: &str) -> (String, String) {
    let mut command = tcpx(&["doctor", "--plugin", double(), "--json"]);
    command.env("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", folder);
    let ended = run(command);
    let report: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let blocking = report["blocking"].as_u64().expect("a number");
    ended.assert_code(i32::from(blocking > 0));
    let checks = report["checks"].as_array().expect("a list");
    let check = checks
        .iter()
        .find(|check| check["id"] == id)
        .expect("the check");
    let text = |field: &str| check[field].as_str().expect("text").to_owned();
    (text("verdict"), text("measured"))
}

#[test]
fn a_daemons_dead_and_live_sockets_differ() {
    let folder = tempfile::tempdir().expect("a folder");
    let (verdict, measured) = examine(&folder.path().join("none"), "TCPX-D021");
    assert_eq!(verdict, "blocks");
    assert!(measured.contains("is not there"), "{measured}");
    drop(UnixListener::bind(folder.path().join("rx_rule_manager")).expect("bound"));
    let (verdict, measured) = examine(folder.path(), "TCPX-D021");
    assert_eq!(verdict, "blocks");
    assert!(measured.contains("nobody listens"), "{measured}");
    fs::remove_file(folder.path().join("rx_rule_manager")).expect("removed");
    let listen = |name: &str| UnixListener::bind(folder.path().join(name)).expect("bound");
    let _listening = ["rx_rule_manager", "rx_rule_uninstall"].map(listen);
    assert_eq!(examine(folder.path(), "TCPX-D021").0, "fine");
}

#[test]
fn a_check_is_explained_and_an_unknown_one_refused() {
    ask(&["doctor", "--explain", "d004"])
        .assert_code(0)
        .assert_says("TCPX-D004 kernel")
        .assert_says("here      ");
    ask(&["doctor", "--explain", "D999"])
        .assert_code(2)
        .assert_complains("--explain all");
    let all = ask(&["doctor", "--explain", "all", "--json"]);
    all.assert_code(0);
    let all: Value = serde_json::from_str(&all.stdout).expect("JSON");
    let all = all["checks"].as_array().expect("checks");
    assert!(all.iter().any(|check| check["id"] == "TCPX-D030"));
}

#[test]
fn what_is_well_takes_one_line_each() {
    let ended = ask(&["doctor", "--plugin", double()]);
    ended.assert_says("TCPX-D004 ").assert_says("TCPX-D013 ok ");
    let lines = |start: &str| {
        ended
            .stdout
            .lines()
            .filter(|line| line.starts_with(start))
            .count()
    };
    let troubles = lines("          fix:");
    assert_eq!(
        lines("TCPX-D") + 2 * troubles + 2,
        ended.stdout.lines().count(),
        "{}",
        ended.stdout
    );
}

#[test]
fn errors_name_the_check_that_explains_them() {
    // Bound and never listened on: a connection to it is refused.
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let port = socket.local_addr().expect("bound").port().to_string();
    let client = [
        "connection",
        "127.0.0.1",
        "--host",
        "--insecure",
        "--port",
        &port,
    ];
    ask(&client)
        .assert_code(1)
        .assert_complains("check: `tcpx doctor --explain TCPX-D037`");
    let missing = [
        "connection",
        "server",
        "--host",
        "--insecure",
        "--plugin",
        "/nonexistent/x.so",
    ];
    ask(&missing)
        .assert_code(1)
        .assert_complains("check: `tcpx doctor --explain TCPX-D010`");
    let directory = tempfile::tempdir().expect("a directory");
    let text = directory.path().join("text.so");
    fs::write(&text, "no library").expect("written");
    let text = text.to_str().expect("text");
    let server = [
        "connection",
        "server",
        "--host",
        "--insecure",
        "--port",
        "0",
        "--plugin",
        text,
    ];
    let ended = ask(&server);
    ended
        .assert_code(1)
        .assert_complains("check: `tcpx doctor --explain TCPX-D011`");
    assert!(!ended.stderr.contains("[TCPX-"), "{}", ended.stderr);
}

#[test]
fn a_plugin_on_a_noexec_mount_is_found_first() {
    const NAME: &str = "a_plugin_on_a_noexec_mount_is_found_first";
    let folder = tempfile::tempdir().expect("a folder");
    // Mounts of a namespace of our own end with its last process.
    let shell = |script: &str| {
        let mut command = Command::new("unshare");
        let mount = "mount -t tmpfs -o noexec none \"$1\" && cp \"$2\" \"$1/x.so\"";
        command
            .args(["-rm", "sh", "-c", &format!("{mount} && {script}"), "sh"])
            .arg(folder.path())
            .args([double(), env!("CARGO_BIN_EXE_tcpx")])
            .stdin(Stdio::null());
        command
    };
    if !shell("true")
        .output()
        .is_ok_and(|output| output.status.success())
    {
        let why = "this user cannot mount in a namespace of its own";
        let _ = writeln!(std::io::stderr(), "skipped: {NAME}: {why}");
        return;
    }
    let found = run(shell("exec \"$3\" doctor --plugin \"$1/x.so\""));
    found
        .assert_code(1)
        .assert_says("TCPX-D012 BLOCKS")
        .assert_says("mount -o remount,exec");
    let flags = "--host --insecure --port 0 --plugin";
    let script = format!("exec \"$3\" connection server {flags} \"$1/x.so\"");
    let named = run(shell(&script));
    named
        .assert_code(1)
        .assert_complains("hint: copy it to a file system that is not mounted noexec")
        .assert_complains("check: `tcpx doctor --explain TCPX-D012`");
}
