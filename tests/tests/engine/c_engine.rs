//! `tcpx.h` and `libtcpx.so`, from C and C++ programs that are compiled here.
#![expect(clippy::unwrap_used, reason = "helpers fail the test that calls them")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tcpx_tests::c_api::{self, Build};
use tcpx_tests::plugin_file;

const C: Build = Build {
    cpp: false,
    sanitized: false,
};
const CPP: Build = Build { cpp: true, ..C };
const SANITIZED: Build = Build {
    sanitized: true,
    ..C
};

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(name)
}

fn example(name: &str) -> PathBuf {
    let examples = plugin_file::workspace().join("crates/tcpx-capi/examples");
    examples.join(name)
}

/// The program, or `None` with a line that says why it is skipped.
fn program(test: &str, build: Build, source: &Path) -> Option<PathBuf> {
    if let Some(why) = build.missing() {
        eprintln!("skipped: {test}: {why}");
        return None;
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    c_api::build_program_as(build, source, &path);
    Some(path)
}

/// One message of fresh random bytes between two processes.
fn moves(program: &Path, bytes: usize, more: &[&str]) {
    c_api::moves(bytes, |source, target| {
        let mut server = Command::new(program);
        server.args(["server", "127.0.0.1:0", "--out"]);
        server.arg(target).args(more);
        c_api::pair(&mut server, "listening on ", |place| {
            let (address, key) = place.split_once(", key ").unwrap();
            let mut client = Command::new(program);
            client.args(["client", address, key, "--in"]);
            client.arg(source).args(more);
            client
        })
    });
}

const SIZES: [usize; 6] = [0, 1, 23, 4097, (512 << 10) + 1, 20_000_003];

fn the_example_moves(test: &str, build: Build, sizes: &[usize]) {
    if let Some(program) = program(test, build, &example("transfer.c")) {
        sizes.iter().for_each(|bytes| moves(&program, *bytes, &[]));
    }
}

#[test]
fn the_transfer_example_moves_every_size_in_c() {
    the_example_moves("transfer_in_c", C, &SIZES);
}

#[test]
fn the_transfer_example_moves_every_size_in_cpp() {
    the_example_moves("transfer_in_cpp", CPP, &SIZES);
}

#[test]
fn the_transfer_example_leaks_nothing() {
    the_example_moves("transfer_sanitized", SANITIZED, &SIZES);
}

#[test]
fn the_transfer_example_moves_memory_of_a_gpu() {
    let name = "the_transfer_example_moves_memory_of_a_gpu";
    let program = program("transfer_gpu", C, &example("transfer.c")).unwrap();
    if let Err(why) = tcpx::Gpu::open(0) {
        eprintln!("skipped: {name}: {why}");
        return;
    }
    SIZES
        .iter()
        .for_each(|bytes| moves(&program, *bytes, &["--gpu", "0"]));
}

#[test]
fn the_transfer_example_says_what_to_do() {
    let program = program("transfer_advice", C, &example("transfer.c")).unwrap();
    let mut server = Command::new(&program);
    let nowhere = ["server", "127.0.0.1:0", "--gpu", "4096"];
    let (code, said) = c_api::run(server.args(nowhere));
    assert_eq!(code, Some(1));
    assert!(said.contains("MEMORY: "), "{said}");
    // A port that nobody listens on: it is ours until the end of the test.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut server = Command::new(&program);
    let (code, said) = c_api::run(server.args(["server", &address]));
    assert_eq!(code, Some(1));
    assert!(said.contains(&address) && said.contains("FAILED"), "{said}");
    let mut client = Command::new(&program);
    let wrong = ["client", &address, "NOKEY"];
    let (code, said) = c_api::run(client.args(wrong));
    assert_eq!(code, Some(1));
    assert!(said.contains("key: ") && said.contains("SETTING"), "{said}");
}

fn puts_and_gets(test: &str, build: Build) {
    if let Some(program) = program(test, build, &example("put_get.c")) {
        let (code, said) = c_api::run(&mut Command::new(program));
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("PASSED: 16 pages"), "{said}");
    }
}

#[test]
fn the_put_get_example_works_in_c() {
    puts_and_gets("put_get_in_c", C);
}

#[test]
fn the_put_get_example_works_in_cpp() {
    puts_and_gets("put_get_in_cpp", CPP);
}

#[test]
fn the_put_get_example_leaks_nothing() {
    puts_and_gets("put_get_sanitized", SANITIZED);
}

fn passes(test: &str, build: Build, source: &Path) {
    if let Some(program) = program(test, build, source) {
        let (code, said) = c_api::run(&mut Command::new(program));
        assert_eq!((code, said.as_str()), (Some(0), "PASSED\n"));
    }
}

#[test]
fn every_wrong_use_gives_a_code_and_a_text() {
    passes("misuse", C, &source("misuse.c"));
}

#[test]
fn wrong_use_touches_no_foreign_memory_and_leaks_nothing() {
    passes("misuse_sanitized", SANITIZED, &source("misuse.c"));
}

#[test]
fn a_killed_peer_is_an_error_and_another_takes_its_place() {
    passes("lost_peer", C, &source("lost_peer.c"));
}

