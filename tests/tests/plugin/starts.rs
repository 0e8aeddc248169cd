//! A plugin that fails or hangs from its constructor to its first properties: a typed error in
//! time.

use std::path::Path;
use std::time::{Duration, Instant};

use tcpx_net::{NetworkError, PluginMemory, PluginNetwork, PluginOptions};
use tcpx_tests::double::{self, Call};
use tcpx_tests::{child, plugin_file};

/// What a start may take that hangs: more than it takes to come to the call that does.
const LIMIT: Duration = Duration::from_secs(3);
/// Far beyond it, and what any other start may take on a busy machine.
const BOUND: Duration = Duration::from_secs(60);

fn load(limit: Duration) -> Result<PluginNetwork, NetworkError> {
    load_file(double::path(), limit)
}

fn load_file(path: &Path, limit: Duration) -> Result<PluginNetwork, NetworkError> {
    let options = PluginOptions {
        path: path.to_owned(),
        abi: None,
        device: 0,
        memory: PluginMemory::StandIn,
    };
    let started = Instant::now();
    let end = PluginNetwork::load_within(options, limit);
    assert!(started.elapsed() < 2 * BOUND, "{:?}", started.elapsed());
    end
}

/// The check of the doctor that explains the error.
fn check(error: &NetworkError) -> Option<&'static str> {
    tcpx::Error::from(error.clone()).check()
}

/// Runs `body` in processes whose double has each of the faults; `TCPX_TEST_CASE` numbers them.
fn each_fault(test: &str, faults: &[String], body: impl Fn(usize)) {
    const CASE: &str = "TCPX_TEST_CASE";
    if child::is_child(test) {
        let case = std::env::var(CASE).ok().and_then(|case| case.parse().ok());
        return body(case.expect("a number"));
    }
    // Those that hang only wait.
    std::thread::scope(|scope| {
        for (number, fault) in faults.iter().enumerate() {
            scope.spawn(move || {
                let environment = [
                    (double::FAULT_VARIABLE, fault.as_str()),
                    (CASE, &number.to_string()),
                ];
                child::run_as(test, &environment, || {});
            });
        }
    });
}

const STARTING: [(Call, &str); 3] = [
    (Call::Init, "init"),
    (Call::Devices, "devices"),
    (Call::Properties, "getProperties"),
];

#[test]
fn a_start_that_fails_names_the_call_and_the_code() {
    const CODES: [i32; 3] = [1, 3, 99];
    let cases: Vec<_> = STARTING
        .into_iter()
        .flat_map(|(call, name)| CODES.map(|code| (call, name, code)))
        .collect();
    let faults: Vec<_> = cases
        .iter()
        .map(|(call, _, code)| double::fault_value(*call, *code, 0))
        .collect();
    each_fault(
        "a_start_that_fails_names_the_call_and_the_code",
        &faults,
        |case| {
            let (_, name, code) = cases[case];
            let error = load(BOUND).expect_err("it fails");
            let text = error.to_string();
            assert!(
                matches!(&error, NetworkError::Plugin { call, .. } if *call == name),
                "{text}"
            );
            assert!(
                text.contains(name) && text.contains(&code.to_string()),
                "{text}"
            );
            // A second attempt in the same process is an answer too.
            load(BOUND).expect_err("it has failed before, or fails again");
        },
    );
}

#[test]
fn a_hanging_start_ends_in_time_and_is_named() {
    let faults = STARTING.map(|(call, _)| double::fault_value(call, -1, 0));
    each_fault(
        "a_hanging_start_ends_in_time_and_is_named",
        &faults,
        |case| {
            let (_, name) = STARTING[case];
            let error = load(LIMIT).expect_err("it hangs");
            let text = error.to_string();
            assert!(
                matches!(&error, NetworkError::PluginStuck { call, .. } if *call == name),
                "{text}"
            );
            assert_eq!(check(&error), Some("TCPX-D033"), "{text}");
            assert!(!tcpx_net::plugin::is_linker_stuck());
            load(LIMIT).expect_err("the first start still holds it");
        },
    );
}

#[test]
fn a_hanging_constructor_ends_in_time() {
    each_fault(
        "a_hanging_constructor_ends_in_time",
        &[double::LOADING_HANGS.to_owned()],
        |_| {
            for _ in 0..2 {
                let error = load(LIMIT).expect_err("it hangs");
                let text = error.to_string();
                assert!(
                    matches!(
                        &error,
                        NetworkError::PluginStuck {
                            call: "loading",
                            ..
                        }
                    ),
                    "{text}"
                );
                assert_eq!(check(&error), Some("TCPX-D011"), "{text}");
                assert!(tcpx_net::plugin::is_linker_stuck());
            }
            tcpx_net::plugin::leave_process(0);
        },
    );
}

#[test]
fn a_hanging_constructor_holds_no_other_plugin() {
    plugin_file::path();
    child::run(
        &[
            (double::FAULT_VARIABLE, double::LOADING_HANGS),
            child::LOOPBACK,
        ],
        || {
            let other = load_file(plugin_file::path(), BOUND).expect("it starts");
            load(LIMIT).expect_err("it hangs");
            assert!(tcpx_net::plugin::is_linker_stuck());
            let start = Instant::now();
            drop(other);
            assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
            tcpx_net::plugin::leave_process(0);
        },
    );
}

#[test]
fn a_plugin_that_starts_in_time_is_there() {
    // No fault: the call numbers end before 99.
    each_fault(
        "a_plugin_that_starts_in_time_is_there",
        &["99=3".to_owned()],
        |_| {
            let network = load(BOUND).expect("it starts");
            assert_eq!(network.plugin_name(), "GPUDirectTCPX_v7");
        },
    );
}
