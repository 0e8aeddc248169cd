use tcpx_tests::plugin_file;

use crate::support::{ask, run};

#[test]
fn the_demo_compares_every_byte_of_every_path() {
    plugin_file::path();
    let ended = ask(&["demo", "--size", "8MiB", "--host"]);
    ended
        .assert_code(0)
        .assert_says("demo: PASSED")
        .assert_says("received 23 bytes with tag 42")
        .assert_says("|Hello from TCPX |");
    let rows: Vec<_> = ended
        .stdout
        .lines()
        .filter(|line| line.trim_end().ends_with("every byte"))
        .collect();
    let expected = [
        ["tcp", "send, receive"],
        ["tcp", "put"],
        ["tcp", "get"],
        ["tcp", "batch of puts"],
        ["plugin", "send, receive"],
    ];
    assert_eq!(rows.len(), expected.len(), "{}", ended.stdout);
    for (row, expected) in rows.iter().zip(expected) {
        // Cells stand at least two blanks apart.
        let cells: Vec<_> = row.split("  ").map(str::trim).collect();
        let cells: Vec<_> = cells.into_iter().filter(|cell| !cell.is_empty()).collect();
        assert_eq!(cells[..2], expected, "{row}");
    }
    // Both processes are named, and they are two.
    let mut processes = ended
        .stdout
        .lines()
        .filter_map(|line| line.trim().split_once("process "));
    let (sender, receiver) = (
        processes.next().expect("the sender"),
        processes.next().expect("the receiver"),
    );
    assert_ne!(sender.1.split(',').next(), receiver.1.split(',').next());
}

#[test]
fn a_plugin_that_is_not_there_is_named() {
    let ended = ask(&[
        "demo",
        "--size",
        "1MiB",
        "--host",
        "--plugin",
        "/nonexistent.so",
    ]);
    ended
        .assert_code(1)
        .assert_complains("/nonexistent.so")
        .assert_says("demo: FAILED");
}

#[test]
fn the_program_alone_shows_the_embedded_network() {
    let directory = tempfile::tempdir().expect("a directory");
    let alone = directory.path().join("tcpx");
    std::fs::copy(env!("CARGO_BIN_EXE_tcpx"), &alone).expect("copied");
    let mut command = std::process::Command::new(&alone);
    command.args(["demo", "--host", "--size", "1MiB"]);
    let ended = run(command);
    ended.assert_code(0).assert_says("plugin: left out");
}
