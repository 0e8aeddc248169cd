//! `tcpx_plugin.h` and `libtcpx.so`, from C programs that are compiled here.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tcpx_tests::instructions::Carrier;
use tcpx_tests::{c_api, double, habits, plugin_file};

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("c")
}

fn program(name: &str, source: &Path) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    c_api::build_program(source, &path);
    path
}

fn transfer() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let source = plugin_file::workspace().join("crates/tcpx-capi/examples/plugin_transfer.c");
        program("plugin_transfer", &source)
    })
}

fn command(carrier: &Carrier) -> Command {
    over(transfer(), carrier)
}

fn over(program: &Path, carrier: &Carrier) -> Command {
    let path = match carrier {
        Carrier::PluginHost(path) => path.clone(),
        _ => double::path().to_owned(),
    };
    let mut command = Command::new(program);
    command
        .env("UCCL_TCPX_PLUGIN_PATH", path)
        .env(habits::OF, double::path())
        .env(habits::HABITS, "no-pool")
        .envs(carrier.environment().iter().copied());
    command
}

/// How both processes of one transfer ended: server, then client, each with its exit code and all
/// that it printed.
fn ends(carrier: &Carrier, source: &Path, target: &Path, device_memory: bool) -> [c_api::Ended; 2] {
    let memory = device_memory.then_some("--device-memory");

    let mut server = command(carrier);
    server.args(["server", "0", "--out"]).arg(target);
    c_api::pair(server.args(memory), "listening on port ", |port| {
        let mut client = command(carrier);
        client.args(["client", "127.0.0.1", port, "--in"]);
        client.arg(source).args(memory);
        client
    })
}

/// One transfer of fresh random bytes between two processes; whether they came in fragments.
fn moves(carrier: &Carrier, bytes: usize, device_memory: bool) -> bool {
    let shown = c_api::moves(bytes, |source, target| {
        ends(carrier, source, target, device_memory)
    });
    !shown.contains("in 0 fragments")
}

const SIZES: [usize; 6] = [0, 1, 23, 4097, (512 << 10) + 1, 20_000_003];

#[test]
fn the_example_moves_every_size_through_the_double() {
    for bytes in SIZES {
        assert!(!moves(&Carrier::double(), bytes, false));
        assert_eq!(moves(&Carrier::double(), bytes, true), bytes > 0);
    }
}

#[test]
fn host_memory_moves_without_a_bounce_pool() {
    let carrier = Carrier::PluginHost(habits::path().to_owned());
    for bytes in [0, 4097, (512 << 10) + 1] {
        assert!(!moves(&carrier, bytes, false));
    }
}

#[test]
fn device_memory_without_a_bounce_pool_is_refused() {
    let carrier = Carrier::PluginHost(habits::path().to_owned());
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    std::fs::write(&source, [7; 4097]).unwrap();
    let [(code, shown), _] = ends(&carrier, &source, &target, true);
    assert_eq!(code, Some(1), "{shown}");
    let why = "the plugin's device queue cannot be read: it has no bounce pool";
    assert!(shown.contains(why), "{shown}");
}

#[test]
fn the_example_moves_every_size_through_a_liberal_one() {
    let carrier = Carrier::PluginHost(habits::liberal().to_owned());
    for bytes in SIZES {
        assert!(!moves(&carrier, bytes, false));
    }
}

#[test]
fn the_example_moves_every_size_through_our_plugin() {
    for bytes in SIZES {
        assert!(!moves(&Carrier::plugin_host(), bytes, false));
    }
}

#[test]
fn the_example_says_what_to_do_without_a_plugin() {
    let mut command = Command::new(transfer());
    let command = command
        .env("UCCL_TCPX_PLUGIN_PATH", "/nonexistent/plugin.so")
        .args(["server", "0"]);
    let (code, said) = c_api::run(command);
    assert_eq!(code, Some(1));
    assert!(
        said.contains("/nonexistent/plugin.so") && said.contains("install the plugin"),
        "{said}"
    );
}

