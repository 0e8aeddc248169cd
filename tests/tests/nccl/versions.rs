//! Ranks of two releases, of which one speaks other versions of the protocol than the other one.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::path::Path;

use tcpx_tests::child::{self, LANES, LOOPBACK};
use tcpx_tests::nccl_link::{MIB, accepted, connected, handle_in, leave, listening, started};
use tcpx_tests::nccl_messages::{receive_all, send_all};

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

fn ranks(test: &str, part: &str, own: &str, peers: &[&str], is_refused: bool) {
    if child::is_child(part) {
        return sender();
    }
    child::run(test, &[LOOPBACK, LANES, (VARIABLE, own)], || {
        let (table, context) = started(12);
        let folder = tempfile::tempdir().unwrap();
        for peer in peers {
            let (listen, handle) = listening(&*table, context);
            let file = folder.path().join(peer);
            leave(&file, &handle);
            let mut environment = vec![
                LOOPBACK,
                LANES,
                (VARIABLE, *peer),
                ("TCPX_TEST_FILE", file.to_str().unwrap()),
            ];
            if is_refused {
                environment.push(("TCPX_TEST_REFUSED", "1"));
            }
            let mut process = child::start(test, part, &environment);
            if !is_refused {
                let receive = accepted(&*table, listen);
                receive_all(&*table, receive, (MIB, MESSAGES), |_| true);
            }
            assert!(process.wait().unwrap().success());
            if is_refused {
                assert_eq!(table.close_listen(listen), 0);
            }
        }
    });
}

#[test]
fn ranks_speak_the_highest_version_that_both_know() {
    let test = "ranks_speak_the_highest_version_that_both_know";
    ranks(
        test,
        "an older or newer sender",
        "3-4",
        &["2-3", "3-3", "4-9"],
        false,
    );
}

#[test]
fn ranks_without_a_common_version_are_an_error() {
    let test = "ranks_without_a_common_version_are_an_error";
    ranks(
        test,
        "a sender that is refused",
        "3-3",
        &["4-5", "1-2"],
        true,
    );
}
