//! `tcpx plugin` with good plugins and with every bad one.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tcpx_tests::{bad_plugin, double, habits, plugin_file};

use crate::support::{Ended, Running, Server, tcpx};

/// A busy host may take long over 64 MiB of random bytes.
const PATIENT: [&str; 2] = ["--timeout", "5m"];

fn check(path: &Path, more: &[&str]) -> Ended {
    let path = path.to_str().expect("text");
    let command = [&["plugin", path], &PATIENT[..]].concat();
    Running::start(tcpx(&[&command[..], more].concat())).end()
}

/// The bad plugin, bad in one way.
fn check_bad(way: &str, more: &[&str]) -> Ended {
    let path = bad_plugin::path().to_str().expect("text");
    let mut command = tcpx(&[&["plugin", path], more].concat());
    command.env(bad_plugin::WAY, way);
    Running::start(command).end()
}

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
}

#[test]
fn our_own_plugin_passes_with_every_table_it_has() {
    let all = json(check(plugin_file::path(), &["--json"]).assert_code(0));
    assert_eq!(all["ok"], true);
    assert_eq!(all["kind"], "our own");
    let moved = all["self_test"].as_array().expect("messages");
    let sizes: Vec<u64> = moved
        .iter()
        .filter_map(|one| one["bytes"].as_u64())
        .collect();
    for size in [0, 1, 4097, 64 << 20] {
        assert!(sizes.contains(&size), "{sizes:?}");
    }
    assert!(
        moved.iter().any(|one| one["requests"].as_u64() > Some(16)),
        "{moved:?}"
    );
    let device = &all["devices"][0];
    for property in [
        "max_coll_bytes",
        "reg_is_global",
        "virtual_devices",
        "rail_id",
    ] {
        assert!(!device[property].is_null(), "{property}: {device}");
    }
    let tables = all["tables"].as_array().expect("tables");
    assert!(tables.len() > 1);
    for table in tables {
        let flag = format!("v{}", table["version"]);
        let text = check(plugin_file::path(), &["--abi", &flag]);
        text.assert_code(0)
            .assert_says("plugin: PASSED")
            .assert_says(&format!("in use   {flag} "));
    }
}

/// Every name of a field in it.
fn fields(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(name, value)| {
            into.insert(name.clone());
            // Names of calls are the plugin's.
            if name != "calls" || !value.is_object() {
                fields(value, into);
            } else {
                let counts = value
                    .as_object()
                    .into_iter()
                    .flat_map(|counts| counts.values());
                counts.take(1).for_each(|count| fields(count, into));
            }
        }),
        Value::Array(list) => list.iter().for_each(|value| fields(value, into)),
        _ => {}
    }
}

