//! Two releases: this one told to speak other versions of the protocol, and the last one.

use std::fs;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use tcpx_tests::plugin_file;

use crate::files::{self, contents};
use crate::support::{Ended, Server, passes, run, tcpx};

/// A program, and the versions that it says it speaks: those of its release if there are none.
type Side<'a> = (&'a str, &'a str);

const OWN: &str = env!("CARGO_BIN_EXE_tcpx");

/// The same command for a side.
fn by((program, protocols): Side<'_>, command: &Command) -> Command {
    let mut other = Command::new(program);
    other.args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other.env("TCPX_PROTOCOLS", protocols);
    other
}

/// The server and the client of a transfer between two sides.
fn transferring(server: Side<'_>, client: Side<'_>, network: &[&str]) -> (Server, Ended) {
    let command = tcpx(&[&["transfer", "server", "--host"], network].concat());
    let server = Server::start(by(server, &command));
    let more = [&["--host", "--timeout", "20s"], network].concat();
    let command = server.client(&["transfer"], &more);
    let client = run(by(client, &command));
    (server, client)
}

fn assert_transfers(server: Side<'_>, client: Side<'_>, network: &[&str]) {
    let (server, client) = transferring(server, client, network);
    client.assert_code(0).assert_says("transfer: PASSED");
    let ended = server.running.end();
    ended.assert_code(0).assert_says("transfer: PASSED");
}

fn assert_file_moves(receiver: Side<'_>, sender: Side<'_>) {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, out) = (folder.path().join("weights"), folder.path().join("out"));
    fs::create_dir(&out).expect("created");
    fs::write(&file, contents(3_000_001)).expect("written");
    let out_text = out.to_str().expect("text");
    let command = tcpx(&["receive", "--host", "--out", out_text]);
    let server = Server::start(by(receiver, &command));
    let client = by(sender, &files::sender(&server, &[&file], &[]));
    passes(server.finish(client));
    assert!(fs::read(out.join("weights")).expect("arrived") == contents(3_000_001));
}

#[test]
fn two_releases_speak_the_highest_version_that_both_know() {
    for (server, client) in [
        ("3-4", "2-3"),
        ("1-3", "3-9"),
        ("3-3", "3-4"),
        ("2-4", "3-3"),
    ] {
        assert_transfers((OWN, server), (OWN, client), &[]);
    }
}

#[test]
fn no_common_version_names_both_and_the_older_one() {
    let own = concat!("tcpx ", env!("CARGO_PKG_VERSION"));
    for (server, client, older) in [
        ("4-5", "3-3", ["the peer is older", "this side is older"]),
        ("3-3", "4-5", ["this side is older", "the peer is older"]),
    ] {
        let (mut server, client) = transferring((OWN, server), (OWN, client), &[]);
        assert_ne!(client.code, Some(0));
        for said in [own, "protocol 3)", "protocols 4 to 5)", older[1]] {
            client.assert_complains(said);
        }
        server.running.find_aside(|line| {
            [own, "protocol 3)", "protocols 4 to 5)", older[0]]
                .iter()
                .all(|said| line.contains(said))
        });
        server.running.signal(Signal::KILL);
    }
}

#[test]
fn files_move_between_releases_with_a_version_in_common() {
    for (receiver, sender) in [("3-4", "2-3"), ("2-3", "3-4")] {
        assert_file_moves((OWN, receiver), (OWN, sender));
    }
}

#[test]
fn the_last_release_and_this_tree_move_bytes_both_ways() {
    let test = "the_last_release_and_this_tree_move_bytes_both_ways";
    let Some(folder) = plugin_file::last_release(test) else {
        return;
    };
    // Beside the program of this tree.
    plugin_file::path();
    let last = folder.join("tcpx");
    let last = last.to_str().expect("text");
    for (server, client) in [(OWN, last), (last, OWN)] {
        let (server, client) = ((server, ""), (client, ""));
        assert_transfers(server, client, &[]);
        assert_transfers(server, client, &["--network", "plugin"]);
        assert_file_moves(server, client);
    }
}