#[test]
fn every_visible_misuse_gives_a_code_and_a_text() {
    let program = program("plugin_misuse", &sources().join("plugin_misuse.c"));
    let (code, said) = c_api::run(Command::new(&program).arg(double::path()));
    assert_eq!((code, said.as_str()), (Some(0), "PASSED\n"));
    // The same with requests that can be looked into: a wait that ran out tells what is inside.
    let mut shown = Command::new(&program);
    let (code, said) = c_api::run(shown.arg(double::path()).env(double::SHOW_VARIABLE, "1"));
    assert_eq!((code, said.as_str()), (Some(0), "PASSED\n"));
}

#[test]
fn wrong_use_of_plugins_touches_no_foreign_memory() {
    let name = "wrong_use_of_plugins_touches_no_foreign_memory";
    let build = c_api::Build {
        sanitized: true,
        ..c_api::Build::default()
    };
    if let Some(why) = build.missing() {
        eprintln!("skipped: {name}: {why}");
        return;
    }
    let source = sources().join("plugin_misuse.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugin_misuse_sanitized");
    c_api::build_program_as(build, &source, &program);
    // Comms that are closed with receives in flight keep their registrations in the double, as in
    // Google's plugin: its leaks are not ours.
    let mut command = Command::new(&program);
    let command = command
        .arg(double::path())
        .env("ASAN_OPTIONS", "detect_leaks=0");
    let (code, said) = c_api::run(command);
    assert_eq!((code, said.as_str()), (Some(0), "PASSED\n"));
}

#[test]
fn a_historic_program_works_unchanged_over_every_plugin() {
    let program = program("historic_run", &sources().join("historic_run.c"));
    for carrier in [
        Carrier::double(),
        Carrier::PluginHost(habits::path().to_owned()),
        Carrier::plugin_host(),
    ] {
        let (code, said) = c_api::run(&mut over(&program, &carrier));
        assert_eq!((code, said.as_str()), (Some(0), "PASSED\n"), "{carrier:?}");
    }
}

#[test]
fn a_historic_program_receives_before_its_peer() {
    let program = program("historic_order", &sources().join("historic_order.c"));
    let ends = |carrier: &Carrier, habit: &str, word: Option<&str>| {
        let mut command = over(&program, carrier);
        let (code, said) = c_api::run(command.env(habits::HABITS, habit).args(word));
        assert_eq!((code, said.as_str()), (Some(0), "PASSED\n"), "{carrier:?}");
    };
    let late = Carrier::PluginHost(habits::path().to_owned());
    ends(&late, "connects-when-accepted,receive-after-send", None);
    ends(&late, "connects-when-accepted", Some("alone"));
    for carrier in [Carrier::double(), Carrier::plugin_host()] {
        ends(&carrier, "", None);
    }
}

#[test]
fn a_close_that_hangs_is_bounded_named_and_made_again() {
    let program = program("plugin_hangs", &sources().join("plugin_hangs.c"));
    let (code, said) = c_api::run(Command::new(&program).arg(double::path()));
    assert_eq!((code, said.as_str()), (Some(0), "PASSED\n"));
}

#[test]
fn the_plugin_header_compiles_alone_and_for_old_sources() {
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("alone.c");
    std::fs::write(
        &alone,
        "#include <tcpx_plugin.h>\nint n(void);\nint n(void) { return (int)sizeof(tcpx_handle); }\n",
    )
    .unwrap();
    for source in [alone, sources().join("plugin_historic.c")] {
        for cpp in [false, true] {
            let Some(output) = c_api::compiles(&source, cpp) else {
                let name = "the_plugin_header_compiles_alone_and_for_old_sources";
                eprintln!("skipped: {name}: no C++ compiler");
                continue;
            };
            let words = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {words}", source.display());
        }
    }
}