#[test]
fn a_peer_of_other_versions_is_an_error_that_names_them() {
    passes("versions", C, &source("versions.c"));
}

#[test]
fn a_killed_peer_leaves_no_leak() {
    passes("lost_peer_sanitized", SANITIZED, &source("lost_peer.c"));
}

#[test]
fn a_program_makes_the_progress_of_its_connections_by_itself() {
    passes("manual", C, &source("manual.c"));
    passes("manual_sanitized", SANITIZED, &source("manual.c"));
}

#[test]
fn a_program_in_c_sets_what_its_side_takes() {
    passes("limits", C, &source("limits.c"));
    passes("limits_sanitized", SANITIZED, &source("limits.c"));
}

/// Names of the functions that a header declares.
fn declared(header: &str) -> BTreeSet<String> {
    let header = std::fs::read_to_string(c_api::include().join(header)).unwrap();
    let is_declaration = |line: &&str| line.starts_with("int ") || line.starts_with("const char *");
    header
        .lines()
        .filter(is_declaration)
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_call_of_the_header_is_misused() {
    let misuse = std::fs::read_to_string(source("misuse.c")).unwrap();
    let calls = declared("tcpx.h");
    assert!(calls.len() > 40, "{}", calls.len());
    for name in calls {
        assert!(misuse.contains(&format!("{name}(")), "{name}");
    }
}

#[test]
fn the_library_exports_what_the_headers_declare() {
    let library = c_api::library_folder().join("libtcpx.so");
    let symbols = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library)
        .output()
        .unwrap();
    let symbols = String::from_utf8(symbols.stdout).unwrap();
    let exported: BTreeSet<_> = symbols
        .lines()
        .filter_map(|line| line.rsplit(' ').next())
        .map(str::to_owned)
        .collect();
    let mut expected = declared("tcpx.h");
    expected.extend(declared("tcpx_plugin.h"));
    assert_eq!(exported, expected);
}

/// What the pieces of the guide find around them.
const AROUND: &str = r#"#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tcpx.h"
void piece(tcpx_endpoint *endpoint, tcpx_connection *connection, tcpx_region *region,
           tcpx_window *window, tcpx_transfer *transfer, tcpx_queue *queue, const void *key,
           size_t key_bytes);
static void check(int code) { if (code != TCPX_OK) exit(1); }
void piece(tcpx_endpoint *endpoint, tcpx_connection *connection, tcpx_region *region,
           tcpx_window *window, tcpx_transfer *transfer, tcpx_queue *queue, const void *key,
           size_t key_bytes)
{
(void)check, (void)endpoint, (void)connection, (void)region, (void)window, (void)transfer;
(void)queue, (void)key, (void)key_bytes;
{
"#;

#[test]
fn the_guides_pieces_compile() {
    let guide = std::fs::read_to_string(plugin_file::workspace().join("docs/guides/c.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("piece.c");
    let pieces: Vec<_> = guide.split("```c\n").skip(1).collect();
    assert!(pieces.len() > 5, "{}", pieces.len());
    for piece in pieces {
        let (piece, _) = piece.split_once("```").unwrap();
        std::fs::write(&source, format!("{AROUND}{piece}}}\n}}\n")).unwrap();
        for cpp in [false, true] {
            let Some(output) = c_api::compiles(&source, cpp) else {
                eprintln!("skipped: the_guides_pieces_compile: no C++ compiler");
                continue;
            };
            let words = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{piece}: {words}");
        }
    }
}

#[test]
fn programs_load_the_library_by_the_number_of_its_interface() {
    let header = std::fs::read_to_string(c_api::include().join("tcpx.h")).unwrap();
    let number = header
        .lines()
        .find_map(|line| line.strip_prefix("#define TCPX_ABI "))
        .unwrap();
    let program = program("transfer_abi", C, &example("transfer.c")).unwrap();
    let bytes = std::fs::read(program).unwrap();
    let soname = format!("libtcpx.so.{number}\0");
    let mut windows = bytes.windows(soname.len());
    assert!(
        windows.any(|window| window == soname.as_bytes()),
        "{soname}"
    );
}

#[test]
fn both_headers_compile_together_and_alone() {
    let folder = tempfile::tempdir().unwrap();
    let sources = [
        ("alone", "#include <tcpx.h>\n"),
        ("together", "#include <tcpx.h>\n#include <tcpx_plugin.h>\n"),
        ("turned", "#include <tcpx_plugin.h>\n#include <tcpx.h>\n"),
    ];
    for (name, include) in sources {
        let source = folder.path().join(name).with_extension("c");
        let body = "int n(void);\nint n(void) { return 1 -TCPX_AGAIN + TCPX_OK; }\n";
        std::fs::write(&source, format!("{include}{body}")).unwrap();
        for cpp in [false, true] {
            let Some(output) = c_api::compiles(&source, cpp) else {
                let name = "both_headers_compile_together_and_alone";
                eprintln!("skipped: {name}: no C++ compiler");
                continue;
            };
            let words = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {words}");
        }
    }
}
