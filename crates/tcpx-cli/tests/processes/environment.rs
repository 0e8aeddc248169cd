//! Variables for plugins: set before the plugin's file is loaded, and printed for a shell.

use std::collections::BTreeMap;
use std::path::Path;

use tcpx_tests::plugin_file;

use crate::support::{Ended, Server, ask, run, tcpx};

/// The variables that a process was started with.
fn started_with(pid: u32) -> BTreeMap<String, String> {
    let block = std::fs::read(format!("/proc/{pid}/environ")).expect("our own process");
    let entries = block.split(|byte| *byte == 0);
    let pairs = entries.filter_map(|entry| {
        let text = String::from_utf8_lossy(entry).into_owned();
        let (name, value) = text.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    });
    pairs.collect()
}

fn double() -> &'static str {
    tcpx_tests::double::path().to_str().expect("text")
}

/// What `--json` told of each variable.
fn variables(ended: &Ended) -> Vec<serde_json::Value> {
    let told: serde_json::Value = serde_json::from_str(&ended.stdout).expect("JSON");
    told["variables"].as_array().expect("variables").clone()
}

#[test]
fn googles_plugin_finds_its_variables_set() {
    let mut command = tcpx(&["connection", "server", "--host", "--plugin", double()]);
    command.env("NCCL_GPUDIRECTTCPX_RECV_SYNC", "0");
    let server = Server::start(command);
    let variables = started_with(server.running.pid());
    let value = |name: &str| variables.get(name).map(String::as_str);
    assert_eq!(value("NCCL_DYNAMIC_CHUNK_SIZE"), Some("524288"));
    assert_eq!(value("NCCL_GPUDIRECTTCPX_RECV_SYNC"), Some("0"));
    assert!(
        value("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME").is_some_and(|names| !names.is_empty()),
        "{variables:?}"
    );
    let client = server.client(&["connection"], &["--host", "--plugin", double()]);
    let (server, client) = server.finish(client);
    for side in [&server, &client] {
        side.assert_code(0)
            .assert_says("connection: PASSED")
            .assert_complains("NCCL_DYNAMIC_CHUNK_SIZE=524288 (needed: ");
    }
    server.assert_complains("NCCL_GPUDIRECTTCPX_RECV_SYNC=0 (yours: ");
    client.assert_complains("NCCL_GPUDIRECTTCPX_RECV_SYNC=1 (needed: ");
}

#[test]
fn a_search_for_the_plugin_starts_no_build() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().expect("a directory");
    let (tool, ran) = (folder.path().join("cargo"), folder.path().join("ran"));
    std::fs::write(&tool, format!("#!/bin/sh\ntouch {}\n", ran.display())).expect("written");
    std::fs::set_permissions(&tool, PermissionsExt::from_mode(0o755)).expect("executable");
    let mut command = tcpx(&["env", "nccl"]);
    command.env("CARGO", &tool).env("PATH", folder.path());
    run(command);
    assert!(!ran.exists(), "the program ran {}", tool.display());
}

#[test]
fn a_shell_that_takes_the_variables_sees_that_there_are_none() {
    let missing = "/nonexistent/libnccl-net-tcpx.so";
    let program = env!("CARGO_BIN_EXE_tcpx");
    let takes = |arguments: &str| {
        let mut command = std::process::Command::new("sh");
        let line = format!("set -e; eval \"$({program} {arguments})\"; echo went on");
        command.args(["-c", &line]);
        run(command)
    };
    for (arguments, complaint) in [
        (format!("env nccl --plugin {missing}"), missing),
        ("env nccl --interfaces eth0".into(), "--interfaces"),
        ("-v env nccls".into(), "nccls"),
        ("env".into(), "Usage"),
    ] {
        let ended = takes(&arguments);
        ended.assert_code(1).assert_complains(complaint);
        assert_eq!(ended.stdout, "");
    }
    let json = ask(&["env", "nccl", "--plugin", missing, "--json"]);
    json.assert_code(1);
    serde_json::from_str::<serde_json::Value>(&json.stdout).expect("JSON alone");
}

#[test]
fn lines_for_googles_plugin_are_taken_by_a_shell() {
    let printed = ask(&["env", "tcpx"]);
    printed.assert_code(0);
    let script = format!("{}\nexec \"$0\" env tcpx --json", printed.stdout);
    let mut shell = std::process::Command::new("sh");
    shell.args(["-ec", &script, env!("CARGO_BIN_EXE_tcpx")]);
    shell.stdin(std::process::Stdio::null());
    let again = run(shell);
    again.assert_code(0);
    let settings = variables(&again);
    let chunk = settings
        .iter()
        .find(|setting| setting["name"] == "NCCL_DYNAMIC_CHUNK_SIZE")
        .expect("listed");
    assert_eq!(chunk["value"], "524288");
    for setting in &settings {
        assert_eq!(setting["origin"], "yours", "{setting}");
        assert_eq!(setting["trouble"], serde_json::Value::Null, "{setting}");
    }
}

#[test]
fn the_lines_for_nccl_name_the_file_and_keep_it_loaded() {
    let ours = plugin_file::path().to_str().expect("text");
    let ended = ask(&["env", "nccl", "--plugin", ours, "--json"]);
    ended.assert_code(0);
    let settings = variables(&ended);
    let value = |name: &str| {
        let setting = settings.iter().find(|setting| setting["name"] == name)?;
        setting["value"].as_str()
    };
    let path = value("NCCL_NET_PLUGIN").expect("a path");
    assert!(Path::new(path).is_absolute() && Path::new(path).is_file());
    assert_eq!(value("NCCL_NET"), Some("TCPX"));
    assert_eq!(value("NCCL_NET_PLUGIN_REF_COUNT"), Some("1"));
    let bad = ask(&["env", "nccl", "--plugin", "/proc/self/exe"]);
    bad.assert_code(1).assert_complains("hint: ");
    let other = ask(&["env", "nccl", "--plugin", double()]);
    other.assert_code(2).assert_complains("`tcpx env tcpx`");
}
