//! `tcpx plugin` with good plugins and with every bad one.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tcpx_tests::{bad_plugin, double, habits, plugin_file};

use crate::support::{Ended, Running, ask, run, tcpx};

/// A busy host may take long.
const PATIENT: [&str; 2] = ["--timeout", "5m"];

fn check(path: &Path, more: &[&str]) -> Ended {
    let path = path.to_str().expect("text");
    let command = [&["plugin", path], &PATIENT[..]].concat();
    ask(&[&command[..], more].concat())
}

/// The bad plugin, bad in one way.
fn check_bad(way: &str, more: &[&str]) -> Ended {
    let path = bad_plugin::path().to_str().expect("text");
    let mut command = tcpx(&[&["plugin", path], more].concat());
    command.env(bad_plugin::WAY, way);
    run(command)
}

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
}

#[test]
fn our_own_plugin_passes_with_every_table_it_has() {
    let all = json(check(plugin_file::path(), &["--json"]).assert_code(0));
    assert_eq!(all["ok"], true);
    assert_eq!(all["kind"], "our own");
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
            fields(value, into);
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
fn googles_double_passes_with_its_variables_shown() {
    check(double::path(), &[])
        .assert_code(0)
        .assert_says("Google's GPUDirectTCPX; tables v7")
        .assert_says("variable NCCL_DYNAMIC_CHUNK_SIZE=524288 (needed)")
        .assert_says("plugin: PASSED");
}

#[test]
fn your_interface_stays_in_a_vendor_plugins_demo() {
    let path = double::path().to_str().expect("text");
    let mut command = tcpx(&["demo", "--size", "1KiB", "--host", "--plugin", path]);
    command.env("NCCL_SOCKET_IFNAME", "^docker");
    let ended = run(command);
    ended
        .assert_code(0)
        .assert_complains("NCCL_SOCKET_IFNAME=^docker (yours: ");
}

/// The double behind a plugin that has `habits`.
fn check_habits(habits: &str) -> Ended {
    let path = habits::path().to_str().expect("text");
    let mut command = tcpx(&[&["plugin", path, "--json"], &PATIENT[..]].concat());
    command
        .env(habits::OF, double::path())
        .env(habits::HABITS, habits);
    run(command)
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
fn a_plugin_that_takes_every_liberty_passes() {
    let report = json(check(habits::liberal(), &["--json"]).assert_code(0));
    assert_eq!(report["in_use"]["name"], "(unnamed)");
    let device = &report["devices"][0];
    assert_eq!(device["name"], "");
    assert!(device["latency_us"].is_null() && device["pci_path"].is_null());
    let missing = &report["in_use"]["missing_functions"];
    assert_eq!(missing.as_array().map(Vec::len), Some(5), "{missing}");
}

#[test]
fn a_name_without_a_folder_means_the_file_in_this_folder() {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::copy(bad_plugin::path(), directory.path().join("here.so")).expect("copied");
    let mut command = tcpx(&["plugin", "here.so"]);
    command
        .current_dir(directory.path())
        .env(bad_plugin::WAY, "init-fails");
    run(command)
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
fn a_plugins_crash_or_exit_is_not_ours() {
    check_bad("init-exits", &[])
        .assert_code(1)
        .assert_complains("the process ended inside \"init\": exit status: 0");
    check_bad("init-crashes", &[])
        .assert_code(1)
        .assert_complains("the process ended inside \"init\": signal: ");
}

#[test]
fn a_plugins_output_is_no_verdict() {
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
        .assert_complains("the plugin has no devices")
        .assert_complains("hint: it found no interface that it can use");
}

/// The double of Google's plugin with a variable that makes it misbehave, driven by a process that
/// is running.
fn start_double(variable: &str, value: &str, timeout: [&str; 2], more: &[&str]) -> Running {
    let path = double::path().to_str().expect("text");
    let mut command = tcpx(&[&["plugin", path], &timeout[..], more].concat());
    command.env(variable, value);
    Running::start(command)
}

#[test]
fn a_failed_call_ends_the_check_with_a_doctors_id() {
    use double::Call;
    let cases = [
        (Call::Init, "init", 3, "TCPX-D033"),
        (Call::Devices, "devices", 2, ""),
        (Call::Properties, "getProperties", 4, ""),
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
