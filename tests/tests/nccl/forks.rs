//! Forks without exec: the child has no part in its parent's connections.

#![expect(clippy::unwrap_used, reason = "a test ends at what it does not expect")]

use std::path::PathBuf;
use std::ptr;
use std::time::{Duration, Instant};

use tcpx_tests::child::{self, LANES, LOOPBACK};
use tcpx_tests::nccl_link::{
    HOST, Link, MIB, accepted, connected, content, good, listening, started, until,
};

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

/// Descriptors that a program executed by this process would get.
fn inherited() -> usize {
    std::fs::read_dir("/proc/self/fdinfo")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok())
        .filter_map(|info| {
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
            i32::from_str_radix(flags.trim(), 8).ok()
        })
        .filter(|flags| flags & libc::O_CLOEXEC == 0)
        .count()
}

#[test]
fn a_forked_child_is_refused_its_parents_comms() {
    child::run(&[LOOPBACK, LANES], || {
        let (before, kept) = (sockets(), inherited());
        let (table, context) = started(12);
        let link = Link::new(&*table, context);
        link.warm();
        let (listen, mut dials) = listening(&*table, context);
        assert_eq!(table.connect(context, &mut dials).0, 0);
        let (mut data, mut target) = (content(MIB), vec![0; MIB]);
        let from = good(table.reg_mr(link.send, &mut data, HOST));
        let to = good(table.reg_mr(link.receive, &mut target, HOST));
        let (start, sink) = (data.as_mut_ptr(), target.as_mut_ptr());
        assert!(sockets() > before);
        assert_eq!(
            inherited(),
            kept,
            "a program that is executed gets descriptors"
        );
        let (rc, received) = table.irecv(link.receive, sink, MIB, to, ptr::null_mut());
        assert!(rc == 0 && !received.is_null());

        child::forked(|| {
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
            let context = good(table.init());
            let own = Link::new(&*table, context);
            own.warm();
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
    });
}

/// Connects, forks a process that lives as long as the file, and waits to be killed.
fn fork_and_wait(file: PathBuf) {
    let (table, context) = started(12);
    let handle = std::fs::read(&file).unwrap().try_into().unwrap();
    let send = connected(&*table, context, handle);
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
        let request = good(table.isend(send, start, len, memory));
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
fn a_killed_process_is_seen_though_its_child_lives() {
    const TEST: &str = "a_killed_process_is_seen_though_its_child_lives";
    const PEER: &str = "the peer of a_process_that_is_killed_is_seen_to_end";
    if child::is_child(PEER) {
        fork_and_wait(std::env::var_os("TCPX_TEST_FILE").unwrap().into());
        return;
    }
    child::run_as(TEST, &[LOOPBACK, LANES], || {
        let (table, context) = started(12);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("handle");
        let (listen, handle) = listening(&*table, context);
        std::fs::write(&file, handle).unwrap();
        let meeting = ("TCPX_TEST_FILE", file.to_str().unwrap());
        let peer = child::start(TEST, PEER, &[LOOPBACK, LANES, meeting]);
        let receive = accepted(&*table, listen);
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
        drop(peer);
        until("the end", || !next());
        assert_eq!(table.close_recv(receive), 0);
    });
}
