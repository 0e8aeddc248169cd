//! Forks without exec: the child has no part in its parent's connections.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::ptr;
use std::time::{Duration, Instant};

use tcpx_tests::child;
use tcpx_tests::nccl_link::{HOST, Link, content, until};
use tcpx_tests::nccl_part::{self, Opaque};

const LOOPBACK: (&str, &str) = ("NCCL_SOCKET_IFNAME", "lo");
const MIB: usize = 1 << 20;
/// `ncclInvalidUsage`.
const INVALID_USAGE: i32 = 5;

/// Sockets that this process has open.
fn sockets() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|link| link.to_string_lossy().starts_with("socket:"))
        .count()
}

/// Runs `body` in a forked child of this process, which must end well.
fn forked(body: impl FnOnce()) {
    // SAFETY: the child uses its own copy of everything and ends by _exit.
    match unsafe { libc::fork() } {
        0 => {
            let ended = std::panic::catch_unwind(AssertUnwindSafe(body));
            // SAFETY: ends the child without its parent's exit handlers.
            unsafe { libc::_exit(i32::from(ended.is_err())) };
        }
        child => {
            let mut status = -1;
            until("the forked process", || {
                // SAFETY: a child of ours, an out pointer of this frame.
                unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) == child }
            });
            assert_eq!(status, 0, "the forked process failed");
        }
    }
}

#[test]
fn a_forked_child_is_refused_its_parents_comms_and_takes_nothing_from_them() {
    child::run(
        "a_forked_child_is_refused_its_parents_comms_and_takes_nothing_from_them",
        &[LOOPBACK],
        || {
            let before = sockets();
            let table = nccl_part::table(12);
            let (rc, context) = table.init();
            assert_eq!(rc, 0);
            let link = Link::new(&*table, context);
            for _ in 0..3 {
                link.transfer(MIB, MIB);
            }
            let mut waits = [0; 128];
            let (rc, listen) = table.listen(context, &mut waits);
            assert_eq!(rc, 0);
            let mut dials = waits;
            assert_eq!(table.connect(context, &mut dials).0, 0);
            let (mut data, mut target) = (content(MIB), vec![0; MIB]);
            let (rc, from) = table.reg_mr(link.send, &mut data, HOST);
            assert_eq!(rc, 0);
            let (rc, to) = table.reg_mr(link.receive, &mut target, HOST);
            assert_eq!(rc, 0);
            let (start, sink) = (data.as_mut_ptr(), target.as_mut_ptr());
            let (rc, received) = table.irecv(link.receive, sink, MIB, to, ptr::null_mut());
            assert!(rc == 0 && !received.is_null());

            forked(|| {
                assert_eq!(sockets(), before, "the child holds connections");
                let began = Instant::now();
                assert_eq!(table.test(received).0, INVALID_USAGE);
                assert_eq!(table.isend(link.send, start, MIB, from).0, INVALID_USAGE);
                let (rc, _) = table.irecv(link.receive, sink, MIB, to, ptr::null_mut());
                assert_eq!(rc, INVALID_USAGE);
                let mut bytes = [0; 8];
                assert_eq!(table.reg_mr(link.send, &mut bytes, HOST).0, INVALID_USAGE);
                assert_eq!(table.dereg_mr(link.send, from), INVALID_USAGE);
                assert_eq!(table.accept(listen).0, INVALID_USAGE);
                assert_ne!(table.connect(context, &mut dials).0, 0);
                // A close is a good answer, and tells the peers nothing.
                assert_eq!(table.close_send(link.send), 0);
                assert_eq!(table.close_recv(link.receive), 0);
                assert_eq!(table.close_listen(listen), 0);
                assert!(
                    began.elapsed() < Duration::from_secs(4),
                    "it waited for threads"
                );
                // What it makes for itself works.
                let (rc, context) = table.init();
                assert_eq!(rc, 0);
                let own = Link::new(&*table, context);
                for _ in 0..3 {
                    own.transfer(MIB, MIB);
                }
                own.close();
            });

            let (rc, sent) = table.isend(link.send, start, MIB, from);
            assert!(rc == 0 && !sent.is_null());
            let mut open = vec![sent, received];
            until("the parent's transfer", || {
                open.retain(|request| {
                    let (rc, done, _) = table.test(*request);
                    assert_eq!(rc, 0);
                    done == 0
                });
                open.is_empty()
            });
            assert!(data == target);
            assert_eq!(table.close_listen(listen), 0);
            link.transfer(20 * MIB, 20 * MIB);
            link.close();
        },
    );
}