#[test]
fn every_field_of_the_json_is_documented() {
    let mut found = BTreeSet::new();
    for ended in [
        check(double::path(), &["--json"]),
        check(plugin_file::path(), &["--json"]),
        check(Path::new("nowhere.so"), &["--json"]),
        check_bad("init-fails", &["--json"]),
    ] {
        let report = json(&ended);
        assert_eq!(report["schema"], "tcpx.plugin");
        assert_eq!(report["version"], 1);
        assert_eq!(report["ok"], ended.code == Some(0));
        fields(&report, &mut found);
    }
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/plugin-check.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let rows = rows.filter_map(|row| row.split(" |").next());
    let documented: BTreeSet<_> = rows
        .flat_map(|names| names.split("`, `"))
        .map(|name| name.trim_end_matches('`'))
        .collect();
    let written = |name: &&String| page.contains(&format!("`{name}`"));
    let missing: Vec<_> = found.iter().filter(|name| !written(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let stale: Vec<_> = documented
        .iter()
        .filter(|name| !found.contains(**name))
        .collect();
    assert!(documented.len() > 30 && stale.is_empty(), "{stale:?}");
}

#[test]
fn the_double_of_google_s_plugin_passes_with_its_variables_shown() {
    check(double::path(), &[])
        .assert_code(0)
        .assert_says("Google's GPUDirectTCPX; tables v7")
        .assert_says("variable NCCL_DYNAMIC_CHUNK_SIZE=524288 (needed)")
        .assert_says("every byte compared")
        .assert_says("plugin: PASSED");
}

#[test]
fn a_variable_by_flag_wins_over_the_environment_and_ours() {
    const CHUNK: &str = "NCCL_DYNAMIC_CHUNK_SIZE";
    let flag = format!("--plugin-env={CHUNK}=262144");
    let path = double::path().to_str().expect("text");
    for more in [&[][..], &[flag.as_str()]] {
        let mut command = tcpx(&[&["plugin", path], &PATIENT[..], more].concat());
        command.env(CHUNK, "131072");
        let value = if more.is_empty() { 131_072 } else { 262_144 };
        Running::start(command)
            .end()
            .assert_code(0)
            .assert_says(&format!("variable {CHUNK}={value} (yours)"));
    }
    check(double::path(), &["--plugin-env", "=1"])
        .assert_code(2)
        .assert_complains("expected NAME=VALUE");
}

#[test]
fn over_loopback_no_zero_copy_is_asked_for_unless_you_do() {
    const ZERO_COPY: &str = "NCCL_MIN_ZCOPY_SIZE";
    let flag = format!("--plugin-env={ZERO_COPY}=16384");
    for (yours, more, value, origin) in [
        (None, &[][..], "0", "detected"),
        (Some("8192"), &[], "8192", "yours"),
        (None, &[flag.as_str()], "16384", "yours"),
        (Some("8192"), &[flag.as_str()], "16384", "yours"),
    ] {
        let path = double::path().to_str().expect("text");
        let mut command = tcpx(&[&["plugin", path, "--json"], &PATIENT[..], more].concat());
        command.env("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "lo");
        command.envs(yours.map(|value| (ZERO_COPY, value)));
        let ended = Running::start(command).end();
        let report = json(ended.assert_code(0));
        let variables = report["variables"].as_array().expect("variables");
        let told = variables.iter().find(|one| one["name"] == ZERO_COPY);
        let told = told.expect("told");
        assert_eq!(
            (&told["value"], &told["origin"]),
            (&value.into(), &origin.into())
        );
    }
}

#[test]
fn an_interface_of_yours_stays_in_the_demo_of_a_vendor_s_plugin() {
    let path = double::path().to_str().expect("text");
    let mut command = tcpx(&["demo", "--size", "1KiB", "--host", "--plugin", path]);
    command.env("NCCL_SOCKET_IFNAME", "^docker");
    let ended = Running::start(command).end();
    ended
        .assert_code(0)
        .assert_complains("NCCL_SOCKET_IFNAME=^docker (yours: ");
}

#[test]
fn a_variable_by_flag_reaches_the_plugin_of_every_command() {
    let path = bad_plugin::path().to_str().expect("text");
    let variable = format!("{}=init-fails", bad_plugin::WAY);
    let link = ["--plugin", path, "--insecure", "--timeout", "10s"];
    for command in [
        &["plugin", path][..],
        &[&["transfer", "server", "--host"], &link[..]].concat(),
    ] {
        Running::start(tcpx(&[command, &["--plugin-env", &variable]].concat()))
            .end()
            .assert_code(1)
            .assert_complains("init returned 3");
    }
}

/// The double behind a plugin that has `habits`.
fn check_habits(habits: &str) -> Ended {
    let path = habits::path().to_str().expect("text");
    let mut command = tcpx(&[&["plugin", path, "--json"], &PATIENT[..]].concat());
    command
        .env(habits::OF, double::path())
        .env(habits::HABITS, habits);
    Running::start(command).end()
}

#[test]
fn a_plugin_that_fills_its_table_in_init_passes() {
    let report = json(check_habits("").assert_code(0));
    assert_eq!(report["in_use"]["name"], "chosen by init");
    let missing = &report["in_use"]["missing_functions"];
    let expected = ["regMrDmaBuf", "iflush", "getDeviceMr"];
    assert_eq!(*missing, serde_json::json!(expected));
}

#[test]
fn a_function_that_init_leaves_out_is_named() {
    let ended = check_habits("incomplete");
    let report = json(ended.assert_code(1));
    let error = report["error"]["what"].to_string();
    assert!(error.contains("no test after init"), "{error}");
    assert_eq!(report["error"]["check"], "TCPX-D013");
}

#[test]
fn a_comm_that_listen_leaves_out_is_named() {
    let report = json(check_habits("null-listen").assert_code(1));
    let error = report["error"]["what"].to_string();
    assert!(error.contains("listen succeeded without a comm"), "{error}");
    assert_eq!(report["error"]["where"], "listen");
}

#[test]
fn a_receive_that_waits_for_its_send_passes() {
    check_habits("receive-after-send").assert_code(0);
}

#[test]
fn a_close_that_waits_for_the_other_end_passes() {
    check_habits("closes-together").assert_code(0);
}

#[test]
fn a_plugin_that_takes_every_liberty_passes() {
    let report = json(check(habits::liberal(), &["--json"]).assert_code(0));
    assert_eq!(report["in_use"]["name"], "(unnamed)");
    let device = &report["devices"][0];
    assert_eq!(device["name"], "");
    assert!(device["latency_us"].is_null() && device["pci_path"].is_null());
    let missing = &report["in_use"]["missing_functions"];
    assert_eq!(missing.as_array().map(Vec::len), Some(5), "{missing}");
}

/// `transfer` and `perf` between two processes over this plugin, with these variables.
fn transfer_and_perf(plugin: &Path, variables: &[(&str, &Path)]) {
    let text = |path: &Path| path.to_str().expect("text").to_owned();
    let directory = tempfile::tempdir().expect("a directory");
    let (file, out) = (
        directory.path().join("weights.bin"),
        directory.path().join("out"),
    );
    let contents = vec![0x5a; 3 << 20];
    std::fs::write(&file, &contents).expect("written");
    std::fs::create_dir(&out).expect("created");
    let link = ["--plugin", &text(plugin), "--channels", "2"];
    let run = |server: &[&str], before: &[&str], after: &[&str]| {
        let mut server = tcpx(&[server, &link].concat());
        server.envs(variables.iter().copied());
        let server = Server::start(server);
        let mut client = server.client(before, &[after, &link].concat());
        client.envs(variables.iter().copied());
        let (server, client) = server.finish(client);
        server.assert_code(0);
        client.assert_code(0);
    };
    run(
        &["receive", "--host", "--out", &text(&out)],
        &["send", &text(&file)],
        &["--host"],
    );
    assert!(std::fs::read(out.join("weights.bin")).expect("arrived") == contents);
    run(
        &["perf", "server", "host"],
        &["perf", "client"],
        &["host", "--size", "1MiB", "--iterations", "3"],
    );
}

#[test]
fn transfer_and_perf_over_closes_that_wait_for_the_peers_end_in_order() {
    let directory = tempfile::tempdir().expect("a directory");
    let pairs = directory.path().join("pairs");
    let variables = [
        (habits::OF, double::path()),
        (habits::HABITS, Path::new("closes-together,closes-alone")),
        (habits::PAIRS, &pairs),
    ];
    transfer_and_perf(habits::path(), &variables);
}

#[test]
fn transfer_and_perf_over_a_plugin_that_takes_every_liberty_end_in_order() {
    transfer_and_perf(habits::liberal(), &[]);
}

#[test]
fn a_name_without_a_folder_means_the_file_in_this_folder() {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::copy(bad_plugin::path(), directory.path().join("here.so")).expect("copied");
    let mut command = tcpx(&["plugin", "here.so"]);
    command
        .current_dir(directory.path())
        .env(bad_plugin::WAY, "init-fails");
    Running::start(command)
        .end()
        .assert_code(1)
        .assert_complains("init returned 3");
}

#[test]
fn a_start_that_fails_is_told_with_the_plugin_s_own_words() {
    check_bad("init-fails", &[])
        .assert_code(1)
        .assert_complains("error: init returned 3")
        .assert_complains("hint: ")
        .assert_complains("about to be bad")
        .assert_says("plugin: FAILED");
}

#[test]
fn a_plugin_that_ends_or_crashes_its_process_does_neither_to_ours() {
    check_bad("init-exits", &[])
        .assert_code(1)
        .assert_complains("the process ended inside \"init\": exit status: 0");
    check_bad("init-crashes", &[])
        .assert_code(1)
        .assert_complains("the process ended inside \"init\": signal: ");
}

#[test]
fn what_a_plugin_prints_is_no_verdict_and_what_it_gives_away_silences_nobody() {
    check_bad("init-forges", &[])
        .assert_code(1)
        .assert_complains("the process ended inside \"init\": exit status: 0")
        .assert_says("plugin: FAILED");
    check_bad("init-redirects", &[])
        .assert_code(1)
        .assert_complains("error: init returned 3");
}

#[test]
fn a_plugin_that_hangs_is_given_up_in_time() {
    for (way, step) in [("init-hangs", "init"), ("load-hangs", "loading the file")] {
        let started = Instant::now();
        let ended = check_bad(way, &["--timeout", "3s", "--json"]);
        ended.assert_code(1);
        let report = json(&ended);
        let error = report["error"]["what"].as_str().expect("an error");
        assert!(error.contains(&format!("\"{step}\"")), "{error}");
        // Limit and grace, ten times over.
        assert!(started.elapsed() < Duration::from_secs(80));
    }
}

#[test]
fn impossible_and_missing_devices_are_named() {
    check_bad("many-devices", &[])
        .assert_code(1)
        .assert_complains("reports 2147483647 devices");
    check_bad("no-devices", &[])
        .assert_code(1)
        .assert_complains("the plugin has no device 0: it has 0")
        .assert_complains("hint: it found no interface that it can use");
}

#[test]
fn a_file_that_is_no_plugin_for_us_says_what_it_is_instead() {
    check(bad_plugin::old(), &[])
        .assert_code(1)
        .assert_complains("it exports ncclNetPlugin_v4")
        .assert_complains("hint: ");
    let directory = tempfile::tempdir().expect("a directory");
    let text = directory.path().join("text.so");
    std::fs::write(&text, "hello").expect("written");
    check(&text, &[])
        .assert_code(1)
        .assert_complains("is not an ELF file");
    check(directory.path(), &[])
        .assert_code(1)
        .assert_complains("is not a file");
    let report = json(check(&directory.path().join("x.so"), &["--json"]).assert_code(1));
    assert_eq!(report["ok"], false);
    check(bad_plugin::path(), &["--abi", "v12"])
        .assert_code(1)
        .assert_complains("v12");
}

/// The double of Google's plugin with a variable that makes it misbehave, driven by a process that is running.
fn start_double(variable: &str, value: &str, timeout: [&str; 2], more: &[&str]) -> Running {
    let path = double::path().to_str().expect("text");
    let mut command = tcpx(&[&["plugin", path], &timeout[..], more].concat());
    command.env(variable, value);
    Running::start(command)
}

#[test]
fn a_plugin_that_moves_messages_passes_with_its_devices_and_properties_told() {
    let all = json(check(double::path(), &["--json"]).assert_code(0));
    assert_eq!(all["ok"], true);
    assert_eq!(all["in_use"]["version"], 7);
    assert_eq!(all["devices"].as_array().expect("devices").len(), 1);
    let moved = all["self_test"].as_array().expect("messages");
    let sizes = moved.iter().filter_map(|one| one["bytes"].as_u64());
    let sizes: Vec<_> = sizes.collect();
    assert_eq!(
        (sizes.iter().min(), sizes.iter().max()),
        (Some(&0), Some(&(64 << 20)))
    );
    for call in [
        "init",
        "devices",
        "getProperties",
        "listen",
        "isend",
        "irecv",
        "irecvConsumed",
        "closeRecv",
    ] {
        assert!(
            all["calls"][call]["calls"].as_u64() > Some(0),
            "{call}: {}",
            all["calls"]
        );
        assert_eq!(all["calls"][call]["failed"], 0, "{call}");
    }
}

#[test]
fn an_error_from_any_call_ends_the_check_and_is_named_with_the_doctor_s_id() {
    use double::Call;
    let cases = [
        (Call::Init, "init", 3, "TCPX-D033"),
        (Call::Devices, "devices", 2, ""),
        (Call::Properties, "getProperties", 4, ""),
        (Call::Listen, "listen", 3, ""),
        (Call::Connect, "connect", 3, "TCPX-D032"),
        (Call::Accept, "accept", 3, "TCPX-D032"),
        (Call::RegMr, "regMr", 3, "TCPX-D030"),
        (Call::Isend, "isend", 3, "TCPX-D036"),
        (Call::Irecv, "irecv", 3, "TCPX-D036"),
        (Call::Test, "test", 2, "TCPX-D031"),
        (Call::Consumed, "irecvConsumed", 3, ""),
        (Call::CloseSend, "closeSend", 5, ""),
        (Call::CloseRecv, "closeRecv", 6, ""),
    ];
    for (call, name, code, id) in cases {
        let fault = double::fault_value(call, code, 0);
        let ended = start_double(double::FAULT_VARIABLE, &fault, PATIENT, &["--json"]).end();
        ended.assert_code(1);
        let report = json(&ended);
        assert_eq!(report["ok"], false, "{name}");
        let error = report["error"]["what"].as_str().expect("an error");
        assert!(
            error.contains(&format!("{name} returned {code}")),
            "{error}"
        );
        if !id.is_empty() {
            assert_eq!(report["error"]["check"], id, "{name}");
        }
        assert!(
            report["error"]["hint"]
                .as_str()
                .is_some_and(|hint| !hint.is_empty()),
            "{name}"
        );
    }
}

#[test]
fn an_error_from_a_call_that_gives_something_back_is_no_pass() {
    use double::Call;
    for (call, words) in [
        (Call::DeregMr, "deregMr failed 2 of 2 times"),
        (Call::CloseListen, "closeListen failed 1 of 1 times"),
    ] {
        start_double(
            double::FAULT_VARIABLE,
            &double::fault_value(call, 2, 0),
            PATIENT,
            &[],
        )
        .end()
        .assert_code(1)
        .assert_says("every byte compared")
        .assert_complains(words)
        .assert_says("plugin: FAILED");
    }
}

#[test]
fn a_plugin_that_lies_does_not_pass() {
    use double::Lie;
    for (lie, words) in [
        (Lie::SizeShort, ""),
        (Lie::SizeLong, "reports 1 bytes for a request of 0"),
        (Lie::SizeNegative, "-7"),
        (Lie::DoneEarly, ""),
    ] {
        let number = (lie as i32).to_string();
        let ended = start_double(double::LIE_VARIABLE, &number, PATIENT, &["--json"]).end();
        ended.assert_code(1);
        let report = json(&ended);
        let error = report["error"]["what"].to_string();
        assert!(
            report["ok"] == false && error.contains(words),
            "{lie:?}: {error}"
        );
    }
}

#[test]
fn a_plugin_that_hangs_holds_no_transfer_and_no_exit() {
    for (fault, words, id) in [
        (
            double::LOADING_HANGS.to_owned(),
            "loading has not returned",
            "TCPX-D011",
        ),
        (
            double::fault_value(double::Call::Init, -1, 0),
            "init has not returned",
            "TCPX-D033",
        ),
    ] {
        let path = double::path().to_str().expect("text");
        let started = Instant::now();
        let mut command = tcpx(&[
            "connection",
            "127.0.0.1",
            "--insecure",
            "--host",
            "--timeout",
            "5s",
            "--plugin",
            path,
        ]);
        command.env(double::FAULT_VARIABLE, fault);
        Running::start(command)
            .end()
            .assert_code(1)
            .assert_complains(words)
            .assert_complains(id);
        assert!(started.elapsed() < Duration::from_secs(80));
    }
}
