//! Ranks of two releases, of which one speaks other versions of the protocol than the other one.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::path::Path;

use tcpx_tests::child::{self, LANES, LOOPBACK};
use tcpx_tests::nccl_link::{
    MIB, accepted, connected, handle_in, leave_handle, listening, started,
};
use tcpx_tests::nccl_messages::{receive_all, send_all};
use tcpx_tests::plugin_file;

const VARIABLE: &str = "TCPX_PROTOCOLS";
const MESSAGES: usize = 8;

/// The sending rank: its messages take lanes.
fn sender() {
    let (table, context) = started(12);
    let handle = std::env::var("TCPX_TEST_FILE").unwrap();
    let mut handle = handle_in(Path::new(&handle));
    if std::env::var("TCPX_TEST_REFUSED").is_ok() {
        let (rc, comm) = table.connect(context, &mut handle);
        assert!(rc != 0 && comm.is_null(), "its peer speaks another version");
        return;
    }
    let send = connected(&*table, context, handle);
    send_all(&*table, send, MIB, MESSAGES);
    assert_eq!(table.close_send(send), 0);
}

/// What a rank runs: a plugin file, that of this tree if it is empty, and the versions that it says
/// it speaks, those of its release if that is.
type Rank<'a> = (&'a str, &'a str);

fn variables<'a>((plugin, protocols): Rank<'a>) -> Vec<(&'static str, &'a str)> {
    vec![
        LOOPBACK,
        LANES,
        (plugin_file::OTHER, plugin),
        (VARIABLE, protocols),
    ]
}

/// Messages from each of the peers to a rank.
fn ranks(test: &str, part: &str, own: Rank<'_>, peers: &[Rank<'_>], is_refused: bool) {
    if child::is_child(part) {
        return sender();
    }
    child::run_as(test, &variables(own), || {
        let (table, context) = started(12);
        let folder = tempfile::tempdir().unwrap();
        for (number, peer) in peers.iter().enumerate() {
            let (listen, handle) = listening(&*table, context);
            let file = folder.path().join(number.to_string());
            leave_handle(&file, &handle);
            let mut environment = variables(*peer);
            environment.push(("TCPX_TEST_FILE", file.to_str().unwrap()));
            if is_refused {
                environment.push(("TCPX_TEST_REFUSED", "1"));
            }
            let process = child::start(test, part, &environment);
            if !is_refused {
                let receive = accepted(&*table, listen);
                receive_all(&*table, receive, (MIB, MESSAGES), |_| true);
            }
            process.succeeds();
            if is_refused {
                assert_eq!(table.close_listen(listen), 0);
            }
        }
    });
}

#[test]
fn ranks_speak_the_highest_version_that_both_know() {
    ranks(
        "ranks_speak_the_highest_version_that_both_know",
        "an older or newer sender",
        ("", "3-4"),
        &[("", "2-3"), ("", "3-3"), ("", "4-9")],
        false,
    );
}

#[test]
fn ranks_without_a_common_version_are_an_error() {
    ranks(
        "ranks_without_a_common_version_are_an_error",
        "a sender that is refused",
        ("", "3-3"),
        &[("", "4-5"), ("", "1-2")],
        true,
    );
}

/// The plugin file of the last release, if it was built.
fn last(test: &str) -> Option<String> {
    let file = plugin_file::last_release(test)?.join("libnccl_net_tcpx.so");
    Some(file.to_str().unwrap().to_owned())
}

#[test]
fn a_rank_of_the_last_release_sends_to_one_of_this_tree() {
    let test = "a_rank_of_the_last_release_sends_to_one_of_this_tree";
    if let Some(last) = last(test) {
        ranks(test, "its sender", ("", ""), &[(&last, "")], false);
    }
}

#[test]
fn a_rank_of_this_tree_sends_to_one_of_the_last_release() {
    let test = "a_rank_of_this_tree_sends_to_one_of_the_last_release";
    if let Some(last) = last(test) {
        ranks(test, "this tree's sender", (&last, ""), &[("", "")], false);
    }
}