/// Connects, forks a process that lives as long as the file, and waits to be killed.
fn fork_and_wait(file: PathBuf) {
    let table = nccl_part::table(12);
    let (rc, context) = table.init();
    assert_eq!(rc, 0);
    let mut handle: [u8; 128] = std::fs::read(&file).unwrap().try_into().unwrap();
    let mut send: Opaque = ptr::null_mut();
    until("connecting", || {
        let (rc, comm) = table.connect(context, &mut handle);
        assert_eq!(rc, 0);
        send = comm;
        !send.is_null()
    });
    // SAFETY: the child ends by _exit.
    if unsafe { libc::fork() } == 0 {
        let until = Instant::now() + Duration::from_secs(100);
        while file.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        // SAFETY: ends the child without its parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    let mut data = content(MIB);
    let (start, len) = (data.as_mut_ptr(), data.len());
    let (_, memory) = table.reg_mr(send, &mut data, HOST);
    loop {
        let (rc, request) = table.isend(send, start, len, memory);
        assert_eq!(rc, 0);
        while !request.is_null() {
            let (rc, done, _) = table.test(request);
            assert_eq!(rc, 0);
            if done == 1 {
                break;
            }
        }
    }
}

#[test]
fn a_process_that_is_killed_is_seen_to_end_although_a_child_of_it_lives() {
    const TEST: &str = "a_process_that_is_killed_is_seen_to_end_although_a_child_of_it_lives";
    const PEER: &str = "the peer of a_process_that_is_killed_is_seen_to_end";
    if child::is_child(PEER) {
        fork_and_wait(std::env::var_os("TCPX_TEST_FILE").unwrap().into());
        return;
    }
    child::run(TEST, &[LOOPBACK], || {
        let table = nccl_part::table(12);
        let (rc, context) = table.init();
        assert_eq!(rc, 0);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("handle");
        let mut handle = [0; 128];
        let (rc, listen) = table.listen(context, &mut handle);
        assert_eq!(rc, 0);
        std::fs::write(&file, handle).unwrap();
        let meeting = ("TCPX_TEST_FILE", file.to_str().unwrap());
        let mut peer = child::start(TEST, PEER, &[LOOPBACK, meeting]);
        let mut receive: Opaque = ptr::null_mut();
        until("accepting", || {
            let (rc, comm) = table.accept(listen);
            assert_eq!(rc, 0);
            receive = comm;
            !receive.is_null()
        });
        assert_eq!(table.close_listen(listen), 0);
        let mut target = vec![0; MIB];
        let (_, memory) = table.reg_mr(receive, &mut target, HOST);
        let start = target.as_mut_ptr();
        let next = || {
            let (rc, request) = table.irecv(receive, start, MIB, memory, ptr::null_mut());
            if rc != 0 {
                return false;
            }
            loop {
                let (rc, done, _) = table.test(request);
                if rc != 0 || done == 1 {
                    return rc == 0;
                }
            }
        };
        for _ in 0..10 {
            assert!(next());
        }
        // Only the process that was started above; its child lives as long as the file.
        peer.kill().unwrap();
        peer.wait().unwrap();
        until("the end", || !next());
        assert_eq!(table.close_recv(receive), 0);
    });
}
