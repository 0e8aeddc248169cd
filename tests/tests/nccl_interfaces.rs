//! Our plugin file between two hosts that have several networks in common. Needs root.

#![expect(clippy::unwrap_used, reason = "what fails here fails its test")]

use std::io::Write;
use std::path::PathBuf;
use std::ptr;

use tcpx_tests::child;
use tcpx_tests::namespaces::{Hosts, missing};
use tcpx_tests::nccl_link::{HOST, accepted, connected, listening, started, until};

const FILE: &str = "TCPX_TEST_FILE";
/// Large enough for lanes.
const LEN: usize = 1 << 20;

/// The message, for both ends.
fn content() -> Vec<u8> {
    (0..LEN).map(|at| ((at * 131) >> 3) as u8).collect()
}

fn meeting() -> PathBuf {
    std::env::var_os(FILE).unwrap().into()
}

/// Listens, leaves the handle in the file, and takes one message.
fn listen() {
    let (table, context) = started(12);
    let (listen, handle) = listening(&*table, context);
    let half = meeting().with_extension("half");
    std::fs::write(&half, handle).unwrap();
    std::fs::rename(half, meeting()).unwrap();
    let receive = accepted(&*table, listen);
    let mut target = vec![0; LEN];
    let (rc, memory) = table.reg_mr(receive, &mut target, HOST);
    assert_eq!(rc, 0);
    let (rc, request) = table.irecv(receive, target.as_mut_ptr(), LEN, memory, ptr::null_mut());
    assert_eq!(rc, 0);
    until("the message", || {
        let (rc, done, _) = table.test(request);
        assert_eq!(rc, 0);
        done == 1
    });
    assert!(target == content());
    assert_eq!(table.close_recv(receive), 0);
}

/// Connects to the handle in the file, and sends one message.
fn connect() {
    let (table, context) = started(12);
    let mut handle = [0; 128];
    until("the handle", || {
        let read = std::fs::read(meeting());
        read.is_ok_and(|bytes| {
            handle.copy_from_slice(&bytes);
            true
        })
    });
    let send = connected(&*table, context, handle);
    let mut data = content();
    let (rc, memory) = table.reg_mr(send, &mut data, HOST);
    assert_eq!(rc, 0);
    let (rc, request) = table.isend(send, data.as_mut_ptr(), LEN, memory);
    assert_eq!(rc, 0);
    until("the message's end", || {
        let (rc, done, _) = table.test(request);
        assert_eq!(rc, 0);
        done == 1
    });
    assert_eq!(table.close_send(send), 0);
}

/// NCCL may pair devices of different networks. Many hosts drop a packet that does not come over the
/// interface where they would send its answer.
#[test]
fn a_host_that_drops_what_comes_from_another_network_is_reached_over_the_routes() {
    const TEST: &str =
        "a_host_that_drops_what_comes_from_another_network_is_reached_over_the_routes";
    if child::is_child("listen") {
        return listen();
    }
    if child::is_child("connect") {
        return connect();
    }
    if let Some(why) = missing() {
        // Not eprintln: the harness hides that.
        let _ = writeln!(std::io::stderr(), "skipped: {TEST}: {why}");
        return;
    }
    let hosts = Hosts::new("routes", &[1000, 1000]).unwrap();
    let strict = "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $f; done";
    for on_a in [true, false] {
        let done = hosts.start(on_a, "sh", &["-ec", strict]).unwrap();
        assert!(done.end().unwrap().success());
    }
    let folder = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let start = |on_a: bool, role: &str, interface: &str| {
        let role = format!("{}={role}", child::MARK);
        let interface = format!("NCCL_SOCKET_IFNAME={interface}");
        let lanes = format!("{}={}", child::LANES.0, child::LANES.1);
        let file = format!("{FILE}={}", folder.path().join("handle").display());
        let words = [
            &role,
            &interface,
            &lanes,
            &file,
            program.to_str().unwrap(),
            TEST,
            "--exact",
            "--nocapture",
        ];
        hosts.start(on_a, "env", &words).unwrap()
    };
    // The devices lie on different links.
    let ends = [
        start(false, "listen", "nic1"),
        start(true, "connect", "nic0"),
    ];
    for end in ends {
        assert!(end.end().unwrap().success());
    }
}
