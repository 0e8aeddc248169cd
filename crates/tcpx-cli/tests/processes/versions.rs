//! Two releases of which one speaks other versions of the protocol than the other one.

use std::fs;

use crate::files::{self, contents};
use crate::support::{Ended, Running, Server, tcpx};

/// The server and the client of a transfer, each of which speaks such versions.
fn speaking(server: &str, client: &str) -> (Server, Ended) {
    let mut command = tcpx(&["transfer", "server", "--host"]);
    command.env("TCPX_PROTOCOLS", server);
    let server = Server::start(command);
    let mut command = server.client(&["transfer"], &["--host", "--timeout", "20s"]);
    command.env("TCPX_PROTOCOLS", client);
    let client = Running::start(command).end();
    (server, client)
}

#[test]
fn two_releases_speak_the_highest_version_that_both_know() {
    for (server, client) in [
        ("3-4", "2-3"),
        ("1-3", "3-9"),
        ("3-3", "3-4"),
        ("2-4", "3-3"),
    ] {
        let (server, client) = speaking(server, client);
        client.assert_code(0).assert_says("transfer: PASSED");
        let ended = server.running.end();
        ended.assert_code(0).assert_says("transfer: PASSED");
    }
}

#[test]
fn releases_without_a_common_version_name_both_and_the_older_one() {
    let own = concat!("tcpx ", env!("CARGO_PKG_VERSION"));
    for (server, client, older) in [
        ("4-5", "3-3", ["the peer is older", "this side is older"]),
        ("3-3", "4-5", ["this side is older", "the peer is older"]),
    ] {
        let (mut server, client) = speaking(server, client);
        assert_ne!(client.code, Some(0));
        for said in [own, "protocol 3)", "protocols 4 to 5)", older[1]] {
            client.assert_complains(said);
        }
        server.running.find_aside(|line| {
            [own, "protocol 3)", "protocols 4 to 5)", older[0]]
                .iter()
                .all(|said| line.contains(said))
        });
        server.running.kill();
    }
}

#[test]
fn files_move_between_releases_with_a_version_in_common() {
    for (receiver, sender) in [("3-4", "2-3"), ("2-3", "3-4")] {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, out) = (folder.path().join("weights"), folder.path().join("out"));
        fs::create_dir(&out).expect("created");
        fs::write(&file, contents(3_000_001)).expect("written");
        let out_text = out.to_str().expect("text");
        let mut command = tcpx(&["receive", "--host", "--out", out_text]);
        command.env("TCPX_PROTOCOLS", receiver);
        let server = Server::start(command);
        let mut client = files::sender(&server, &[&file], &[]);
        client.env("TCPX_PROTOCOLS", sender);
        let (server, client) = server.finish(client);
        client.assert_code(0);
        server.assert_code(0);
        assert!(fs::read(out.join("weights")).expect("arrived") == contents(3_000_001));
    }
}
