//! Processes that end as soon as the last thing they sent is done, in each way that a process ends:
//! their peers, which may be late, get all of it.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::path::Path;
use std::time::{Duration, Instant};

use tcpx_tests::child::{self, LANES, LOOPBACK, NO_LANES};
use tcpx_tests::nccl_link::{
    MIB, accepted, connected, handle_in, leave_handle, listening, started,
};
use tcpx_tests::nccl_messages::{receive_all, send_all};

/// Sizes of messages, and how many are sent of each, one behind the other: more than a receiver's
/// kernel takes where nobody reads.
const MESSAGES: [(usize, usize); 6] = [
    (1, 1000),
    (4096, 200),
    (16_384, 60),
    (65_536, 40),
    (300_000, 12),
    (64 * MIB, 1),
];
/// For so long the receiver rests amid them.
const LATE: Duration = Duration::from_millis(300);

/// How a process ends; one that starts takes a second.
fn ends(size: usize) -> &'static [&'static str] {
    match size {
        4096 | 300_000 => &["return", "exit", "_exit"],
        _ => &["_exit"],
    }
}

/// The sending process: how it ends, and the messages, are in its environment.
fn sender() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let (table, context) = started(12);
    let handle = handle_in(Path::new(&variable("TCPX_TEST_FILE")));
    let send = connected(&*table, context, handle);
    let number = |name: &str| variable(name).parse::<usize>().unwrap();
    send_all(
        &*table,
        send,
        number("TCPX_TEST_SIZE"),
        number("TCPX_TEST_COUNT"),
    );
    match variable("TCPX_TEST_END").as_str() {
        "exit" => std::process::exit(0),
        // SAFETY: nothing of this process is needed any more.
        "_exit" => unsafe { libc::_exit(0) },
        _ => {}
    }
}

fn peers_get_all(test: &str, part: &str, lanes: (&str, &str)) {
    if child::is_child(part) {
        return sender();
    }
    child::run_as(test, &[LOOPBACK, lanes], || {
        let (table, context) = started(12);
        let folder = tempfile::tempdir().unwrap();
        for (size, messages) in MESSAGES {
            for end in ends(size) {
                let (listen, handle) = listening(&*table, context);
                let file = folder.path().join(format!("{size}-{end}"));
                let (size_is, count) = (size.to_string(), messages.to_string());
                let environment = [
                    LOOPBACK,
                    lanes,
                    ("TCPX_TEST_FILE", file.to_str().unwrap()),
                    ("TCPX_TEST_SIZE", &size_is),
                    ("TCPX_TEST_COUNT", &count),
                    ("TCPX_TEST_END", end),
                ];
                let process = child::start(test, part, &environment);
                leave_handle(&file, &handle);
                let receive = accepted(&*table, listen);
                let start = Instant::now();
                // The sender is done with what it need not wait for, and gone, when the rest is
                // read.
                receive_all(&*table, receive, (size, messages), |number| {
                    number < messages / 2 || start.elapsed() >= LATE
                });
                process.succeeds();
            }
        }
    });
}

#[test]
fn a_peer_gets_all_of_a_process_that_ends_without_lanes() {
    let test = "a_peer_gets_all_of_a_process_that_ends_without_lanes";
    let part = "the sender of a_peer_gets_all_of_a_process_that_ends_without_lanes";
    peers_get_all(test, part, NO_LANES);
}

#[test]
fn a_peer_gets_all_of_a_process_that_ends_with_lanes() {
    let test = "a_peer_gets_all_of_a_process_that_ends_with_lanes";
    let part = "the sender of a_peer_gets_all_of_a_process_that_ends_with_lanes";
    peers_get_all(test, part, LANES);
}
